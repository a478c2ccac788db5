"""The whole system, read aloud: sample, grade, learn, publish. Start here.

    prompts ─▶ collect ─▶ grade ─▶ credit ─▶ old log-probs ─▶ objective × updates ─▶ publish ─▶ (evaluate, checkpoint)

One step is a function of the weights, the seed and the step number; nothing else is carried along. That is why a run that
was killed continues bit for bit: reload the weights of step s and do step s + 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollkeel import advantages
from rollkeel.batch.build import TrainingBatch, build_batch, split_by_groups
from rollkeel.diagnostics.mismatch import mismatch_metrics
from rollkeel.diagnostics.rollout_store import write_step
from rollkeel.errors import Interrupted, RunStopped
from rollkeel.rollout.collect import collect, issue
from rollkeel.rollout.evaluate import evaluate
from rollkeel.run import Clock, Run
from rollkeel.train.checkpoint import step_name
from rollkeel.types import Rollout

BARREN_STEPS = 20
"""Steps in a row without any group to learn from after which a run stops."""


def train_sync(run: Run, first: int) -> None:
    """Steps `first` … `config.run.steps`, each on rollouts of the weights it starts from.

    Step 0 is the evaluation of the start model. Raises `Interrupted` after a checkpoint when asked to stop.
    """
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
            barren = 0 if step_once(run, step) else barren + 1
            done = step
            if barren >= BARREN_STEPS:
                raise RunStopped(
                    f"{barren} steps in a row had no group with differing rewards; make the task easier or harder"
                )
    except Interrupted:
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
        run.publish()
    with clock.stage("eval"):
        scores = held_out(run)
    run.record({"step": 0, "version": run.trainer.version, **scores, **clock.metrics({})})
    save(run, 0)


def step_once(run: Run, step: int) -> bool:
    """One step: everything between two versions of the weights. False if there was nothing to learn from."""
    config, clock = run.config, run.clock(step)
    with clock.stage("rollout"):
        sampled = sample(run, step)
    with clock.stage("reward"):
        graded = run.grader.grade([r for r in sampled if r.status.complete])
        failed = [r for r in sampled if not r.status.complete]
        metrics = run.budget.check([*graded, *failed])
    good = [r for r in graded if r.reward is not None]
    learnt = learn(run, step, good, metrics, clock)
    with clock.stage("sync"):
        run.publish()
    if step == config.run.steps or (config.eval.every and step % config.eval.every == 0):
        with clock.stage("eval"):
            metrics |= held_out(run)
    tokens = sum(len(r.span) for r in sampled)
    metrics |= describe(good) | clock.metrics({"rollout": tokens, "update": sum(len(r.span) for r in good)})
    run.record({"step": step, "version": run.trainer.version, **metrics})
    if step == config.run.steps or (config.checkpoint.every and step % config.checkpoint.every == 0):
        save(run, step)
    return learnt


def sample(run: Run, step: int) -> list[Rollout]:
    """The step's rollouts, from prompts that follow from the step number."""
    size = run.config.rollout
    first = (step - 1) * size.prompts
    prompts = run.source.prompts(range(first, first + size.prompts))
    issued = issue(prompts, size.samples, run.sampling, first, run.engine)
    return collect(
        run.engine, issued, run.policy.tokenizer, deadline_s=run.config.engine.deadline_s, should_stop=run.stop
    )


def learn(run: Run, step: int, rollouts: Sequence[Rollout], metrics: dict[str, float], clock: Clock) -> bool:
    """Credit, old log-probs, updates; adds to `metrics` and writes the step's rollouts. False if nothing was learnt."""
    config, objective, trainer = run.config, run.objective, run.trainer
    credit, kept = credit_of(run, step, rollouts, metrics)
    chosen = [r for r, keep in zip(rollouts, kept, strict=True) if keep]
    batches = split_by_groups(chosen, config.train.updates_per_step) if chosen else []
    values = dict(zip((r.id for r in rollouts), credit, strict=True))
    version = trainer.version
    whole = (
        build_batch(chosen, [values[r.id] for r in chosen], objective.aggregate).to(trainer.device) if chosen else None
    )
    logprobs = keep = None
    if whole is not None:
        # One update on all tokens sees exactly the weights that "old" means: its own first pass is the old pass.
        old = ref = None
        if "old_logprobs" in objective.needs and len(batches) > 1:
            with clock.stage("logprob"):
                old, _ = trainer.logprobs(whole)
        if "ref_logprobs" in objective.needs:
            with clock.stage("logprob"):
                ref = trainer.ref_logprobs(whole)
        with clock.stage("update"):
            parts = [build_batch(b, [values[r.id] for r in b], objective.aggregate) for b in batches]
            logprobs, keep = update(run, parts, old, ref, metrics)
        # Without an old pass only the first update's pass saw the weights that `version` names.
        seen = whole if old is not None else parts[0]
        metrics |= mismatch_metrics(seen.to(trainer.device).tokens(logprobs[: len(seen)], old_logprobs=old), version)
        logprobs = old if old is not None else logprobs
    metrics["optimizer/updates"] = float(len(batches))
    if config.report.rollouts:
        with clock.stage("record"):
            store(run, step, rollouts, chosen, values, logprobs, keep)
    return bool(batches)


