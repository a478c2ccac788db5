"""A run that trains on nothing, or on the wrong thing, must say so while it runs: hours later nobody can tell why it learnt nothing.

Faults injected into tiny runs of the three loops, and the same runs without them. Not covered: whole recipes over many steps
(`benchmarks/healthy.py`), faults that only a trace shows (the doctor).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import TINY, events, rows

from rollkeel import advantages, report
from rollkeel.batch.build import build_batch
from rollkeel.engines.local import LocalEngine
from rollkeel.errors import EngineFailure, GraderFailure, RunStopped
from rollkeel.host import within
from rollkeel.loop import learn, steps
from rollkeel.loop.job import train
from rollkeel.models import packed, routers
from rollkeel.objectives.compose import compose
from rollkeel.objectives.objective import Objective
from rollkeel.objectives.registry import build
from rollkeel.recipe import load
from rollkeel.record.checks import Checks, changeable
from rollkeel.record.oddities import surplus
from rollkeel.rewards import Graders
from rollkeel.rewards import graders as registry
from rollkeel.tasks.source import PromptSource
from rollkeel.train.adamw import AdamW
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan

Patch = pytest.MonkeyPatch
LOOPS = {
    "sync": [],
    "budgeted": ["run.loop=budgeted", "rollout.budget={tokens: 90, capacity: 32, retention: 3}"],
    "async": ["run.loop=async", "engine.processes=1", "rollout.overlap.max_staleness=4"],
}
FAST = ["train.kl_coefficient=0", "train.updates_per_step=1", "eval.every=0", "eval.items=2", "checkpoint.every=0"]


def run(path: Path, mode: str, *words: str, steps: int = 3) -> tuple[set[tuple[str, int]], str]:
    """Checks raised, with their steps, and how the run ended."""
    end = ""
    try:
        train(load(None, [*TINY, *FAST, *LOOPS[mode], f"run.steps={steps}", *words, f"run.dir={path}"]))
    except RunStopped as stopped:
        end = str(stopped)
        assert "\n" not in end
    log = [e for e in events(path) if e["event"] == "check"]
    assert all(e["evidence"] and e["advice"] for e in log)
    for row in rows(path) if (path / "metrics.jsonl").exists() else ():
        raised = {k for k, v in row.items() if k.startswith("checks/")}
        assert raised <= {f"checks/{e['check']}" for e in log}, "a metric without an event"
    return {(e["check"], e["step"]) for e in log}, end


def altered(patch: Patch, alter: Callable[[list[Rollout]], list[Rollout]]) -> None:
    """The trainer gets its rollouts as `alter` makes them."""
    inner = steps.learn

    def learning(run: Any, drawn: Any, clock: Any) -> dict[str, float]:
        new = alter(list(drawn.rollouts))
        batch = [r for r in new if r.reward is not None]
        return inner(run, replace(drawn, rollouts=new, batch=batch), clock)

    patch.setattr(steps, "learn", learning)


def unreachable(patch: Patch) -> None:
    """The experts interface of another transformers."""
    for module in (routers, packed):
        patch.setattr(module, "expert_layers", lambda _: ())


def each(change: Callable[[Rollout], Rollout]) -> Callable[[Patch], None]:
    return lambda patch: altered(patch, lambda rollouts: [change(r) for r in rollouts])


def cut(r: Rollout, by: int) -> Rollout:
    """The answer without its last tokens, called finished."""
    keep = max(len(r.span) - by, 1)
    part = {name: value[:keep] for name in vars(r.span) if (value := getattr(r.span, name)) is not None}
    return replace(r, span=TokenSpan(**part), status=Status.FINISHED)


def improbable(r: Rollout) -> Rollout:
    return replace(r, span=replace(r.span, logprobs=np.full(len(r.span), -9.0, np.float32)))


def twice(patch: Patch) -> None:
    def doubled(rollouts: list[Rollout]) -> list[Rollout]:
        first = [improbable(r) for r in rollouts]
        return first + [replace(r, id=r.id + 10**6) for r in first]

    altered(patch, doubled)


def same_prompt(patch: Patch) -> None:
    honest = PromptSource.prompts

    def prompts(self: PromptSource, indices: Sequence[int]) -> list[Prompt]:
        return honest(self, [0 for _ in indices])

    patch.setattr(PromptSource, "prompts", prompts)
    patch.setattr(PromptSource, "prompt", lambda self, index: honest(self, [0])[0])


def neighbour(patch: Patch) -> None:
    honest = advantages.compute
    patch.setattr(learn.advantages, "compute", lambda *about: np.roll(honest(*about), 1))


def no_gradient(patch: Patch) -> None:
    honest = Objective.loss
    patch.setattr(Objective, "loss", lambda self, tokens: honest(self, tokens) * 0.0)


def no_credit(patch: Patch) -> None:
    honest = advantages.compute
    patch.setattr(advantages, "compute", lambda *given: 0.0 * honest(*given))


def detached(patch: Patch) -> None:
    honest = Objective.loss
    patch.setattr(Objective, "loss", lambda self, tokens: honest(self, tokens).detach())


def no_step(patch: Patch) -> None:
    patch.setattr(AdamW, "step", lambda self, *_: None)


def nothing(patch: Patch) -> None:
    """The fault is in the words."""


FAULTS: dict[str, tuple[Callable[[Patch], None], str, tuple[str, ...], int]] = {
    "every rollout twice": (lambda p: altered(p, lambda rollouts: rollouts * 2), "repeated_ids", (), 2),
    "every rollout twice, new ids": (twice, "duplicates", (), 2),
    "one prompt": (same_prompt, "same_prompt", (), 4),
    "cut and called finished": (each(lambda r: cut(r, 2)), "unstopped", (), 2),
    "stop token cut off": (each(lambda r: cut(r, 1)), "unstopped", (), 2),
    "advantages of the neighbour": (neighbour, "credit", (), 2),
    "reward for nothing": (each(lambda r: replace(r, text="", reward=1.0) if r.id % 3 else r), "empty_rewarded", (), 2),
    "right answers unrewarded": (
        each(lambda r: replace(r, text=r.prompt.answer, reward=0.0) if r.id % 2 else replace(r, reward=1.0)),
        "right_unrewarded",
        (),
        3,
    ),
    "rewards swallowed to 0": (each(lambda r: replace(r, reward=0.0)), "no_signal", (), 10),
    "gradient 0": (no_gradient, "gradient", (), 2),
    "no advantage": (no_credit, "no_credit", (), 8),
    "loss detached": (detached, "does not depend on the model", (), 2),
    "optimizer does not step": (no_step, "unchanged", (), 3),
    "steps below float32": (nothing, "update_too_small", ("sft.steps=3", "train.lr=1e-11", "train.warmup_steps=0"), 2),
    "everything masked": (nothing, "masked", ("engine.dtype=fp8", "objective={name: kpop, phi: 1e-30}"), 4),
    "experts out of reach": (unreachable, "experts_not_found", (), 1),
    "limit below any answer": (nothing, "truncated", ("sampling.max_new_tokens=1",), 6),
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_pages(monkeypatch: Patch) -> None:
    """A report costs more than such a run."""
    monkeypatch.setattr(report, "render", lambda folder: None)


SLOW = pytest.mark.slow
QUICK = "advantages of the neighbour", "budgeted"
CASES = [
    pytest.param(fault, mode, marks=[] if mode == "sync" or (fault, mode) == QUICK else SLOW)
    for fault in FAULTS
    for mode in LOOPS
]


@pytest.mark.usually(
    "every rollout twice, new ids-sync",
    "cut and called finished-sync",
    "advantages of the neighbour-budgeted",
    "right answers unrewarded-sync",
    "rewards swallowed to 0-sync",
    "gradient 0-sync",
    "optimizer does not step-sync",
    "everything masked-sync",
    "experts out of reach-sync",
)
@pytest.mark.parametrize(("fault", "mode"), CASES)
def test_a_fault_is_noticed_while_it_runs(fault: str, mode: str, tmp_path: Path, monkeypatch: Patch) -> None:
    inject, check, words, steps = FAULTS[fault]
    inject(monkeypatch)
    found, end = run(tmp_path / "run", mode, *words, steps=steps)
    assert check in {name for name, _ in found} or check in end
    if check in ("repeated_ids", "unstopped", "credit"):
        assert check in end
        assert len(rows(tmp_path / "run")) == 1, "the weights were touched"


@pytest.mark.parametrize("mode", ["sync", "budgeted", pytest.param("async", marks=SLOW)])
def test_a_healthy_run_is_told_nothing(mode: str, tmp_path: Path) -> None:
    found, end = run(tmp_path / "run", mode, steps=4)
    assert (found, end) == (set(), "")
    last = rows(tmp_path / "run")[-1]
    assert last["rollout/duplicates"] == last["mask/dropped_share"] == 0
    assert last["rollout/distinct_prompts"] > 1
    assert last["optimizer/changed_share"] > 0.1


def test_an_alarm_that_stops_stops_for_a_check_too(tmp_path: Path, monkeypatch: Patch) -> None:
    inject, check, *_ = FAULTS["reward for nothing"]
    inject(monkeypatch)
    found, end = run(tmp_path / "run", "sync", "alarms.on_alarm=stop", steps=3)
    assert (check, 1) in found
    assert "A checkpoint was saved" in end
    assert "Doctor: reward_failures" in end


def test_a_weight_is_changeable_if_half_its_last_place_is_below_the_learning_rate() -> None:
    p = torch.tensor([1.0, 0.5, 0.01, 1e-4, 0.0, -0.75] * 100)
    for dtype in (torch.bfloat16, torch.float32):
        q = p.to(dtype)  # which has a float32 master
        for lr in (1e-9, 1e-6, 1e-4, 3e-3, 1e-1):
            changed = [float(((q.double() - sign * lr).float() != q.float()).double().mean()) for sign in (1, -1)]
            able, total = changeable([q], lr)
            assert min(changed) - 1e-6 <= able / total <= max(changed) + 1e-6, (dtype, lr)


def rollouts(spans: Sequence[tuple[Sequence[int], float]]) -> list[Rollout]:
    """Answers of one prompt: tokens, and the log-prob of the whole."""
    prompt = Prompt(
        id="p", index=0, text="", token_ids=np.arange(2), answer="", grader=GraderSpec(name="exact"), task="t"
    )
    out = []
    for i, (ids, logprob) in enumerate(spans):
        n, zeros = len(ids), np.zeros(len(ids), np.int64)
        span = TokenSpan(
            token_ids=np.array(ids),
            logprobs=np.full(n, logprob / n, np.float32),
            kept_mass=np.ones(n, np.float32),
            versions=zeros,
            kv_versions=zeros,
        )
        about = {"status": Status.FINISHED, "sampling": SamplingParams(), "engine": "e", "dtype": "fp32"}
        out.append(Rollout(id=i, group=0, member=i, prompt=prompt, span=span, **about))  # type: ignore[arg-type]
    return out


def test_a_sure_policy_repeats_itself_and_an_unsure_one_does_not() -> None:
    rng = np.random.default_rng(1)
    for p in (0.999, 0.7, 0.3, 0.05):  # one likely answer, the rest all different
        for _ in range(200):
            likely = rng.random(16) < p
            spans = [([1, 2], np.log(p)) if hit else ([9, 100 + i], -12.0) for i, hit in enumerate(likely)]
            assert surplus(rollouts(spans)) == 0
    assert surplus(rollouts([([1, 2, 3], -40.0), ([1, 2, 3], -40.0), ([4, 5], -3.0)])) == 1
    assert surplus(rollouts([([i], -7.0) for i in (1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8)])) > 4
    assert surplus([]) == 0


@pytest.mark.parametrize(("loop", "found"), [("sync", {}), ("budgeted", {"rollout/miscredited": 1.0})])
def test_credit_is_judged_under_the_estimator_that_gave_it(loop: str, found: dict[str, float]) -> None:
    """Parts of groups get RLOO in the place of the objective's own estimator, which may pay for what it likes."""
    some = [replace(r, reward=reward) for r, reward in zip(rollouts([([1], -1.0)] * 2), (0.0, 1.0), strict=True)]
    parts = [build_batch(some, [0.5, -0.5], "token_mean")]
    config = load(None, [*LOOPS[loop], *(["rollout.budget.group=partial"] if loop == "budgeted" else [])])
    objective: Any = SimpleNamespace(advantage="own.py:estimator")
    assert learn.credited(config, objective, parts, some) == found


