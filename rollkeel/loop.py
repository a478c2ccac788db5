"""The whole system, read aloud: sample, grade, learn, publish. Start here.

    prompts ─▶ collect ─▶ grade ─▶ old log-probs ─▶ credit ─▶ objective × updates ─▶ publish ─▶ (evaluate, checkpoint)

`train_sync` waits for all rollouts of a step. `train_budgeted` (C3PO++) ends a step's sampling with a token budget and
carries what is unfinished into the next. `train_async` samples and grades the next steps' rollouts while it trains. They
differ in `sample` alone, and in what goes on beside it: `rollout/feeder.py` draws that.

One step is a function of the weights, the seed, the step number, the prompts consumed so far, the objective's state and
what the loop carries (`Run.carried`): pool, open rollouts, queue. That is why a run that was killed continues bit for bit:
reload those of step s and do s + 1. In `train_async` it is a function of the schedule too, which is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rollkeel.config import Config
from rollkeel.diagnostics import checks
from rollkeel.diagnostics.alarms import Alarm
from rollkeel.errors import Interrupted, RunStopped
from rollkeel.learn import learn
from rollkeel.rollout.budgeted import stepped
from rollkeel.rollout.collect import issue
from rollkeel.rollout.dynamic import Drawn, draw_once, draw_varied, varied_groups
from rollkeel.rollout.evaluate import evaluate
from rollkeel.rollout.feeder import check_staleness
from rollkeel.run import Clock, Run
from rollkeel.train.checkpoint import step_name
from rollkeel.types import Rollout

BARREN_STEPS = 20
"""Steps in a row without any group to learn from after which a run stops."""


Sample = Callable[[Run, dict[str, float], Clock], Drawn]


def train_sync(run: Run, first: int) -> None:
    """Steps `first` … `config.run.steps`, each on rollouts of the weights it starts from (with `rollout.lag`, of those so many
    steps before), whole batches of prompts.

    Step 0 is the evaluation of the start model. Raises `Interrupted` after a checkpoint when asked to stop.
    """
    _train(run, first, sample if run.lagged is None else sample_lagged)


def train_budgeted(run: Run, first: int) -> None:
    """The same with C3PO++ (Ring-1T report §2.3.3): a step trains on what finished by the end of its token budget, which
    earlier versions of the weights may have begun; what is unfinished waits in the pool, see `rollout/budgeted.py`."""
    _train(run, first, sample_budgeted)


def train_async(run: Run, first: int) -> None:
    """The same while further rollouts are sampled and graded: a step trains on whole batches in order, whose tokens are at
    most `rollout.overlap.max_staleness` versions old, and weights are published between decode steps. See
    `rollout/feeder.py` for who waits for whom and `rollout/overlap.py` for the bound."""
    settings, updates = run.config.rollout.overlap, run.config.train.updates_per_step
    if settings.max_staleness < updates:
        run.view.note(
            f"rollout.overlap.max_staleness={settings.max_staleness} is below train.updates_per_step={updates}: nothing overlaps"
        )
    _train(run, first, sample_async)


def _train(run: Run, first: int, sampled: Sample) -> None:
    done, barren = first - 1, _barren_before(run)
    try:
        if first == 0:
            start(run)
            done = 0
        else:
            run.publish()
        for step in range(done + 1, run.config.run.steps + 1):
            if run.stop():
                raise Interrupted("stopped between steps")
            barren = 0 if step_once(run, step, sampled) else barren + 1
            done = step
            if barren >= BARREN_STEPS:
                raise RunStopped(
                    f"{barren} steps in a row had no group with differing rewards; make the task easier or harder"
                )
        check(run, run.checks.at_end(done))
    except Interrupted:
        if run.overlap is not None and run.overlap.replayed:
            raise  # a checkpoint here would be one that the replayed run did not make
        if done >= 0:
            save(run, done)
        raise


def _barren_before(run: Run) -> int:
    """Steps in a row without an update at the end of the metrics: a resumed run stops where the whole one would."""
    learnt = [row.get("optimizer/updates", 1) > 0 for row in run.folder.metrics()]
    return len(learnt) if not any(learnt) else learnt[::-1].index(True)


def start(run: Run) -> None:
    """Publish the start weights, evaluate them as step 0 and keep them as a checkpoint."""
    clock = run.clock(0)
    with clock.stage("sync"):
        proof = run.publish()
    with clock.stage("eval"):
        scores = proof | held_out(run)
    run.record({"step": 0, "version": run.trainer.version, **scores, **clock.metrics({})})
    save(run, 0)


def step_once(run: Run, step: int, sampled: Sample) -> bool:
    """One step: everything between two versions of the weights. False if there was nothing to learn from."""
    config, clock = run.config, run.clock(step)
    metrics: dict[str, float] = {}
    drawn = sampled(run, metrics, clock)
    learnt = learn(run, step, drawn, metrics, clock)
    with clock.stage("sync"):
        metrics |= run.publish()
    evaluates, saves = due(config, step)
    if run.overlap is not None:
        go_on(run, step, clock, pause=evaluates or saves)
    if evaluates:
        with clock.stage("eval"):
            metrics |= held_out(run)
    metrics |= describe([r for r in drawn.rollouts if r.reward is not None])
    update, rollout = (sum(r.span.own_count for r in rollouts) for rollouts in (drawn.batch, drawn.rollouts))
    tokens = {"update": update, "step": update}
    metrics |= watch_graders(run, step)
    if run.overlap is None:  # there, sampling has no time of its own
        tokens["rollout"] = int(metrics.get("rollout/generated_tokens", rollout))
    metrics |= clock.metrics(tokens)
    row = {"step": step, "version": run.trainer.version, **metrics}
    checked, found = run.checks.observe(row)
    run.record(row | checked, drawn.rollouts if evaluates else ())
    raised = [*warn(run, row), *check(run, found)]
    if saves or (raised and config.alarms.on_alarm in ("checkpoint", "stop")):
        save(run, step)
    if raised and config.alarms.on_alarm == "stop":
        raise RunStopped(f"{raised[0].line} A checkpoint was saved; alarms.on_alarm=warn goes on")
    checks.tell([f for f in found if f.stops], run.folder.events, run.view.note)
    return learnt


def check(run: Run, found: Sequence[checks.Finding]) -> list[checks.Finding]:
    """Tell and log findings that warn; returns them."""
    warnings = [] if run.config.alarms.on_alarm == "off" else [f for f in found if not f.stops]
    checks.tell(warnings, run.folder.events, run.view.note)
    return warnings


def due(config: Config, step: int) -> tuple[bool, bool]:
    """Whether `step` ends with an evaluation, and with a checkpoint; the asynchronous loop pauses for either."""
    evaluates, saves = (
        step == config.run.steps or (every > 0 and step % every == 0)
        for every in (config.eval.every, config.checkpoint.every)
    )
    return evaluates, saves


def warn(run: Run, row: Mapping[str, Any]) -> list[Alarm]:
    """What the rows so far say about those to come: told and logged."""
    if run.config.alarms.on_alarm == "off":
        return []
    raised = run.alarms.observe(row)
    for alarm in raised:
        run.folder.events.emit(
            "alarm", step=alarm.step, alarm=alarm.kind, evidence=list(alarm.evidence), advice=alarm.advice
        )
        run.view.note(alarm.line)
    return raised


def watch_graders(run: Run, step: int) -> dict[str, float]:
    """Metrics of the graders since the last step; those that are slow or do not agree with themselves are told and logged."""
    metrics, events = run.grader.report()
    for event in events:
        run.folder.events.emit(event.pop("event"), step=step, **event)
    if metrics["failures/grader_nondeterministic"]:
        differing = next(e for e in events if "values" in e)
        run.view.note(
            f"grader {differing['grader']}: rollout {differing['rollout']} was graded twice, with {differing['values'][0]} and"
            f" {differing['values'][1]}; see events.jsonl for all"
        )
    return metrics


def go_on(run: Run, step: int, clock: Clock, *, pause: bool) -> None:
    """Asynchronous: the step is trained and published, so further groups may enter the engine. `pause`: park instead."""
    overlap = run.overlap
    assert overlap is not None  # `assemble` made it
    with clock.stage("park" if pause else "submit"):
        overlap.finish()
        overlap.park() if pause else overlap.send()
    overlap.commit(step)


def sample(run: Run, metrics: dict[str, float], clock: Clock) -> Drawn:
    """The step's graded rollouts, of the prompts behind those that earlier steps consumed."""
    size, deadline_s = run.config.rollout, run.config.engine.deadline_s
    seen: list[Rollout] = []

    def draw(first: int, count: int) -> Sequence[Rollout]:
        with clock.stage("rollout"):
            prompts = run.source.prompts(range(first, first + count))
            issued = issue(prompts, size.samples, run.sampling, first, run.engine)
            found = run.gather(
                run.engine, issued, run.policy.tokenizer, deadline_s=deadline_s, should_stop=run.stop, grader=run.grader
            )
        with clock.stage("reward"):
            graded = iter(run.grader.grade([r for r in found if r.status.complete]))
            found = [next(graded) if r.status.complete else r for r in found]
            seen.extend(found)
            metrics.update(run.budget.check(seen))
        return found

    if size.dynamic_rounds:
        drawn = draw_varied(draw, run.consumed, size.prompts, size.dynamic_rounds)
        metrics |= drawn.metrics()
    else:
        drawn = draw_once(draw, run.consumed, size.prompts, varied_only=size.drop_zero_variance)
    run.consumed += drawn.consumed  # only now: an interrupted step is repeated from its first prompt
    return drawn