def update(
    run: Run,
    parts: Sequence[TrainingBatch],
    old: torch.Tensor | None,
    ref: torch.Tensor | None,
    metrics: dict[str, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimizer update per part; metrics are means over updates weighted by tokens (maxima for `…max`).

    Returns the log-probs each part's pass saw and the tokens its masks kept, both `[T]` over all parts in order.
    """
    outputs, start = [], 0
    for part in parts:
        window = slice(start, start + len(part))
        start += len(part)
        outputs.append(
            run.trainer.update(
                part,
                run.objective,
                old_logprobs=None if old is None else old[window],
                ref_logprobs=None if ref is None else ref[window],
                old_is_current="old_logprobs" in run.objective.needs and old is None,
            )
        )
    for name in dict.fromkeys(k for o in outputs for k in o.metrics):
        have = [(o.metrics[name], len(p)) for o, p in zip(outputs, parts, strict=True) if name in o.metrics]
        if name.endswith("max"):
            metrics[name] = max(v for v, _ in have)
        elif name == "optimizer/lr":
            metrics[name] = have[-1][0]
        elif name.endswith(("clamped_log_ratios", "floored")):
            metrics[name] = sum(v for v, _ in have)
        else:
            mean = sum(v * n for v, n in have) / sum(n for _, n in have)
            low, high = min(v for v, _ in have), max(v for v, _ in have)
            metrics[name] = min(
                max(mean, low), high
            )  # a constant (φ, say) stays what it is, without a rounding residue
    return torch.cat([o.logprobs for o in outputs]), torch.cat([o.keep for o in outputs])


def credit_of(
    run: Run, step: int, rollouts: Sequence[Rollout], metrics: dict[str, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Advantage of each rollout and whether it enters the batch, both `[R]`."""
    config = run.config
    if not rollouts:
        metrics |= advantages.group_metrics([], [])
        return np.zeros(0), np.zeros(0, bool)
    reward = np.array([r.reward for r in rollouts], dtype=np.float64)
    groups = np.array([r.group for r in rollouts])
    credit = advantages.compute(config.advantages.name or run.objective.advantage, reward, groups)
    metrics |= advantages.group_metrics(reward, groups)
    kept = np.ones(len(rollouts), bool)
    if config.rollout.drop_zero_variance:
        for group in np.unique(groups):
            kept[groups == group] = np.ptp(reward[groups == group]) > 0
    if config.advantages.shuffle:
        credit[kept] = advantages.shuffle(credit[kept], config.run.seed, step)
    return credit, kept


def describe(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Lengths and endings of a step's rollouts."""
    if not rollouts:
        return {}
    lengths = np.array([len(r.span) for r in rollouts])
    return {
        "rollout/length_mean": float(lengths.mean()),
        "rollout/length_max": float(lengths.max()),
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
    )[0]


def save(run: Run, step: int) -> None:
    """Checkpoint after `step`, unless it is there already."""
    if (run.folder.checkpoints / step_name(step)).is_dir():
        return
    run.folder.events.emit("stage", step=step, stage="checkpoint")
    run.save(step)
    run.folder.events.emit("checkpoint_saved", step=step)


def store(
    run: Run,
    step: int,
    rollouts: Sequence[Rollout],
    chosen: Sequence[Rollout],
    credit: dict[int, float],
    logprobs: torch.Tensor | None,
    keep: torch.Tensor | None,
) -> None:
    """Write the step's rollouts with what the trainer thought of every token."""
    trained: dict[int, np.ndarray] = {}
    masks: dict[int, np.ndarray] = {}
    if logprobs is not None and keep is not None:
        p, k, start = logprobs.cpu().numpy(), keep.cpu().numpy(), 0
        for r in chosen:
            window = slice(start, start + len(r.span))
            trained[r.id], masks[r.id] = p[window], k[window]
            start += len(r.span)
    spread = {r.id: np.full(len(r.span), credit[r.id], np.float32) for r in rollouts}
    tokenizer = run.policy.tokenizer
    write_step(
        run.folder.rollouts(step),
        rollouts,
        step=step,
        train_logprobs=trained,
        keep=masks,
        advantages=spread,
        piece=lambda i: tokenizer.decode([i]),
    )
