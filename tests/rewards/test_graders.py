"""A reward is the only thing the policy learns from: a wrong answer must be 0, a right one 1, and a broken grader neither.

Covers the graders that run in this process, user graders that misbehave in every way found, and the failure budget. Graders that
hang or kill their process are in test_workers.py, programs in test_programs.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollkeel import rewards, tasks
from rollkeel.errors import BadInput, EngineFailure, GraderFailure
from rollkeel.protocols import Grader
from rollkeel.rewards import FailureBudget, Graders, graders
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan


def rollout(text: str = "", answer: str = "4", grader: GraderSpec | str = "exact", **changes: Any) -> Rollout:
    spec = GraderSpec(name=grader) if isinstance(grader, str) else grader
    prompt = Prompt(id="x", index=0, text="q", token_ids=np.array([1]), answer=answer, grader=spec, task="t")
    fields: dict[str, Any] = {"id": 7, "status": Status.FINISHED, **changes}
    return Rollout(
        group=0,
        member=0,
        prompt=prompt,
        span=TokenSpan.empty(),
        sampling=SamplingParams(),
        engine="e",
        dtype="fp32",
        text=text,
        **fields,
    )


def grade(one: Rollout) -> Rollout:
    return Graders().grade([one])[0]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graders, "_GRADERS", dict(graders._GRADERS))


def test_it_is_a_grader_and_keeps_order_and_everything_else() -> None:
    grader: Grader = Graders()
    given_rollouts = [rollout("4", id=1), rollout("5", id=2), rollout("4", id=3, status=Status.LENGTH)]
    out = grader.grade(given_rollouts)
    assert [(r.id, r.reward, r.detail, r.status) for r in out] == [
        (1, 1.0, "4", Status.FINISHED),
        (2, 0.0, "5", Status.FINISHED),
        (3, 1.0, "4", Status.LENGTH),
    ]
    assert given_rollouts[0].reward is None
    assert out[0].prompt is given_rollouts[0].prompt
    assert grader.grade([]) == []


@pytest.mark.parametrize(
    "name", [n for n in tasks.names() if n not in ("gym", "gymnasium", "programs", "repo", "terminal", "verifiers")]
)
def test_task_grader_scores_gold_and_near_miss(name: str) -> None:
    task = tasks.get(name)
    for i in range(10):
        item = task.item(0, "train", i)
        spec = GraderSpec(
            name="task", options={"task": name, "options": task.options.model_dump(), "item": item.to_json()}
        )
        assert grade(rollout(task.gold(item), grader=spec)).reward == 1.0
        assert [grade(rollout(t, grader=spec)).reward for t in task.near_misses(item)] == [0.0] * len(
            task.near_misses(item)
        )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"task": "nope", "item": {"text": "", "answer": ""}},
        {"task": "runsum", "item": {}},
        {"task": "countdown", "item": {"text": "", "answer": ""}},
    ],
)
def test_broken_task_options_are_a_grader_failure(options: dict[str, Any]) -> None:
    out = grade(rollout("1", grader=GraderSpec(name="task", options=options)))
    assert out.status is Status.GRADER_FAILURE
    assert out.reward is None
    assert out.detail.startswith("grader task: ")
    assert "\n" not in out.detail


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("a b", "a b", 1.0),
        ("  a \n\t b\n", "a b", 1.0),
        ("a b", " a  b ", 1.0),
        ("ab", "a b", 0.0),
        ("A b", "a b", 0.0),
        ("the answer is a b", "a b", 0.0),
        ("a b.", "a b", 0.0),
        ("", "a", 0.0),
        ("a\u00a0b", "a b", 0.0),
        ("é", "e\u0301", 0.0),
        ("4\x00", "4", 0.0),
    ],
)
def test_exact(text: str, answer: str, reward: float) -> None:
    assert grade(rollout(text, answer)).reward == reward


def test_exact_with_an_empty_gold_answer_is_a_failure_not_a_gift() -> None:
    out = grade(rollout("", " \n"))
    assert (out.reward, out.status) == (None, Status.GRADER_FAILURE)
    assert out.detail == "grader exact: ValueError: the gold answer is empty, so that silence would score 1"


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("0.5", "1/2", 1.0),
        (" 2/4\n", "0.50", 1.0),
        (".5", "+0.5", 1.0),
        ("-3", "-3.0", 1.0),
        ("007", "7", 1.0),
        ("0.1", "1/10", 1.0),  # false in binary floating point
        ("0.30000000000000004", "0.3", 0.0),
        ("3", "-3", 0.0),
        ("7 apples", "7", 0.0),
        ("x=7", "7", 0.0),
        ("7 7", "7", 0.0),
        ("1,000", "1000", 0.0),
        ("1_000", "1000", 0.0),
        ("7e0", "7", 0.0),
        ("1e999999999", "1", 0.0),
        ("nan", "1", 0.0),
        ("inf", "1", 0.0),
        ("７", "7", 0.0),
        ("٧", "7", 0.0),
        ("7\u2003", "7", 0.0),
        ("--7", "7", 0.0),
        ("- 7", "-7", 0.0),
        ("7/1/1", "7", 0.0),
        ("7/-1", "-7", 0.0),
        ("14/2.0", "7", 0.0),
        ("1/0", "7", 0.0),
        ("0/0", "0", 0.0),
        ("5.", "5", 0.0),
        ("", "0", 0.0),
        ("7\n7", "7", 0.0),
        ("9" * 100_000, "7", 0.0),
        ("0" * 300 + "7", "7", 0.0),
    ],
)
def test_numeric(text: str, answer: str, reward: float) -> None:
    out = grade(rollout(text, answer, "numeric"))
    assert (out.reward, out.status) == (reward, Status.FINISHED)
    assert "\n" not in out.detail


@pytest.mark.parametrize("answer", ["seven", "", "1/0", "9" * 300])
def test_numeric_without_a_numeric_gold_answer_is_a_failure(answer: str) -> None:
    assert grade(rollout("7", answer, "numeric")).status is Status.GRADER_FAILURE


@given(st.text(max_size=40), st.fractions(max_denominator=999))
@settings(max_examples=200, deadline=None)
def test_numeric_credits_only_the_value(text: str, value: Any) -> None:
    assert grade(rollout(str(value), str(value), "numeric")).reward == 1.0
    out = grade(rollout(text, str(value), "numeric"))
    assert out.reward == 0.0 or graders.parse_number(text) == value


def _raises(kind: type[Exception]) -> Any:
    def fn(_: Rollout) -> float:
        raise kind("first line\nsecond line")

    return fn


AT = f"({__file__}:{_raises.__code__.co_firstlineno + 2} in fn)"
"""A grader's own line that failed, and its function."""


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (_raises(ValueError), f"grader mine: ValueError: first line second line {AT}"),
        (_raises(RecursionError), f"grader mine: RecursionError: first line second line {AT}"),
        (_raises(MemoryError), f"grader mine: MemoryError: first line second line {AT}"),
        (_raises(TimeoutError), f"grader mine: TimeoutError: first line second line {AT}"),
        (lambda r: float("nan"), "grader mine: ValueError: expected a finite reward, got nan"),
        (lambda r: float("inf"), "grader mine: ValueError: expected a finite reward, got inf"),
        (lambda r: np.float32("nan"), "grader mine: ValueError: expected a finite reward, got nan"),
        (lambda r: None, "grader mine: TypeError: expected a real number as reward, got NoneType"),
        (lambda r: "1.0", "grader mine: TypeError: expected a real number as reward, got str"),
        (lambda r: 1j, "grader mine: TypeError: expected a real number as reward, got complex"),
        (lambda r: (1.0, "a", "b"), "grader mine: TypeError: expected a real number as reward, got tuple"),
        (lambda r: 10**400, "grader mine: OverflowError: int too large to convert to float"),
    ],
)
@pytest.mark.usefixtures("registry")
def test_a_broken_grader_is_a_failure_and_never_a_zero(fn: Any, reason: str) -> None:
    rewards.register("mine", fn)
    out = grade(rollout("4", grader="mine"))
    place = "" if AT in reason else f" ({__file__}:{fn.__code__.co_firstlineno} in <lambda>)"
    assert (out.status, out.reward, out.detail) == (Status.GRADER_FAILURE, None, reason + place)