def test_a_resumed_run_goes_on_counting() -> None:
    row = {"groups/count": 8.0, "groups/zero_variance": 8.0, "reward/mean": 0.0}
    checks = Checks(1e-3)
    told = [[f.check for f in checks.observe({"step": step, **row})[1]] for step in range(1, 15)]
    assert told == [[]] * 9 + [["no_signal"]] + [[]] * 4
    assert checks.at_end(14) == []
    short = Checks(1e-3)
    short.observe({"step": 1, **row})
    assert [f.check for f in short.at_end(1)] == ["no_signal"]


DIFFERS = {"groups/count": 8.0, "groups/zero_variance": 0.0, "optimizer/updates": 1.0, "optimizer/lr": 1e-3}
HEALTHY_BY_DESIGN = {
    "an estimator that pays no tie": {**DIFFERS, "advantages/nonzero": 0.2, "optimizer/grad_norm": 0.1},
    "an estimator over the batch": {**DIFFERS, "groups/zero_variance": 8.0, "advantages/nonzero": 1.0},
    "answers of one token": {**DIFFERS, "advantages/nonzero": 1.0, "rollout/truncated": 1.0},
    "a mask that keeps no token with credit": {
        **DIFFERS,
        "advantages/nonzero": 0.5,
        "advantages/kept": 0.0,
        "objective/kept": 0.02,
        "optimizer/grad_norm": 0.0,
    },
    "one prompt by chance": {"rollout/same_prompt": 2.0},
}


