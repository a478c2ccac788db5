"""A stage that unlearns what came before it, or a judge that is told whose answer it reads, would go unseen: `rollkeel retained` and
`rollkeel win-rate` as typed, on answers made up so that every number can be worked out by hand.

A language model as judge is in tests/rewards/test_judge_model.py. Not covered: that models learn anything (tests/test_general.py),
and whether a judge is any good.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_run import cli

from rollkeel.evals.estimators import wilson
from rollkeel.record.rollout_store import write_step
from rollkeel.rewards.trial import rollout_of
from rollkeel.tasks.source import Problem
from rollkeel.types import GraderSpec, Status

JUDGES = """
def longer(rollout):
    mine, other = len(rollout.text), len(rollout.prompt.answer)
    return 0.5 if mine == other else float(mine > other)

def first(rollout):
    return 1.0

def generous(rollout):
    return 3

def broken(rollout):
    raise OSError("away")

def nosy(rollout):
    with open("seen.txt", "a") as file:
        about = [rollout.id % 2, rollout.group, rollout.member, rollout.engine, rollout.dtype, rollout.span.versions.max().item(),
                 rollout.prompt.id, rollout.prompt.index, repr(rollout.reward), rollout.detail, rollout.sampling.seed]
        print(rollout.text, *about, sep="|", file=file)
    return 0.5
