"""The whole system, read aloud: sample, grade, learn, publish. Start here.

    feed.draw ─▶ old log-probs ─▶ credit ─▶ objective × updates ─▶ publish ─▶ (evaluate, checkpoint)
    feeds.py     ╰──────────── learn.py ──────────────────────╯

`learn` cuts the batch into `train.updates_per_step` parts of whole groups; each makes one optimizer update. The version of
the weights counts updates, not steps. `learn` also writes the step's rollouts.

The loops differ in their feed alone: whole batches (`run.loop=sync`), a token budget with a pool of unfinished rollouts
(`budgeted`, C3PO++), or rollouts sampled while others are trained (`async`).

One step is a function of the seed, the step number and `Run.state`: weights and optimizer, prompts consumed so far and the
order of the next, the objective's state, what the feed carries. That is why a run that was killed continues bit for bit: reload
the state of step s and do s + 1. In the asynchronous loop it is a function of the schedule too, which is recorded.
"""

from __future__ import annotations

from rollkeel.config import Config
from rollkeel.errors import Interrupted, RunStopped, StoppedByCheck
from rollkeel.host import collect_as_usual
from rollkeel.loop.learn import learn
from rollkeel.loop.run import HeldOut, Run
from rollkeel.loop.watch import (
    LAST_PATIENCE_S,
    by_source,
    describe,
    tell_doctor,
    tell_graders,
    tell_warnings,
    with_doctor,
)
from rollkeel.record import checks
from rollkeel.rollout.collect import collect
from rollkeel.rollout.evaluate import evaluate
from rollkeel.train.checkpoint import step_name

BARREN_STEPS = 20
"""A run stops after so many steps in a row without an update, because no group was left to train on."""


def train(run: Run, first: int) -> None:
    """Steps `first` … `config.run.steps`; step 0 evaluates the start model. Raises `Interrupted` when asked to stop, after a
    checkpoint of the last whole step, and `RunStopped` when a rule ends the run."""
    done, barren = first - 1, _barren_before(run)
    collect_as_usual()
    try:
        if first == 0:
            start(run)
            done = 0
        else:
            run.publish()
        for step in range(done + 1, run.config.run.steps + 1):
            if run.stop():
                raise Interrupted("stopped between steps")
            barren = 0 if step_once(run, step) else barren + 1
            done = step
            if barren >= BARREN_STEPS:
                raise RunStopped(
                    f"{barren} steps in a row had no group with differing rewards; make the task easier or harder"
                )
        if barren and barren == done:
            raise RunStopped(
                f"none of {done} steps made an update; look at the rewards, or make the task easier or harder"
            )
        tell_warnings(run, run.checks.at_end(done))
        tell_doctor(run, done, run.doctor.hear(LAST_PATIENCE_S))
    except StoppedByCheck as error:
        run.doctor.hear(LAST_PATIENCE_S)
        word = run.doctor.ask(LAST_PATIENCE_S, alone=True)
        tell_doctor(run, done + 1, word)
        raise StoppedByCheck(with_doctor(str(error), word)) from error
    except Interrupted:
        if done >= 0 and not run.feed.replays():
            save(run, done)
        raise


def start(run: Run) -> None:
    """Publish the start weights and evaluate them as step 0. Checkpoint them if `checkpoint.every` is set."""
    clock = run.clock(0)
    with clock.stage("sync"):
        proof = run.publish()
    with clock.stage("eval"):
        scores = proof | held_out(run, 0)
    run.record({"step": 0, "version": run.trainer.version, **scores, **run.phases(), **clock.metrics({})})
    if run.config.checkpoint.every:
        save(run, 0)


def step_once(run: Run, step: int) -> bool:
    """One step: everything between two publications. False if it made no update."""
    clock = run.clock(step)
    drawn = run.feed.draw(clock, run.trainer.version)
    run.source.problems.observe(drawn.rollouts)  # rewards may decide which prompts come next
    run.rest_engine(clock)
    metrics = {**drawn.metrics, **learn(run, drawn, clock)}
    with clock.stage("sync"):
        metrics |= run.publish()
    evaluates, saves = due(run.config, step)
    run.feed.published(clock, pause=evaluates or saves)
    if evaluates:
        with clock.stage("eval"):
            metrics |= held_out(run, step)
    metrics |= describe([r for r in drawn.rollouts if r.reward is not None]) | tell_graders(run, step)
    metrics |= by_source([part.name for part in run.config.data.parts], drawn)
    trained = sum(r.span.own_count for r in drawn.batch)
    sampled = {} if drawn.generated is None else {"rollout": drawn.generated}
    metrics |= clock.metrics({"update": trained, "step": trained, **sampled})
    row = {"step": step, "version": run.trainer.version, **metrics, **run.phases()}
    checked, findings = run.checks.observe(row)
    run.record(row | checked, texts_of=drawn.rollouts if evaluates else ())
    tell_doctor(run, step, run.doctor.hear())
    warnings = tell_warnings(run, findings, row)
    act = run.config.alarms.on_alarm
    if saves or (warnings and act in ("checkpoint", "stop")):
        save(run, step)
    if warnings and act == "stop":
        word = run.doctor.hear(LAST_PATIENCE_S) or run.doctor.word
        line = f"{warnings[0].line} A checkpoint was saved; alarms.on_alarm=warn goes on"
        raise RunStopped(with_doctor(line, word))
    checks.tell([f for f in findings if f.stops], run.folder.events, run.view.note)
    return metrics["optimizer/updates"] > 0


def due(config: Config, step: int) -> tuple[bool, bool]:
    """Whether `step` ends with an evaluation, and whether with a checkpoint; the feed pauses for either."""
    intervals = [config.eval.every, *(one.every for one in config.eval.sets if one.every is not None)]
    return any(is_due(config, step, every) for every in intervals), is_due(config, step, config.checkpoint.every)


def is_due(config: Config, step: int, every: int) -> bool:
    """Whether `step` is the last one or a multiple of `every`; with `every` = 0, the last one only."""
    return step == config.run.steps or (every > 0 and step % every == 0)


def held_out(run: Run, step: int) -> dict[str, float]:
    """Accuracy on the evaluation sets that are due at `step`, all of them at 0, under the weights the engine serves."""
    settings = run.config.eval
    own = HeldOut(prompts=run.eval_prompts, sampling=run.eval_sampling, samples=settings.samples, every=settings.every)
    metrics = {}
    for one in (own, *run.eval_sets):
        if one.prompts and (step == 0 or is_due(run.config, step, one.every)):
            metrics |= evaluate(
                run.engine,
                run.grader,
                run.policy.tokenizer,
                one.prompts,
                one.sampling,
                samples=one.samples,
                greedy=settings.greedy and one is own,
                deadline_s=run.config.silence_s,
                gather=run.gather if one is own else collect,
            )[0]
    return metrics


def save(run: Run, step: int) -> None:
    """Take everything out of the engine. Then save the checkpoint of `step`, unless it exists."""
    kept = (run.folder.checkpoints / step_name(step)).is_dir()
    run.feed.park(None if kept else step)
    if not kept:
        run.folder.events.emit("stage", step=step, stage="checkpoint")
        run.save(step)
        run.folder.events.emit("checkpoint_saved", step=step)


def _barren_before(run: Run) -> int:
    """Steps without an update that end the metrics so far: a resumed run stops where the uninterrupted one would."""
    learnt = [row.get("optimizer/updates", 1) > 0 for row in run.folder.metrics()]
    return len(learnt) if not any(learnt) else learnt[::-1].index(True)