@pytest.mark.usefixtures("registry")
def test_what_a_user_grader_may_return() -> None:
    for value, reward in ((1, 1.0), (True, 1.0), (-0.5, -0.5), (np.float32(0.25), 0.25), (np.int64(3), 3.0)):
        rewards.register("mine", lambda r, v=value: (v, "two\nlines"))
        out = grade(rollout("4", grader="mine"))
        assert out.reward == reward
        assert type(out.reward) is float
        assert out.detail == "two lines"


@pytest.mark.usefixtures("registry")
def test_one_failure_leaves_the_others_alone_and_interrupts_pass_through() -> None:
    rewards.register("mine", _raises(ValueError))
    out = Graders().grade([rollout("4"), rollout("4", grader="mine"), rollout("5")])
    assert [r.reward for r in out] == [1.0, None, 0.0]

    def stop(_: Rollout) -> float:
        raise KeyboardInterrupt

    rewards.register("mine", stop)
    with pytest.raises(KeyboardInterrupt):
        grade(rollout("4", grader="mine"))


@pytest.mark.parametrize("status", [s for s in Status if not s.complete])
def test_incomplete_rollouts_are_refused(status: Status) -> None:
    with pytest.raises(BadInput, match=f"rollout 7: expected status finished or length to grade, got {status.value}"):
        grade(rollout("4", status=status))