"""
Rewards = Mapping[str, Sequence[Sequence[float | None]]]


def answers(
    path: Path, texts: Mapping[str, Sequence[Sequence[str]]], rewards: Rewards | None = None, of: str = ""
) -> Path:
    """A file as `rollkeel eval --out` writes it: domain → items → answers."""
    made = []
    for domain, items in texts.items():
        for number, said in enumerate(items):
            spec = GraderSpec(name="task", options={})
            problem = Problem(text=f"{domain} {number}?", answer="gold", grader=spec, metadata={"n": number})
            for member, text in enumerate(said):
                reward = rewards[domain][number][member] if rewards else 0.0
                r = rollout_of(domain, problem, text)
                span = replace(r.span, versions=r.span.versions + len(of))
                status = Status.GRADER_FAILURE if reward is None else Status.FINISHED
                made.append(
                    replace(
                        r, id=len(made), group=number, member=member, engine=of, span=span, reward=reward, status=status
                    )
                )
    write_step(path, made, step=0)
    return path


def scored(path: Path, rewards: Rewards) -> Path:
    return answers(path, {d: [["x"] * len(item) for item in items] for d, items in rewards.items()}, rewards)


@pytest.fixture
def judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judges.py").write_text(JUDGES)
    return tmp_path


def test_a_domain_is_held_against_the_best_earlier_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = scored(tmp_path / "one.parquet", {"sums": [[1, 1], [1, 0]], "talk": [[0.2], [0.2]]})
    two = scored(tmp_path / "two.parquet", {"sums": [[1, 1], [1, None]], "talk": [[0.0], [0.2]]})
    for left, kept in (([[1, 1], [0.91, 0.91]], True), ([[1, 1], [0.9, 0.88]], False)):  # of 1.0: 0.955, 0.945
        now = scored(tmp_path / "now.parquet", {"sums": left, "talk": [[0.1], [0.3]], "new": [[0], [0]]})
        code, out, _ = cli(capsys, "retained", now, one, two, "--json")
        assert code == (0 if kept else 1)
        said = json.loads(out)
        assert set(said) == {"sums", "talk"}
        sums, talk = said["sums"], said["talk"]
        assert (sums["stage"], sums["best"], sums["kept"]) == (str(two), 1.0, kept)
        assert sums["value"] == pytest.approx(np.mean(left))
        assert sums["difference"]["value"] == pytest.approx(np.mean(left) - 1)
        assert (Path(talk["stage"]), talk["best"], talk["value"], talk["kept"]) == (one, 0.2, 0.2, True)
    assert cli(capsys, "retained", now, one, two, "--allow", "0.06")[0] == 0
    code, out, _ = cli(capsys, "retained", now, one, two)
    assert (code, out.count("lost"), out.count("kept")) == (1, 1, 1)
    now = scored(tmp_path / "now.parquet", {"sums": [[1, 1], [1, 1]], "talk": [[0.17], [0.2]]})  # of 0.2: 0.925
    said = json.loads(cli(capsys, "retained", now, one, two, "--json")[1])
    assert (said["sums"]["kept"], said["talk"]["kept"]) == (True, False)


def test_results_of_benchmarks_are_held_against_each_other_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, rewards in (("one", (1, 1)), ("two", (1, 0))):
        folder = tmp_path / name / "aime24"
        folder.mkdir(parents=True)
        (folder.parent / "results.json").write_text(json.dumps({"benchmarks": {"aime24": {}}}))
        lines = [{"key": str(k), "hash": "h", "samples": [{"reward": r}]} for k, r in enumerate(rewards)]
        (folder / "items.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cli(capsys, "retained", tmp_path / "one", tmp_path / "two")[0] == 0
    code, out, _ = cli(capsys, "retained", tmp_path / "two", tmp_path / "one", "--json")
    assert (code, json.loads(out)["aime24"]["difference"]["value"]) == (1, -0.5)


def test_what_was_not_evaluated_alike_is_refused_in_one_line(judges: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = scored(judges / "two.parquet", {"sums": [[1], [1]]})
    fewer = scored(judges / "fewer.parquet", {"sums": [[1]]})
    other = scored(judges / "other.parquet", {"talk": [[1], [1]]})
    dead = scored(judges / "dead.parquet", {"sums": [[None], [None]]})
    wins = ["win-rate", two, two]
    for words, told in (
        (["retained", fewer, two], "other items of 'sums'"),
        (["retained", other, two], "other items of 'sums'"),
        (["retained", dead, two], "no reward at all"),
        (["retained", two, judges / "none.parquet"], "no such file"),
        (["win-rate", two, fewer, "data.grader=judges.py:longer"], "other prompts"),
        ([*wins, "data.grader=exact"], "does not compare two answers"),
        (
            [*wins, "data.grader=judge_model", 'data.grader_options={"url": "http://x/v1", "model": "m"}'],
            "kind=pairwise",
        ),
        ([*wins, "data.grader=judges.py:longest"], "longest"),
    ):
        code, _, err = cli(capsys, *words)
        assert (code, err.count("\n")) == (2, 1), err
        assert told in err, err


def test_wins_ties_and_silence_by_hand(judges: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = answers(
        judges / "one.parquet", {"a": [["xx", "xx"], ["x", "x"]], "b": [["same"], ["</think> "], ["long</think>xx"]]}
    )
    two = answers(judges / "two.parquet", {"a": [["xxx", "x"], ["xx", "xx"]], "b": [["same"], ["x"], ["yy"]]})
    code, out, _ = cli(capsys, "win-rate", one, two, "data.grader=judges.py:longer", "--json")
    said = json.loads(out)
    assert {name: (row["value"], row["items"]) for name, row in said["domains"].items()} == {
        "a": (0.75, 2),  # one win and one loss, two wins
        "b": (pytest.approx(2 / 3), 3),  # the same, silence, the same length
    }
    assert (said["pairs"], said["failed"], said["swayed"]) == (7, 0, 0)
    assert (said["all"]["value"], said["all"]["items"]) == (pytest.approx(0.7), 5)
    assert code == 1  # the interval of five items holds one half
    silent = json.loads(cli(capsys, "win-rate", one, two, "data.grader=judges.py:first", "--json")[1])
    assert silent["domains"]["b"]["value"] == pytest.approx(2 / 3)
    back = json.loads(cli(capsys, "win-rate", two, one, "data.grader=judges.py:longer", "--json")[1])
    assert back["all"]["value"] == pytest.approx(0.3)
    assert back["all"]["high"] == pytest.approx(1 - said["all"]["low"])


def test_a_clear_winner_ends_with_zero_and_a_judge_of_places_decides_nothing(
    judges: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = answers(judges / "one.parquet", {"a": [["x"]] * 30})
    two = answers(judges / "two.parquet", {"a": [["xy"]] * 30})
    code, out, _ = cli(capsys, "win-rate", one, two, "data.grader=judges.py:longer")
    assert (code, "100.0" in out) == (0, True)
    assert cli(capsys, "win-rate", two, one, "data.grader=judges.py:longer")[0] == 1
    code, out, _ = cli(capsys, "win-rate", one, two, "data.grader=judges.py:first", "--json")
    said = json.loads(out)
    assert (code, said["all"]["value"], said["swayed"]) == (1, 0.5, 1.0)
    for judge, expected, told in (("generous", 2, "from 0 to 1"), ("broken", 3, "away")):
        code, _, err = cli(capsys, "win-rate", one, two, f"data.grader=judges.py:{judge}")
        assert (code, err.count("\n"), told in err) == (expected, 1, True), err


def test_a_judge_sees_nothing_that_tells_the_models_apart(judges: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = answers(judges / "one.parquet", {"a": [["mine"] * 40]}, of="m")
    two = answers(judges / "two.parquet", {"a": [["ours"] * 40]}, of="other")
    cli(capsys, "win-rate", one, two, "data.grader=judges.py:nosy", "--json")
    seen = [line.split("|") for line in (judges / "seen.txt").read_text().splitlines()]
    by_text = {text: {tuple(rest[1:]) for said, *rest in seen if said == text} for text in ("mine", "ours")}
    both = {field for rows in by_text.values() for row in rows for field in row}
    assert not both & {"m", "other", "1", "5"}, both
    assert len(by_text["mine"]) == len(by_text["ours"]) == 1
    assert {(said, parity) for said, parity, *_ in seen} == {(t, p) for t in ("mine", "ours") for p in "01"}
    order = [said for said, *_ in seen]
    assert {tuple(order[i : i + 2]) for i in range(0, len(order), 2)} > {("mine", "ours"), ("ours", "mine")}


def test_wilson_s_interval() -> None:
    told = wilson([1.0] * 8 + [0.0] * 2)
    assert (told.low, told.high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert wilson([1.0] * 3).low == pytest.approx(0.4385, abs=1e-4)
    rng = np.random.default_rng(0)
    for p, n in ((0.5, 40), (0.9, 40), (0.6, 300)):
        shares = rng.binomial(n, p, 2000) / n
        held = [w.low <= p <= w.high for w in (wilson([1.0] * round(s * n) + [0.0] * round(n - s * n)) for s in shares)]
        assert 0.93 <= np.mean(held) <= 0.98
