"""Grading beside sampling must give the same bits as grading afterwards, and a grader at odds with itself must be named.

`Graders` with real workers, fakes that are random, slow or broken, and the graders that are made of others. Not covered: what single graders
accept (their own tests), the sandbox (test_programs.py), whole runs (test_overlapped_run.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from grader_fakes import AT, by_command
from test_graders import rollout

from rollkeel import rewards
from rollkeel.config import GradersConfig
from rollkeel.errors import BadInput, GraderFailure
from rollkeel.plugins import place
from rollkeel.protocols import OverlappedGrader
from rollkeel.rewards import FailureBudget, Graders, graders, grading
from rollkeel.types import GraderSpec, Rollout, Status


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graders, "_GRADERS", dict(graders._GRADERS))
    rewards.register("worker", "grader_fakes:by_command")
    rewards.register("measure", "grader_fakes:length")


def open_graders(*, deadline_s: float = 1.0, regrade: float = 0.0, **options: Any) -> Graders:
    return Graders(GradersConfig(deadline_s=deadline_s), memory_mb=256, regrade=regrade, **options)


@pytest.fixture(scope="module")
def plain() -> Iterator[Graders]:
    with open_graders() as made:
        yield made


def batch(n: int = 40) -> list[Rollout]:
    """Rollouts of all lanes but the sandbox, in mixed order."""
    specs = [
        GraderSpec(name="exact"),
        GraderSpec(name="worker"),
        GraderSpec(name="measure"),
        GraderSpec(name="mix", options={"parts": [{"grader": "measure", "weight": 0.25}, {"grader": "numeric"}]}),
    ]
    return [rollout("4" * (i % 3), grader=specs[i % 4], id=i) for i in range(n)]


def facts(found: list[Rollout]) -> list[Any]:
    return [(r.id, r.reward, r.detail, r.status) for r in found]


def test_grading_beside_sampling_gives_the_bits_of_grading_afterwards(plain: Graders) -> None:
    given = batch()
    afterwards = facts(plain.grade(given))
    assert {reward for _, reward, _, _ in afterwards} == {0.0, 1.0, 1.25, 2.0}
    order = random.Random(0)
    for _ in range(3):
        fresh = batch()
        ended = order.sample(fresh, len(fresh))
        for start in range(0, len(ended), 7):
            plain.begin(ended[start : start + 7])
        assert facts(plain.grade(fresh)) == afterwards
        assert plain._begun == {}


def test_what_is_begun_is_ready_later_and_its_time_is_hidden(plain: Graders) -> None:
    assert isinstance(plain, OverlappedGrader)
    plain.report()
    slow, cheap = rollout("sleep 0.2", grader="worker", id=1), rollout("4", id=2)
    plain.begin([slow, cheap])
    assert (plain.ready(slow), plain.ready(cheap)) == (False, True)
    until = time.monotonic() + 30
    while not plain.ready(slow) and time.monotonic() < until:
        time.sleep(0.01)
    assert [r.reward for r in plain.grade([cheap, slow])] == [1.0, 1.0]
    metrics, events = plain.report()
    assert metrics["time/reward_overlapped_seconds"] >= 0.2
    assert (
        metrics["time/grader_worker_max_seconds"]
        >= metrics["time/grader_worker_p99_seconds"]
        >= metrics["time/grader_worker_p50_seconds"]
    )
    assert "time/grader_exact_p50_seconds" in metrics
    assert events == []
    none = {"reward/undecided": 0.0, "failures/grader_nondeterministic": 0.0, "time/reward_overlapped_seconds": 0.0}
    assert plain.report() == (none, [])


@pytest.mark.usually("hang-*", "nan-*", "raise-*")
@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("hang", "grader worker: no answer in 1 s"),
        ("exit", "grader worker: worker died by exit code 3"),
        ("crash", "grader worker: worker died by signal 11"),
        ("nan", f"grader worker: ValueError: expected a finite reward, got nan{place(by_command)}"),
        ("raise", f"grader worker: ValueError: two lines {AT}"),
    ],
)
def test_a_fault_in_a_worker_is_a_failure_and_the_others_go_on(plain: Graders, text: str, detail: str) -> None:
    found = plain.grade([rollout("ab", grader="worker"), rollout(text, text, grader="worker"), rollout("4")])
    assert facts(found) == [
        (7, 2.0, "", Status.FINISHED),
        (7, None, detail, Status.GRADER_FAILURE),
        (7, 1.0, "4", Status.FINISHED),
    ]
    with pytest.raises(GraderFailure, match="1 of 3 rollouts failed"):
        FailureBudget(0.3).check(found)


def test_who_is_to_blame_for_a_grading_without_a_result(plain: Graders) -> None:
    """A response that hangs or kills a grader which reads the gold answer has earned a 0; what one's own grader throws is its fault."""
    given = [rollout(text, "4", "worker") for text in ("hang", "exit", "greedy", "raise")]
    silent: Any = lambda r: (None, "two readings") if r.text else None  # noqa: E731
    rewards.register("none", silent)
    plain.report()
    found = plain.grade(
        [*given, rollout("a", grader="none"), rollout("", grader="none"), rollout("7 m or 8 m", "7 m", "quantity")]
    )
    assert facts(found)[:3] == [
        (7, 0.0, f"undecided: grader worker: {why}", Status.FINISHED)
        for why in ("no answer in 1 s", "worker died by exit code 3", "worker out of memory")
    ]
    assert [(r.reward, r.detail) for r in found[3:6]] == [
        (None, f"grader worker: ValueError: two lines {AT}"),
        (0.0, "undecided: two readings"),
        (None, f"grader none: TypeError: expected a real number as reward, got NoneType{place(silent)}"),
    ]
    assert (found[6].reward, found[6].detail.split(":")[0]) == (0.0, "undecided")
    assert plain.report()[0]["reward/undecided"] == 5.0


