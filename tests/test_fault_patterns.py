"""Twelve faults that runs of other frameworks went on with, each injected into a running job: stopped or told in the step where it happens.

A job that learns from such a step is worth less than one that ends. What stops a step does so before the optimizer: weights keep their
bits, the run ends with one line and exit code 3, and resumed without the fault it comes to the model of the undisturbed run. Not covered:
faults too small for the numbers of engine and trainer (weights one update old under fp8), which the doctor finds over many steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import TINY, assert_same, cli, events, rows

from benchmarks.doctor import alterations as alter
from benchmarks.doctor import patches
from rollkeel import advantages, report
from rollkeel.engines import local
from rollkeel.loop import assemble, learn, machines, steps
from rollkeel.record.rollout_store import read_step
from rollkeel.sync import publish
from rollkeel.train.optimizer import Stepper
from rollkeel.types import Rollout, Status, TokenSpan

Patch = pytest.MonkeyPatch
FIRST, LATE = 3, 8
"""The steps in which faults begin; the later one where it takes others to know what is usual."""
LOOPS = {
    "sync": [],
    "budgeted": ["run.loop=budgeted", "rollout.budget={tokens: 60, capacity: 40, retention: 3}"],
    "async": ["run.loop=async", "engine.processes=1", "rollout.overlap.max_staleness=2"],
}
FAST = ["train.updates_per_step=1", "train.kl_coefficient=0", "eval.every=0", "eval.items=2", "checkpoint.every=1"]
FAST += ["rollout.prompts=16", "checkpoint.keep=9"]


@pytest.fixture(autouse=True)
def no_pages(monkeypatch: Patch) -> None:
    """A report costs more than such a run."""
    monkeypatch.setattr(report, "render", lambda folder: None)


def words(mode: str, *more: str, last: int = FIRST) -> list[str]:
    return [*TINY, *FAST, *LOOPS[mode], f"run.steps={last}", *more]


def batches(patch: Patch, change: Callable[[Sequence[Rollout]], Sequence[Rollout]], first: int = FIRST) -> None:
    """The trainer gets the rollouts of the steps from `first` on as `change` makes them."""
    inner = steps.learn

    def learning(run: Any, drawn: Any, clock: Any) -> dict[str, float]:
        if clock.step < first:
            return inner(run, drawn, clock)
        new = list(change(drawn.rollouts))
        chosen = {r.id for r in drawn.batch}
        batch = [r for r in new if r.id in chosen]
        return inner(run, replace(drawn, rollouts=new, batch=batch), clock)

    patch.setattr(steps, "learn", learning)


def each(change: Callable[[Rollout], Rollout]) -> Callable[[Patch], None]:
    return lambda patch: batches(patch, lambda rollouts: [change(r) for r in rollouts])


def from_first(patch: Patch, where: Any, name: str, broken: Callable[..., Any]) -> None:
    """`where.name` is `broken(honest, …)` from step `FIRST` on."""
    honest, at, inner = getattr(where, name), [0], steps.learn

    def learning(run: Any, drawn: Any, clock: Any) -> dict[str, float]:
        at[0] = clock.step
        return inner(run, drawn, clock)

    def either(*args: Any, **named: Any) -> Any:
        return broken(honest, *args, **named) if at[0] >= FIRST else honest(*args, **named)

    patch.setattr(steps, "learn", learning)
    patch.setattr(where, name, either)


def old_weights(patch: Patch) -> None:
    """What is published as the weights of `FIRST` − 1 and later is what was published first, checksums and all."""
    honest, memory = publish.full_update, dict[str, torch.Tensor]()

    def update(named: Any, version: int, *args: Any, **options: Any) -> Any:
        pairs = [(name, tensor) for name, tensor in named]
        memory.update({name: tensor.clone() for name, tensor in pairs} if not memory else {})
        late = version >= FIRST - 1
        return honest([(n, memory[n] if late else t) for n, t in pairs], version, *args, **options)

    patch.setattr(publish, "full_update", update)
    patch.setattr(assemble, "two_copies", lambda config: "so that they can differ")


def old_kv(patch: Patch) -> None:
    """KV over new weights is kept, and stated to be recomputed."""
    honest = local.LocalEngine.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        honest(self, *args, **options)
        self._keep = True

    patch.setattr(local.LocalEngine, "__init__", init)


def other_ids(r: Rollout) -> Rollout:
    """Encoded anew, where the tokenizer has a token for the first two characters."""
    if len(r.span) < 3:
        return r
    pair = tuple(r.span.token_ids[:2].tolist())
    return alter.retokenised(r, lambda ids: patches.merged(ids, {pair: patches.FIRST_PAIR}))


def forgotten_temperature(patch: Patch) -> None:
    honest = machines.trainer_options
    for module in ("rollkeel.loop.one_process", "rollkeel.cluster.ranks"):
        patch.setattr(f"{module}.trainer_options", lambda config: {**honest(config), "temperature": 1.0})


def stamped(r: Rollout, by: int) -> Rollout:
    """Versions `by` later: as a resume that forgets them stamps, or that keeps what waited too long."""
    span = r.span
    return replace(r, span=replace(span, versions=span.versions + by, kv_versions=span.kv_versions + by))


def no_update(patch: Patch) -> None:
    """`learn` says that it trained."""

    def idle(honest: Any, trainer: Any, *args: Any) -> Any:
        return honest(trainer, *args)

    from_first(patch, learn, "update", idle)
    from_first(patch, Stepper, "step", lambda honest, self, *_: {"optimizer/grad_norm": 0.1, "optimizer/lr": 1e-3})


def bad_gradient(patch: Patch) -> None:
    def norm(honest: Any, self: Any, grads: Any) -> torch.Tensor:
        grads[0][0] = float("nan")
        return honest(self, grads)

    from_first(patch, Stepper, "_norm", norm)


def stray_gradient(patch: Patch) -> None:
    """Gradients of the batch before are never forgotten; then comes a batch without differing rewards."""
    patch.setattr(Stepper, "zero_grad", lambda self: None)
    batches(patch, lambda rollouts: [replace(r, reward=1.0) for r in rollouts])


def by_rounding(patch: Patch) -> None:
    """Rounding of a group's mean over its equally small standard deviation."""
    from_first(patch, advantages, "compute", lambda honest, *given: honest(*given) + 1e-3)