@pytest.mark.parametrize("name", HEALTHY_BY_DESIGN)
def test_what_is_odd_by_design_is_told_nothing(name: str) -> None:
    checks = Checks(1e-3)
    steps = 1 if "chance" in name else 30
    assert [
        f for step in range(1, steps + 1) for f in checks.observe({"step": step, **HEALTHY_BY_DESIGN[name]})[1]
    ] == []


def test_what_masks_are_asked_to_drop_is_not_odd_and_what_they_drop_beyond_it_is(tmp_path: Path) -> None:
    words = ["objective={name: random_rejection, acceptance: 0.005}", "rollout.prompts=40"]  # 1 answer of 160
    told, _ = run(tmp_path / "run", "sync", *words)
    assert all(0.99 < row["mask/dropped_share"] < 1 for row in rows(tmp_path / "run")[1:])
    assert "masked" not in {name for name, _ in told}
    for left, kept, odd in ((1.0, 0.011, False), (1.0, 0.009, True), (0.01, 0.0002, False), (0.01, 0.00009, True)):
        checks = Checks(1e-3, left)
        found = [
            f.check for step in (1, 2, 3) for f in checks.observe({"step": step, "mask/dropped_share": 1 - kept})[1]
        ]
        assert found == ["masked"] * odd


def test_the_share_that_masks_leave_is_that_of_the_options() -> None:
    def left(*masks: Any) -> float:
        return compose(masks=masks).left

    assert left("ratio_band", "second_moment") == 1
    assert left({"top_entropy": {"share": 0.01}}) == 0.01
    assert left({"clip_cov": {"share": 0.25}}) == 0.75
    assert left({"ratio_cap": {"cap": {"drop_rate": 0.5}}}, {"top_entropy": {"share": 0.5}}) == 0.25
    assert build("ac_mis_po", {}).left == 0.2  # its acceptance falls from 0.4 to 0.2
    assert build("random_rejection", {"acceptance": 0.1}).left == 0.1
    assert build("random_rejection", {"like": "mis_po"}).left == 1