def test_a_random_grader_is_named_and_a_steady_one_is_not() -> None:
    draw = random.Random(0)
    rewards.register("dice", lambda r: draw.random())
    rewards.register("moody", _every_second_call_fails())
    with open_graders(regrade=1.0) as twice:
        found = twice.grade(
            [rollout("a", grader="dice", id=3), rollout("random", grader="worker", id=4), rollout("4", id=5)]
        )
        metrics, events = twice.report()
        assert metrics["failures/grader_nondeterministic"] == 2.0
        assert [(e["event"], e["grader"], e["rollout"]) for e in events] == [
            ("grader_nondeterministic", "dice", 3),
            ("grader_nondeterministic", "worker", 4),
        ]
        assert events[0]["values"][0] == found[0].reward != events[0]["values"][1]
        twice.grade([rollout("a", grader="moody", id=6)])
        at = f"({__file__}:{_every_second_call_fails.__code__.co_firstlineno + 6} in fn)"
        assert twice.report()[1][0]["values"] == [1.0, f"grader moody: ValueError: not today {at}"]


def _every_second_call_fails() -> Any:
    calls: list[int] = []

    def fn(_: Rollout) -> float:
        calls.append(0)
        if len(calls) % 2 == 0:
            raise ValueError("not today")
        return 1.0

    return fn


def test_the_sample_that_is_graded_twice_is_that_of_the_seed() -> None:
    def sampled(seed: int, share: float) -> list[int]:
        calls: list[int] = []
        rewards.register("count", lambda r: float(calls.append(r.id) or 1))
        with open_graders(regrade=share, seed=seed) as found:
            found.grade([rollout("a", grader="count", id=i) for i in range(400)])
        return sorted(i for i in set(calls) if calls.count(i) == 2)

    one = sampled(0, 0.1)
    assert sampled(0, 0.1) == one != sampled(1, 0.1)
    assert 20 <= len(one) <= 60
    assert sampled(0, 0.0) == []
    assert sampled(0, 1.0) == list(range(400))


def test_a_slow_grader_is_named_with_its_worst_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "SLOW", 0.1)
    with open_graders() as watched:
        given = [rollout(f"sleep {s}", grader="worker", id=i) for i, s in enumerate((0.01, 2.0, 0.15))]
        watched.grade([*given, rollout("4", id=9)])
        events = watched.report()[1]
    assert [(e["event"], e["grader"], e["rollout"]) for e in events] == [("grader_slow", "worker", 1)]
    assert events[0]["seconds"] >= 2.0


def test_waiting_ends_with_the_name_of_what_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "WAITS", 0.01)
    message = r"waited 0.3 s for 1 of 2 gradings, the first is worker of rollout 5"
    with open_graders(deadline_s=30.0) as found, pytest.raises(GraderFailure, match=message):
        found.grade([rollout("4", id=4), rollout("hang", grader="worker", id=5)])


def mixed(text: str, *parts: dict[str, Any], answer: str = "4") -> Rollout:
    with open_graders() as found:
        return found.grade([rollout(text, answer, GraderSpec(name="mix", options={"parts": list(parts)}))])[0]


def test_mix_adds_weighted_parts_and_falls_with_a_required_one() -> None:
    numeric, exact = {"grader": "numeric", "weight": 0.75}, {"grader": "exact", "weight": 0.5}
    assert mixed("4", numeric, exact).reward == 1.25
    assert mixed("4.0", numeric, exact).reward == 0.75
    assert mixed("4.0", numeric, exact).detail == "numeric 1 (4); exact 0 (4.0)"
    assert mixed("4.0", numeric, {**exact, "required": True}).reward == 0.0
    assert mixed("4", numeric, {**exact, "required": True, "weight": 0}).reward == 0.75
    rewards.register("half", lambda r: 0.5)
    assert mixed("4", numeric, {"grader": "half", "weight": -1}).reward == 0.25
    assert mixed("4", numeric, {"grader": "half", "required": True}).reward == 0.0


