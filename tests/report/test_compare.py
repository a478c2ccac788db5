"""A comparison is read as proof: groups, differences and intervals must be those of the runs, and one seed must not pose as many.

Not covered: how a browser paints the page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_report import page
from tiny_run import cli

from rollkeel.recipe import load
from rollkeel.record.runfolder import RunFolder
from rollkeel.report.compare import _flat, compared, differences
from rollkeel.report.run_files import read_run


def make(folder: Path, score: float, *words: str, error: float = 0.01) -> Path:
    """A run folder whose only evaluations are 0.3 at step 0 and `score` at step 4."""
    run = RunFolder.create(folder, load(overrides=["run.steps=4", *words]))
    rows: list[dict[str, Any]] = [{"step": 0, "eval/x/avg@k": 0.3, "eval/x/avg@k_se": error}]
    rows += [{"step": i, "reward/mean": 0.1 * i, "mismatch/ratio_std": 0.01} for i in range(1, 5)]
    rows[-1] |= {"eval/x/avg@k": score, "eval/x/avg@k_se": error}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.end("done")
    return folder


def by_arm(folders: list[Path]) -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {}
    for run in compared([read_run(folder) for folder in folders]):
        out.setdefault(run.arm, []).append(run)
    return out


def sweep(tmp_path: Path) -> list[Path]:
    scores = {"kpop": (0.5, 0.6, 0.7), "grpo": (0.4, 0.52, 0.58)}
    return [
        make(tmp_path / f"{name}{seed}", score, f"objective={{name: {name}}}", f"run.seed={seed}", f"run.name=r{seed}")
        for name, values in scores.items()
        for seed, score in enumerate(values)
    ]


def test_a_sweep_is_settings_by_seeds_with_a_paired_interval(tmp_path: Path) -> None:
    arms = by_arm(sweep(tmp_path))
    assert {arm: [(run.seed, run.score) for run in runs] for arm, runs in arms.items()} == {
        "kpop": [(0, 0.5), (1, 0.6), (2, 0.7)],
        "grpo": [(0, 0.4), (1, 0.52), (2, 0.58)],
    }
    (_, tone, text) = differences(arms)[1]
    # Gaps −0.10, −0.08, −0.12: mean −0.1, std 0.02, t(2) = 4.30, half 0.0497.
    assert tone == "bad"
    assert text == "worse: x avg@k at the end 0.500, -0.100 (95 % interval -0.150 to -0.050; 3 seeds, paired)."


def test_single_runs_have_the_interval_of_their_evaluation_and_say_so(tmp_path: Path) -> None:
    folders = [make(tmp_path / "a", 0.5, "train.lr=1e-3"), make(tmp_path / "b", 0.52, "train.lr=1e-4")]
    (first, *_), (arm, tone, text) = differences(by_arm(folders))
    assert (first, arm, tone) == ("train.lr=0.001", "train.lr=0.0001", "plain")
    assert "no difference shown" in text
    assert "one run each says nothing about other seeds" in text


def test_only_options_of_the_same_objective_name_a_setting(tmp_path: Path) -> None:
    words = ("objective={name: kpop, phi: 0.1}", "objective={name: kpop, phi: 0.2}", "objective={name: icepop}")
    arms = by_arm([make(tmp_path / str(i), 0.5, word) for i, word in enumerate(words)])
    assert list(arms) == ["kpop, phi=0.1", "kpop, phi=0.2", "icepop"]
    same = by_arm([make(tmp_path / name, 0.5) for name in ("c", "d")])
    assert list(same) == ["c", "d"]
    assert _flat({"a": {"b": {"c": 1}}, "d": []}) == {"a.b.c": 1, "d": []}


def test_the_page_by_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders, out = sweep(tmp_path), tmp_path / "deep" / "all.html"
    with (folders[0] / "metrics.jsonl").open("a") as file:
        file.write("garbage\n")
    code, printed, _ = cli(capsys, "report", *folders, "--out", out)
    assert (code, printed.strip()) == (4, str(out))  # a file is damaged: the page says which, and shows the rest
    assert out.stat().st_size < 1_500_000
    shown = page(out)
    shown.assert_inert()
    for part in (
        "6 runs compared",
        "seed 2",
        "0.600 ± 0.058",
        "Settings that differ",
        "kpop0: metrics.jsonl: 1 damaged",
    ):
        assert part in shown.text, part
    code, _, err = cli(capsys, "report", folders[0], folders[0])
    assert code == 2
    assert "twice" in err