def again(patch: Patch) -> None:
    """The batch of the step before once more, stamps and all."""
    kept: list[Any] = []

    inner = steps.learn

    def learning(run: Any, drawn: Any, clock: Any) -> dict[str, float]:
        drawn = kept[-1] if clock.step == FIRST else drawn
        kept.append(drawn)
        return inner(run, drawn, clock)

    patch.setattr(steps, "learn", learning)


def nothing_drawn(patch: Patch) -> None:
    batches(patch, lambda rollouts: [])


def silent_zeros(patch: Patch) -> None:
    """A grader that pays every third answer, and swallows its errors since step `LATE`."""
    batches(patch, lambda rollouts: [replace(r, reward=0.0) for r in rollouts], LATE)
    batches(patch, lambda rollouts: [replace(r, reward=float(r.id % 3 == 0)) for r in rollouts], 1)


STOPS = True
PATTERNS: dict[str, tuple[Callable[[Patch], None], str, bool, tuple[str, ...]]] = {
    "rewards that are 0 in silence": (silent_zeros, "rewards_gone", not STOPS, (f"run.steps={LATE}",)),
    "weights that did not arrive": (old_weights, "fresh_ratio", STOPS, ("train.lr=3e-3", "train.warmup_steps=0")),
    "stale KV": (old_kv, "old_kv", STOPS, ()),
    "shifted log-probs": (each(lambda r: alter.shifted(r, 1)), "fresh_ratio", STOPS, ()),
    "ids encoded anew": (each(other_ids), "fresh_ratio", STOPS, ()),
    "wrong temperature": (forgotten_temperature, "fresh_ratio", STOPS, ("sampling.temperature=0.6",)),
    "versions forgotten by a resume": (each(lambda r: stamped(r, 1)), "from_later", STOPS, ()),
    "a bound forgotten by a resume": (each(lambda r: stamped(r, -9)), "too_old", STOPS, ()),
    "trained without training": (no_update, "not_trained", STOPS, ()),
    "NaN reward": (each(lambda r: replace(r, reward=float("nan"))), "non_finite", STOPS, ()),
    "NaN gradient": (bad_gradient, "non_finite", STOPS, ()),
    "a batch without variance has a gradient": (stray_gradient, "stray_gradient", STOPS, ()),
    "a group without variance has advantages": (by_rounding, "uncaused", STOPS, ()),
    "every rollout twice": (lambda p: batches(p, lambda some: [*some, *some]), "repeated_ids", STOPS, ()),
    "the batch of the step before": (again, "trained_before", STOPS, ()),
    "empty answers": (each(lambda r: replace(r, text="")), "empty", not STOPS, ()),
    "answers without tokens": (
        each(lambda r: replace(r, text="", span=TokenSpan.empty(), status=Status.LENGTH)),
        "no_tokens",
        STOPS,
        (),
    ),
    "nothing is drawn": (nothing_drawn, "nothing_sampled", not STOPS, ()),
}  # fmt: skip
BEGINS = {"wrong temperature": 1, "rewards that are 0 in silence": LATE}
"""Steps in which other faults begin."""
NEEDS = {
    "stale KV": ("budgeted",),
    "weights that did not arrive": (
        "sync",
        "budgeted",
    ),  # in `async` the gap grows as staleness does: the doctor's, over steps
    "versions forgotten by a resume": ("sync", "budgeted"),
    "a bound forgotten by a resume": ("sync", "async"),
    "nothing is drawn": ("sync", "async"),
}
"""Loops that have such a fault, or notice it."""
SLOW = pytest.mark.slow
QUICK = ("shifted log-probs", "the batch of the step before")
"""Patterns that are cheap to show in two loops."""
CASES = [
    pytest.param(
        name,
        mode,
        marks=[] if mode == NEEDS.get(name, ("sync",))[0] or (mode == "budgeted" and name in QUICK) else SLOW,
    )
    for name in PATTERNS
    for mode in NEEDS.get(name, LOOPS)
]


