"""An evaluation that loses, repeats or mislabels an answer reports a wrong number, so it is killed, resumed and compared bit for bit.

The embedded engine with the tiny preset, a benchmark of sums in the columns of AIME, and graders with known behaviour. Not covered:
real benchmarks and inference servers.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollkeel.cli import main
from rollkeel.config import Config
from rollkeel.errors import BadInput, Corrupt, GraderFailure, Interrupted
from rollkeel.evals import record, summary
from rollkeel.evals.benchmarks import BENCHMARKS, Loaded, Options, get
from rollkeel.evals.run import run_benchmarks
from rollkeel.recipe import load
from rollkeel.rewards import graders
from rollkeel.types import Rollout

ITEMS = 5
WORDS = ["model.path=preset:tiny-qwen3", "sampling.max_new_tokens=3", "engine.slots=8"]


def config(*words: str) -> Config:
    return load(None, [*WORDS, *words])


def fake(fn: Callable[[Rollout], float]) -> graders.Entry:
    """A grader in this process in the place of one that needs workers."""
    return graders.Entry(lane=graders.Lane.INLINE, run=fn)


def first_byte_is_low(rollout: Rollout) -> float:
    """A grader that an untrained model passes about half of the time."""
    return float(len(rollout.text) > 0 and ord(rollout.text[0]) < 128)


@pytest.fixture(autouse=True)
def _grader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(graders._GRADERS, "math", fake(first_byte_is_low))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"problem": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(ITEMS)))
    return path


@pytest.fixture
def aime(rows: Path) -> Loaded:
    return get("aime25").load(rows)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "aime25" / "items.jsonl").read_text().splitlines()]


def by_key(out: Path) -> dict[str, dict[str, Any]]:
    return {line["key"]: line for line in lines(out)}


def test_samples_and_greedy_of_every_item_are_on_disk_with_their_numbers(aime: Loaded, tmp_path: Path) -> None:
    out = tmp_path / "out"
    results = run_benchmarks(config(), [aime], out, samples=3, greedy=True)
    assert json.loads((out / "results.json").read_text()) == json.loads(json.dumps(results))
    found = lines(out)
    assert sorted(line["key"] for line in found) == [str(i + 1) for i in range(ITEMS)]
    assert all(len(line["samples"]) == 3 and line["greedy"] is not None for line in found)
    rewards = [[s["reward"] for s in line["samples"]] for line in found]
    result = results["benchmarks"]["aime25"]
    assert result["metrics"]["avg@k"]["value"] == pytest.approx(sum(map(sum, rewards)) / (3 * ITEMS))
    assert result["metrics"]["pass@3"]["value"] == pytest.approx(sum(map(max, rewards)) / ITEMS)
    assert set(result["metrics"]) == {"avg@k", "pass@1", "pass@2", "pass@3", "majority@2", "majority@3", "greedy"}
    counts = result["counts"]
    assert (counts["items"], counts["answers"], counts["grader_failures"], counts["engine_failures"]) == (
        ITEMS,
        4 * ITEMS,
        0,
        0,
    )
    assert 0 < counts["length_limited"] <= 1
    assert counts["tokens_mean"] <= 3
    assert "expected the 30 items" in result["source"]["warning"]
    assert load(out / "config.yaml", []) == config()


def test_fewer_samples_are_the_first_of_more_and_a_limit_changes_none(aime: Loaded, rows: Path, tmp_path: Path) -> None:
    run_benchmarks(config(), [aime], tmp_path / "four", samples=4)
    run_benchmarks(config("engine.slots=2"), [aime], tmp_path / "two", samples=2)
    run_benchmarks(config(), [get("aime25").load(rows, Options(limit=2))], tmp_path / "few", samples=4)
    four, two, few = (by_key(tmp_path / name) for name in ("four", "two", "few"))
    assert {k: v["samples"][:2] for k, v in four.items()} == {k: v["samples"] for k, v in two.items()}
    assert few == {k: four[k] for k in ("1", "2")}


@pytest.mark.parametrize("slots", [2, 5])
def test_interrupted_and_resumed_is_the_uninterrupted_run(
    slots: int, aime: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    run_benchmarks(config(), [aime], whole, samples=2, greedy=True)
    graded: list[str] = []

    def stopping(rollout: Rollout) -> float:
        graded.append(rollout.prompt.metadata["key"])
        if len(graded) == 4:  # in the middle of the second item
            os.kill(os.getpid(), signal.SIGINT)
        return first_byte_is_low(rollout)

    monkeypatch.setitem(graders._GRADERS, "math", fake(stopping))
    with pytest.raises(Interrupted, match=r"stopped with [1-4] of 5 items of aime25; the same command resumes"):
        run_benchmarks(config(f"engine.slots={slots}"), [aime], out, samples=2, greedy=True)
    done = [each["key"] for each in lines(out)]
    assert 2 <= len(done) < ITEMS
    assert not (out / "results.json").exists()
    with (out / "aime25" / "items.jsonl").open("a") as file:
        file.write('{"key": "5", "sam')  # a kill in the middle of a line
    first = len(graded)
    run_benchmarks(config(), [aime], out, samples=2, greedy=True)
    assert not set(done) & set(graded[first:])
    assert by_key(out) == by_key(whole)
    assert len(lines(out)) == ITEMS
    assert read_but_for_config(out) == read_but_for_config(whole)


def read_but_for_config(out: Path) -> dict[str, Any]:
    return {k: v for k, v in record.read_results(out).items() if k != "config"}


def test_a_finished_one_asks_nothing_again(aime: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    first = run_benchmarks(config(), [aime], out, samples=1)
    monkeypatch.setattr(record, "append", lambda *_: pytest.fail("asked again"))
    assert run_benchmarks(config(), [aime], out, samples=1) == first


class Broken:
    """Fails on the items it is told, otherwise as `first_byte_is_low`."""

    def __init__(self, *keys: str) -> None:
        self.keys = keys

    def __call__(self, rollout: Rollout) -> float:
        if rollout.prompt.metadata["key"] in self.keys:
            raise RuntimeError("no verdict")
        return first_byte_is_low(rollout)


def test_a_broken_grader_is_no_zero_stops_above_the_budget_and_is_asked_again(
    aime: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    run_benchmarks(config(), [aime], whole, samples=2)
    monkeypatch.setitem(graders._GRADERS, "math", fake(Broken("2", "4")))
    with pytest.raises(
        GraderFailure, match=r"aime25: 0 of 10 answers failed in the engine, 4 in the grader, budget 0.05"
    ):
        run_benchmarks(config(), [aime], out, samples=2)
    result = json.loads((out / "results.json").read_text())["benchmarks"]["aime25"]
    assert (result["counts"]["grader_failures"], result["counts"]["items_without_score"]) == (4, 2)
    assert result["metrics"]["avg@k"]["items"] == ITEMS - 2
    kept = [
        sum(s["reward"] for s in line["samples"]) / 2 for key, line in by_key(whole).items() if key not in ("2", "4")
    ]
    assert result["metrics"]["avg@k"]["value"] == pytest.approx(sum(kept) / 3)
    run_benchmarks(
        config("rollout.failure_budget=1.0"), [aime], out, samples=2
    )  # settings that change no answer may differ
    monkeypatch.setitem(graders._GRADERS, "math", fake(first_byte_is_low))
    run_benchmarks(config(), [aime], out, samples=2)
    assert by_key(out) == by_key(whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"words": ["sampling.temperature=0.5"]}, "was begun with sampling"),
        ({"words": ["model.overrides={initializer_range: 0.05}"]}, "was begun with weights"),
        ({"samples": 2}, "was begun with samples"),
        ({"greedy": True}, "was begun with greedy"),
        ({"problem": "another"}, "was begun with items"),
    ],
)
def test_other_settings_are_refused_in_the_same_folder(
    change: dict[str, Any], message: str, aime: Loaded, rows: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run_benchmarks(config(), [aime], out, samples=1)
    before = (out / "aime25" / "items.jsonl").read_bytes()
    if "problem" in change:
        rows.write_text(json.dumps({"problem": "new", "answer": 1}) + "\n")
        aime = get("aime25").load(rows)
    with pytest.raises(BadInput, match=message):
        run_benchmarks(
            config(*change.get("words", [])),
            [aime],
            out,
            samples=change.get("samples", 1),
            greedy=change.get("greedy", False),
        )
    assert (out / "aime25" / "items.jsonl").read_bytes() == before


def test_what_is_refused(aime: Loaded, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: run_benchmarks(config(), [aime], tmp_path / "a", samples=0), "or 0 with --greedy"),
        (lambda: run_benchmarks(config("sampling.temperature=0"), [aime], tmp_path / "a", samples=1), "temperature"),
        (lambda: run_benchmarks(config(), [aime], tmp_path / "full", samples=1), "choose another --out"),
    ]
    for call, message in cases:
        with pytest.raises(BadInput, match=message):
            call()
    assert not (tmp_path / "a").exists()


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "items.jsonl"
    file.write_text('{"key": "1"}\n{"key"\n{"key": "2"}\n')
    with pytest.raises(Corrupt, match="line 2"):
        record.load(file)


# -- summaries and comparisons, by hand -----------------------------------------------------------------------------------


def line(
    key: str,
    rewards: list[float | None],
    *,
    unit: str = "",
    group: str = "",
    votes: str = "",
    greedy: float | None = None,
) -> dict[str, Any]:
    samples = [
        {"reward": r, "status": "finished" if r is not None else "grader_failure", "tokens": 2, "vote": v or None, "detail": "", "text": ""}
        for r, v in zip(rewards, votes.split(",") if votes else [""] * len(rewards), strict=True)
    ]  # fmt: skip
    last = None if greedy is None else {**samples[0], "reward": greedy}
    return {
        "key": key,
        "hash": key,
        "unit": unit or key,
        "group": group,
        "order": [],
        "samples": samples,
        "greedy": last,
    }


def metrics(name: str, found: list[dict[str, Any]], samples: int) -> dict[str, Any]:
    loaded = Loaded(benchmark=BENCHMARKS[name], options=Options(), items=())
    return summary.summarize(loaded, found, samples)["metrics"]


def test_votes_and_failures_by_hand() -> None:
    found = metrics("aime25", [line("a", [1, 1, 0], votes="7,7,8"), line("b", [0, None, 1], votes="8,9,7")], 3)
    assert found["avg@k"]["value"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    # Item b has two samples with a reward: it is left out where three are needed.
    assert (found["pass@3"]["items"], found["pass@2"]["items"]) == (1, 2)
    assert found["majority@3"]["value"] == 1.0
    assert found["majority@2"]["value"] == pytest.approx((2 / 3 + 1 / 2) / 2)


def test_items_of_one_unit_count_once() -> None:
    found = metrics(
        "arc_agi_1", [line("a/0", [1.0], unit="a"), line("a/1", [0.0], unit="a"), line("b/0", [1.0], unit="b")], 1
    )
    assert found["avg@k"]["value"] == pytest.approx(0.75)
    assert found["avg@k"]["items"] == 2
    assert found["avg@k"]["se"] == pytest.approx(0.25)  # 0.5 and 1: std 0.3536, / √2


def test_group_means_by_hand() -> None:
    lines = [
        line("a", [1.0], group="x"),
        line("b", [1.0], group="x"),
        line("c", [1.0], group="x"),
        line("d", [0.0], group="y"),
    ]
    assert metrics("ceval", lines, 1)["groups mean"]["value"] == 0.5  # (1 + 0) / 2, where the mean over items is ¾
    shifted = metrics("bbeh", lines, 1)["harmonic mean"]["value"]
    assert shifted == pytest.approx(2 / (1 / 1.01 + 1 / 0.01))


def test_the_error_of_group_means_is_that_of_fixed_groups() -> None:
    # Two groups of 100 coins: Var of the mean of group means = (¼/100 + ¼/100) / 4.
    found = summary.over_groups([[0.0, 1.0] * 50, [0.0, 1.0] * 50], summary._mean)
    assert found["se"] == pytest.approx((0.25 / 100 / 2) ** 0.5, rel=0.06)
    assert found["low"] < 0.5 < found["high"]


def folder(path: Path, found: list[dict[str, Any]], samples: int = 2) -> Path:
    (path / "aime25").mkdir(parents=True)
    (path / "aime25" / "items.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found))
    (path / "results.json").write_text(json.dumps({"benchmarks": {"aime25": {"k": samples}}}))
    return path


def test_comparison_is_paired_by_item(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = folder(tmp_path / "1", [line(str(i), [i % 2, 0], greedy=0) for i in range(20)])
    other = folder(tmp_path / "2", [line(str(i), [i % 2, 1], greedy=i % 2) for i in reversed(range(20))])
    found = summary.compare(one, other)["aime25"]
    assert found["avg@k"]["a"] == 0.25
    assert found["avg@k"]["b"] == 0.75
    assert found["avg@k"]["difference"] == {"value": 0.5, "se": 0.0, "low": 0.5, "high": 0.5, "items": 20}
    assert found["greedy"]["difference"]["value"] == 0.5
    with pytest.raises(SystemExit) as ended:
        main(["eval-compare", str(one), str(other)])
    assert ended.value.code == 0
    assert re.search(r"avg@k +20 +25\.0 +75\.0 +\+50\.0\* ±0\.0 +\+50\.0 … \+50\.0", capsys.readouterr().out)


def test_comparison_refuses_other_questions(tmp_path: Path) -> None:
    one = folder(tmp_path / "1", [line("a", [1, 0])])
    other = folder(tmp_path / "2", [{**line("a", [1, 0]), "hash": "other"}])
    with pytest.raises(BadInput, match="item a was not the same question"):
        summary.compare(one, other)
    with pytest.raises(BadInput, match="finished evaluation"):
        summary.compare(one, tmp_path)
