"""A verdict people quote must follow from the numbers alone: truth tables of the rules, the sentence, the page, the exit code.

Not covered: what the presets' own claims say; `test_lab_presets.py` tries those on made-up readings.
"""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import tiny_lab
from tiny_lab import measured
from tiny_run import cli

from rollkeel.lab.claims import over_last
from rollkeel.lab.measure import Outcome, verdict
from rollkeel.lab.page import MAX_BYTES, as_json, drawn, finding_rows, lines, page, reading_rows, worst
from rollkeel.lab.preset import (
    NOT_REPRODUCED,
    REPRODUCED,
    UNDECIDED,
    Arm,
    Finding,
    apart,
    compared,
    over_steps,
    shown,
)
from rollkeel.lab.preset import within as in_band
from rollkeel.lab.presets import PRESETS
from rollkeel.report.bands import Band


@pytest.mark.parametrize(
    ("high", "low", "margin", "expected"),
    [
        ([0.8, 0.9, 0.85], [0.1, 0.2, 0.15], 0.0, REPRODUCED),
        ([0.1, 0.2, 0.15], [0.8, 0.9, 0.85], 0.0, NOT_REPRODUCED),
        ([0.5, 0.7, 0.6], [0.5, 0.6, 0.7], 0.0, UNDECIDED),
        ([0.9], [0.1], 0.0, UNDECIDED),
        ([0.9, 0.9], [0.1], 0.0, UNDECIDED),
        ([0.5, 0.5], [0.4, 0.4], 0.0, REPRODUCED),
        ([0.5, 0.5], [0.5, 0.5], 0.0, UNDECIDED),
        ([0.8, 0.9, 0.85], [0.7, 0.8, 0.75], 0.3, NOT_REPRODUCED),
        ([0.8, 0.9, 0.85], [0.1, 0.2, 0.15], 0.3, REPRODUCED),
        ([float("nan"), 0.9], [0.1, 0.2], 0.0, UNDECIDED),
        ([0.1, 0.5, 0.95], [0.05, 0.43, 0.9], 0.0, REPRODUCED),  # seeds apart by far, arms by little in each
        ([0.1, 0.5, 0.95], [0.9, 0.05, 0.43], 0.0, UNDECIDED),  # the same numbers of other seeds
    ],
)
def test_two_standard_errors_decide(high: list[float], low: list[float], margin: float, expected: str) -> None:
    assert apart(np.array(high), np.array(low), margin) == expected


def test_just_within_two_standard_errors_is_undecided() -> None:
    low, spread = np.zeros(4), np.array([-1.0, 1.0, -1.0, 1.0])
    error = np.std(spread, ddof=1) / 2  # of four runs; the other side has none
    assert apart(spread + 1.99 * error, low) == UNDECIDED
    assert apart(spread + 2.01 * error, low) == REPRODUCED
    assert apart(spread - 2.01 * error, low) == NOT_REPRODUCED


def test_bands_include_their_edges_and_refuse_nan() -> None:
    assert in_band(np.array([0.4, 0.6]), 0.5, 1)
    assert in_band(np.array([0.5]), 0, 0.5)
    assert not in_band(np.array([0.4, 0.5]), 0.5, 1)
    assert not in_band(np.array([0.4, np.nan]), 0, 1)


def test_readings() -> None:
    rows = [{"step": 1, "a": 1.0}, {"step": 2}, {"step": 3, "a": 4.0}]
    assert over_steps("a", 1, 3)(rows) == 2.5
    assert over_steps("a", 2, 3)(rows) == 4.0
    assert np.isnan(over_steps("a", 4, 9)(rows))
    assert over_last("a", 1)(rows) == 4.0
    assert np.isnan(over_last("b", 1)(rows))
    assert shown(np.array([0.5])) == "0.500"
    assert shown(np.array([0.4, 0.6])) == "0.500 ± 0.100"
    both = compared(np.array([0.4, 0.6]), np.array([0.3, 0.4]), "{:.2f}")
    assert both == "0.50 ± 0.10 against 0.35 ± 0.05, apart by 0.15 ± 0.05"
    assert compared(np.array([0.4]), np.array([0.3]), "{:.1f}") == "0.4 against 0.3"