def test_no_advantage_where_rewards_differ_is_told_and_does_not_blame_the_loss() -> None:
    checks, row = Checks(1e-3), {**DIFFERS, "advantages/nonzero": 0.0, "optimizer/grad_norm": 0.0}
    told = [f for step in range(1, 9) for f in checks.observe({"step": step, **row})[1]]
    assert [(f.check, f.step, f.stops) for f in told] == [("no_credit", 3, False)]


# -- calls that do not return ------------------------------------------------------------------------------------------


def hang(*_: Any) -> Any:
    with suppress(Exception):  # what hangs may swallow errors
        time.sleep(30)


def test_a_hung_grader_of_this_process_is_a_failure_and_a_second_stops(monkeypatch: Patch) -> None:
    monkeypatch.setitem(registry._GRADERS, "exact", replace(registry.get("exact"), run=hang))
    some = rollouts([([1], -1.0)] * 4)
    began = time.monotonic()
    with Graders(load(None, ["reward.graders.deadline_s=0.1"]).reward.graders) as graders:
        (first,) = graders.grade(some[:1])
        assert first.status is Status.GRADER_FAILURE
        assert "no answer for 0.1 s (reward.graders.deadline_s)" in first.detail
        with pytest.raises(GraderFailure, match=r"3 gradings took longer .* rollout 2"):
            graders.grade(some)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(("mode", "name"), [("sync", "poll"), ("budgeted", "advance")])
def test_a_hung_engine_of_this_process_ends_the_run(mode: str, name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(LocalEngine, name, hang)
    _, end = run(tmp_path / "run", mode, "engine.deadline_s=0.5", steps=2)
    assert "engine local" in end
    assert "engine.deadline_s=0.5" in end


def test_a_deadline_inside_another_leaves_it_running() -> None:
    def nested() -> None:
        with within(0.3, EngineFailure("outer")):
            with within(5.0, EngineFailure("inner")):
                pass
            time.sleep(5)

    with pytest.raises(EngineFailure, match="outer"):
        nested()