def sample_budgeted(run: Run, metrics: dict[str, float], clock: Clock) -> Drawn:
    """The groups that the step's token budget completed, graded; what is unfinished stays in `run.budgeted`."""
    pooled = run.budgeted
    assert pooled is not None  # `assemble` made it
    engine, deadline_s = stepped(run.engine), run.config.engine.deadline_s
    with clock.stage("rollout"):
        partition = pooled.sample(
            engine,
            run.sampling,
            run.policy.tokenizer,
            deadline_s=deadline_s,
            should_stop=run.stop,
            check=run.budget.check,
            grader=run.grader,
        )
    with clock.stage("reward"):
        graded = run.grader.grade([r for r in partition.ended if r.status.complete])
        failed = [r for r in partition.ended if not r.status.complete]
        metrics |= run.budget.check([*graded, *failed])
        chosen = pooled.settle(graded)
    metrics |= pooled.metrics(partition)
    before, run.consumed = run.consumed, pooled.pool.counts["prompts_consumed"]
    useful = set(varied_groups(chosen))
    varied_only = run.config.rollout.drop_zero_variance
    batch = [r for r in chosen if r.group in useful or not varied_only]
    return Drawn(chosen, batch, run.consumed - before, 1)


def sample_async(run: Run, metrics: dict[str, float], clock: Clock) -> Drawn:
    """The next rollouts in order, waited for as far as they are not there yet; others stay in flight."""
    overlap, size = run.overlap, run.config.rollout
    assert overlap is not None  # `assemble` made it
    with clock.stage("rollout"):
        if not overlap.running:
            overlap.begin()
        while (found := overlap.batch(run.stop)) is None:
            # The run whose schedule is replayed was interrupted here, and resumed.
            overlap.park()
            overlap.begin()
    rollouts = found
    check_staleness(rollouts, run.trainer.version, size.overlap.max_staleness)
    metrics |= run.budget.check(rollouts) | overlap.metrics()
    metrics["async/wait_s"] = clock.seconds["rollout"]
    drawn = draw_once(lambda first, count: rollouts, run.consumed, size.prompts, varied_only=size.drop_zero_variance)
    run.consumed += drawn.consumed
    return drawn