@pytest.mark.usefixtures("registry")
def test_names() -> None:
    with pytest.raises(BadInput, match=r"grader 'numerc': unknown; did you mean numeric\?"):
        grade(rollout("4", grader="numerc"))
    with pytest.raises(BadInput, match="built in"):
        rewards.register("exact", lambda r: 1.0)
    with pytest.raises(BadInput, match="expected a name and a function"):
        rewards.register("mine", 3)  # type: ignore[arg-type]
    rewards.register("mine", lambda r: 1.0)
    assert rewards.names()[:3] == ["task", "exact", "numeric"]
    assert rewards.names()[-1] == "mine"
    assert rewards.get("numeric").run is graders.grade_numeric


def step(good: int, grader: int = 0, engine: int = 0) -> list[Rollout]:
    failed = [rollout(status=Status.GRADER_FAILURE, detail="bad regex", id=100 + i) for i in range(grader)]
    dead = [rollout(status=Status.ENGINE_FAILURE, detail="out of memory", id=200 + i) for i in range(engine)]
    return [rollout("4", reward=1.0) for _ in range(good)] + failed + dead


def test_budget_counts() -> None:
    assert FailureBudget(0.5).check(step(6, 1, 2)) == {"failures/grader": 1.0, "failures/engine": 2.0}
    assert FailureBudget(0.0).check(step(3)) == {"failures/grader": 0.0, "failures/engine": 0.0}
    assert FailureBudget(0.0).check([]) == {"failures/grader": 0.0, "failures/engine": 0.0}
    assert FailureBudget(1.0).check(step(0, 3)) == {"failures/grader": 3.0, "failures/engine": 0.0}


def test_budget_edge_is_inclusive_despite_rounding() -> None:
    for percent in range(1, 100):
        FailureBudget(percent / 100).check(step(100 - percent, percent))
        with pytest.raises(GraderFailure):
            FailureBudget(percent / 100).check(step(99 - percent, percent + 1))


def test_budget_stops_with_counts_and_first_reason() -> None:
    with pytest.raises(GraderFailure) as caught:
        FailureBudget(0.05).check(step(6, 3, 1))
    assert str(caught.value) == (
        "4 of 10 rollouts failed (1 in the engine, 3 in the grader), budget 0.05 of a step; first: rollout 100: bad regex"
    )
    assert caught.value.exit_code == 3
    with pytest.raises(EngineFailure, match="first: rollout 200: out of memory"):
        FailureBudget(0.05).check(step(6, 2, 2))
    with pytest.raises(GraderFailure):  # together above the budget, though neither is alone
        FailureBudget(0.25).check(step(7, 2, 1))


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_budget_range(fraction: float) -> None:
    with pytest.raises(BadInput, match="expected a share in"):
        FailureBudget(fraction)