def digest(run: Any) -> str:
    import hashlib

    found = hashlib.sha256()
    for _, tensor in run.trainer.named_weights():
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


def watched(patch: Patch) -> list[str]:
    """Digests of the weights before and behind the last step, whatever came of it."""
    inner, found = steps.step_once, list[str]()

    def stepping(run: Any, step: int) -> bool:
        found[:] = [digest(run)]
        try:
            return inner(run, step)
        finally:
            found.append(digest(run))

    patch.setattr(steps, "step_once", stepping)
    return found


@pytest.mark.usually(
    "rewards that are 0 in silence-sync",
    "weights that did not arrive-sync",
    "stale KV-budgeted",
    "shifted log-probs-sync",
    "ids encoded anew-sync",
    "wrong temperature-sync",
    "versions forgotten by a resume-sync",
    "trained without training-sync",
    "NaN gradient-sync",
    "every rollout twice-sync",
    "empty answers-sync",
)
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_it_is_noticed_in_the_step_where_it_happens(
    name: str, mode: str, tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    inject, check, stops, more = PATTERNS[name]
    if mode == "async" and check == "fresh_ratio" and name not in BEGINS:
        check, stops = "gap_jumped", False  # no token of such a batch is fresh
    inject(monkeypatch)
    found = watched(monkeypatch)
    run = tmp_path / "run"
    code, _, err = cli(capsys, "train", "default", *words(mode, *more), f"run.dir={run}")
    told = [e for e in events(run) if e["event"] == "check"]
    first = BEGINS.get(name, FIRST)
    assert check in {e["check"] for e in told}, (told, err)
    assert next(e["step"] for e in told if e["check"] == check) == first
    assert all(e["advice"] and e["evidence"] for e in told)
    if stops:
        assert (code, err.count("\n")) == (3, 1)
        assert check in err
        assert found[0] == found[1], "the weights moved"
        assert rows(run)[-1]["step"] == first - (check != "not_trained")
    else:
        assert code == 0


def test_a_stopped_run_goes_on_without_the_fault_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    asked = words("sync", last=FIRST + 1)
    assert cli(capsys, "train", "default", *asked, f"run.dir={whole}")[0] == 0
    with monkeypatch.context() as broken:
        PATTERNS["shifted log-probs"][0](broken)
        assert cli(capsys, "train", "default", *asked, f"run.dir={run}")[0] == 3
    stopped = read_step(run / "rollouts" / f"step_{FIRST:06}.parquet").to_pydict()
    assert any(values and np.isfinite(values).all() for values in stopped["train_logprobs"])
    size = len(read_step(run / "rollouts" / f"step_{FIRST - 1:06}.parquet"))
    for back in (1, FIRST - 1):  # the batch that was trained last, or the first, once more
        with monkeypatch.context() as doubled:
            inner = steps.learn

            def learning(run: Any, drawn: Any, clock: Any, by: int = back * size, inner: Any = inner) -> Any:
                return inner(run, replace(drawn, batch=[replace(r, id=r.id - by) for r in drawn.batch]), clock)

            doubled.setattr(steps, "learn", learning)
            code, _, err = cli(capsys, "train", "--resume", run)
            assert (code, "trained_before" in err) == (3, True)
    assert cli(capsys, "train", "--resume", run)[0] == 0
    assert_same(run, whole)


def test_a_warning_is_all_where_that_is_asked(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    batches(monkeypatch, lambda rollouts: [alter.shifted(r, 1) for r in [*rollouts, *rollouts]])
    code, out, err = cli(capsys, "train", "default", *words("sync", "alarms.on_impossible=warn"), f"run.dir={run}")
    assert (code, err) == (0, "")
    assert {"repeated_ids", "fresh_ratio"} <= {e["check"] for e in events(run) if e["event"] == "check"}
    assert "fresh_ratio" in out
    assert rows(run)[-1]["optimizer/updates"] > 0


def test_a_run_that_trained_nothing_does_not_end_well(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    batches(monkeypatch, lambda rollouts: [], 1)
    code, _, err = cli(capsys, "train", "default", *words("sync"), f"run.dir={tmp_path / 'run'}")
    assert (code, err.count("\n")) == (3, 1)
    assert f"none of {FIRST} steps made an update" in err