def sample_lagged(run: Run, metrics: dict[str, float], clock: Clock) -> Drawn:
    """The batch that has waited `rollout.lag` steps; behind it, the queue is filled up with batches of the weights of now."""
    lagged = run.lagged
    assert lagged is not None  # `assemble` made it
    count = lagged.wanted(clock.step)
    for number in range(1, count + 1):
        about: dict[str, float] = {}
        lagged.push(sample(run, about, clock), about)
        if count > 1 and (number % 10 == 0 or number == count):
            run.view.note(f"rollout.lag={lagged.lag}: {number} of {count} batches sampled from the start weights")
    drawn, about = lagged.pop()
    metrics |= about
    return drawn


def describe(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Lengths (tokens that the policy sampled) and endings of a step's rollouts."""
    if not rollouts:
        return {}
    lengths = np.array([r.span.own_count for r in rollouts])
    masks = [r.span.sampled for r in rollouts if r.span.sampled is not None]
    ends = sum(int(np.sum(mask[:-1] > mask[1:])) for mask in masks)  # of turns but the last
    played = {"rollout/turns_mean": 1 + ends / len(rollouts)} if masks else {}
    return played | {
        "rollout/length_mean": float(lengths.mean()),
        "rollout/length_max": float(lengths.max()),
        "rollout/length_min": float(lengths.min()),
        "rollout/truncated": float(np.mean([r.status == "length" for r in rollouts])),
        "rollout/tokens": float(lengths.sum()),
        "rollout/count": float(len(rollouts)),
    }


def held_out(run: Run) -> dict[str, float]:
    """Accuracy on the evaluation items, under the weights the engine serves."""
    if not run.eval_prompts:
        return {}
    settings = run.config.eval
    return evaluate(
        run.engine,
        run.grader,
        run.policy.tokenizer,
        run.eval_prompts,
        run.eval_sampling,
        samples=settings.samples,
        greedy=settings.greedy,
        deadline_s=run.config.engine.deadline_s,
        should_stop=lambda: False,
        gather=run.gather,
    )[0]


def save(run: Run, step: int) -> None:
    """Checkpoint after `step`, unless it is there already; nothing is in flight then."""
    if run.overlap is not None:
        run.overlap.park()
    if (run.folder.checkpoints / step_name(step)).is_dir():
        if run.overlap is not None:
            run.overlap.discard()
        return
    if run.overlap is not None:
        run.overlap.commit(step)
    run.folder.events.emit("stage", step=step, stage="checkpoint")
    run.save(step)
    run.folder.events.emit("checkpoint_saved", step=step)