def test_a_mix_with_a_broken_part_has_no_reward() -> None:
    found = mixed("seven", {"grader": "exact"}, {"grader": "numeric", "weight": 0}, answer="seven")
    assert (found.status, found.reward) == (Status.GRADER_FAILURE, None)
    assert found.detail == "mix: grader numeric: ValueError: the gold answer 'seven' is not a number"


@pytest.mark.parametrize(
    "options",
    [{}, {"parts": []}, {"parts": [{"weight": 1}]}, {"parts": [{"grader": "mix"}]}, {"parts": [{"grader": "exact", "weigth": 1}]},
     {"parts": [{"grader": "exact", "weight": float("nan")}]}, {"parts": [{"grader": "exact"}], "x": 1}, {"parts": [{"grader": "exat"}]}],
)  # fmt: skip
def test_a_mix_that_cannot_be_meant_is_refused(plain: Graders, options: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="grader"):
        plain.grade([rollout("4", grader=GraderSpec(name="mix", options=options))])


class Model:
    """A reward model whose score is the number of words; batches are kept."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def score(self, texts: list[str]) -> list[float]:
        self.batches.append(texts)
        if "break" in texts[0]:
            raise RuntimeError("no weights")
        return [float("nan") if "nan" in t else float(len(t.split())) for t in texts]


def test_a_reward_model_scores_prompt_and_response_in_batches_in_order() -> None:
    model, paths = Model(), []
    with open_graders(load_model=lambda path: paths.append(path) or model) as found:
        spec = GraderSpec(name="reward_model", options={"path": "judge", "batch_size": 2})
        out = found.grade([rollout(t, grader=spec) for t in (" a", " a b", " nan")])
        assert [r.reward for r in out] == [2.0, 3.0, None]
        assert out[2].detail == "grader reward_model: ValueError: expected a finite reward, got nan"
        assert model.batches == [["q a", "q a b"], ["q nan"]]
        single = GraderSpec(name="reward_model", options={"path": "judge"})
        assert [r.reward for r in found.grade([rollout(t, grader=single) for t in (" break", " a")])] == [None, 2.0]
        together = [rollout(t, grader=spec) for t in (" break", " a")]
        assert [r.reward for r in found.grade(together)] == [None, 2.0]
        assert paths == ["judge"]
    out = open_graders().grade([rollout("a", grader=single)])
    assert out[0].detail == "grader reward_model: expected the option path and a run that can load reward models"


@pytest.mark.parametrize(
    ("text", "reward", "detail"),
    [
        ("B", 1.0, "B"),
        ("b", 1.0, "B"),
        ("(B)", 1.0, "B"),
        ("B) Paris", 1.0, "B"),
        ("The answer is (B).", 1.0, "B"),
        ("I think A. No.\nAnswer: **B**", 1.0, "B"),
        ("so \\boxed{\\text{B}}", 1.0, "B"),
        ("\\boxed{A} or \\boxed{B}", 1.0, "B"),
        ("Option B: Paris or Rome", 1.0, "B"),
        ("A", 0.0, "A"),
        ("Answer: A or B", 0.0, "no letter: A or B"),
        ("B or A", 0.0, "no letter: B or A"),
        ("(B), (C)", 0.0, "no letter: (B), (C)"),
        ("Bread", 0.0, "no letter: Bread"),
        ("E", 0.0, "no letter: E"),
        ("<think>B</think>", 0.0, "no answer: nothing there (stated)"),
        ("<think>B", 0.0, "no answer: the thought is not closed"),
        ("", 0.0, "no answer: nothing there (stated)"),
    ],
)
def test_choice(plain: Graders, text: str, reward: float, detail: str) -> None:
    out = plain.grade([rollout(text, "(B)", "choice")])[0]
    assert (out.reward, out.detail) == (reward, detail)


def test_choice_without_a_letter_as_gold_or_with_an_unknown_option_is_a_failure(plain: Graders) -> None:
    given = [rollout("E", "E", "choice"), rollout("B", "B", GraderSpec(name="choice", options={"leters": "AB"}))]
    assert [r.reward for r in plain.grade(given)] == [None, None]
    wide = GraderSpec(name="choice", options={"letters": "ABCDEFGHIJ"})
    assert plain.grade([rollout("J", "J", wide)])[0].reward == 1.0


def test_registered_paths_and_what_is_missing() -> None:
    with pytest.raises(BadInput, match="module:function"):
        rewards.register("mine", "no path")
    graders._GRADERS["odd"] = graders.Entry(
        lane=graders.Lane.WORKER, run="a:b", needs="not_installed_here", extra="math"
    )
    with pytest.raises(BadInput, match=r"needs not_installed_here; install rollkeel\[math\]"):
        rewards.get("odd")