def finding(kind: str, met: bool | None = None, claim: str = "it is so") -> Finding:
    return Finding(claim=claim, source="somewhere", numbers="1 against 0", verdict=kind, met=met)


@pytest.mark.parametrize(
    ("kinds", "sentence"),
    [
        ([REPRODUCED], "Reproduced: 1 against 0."),
        ([REPRODUCED, REPRODUCED], "Reproduced: all 2 claims."),
        ([UNDECIDED], "Undecided at this scale: it is so (1 against 0); of 1 claims 1 undecided at this scale."),
        (
            [REPRODUCED, UNDECIDED, NOT_REPRODUCED],
            "Not reproduced: it is so (1 against 0); of 3 claims 1 reproduced, 1 not reproduced, 1 undecided at this scale.",
        ),
    ],
)
def test_the_sentence(kinds: list[str], sentence: str) -> None:
    assert verdict([finding(kind) for kind in kinds]) == sentence


def outcome(findings: list[Finding], *, arms: int = 2, seeds: int = 3, steps: int = 5) -> Outcome:
    names = [f"arm <{i}>" for i in range(arms)]
    preset = dataclasses.replace(
        measured(), arms=tuple(Arm(name=n) for n in names), notes=("a <b>note</b>",), charts=("reward/mean",)
    )
    values = np.linspace(0, 1, arms * seeds).reshape(arms, seeds)
    noise = np.random.default_rng(0).random((arms, seeds, steps))
    return Outcome(
        preset=preset,
        seeds=tuple(range(seeds)),
        readings={
            "value": dict(zip(names, values, strict=True)),
            "none": {n: np.full(seeds, np.nan) for n in names},
        },
        findings=tuple(findings),
        bands=tuple(
            Band(arm=n, key=key, steps=np.arange(steps), values=noise[i])
            for key in ("reward/mean", "mismatch/ratio_std", "mismatch/kl_k3", "policy/entropy")
            for i, n in enumerate(names)
        ),
        stopped={(names[0], 1): "loss <is> nan"},
        seconds=1.0,
    )


@pytest.mark.parametrize(
    ("kinds", "met"),
    [
        ([(REPRODUCED, True)], True),
        ([(NOT_REPRODUCED, None)], True),
        ([(NOT_REPRODUCED, True)], True),
        ([(REPRODUCED, False)], False),
        ([(REPRODUCED, True), (REPRODUCED, False)], False),
    ],
)
def test_bands_decide_the_exit_code_and_claims_do_not(kinds: list[tuple[str, bool | None]], met: bool) -> None:
    found = outcome([finding(*kind) for kind in kinds])
    assert found.met is met
    assert as_json(found)["met"] is met
    assert ("MISSED" in str(finding_rows(found))) is not met
    assert any("BAND MISSED" in line for line in lines(found)) is not met


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "iframe"):
            self.found.append(tag)
        self.found += [
            v for k, v in attrs if k in ("src", "href", "xlink:href") and v and not v.startswith(("data:", "#"))
        ]


def test_the_page_stands_alone_is_small_and_escapes() -> None:
    found = outcome([finding(NOT_REPRODUCED, claim="a < b")], arms=12, seeds=5, steps=400)
    text = page(found)
    links = _Links()
    links.feed(text)
    assert links.found == []
    assert "@import" not in text
    assert len(text.encode()) < MAX_BYTES
    for piece in ("a &lt; b", "arm &lt;0&gt;", "a &lt;b&gt;note", "loss &lt;is&gt; nan"):
        assert piece in text
    assert found.sentence.replace("<", "&lt;") in text
    assert '<td class="bad">not reproduced</td>' in text
    assert text.count("<figure>") == 1 + 4  # the reading that has numbers, and the metrics


