"""Five domains in one run: each must get its share of what is trained in every loop, be measured by itself, and survive a kill.

Real runs on a tiny model, killed with SIGKILL. Not covered: servers, mixtures on a GPU.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tiny_run import assert_same, cli, events, killed_in, rows

from rollkeel.loop.job import train
from rollkeel.recipe import load
from rollkeel.record.rollout_store import read_step
from rollkeel.report.charts import matching

SHARES = {"runsum": 3, "add": 2, "knights": 2, "rows": 1}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    lines = [{"q": f"{i}+{i % 7}=", "a": str(i + i % 7), "level": i % 3, "by": "exact"} for i in range(80)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    of_file = {
        "path": str(file),
        "prompt_column": "q",
        "answer_column": "a",
        "grader_column": "by",
        "draw": "pass_rate",
    }
    sources = [
        {"task": "runsum", "options": {"digits": 2}, "grader": "exact", "share": 3},
        {"task": "addition", "options": {"digits": 1, "terms": 2}, "grader": "numeric", "share": 2, "name": "add"},
        {"task": "knights", "options": {"people": 2, "depth": 1}, "share": 2},
        of_file,
    ]
    return [
        "run.steps=6", "data.task=null", f"data.sources={json.dumps(sources)}", "sft.steps=60", "sft.lr=1e-2",
        "sampling.max_new_tokens=4", "rollout.prompts=6", "rollout.samples=4", "train.updates_per_step=2",
        "train.lr=1e-3", "eval.every=3", "eval.items=6", "eval.samples=2", "checkpoint.every=2",
    ]  # fmt: skip


def groups(run: Path) -> Counter[str]:
    """Trained groups of each source so far."""
    counted = Counter[str]()
    for row in rows(run)[1:]:
        counted.update({name: int(row[f"source/{name}/groups"]) for name in SHARES})
    return counted


def assert_shares(counted: Counter[str], within: float = 1.0) -> None:
    whole = sum(SHARES.values())
    assert counted.total() > 0
    assert all(abs(counted[name] - counted.total() * share / whole) <= within for name, share in SHARES.items()), (
        counted
    )


@pytest.fixture(scope="module")
def whole(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    train(load(None, [*words, f"run.dir={run}"]))
    return run


def test_every_source_gets_its_share_and_is_measured_by_itself(whole: Path) -> None:
    assert_shares(groups(whole))
    found = rows(whole)
    assert {key for row in found for key in row if key.startswith("eval/") and key.endswith("avg@k")} == {
        f"eval/{name}/avg@k" for name in SHARES
    }
    assert len(matching(found, [f"reward/{name}" for name in SHARES])) == 4
    stored = read_step(whole / "rollouts" / "step_000003.parquet")
    by_source: dict[str, list[Any]] = {}
    for row in stored.select(["task", "reward"]).to_pylist():
        by_source.setdefault(row["task"], []).append(row["reward"])
    told = {name: pytest.approx(sum(rewards) / len(rewards)) for name, rewards in by_source.items()}
    assert {name: found[3][f"reward/{name}"] for name in by_source} == told


@pytest.mark.slow
def test_killed_mixture_continues_bit_for_bit(words: list[str], whole: Path, tmp_path: Path) -> None:
    run = killed_in(tmp_path, words, "update", 4, 0.002)
    train(load(run / "config.yaml"), resume=run)
    assert_same(run, whole)


@pytest.mark.usually("loop2-3.0")
@pytest.mark.parametrize(
    ("loop", "within"),
    [
        (["rollout.zero_variance=refill"], 3.0),  # what one step leaves open the next fills
        (["run.loop=budgeted", "rollout.budget.tokens=64", "rollout.budget.capacity=24"], 3.0),  # and the pool holds
        (["run.loop=budgeted", "rollout.budget={tokens: 64, capacity: 24}", "rollout.zero_variance=refill"], 3.0),
        (["run.loop=async", "engine.processes=1", "rollout.overlap.max_staleness=4"], 1.0),
    ],
)
def test_shares_hold_in_every_loop_and_a_stopped_run_goes_on(
    loop: list[str], within: float, words: list[str], tmp_path: Path
) -> None:
    run, base = tmp_path / "run", [*words, *loop, "checkpoint.every=1"]
    train(load(None, [*base, f"run.dir={run}"]))
    assert_shares(groups(run), within)
    if loop[0] != "run.loop=async":  # whose timing is its own; tests/test_async.py replays it
        half = tmp_path / "half"
        train(load(None, [*base, "run.steps=3", f"run.dir={half}"]))
        train(load(half / "config.yaml", ["run.steps=6"]), resume=half)
        assert_same(half, run)


def test_unknown_tasks_and_graders_are_refused_in_one_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source, told in (("task: runsums", "did you mean"), ("task: runsum, grader: exakt", "did you mean")):
        code, _, err = cli(capsys, "train", *words, f"data.sources=[{{{source}}}]", f"run.dir={tmp_path / 'no'}")
        assert (code, err.count("\n")) == (2, 1), err
        assert told in err
    code, _, err = cli(capsys, "train", *words, "data.sources=[{task: sudoku_turns}]", f"run.dir={tmp_path / 'no'}")
    assert (code, "played in turns" in err) == (2, True), err


@pytest.mark.slow
def test_the_recipe_of_five_domains(tmp_path: Path) -> None:
    """Four graders; over 100 steps every share is within one group, and the reward of at least three domains rises."""
    run = tmp_path / "run"
    config = load("mixed", [f"run.dir={run}"])
    train(config)
    found = rows(run)
    parts = config.data.parts
    assert {part.grader or ("code" if part.task == "programs" else "task") for part in parts} == {
        "exact", "numeric", "task", "code",
    }  # fmt: skip
    counts = {part.name: sum(row[f"source/{part.name}/groups"] for row in found[1:]) for part in parts}
    share = {part.name: part.share / sum(p.share for p in parts) for part in parts}
    assert all(abs(counts[name] - 100 * 20 * share[name]) <= 1 for name in counts), counts
    rose = []
    for name in counts:
        before, after = found[0][f"eval/{name}/avg@k"], found[-1][f"eval/{name}/avg@k"]
        error = (found[0][f"eval/{name}/avg@k_se"] ** 2 + found[-1][f"eval/{name}/avg@k_se"] ** 2) ** 0.5
        rose += [name] if after - before > 2 * error else []
    assert len(rose) >= 3, rose
    assert events(run)[-1]["status"] == "done"