def test_colours_and_pictures_follow_the_findings() -> None:
    for kinds, colour in (
        ([(REPRODUCED, True)], "good"),
        ([(REPRODUCED, None), (UNDECIDED, None)], "warn"),
        ([(NOT_REPRODUCED, None), (UNDECIDED, None)], "bad"),
        ([(REPRODUCED, False)], "bad"),
    ):
        assert worst(outcome([finding(*kind) for kind in kinds])) == colour
    about = dataclasses.replace(finding(REPRODUCED), numbers="value: 1 against 0")
    assert drawn(outcome([about])) == ["value"]


def test_the_json_is_valid_and_complete() -> None:
    found = outcome([finding(REPRODUCED, True)])
    read = json.loads(json.dumps(as_json(found), allow_nan=False))
    assert set(read) == {"preset", "paper", "verdict", "met", "seeds", "seconds", "findings", "readings", "stopped"}
    assert read["readings"]["none"]["arm <0>"] == [None, None, None]
    assert read["findings"] == [
        {"claim": "it is so", "source": "somewhere", "numbers": "1 against 0", "verdict": REPRODUCED, "met": True}
    ]
    assert read["stopped"] == [{"arm": "arm <0>", "seed": 1, "why": "loss <is> nan"}]
    assert {row[0]: row[1:] for row in reading_rows(found)}["none"] == ("", "")


@pytest.fixture
def _tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tiny_lab.HEARD, str(tmp_path / "heard"))
    monkeypatch.setenv("ROLLKEEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(PRESETS, "measured", measured())
    down = dataclasses.replace(measured("down"), arms=measured().arms[::-1])
    monkeypatch.setitem(PRESETS, "down", down)


@pytest.mark.usefixtures("_tiny")
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = cli(capsys, "lab", "measured", "--out", tmp_path / "up", "--jobs", "2")
    assert code == 0
    assert out.splitlines()[-2:] == [
        "Reproduced: 2.005 ± 0.005 against 1.005 ± 0.005, apart by 1.000 ± 0.000.",
        f"report {tmp_path}/up/lab.html",
    ]
    assert len(err.splitlines()) == 4
    code, out, _ = cli(capsys, "lab", "down", "--out", tmp_path / "down", "--json")
    assert code == 1, "the band is missed"
    assert json.loads(out) == json.loads((tmp_path / "down" / "lab.json").read_text())
    assert json.loads(out)["findings"][0]["verdict"] == NOT_REPRODUCED
    code, out, _ = cli(capsys, "lab")
    assert code == 0
    assert "measured" in out
    assert "async-fp8" in out


@pytest.mark.usefixtures("_tiny")
def test_what_cannot_be_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    for words, message in (
        (("mesured",), "lab 'mesured': no such preset; did you mean measured?"),
        (("measured", "--seeds", "0"), "lab --seeds: expected at least 1, got 0"),
        (("measured", "--jobs", "0"), "lab --jobs: expected at least 1, got 0"),
        (("measured", "--jobs", "-3"), "lab --jobs: expected at least 1, got -3"),
        (("measured", "--out", str(file)), "cannot be written (File exists); choose another folder"),
        (("measured", "--out", str(file / "x")), "cannot be written (Not a directory); choose another folder"),
    ):
        code, out, err = cli(capsys, "lab", *(words if "--out" in words else (*words, "--out", str(tmp_path / "o"))))
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert message in err
    monkeypatch.setenv("ROLLKEEL_CACHE", str(file))
    code, _, err = cli(capsys, "lab", "measured", "--out", tmp_path / "o")
    assert (code, err.count("\n")) == (2, 1)
    assert "set ROLLKEEL_CACHE to another folder" in err
    assert tiny_lab.heard() == []
