"""The whole system, read aloud: sample, grade, learn, publish. Start here.

    prompts ─▶ collect ─▶ grade ─▶ old log-probs ─▶ credit ─▶ objective × updates ─▶ publish ─▶ (evaluate, checkpoint)

`train_sync` waits for all rollouts of a step. `train_budgeted` (C3PO++) ends a step's sampling with a token budget and
carries what is unfinished into the next. They differ in `sample` alone.

One step is a function of the weights, the seed, the step number, the prompts consumed so far, the objective's state and, in
`train_budgeted`, the pool; nothing else is carried along. That is why a run that was killed continues bit for bit: reload
those of step s and do s + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rollkeel import advantages
from rollkeel.batch.build import TrainingBatch, build_batch, split_by_groups
from rollkeel.diagnostics.mismatch import mismatch_metrics
from rollkeel.diagnostics.rollout_store import write_step
from rollkeel.diagnostics.routing import routing_metrics
from rollkeel.diagnostics.updates import merge_updates
from rollkeel.errors import Interrupted, RunStopped
from rollkeel.objectives.kl import ESTIMATORS
from rollkeel.rewards.overlong import overlong_penalty
from rollkeel.rollout.budgeted import stepped
from rollkeel.rollout.collect import collect, issue
from rollkeel.rollout.dynamic import Drawn, draw_once, draw_varied, varied_groups
from rollkeel.rollout.evaluate import evaluate
from rollkeel.run import Clock, Run
from rollkeel.train.checkpoint import step_name
from rollkeel.train.scores import Scores
from rollkeel.train.trainer import UpdateOutput
from rollkeel.types import Rollout

BARREN_STEPS = 20
"""Steps in a row without any group to learn from after which a run stops."""


Sample = Callable[[Run, dict[str, float], Clock], Drawn]


def train_sync(run: Run, first: int) -> None:
    """Steps `first` … `config.run.steps`, each on rollouts of the weights it starts from, whole batches of prompts.

    Step 0 is the evaluation of the start model. Raises `Interrupted` after a checkpoint when asked to stop.
    """
    _train(run, first, sample)


def train_budgeted(run: Run, first: int) -> None:
    """The same with C3PO++ (Ring-1T report §2.3.3): a step trains on what finished by the end of its token budget, which
    earlier versions of the weights may have begun; what is unfinished waits in the pool, see `rollout/budgeted.py`."""
    _train(run, first, sample_budgeted)


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


def step_once(run: Run, step: int, sampled: Sample) -> bool:
    """One step: everything between two versions of the weights. False if there was nothing to learn from."""
    config, clock = run.config, run.clock(step)
    metrics: dict[str, float] = {}
    drawn = sampled(run, metrics, clock)
    learnt = learn(run, step, drawn, metrics, clock)
    with clock.stage("sync"):
        run.publish()
    if step == config.run.steps or (config.eval.every and step % config.eval.every == 0):
        with clock.stage("eval"):
            metrics |= held_out(run)
    metrics |= describe([r for r in drawn.rollouts if r.reward is not None])
    update, rollout = (sum(len(r.span) for r in rollouts) for rollouts in (drawn.batch, drawn.rollouts))
    metrics |= clock.metrics({"rollout": int(metrics.get("rollout/generated_tokens", rollout)), "update": update})
    run.record({"step": step, "version": run.trainer.version, **metrics})
    if step == config.run.steps or (config.checkpoint.every and step % config.checkpoint.every == 0):
        save(run, step)
    return learnt


def sample(run: Run, metrics: dict[str, float], clock: Clock) -> Drawn:
    """The step's graded rollouts, of the prompts behind those that earlier steps consumed."""
    size, deadline_s = run.config.rollout, run.config.engine.deadline_s
    seen: list[Rollout] = []

    def draw(first: int, count: int) -> Sequence[Rollout]:
        with clock.stage("rollout"):
            prompts = run.source.prompts(range(first, first + count))
            issued = issue(prompts, size.samples, run.sampling, first, run.engine)
            found = collect(run.engine, issued, run.policy.tokenizer, deadline_s=deadline_s, should_stop=run.stop)
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


@dataclass(frozen=True, kw_only=True)
class Known:
    """What other policies say about the step's tokens, `[T]` each, where somebody needs it."""

    old: Scores | None = None
    """The weights at the start of the step."""
    ref: torch.Tensor | None = None
    """Log-probs of the frozen start model."""

    def of(self, part: slice) -> dict[str, torch.Tensor | None]:
        """Arguments of `LocalTrainer.update` for a part of the tokens."""
        old = (None, None) if self.old is None else (self.old.logprobs, self.old.topk_logprobs)
        named = {"old_logprobs": old[0], "old_topk_logprobs": old[1], "ref_logprobs": self.ref}
        return {name: None if value is None else value[part] for name, value in named.items()}


def learn(run: Run, step: int, drawn: Drawn, metrics: dict[str, float], clock: Clock) -> bool:
    """Passes, credit, updates; adds to `metrics` and writes the step's rollouts. False if nothing was learnt."""
    config, objective = run.config, run.objective
    graded = [r for r in drawn.rollouts if r.reward is not None]
    metrics |= advantages.group_metrics([r.reward for r in graded], [r.group for r in graded])
    groups = split_by_groups(drawn.batch, config.train.updates_per_step)
    chosen = [r for group in groups for r in group]
    credit: dict[int, float] = {}
    logprobs = keep = None
    if chosen:
        version = run.trainer.version
        whole = build_batch(chosen, np.zeros(len(chosen)), objective.aggregate).to(run.trainer.device)
        known = passes(run, whole, len(groups), clock)
        credit = credit_of(run, step, chosen, known, metrics)
        with clock.stage("update"):
            parts = [build_batch(g, [credit[r.id] for r in g], objective.aggregate) for g in groups]
            outputs = update(run, parts, known, metrics)
        metrics |= watch(run, whole, parts, known, outputs, version)
        logprobs = known.old.logprobs if known.old else torch.cat([o.logprobs for o in outputs])
        keep = torch.cat([o.keep for o in outputs])
    metrics["optimizer/updates"] = float(len(groups))
    if config.report.rollouts:
        with clock.stage("record"):
            store(run, step, graded, chosen, credit, logprobs, keep)
    return bool(groups)


def passes(run: Run, whole: TrainingBatch, updates: int, clock: Clock) -> Known:
    """Forward passes over all tokens before the first update, as far as somebody needs them."""
    needs, in_reward = run.objective.needs, run.config.train.kl_in == "reward" and run.config.train.kl_coefficient > 0
    old = ref = None
    # One update on all tokens sees exactly the weights that "old" means: its own first pass is the old pass, unless
    # a rule must look at the whole batch before that.
    ahead = run.objective.denominator == "kept" or any(rule.threshold.adaptive for _, rule in run.objective.rules())
    if in_reward or ((updates > 1 or ahead) and needs & {"old_logprobs", "old_topk_logprobs"}):
        with clock.stage("logprob"):
            old = run.trainer.score(whole)
    if in_reward or "ref_logprobs" in needs:
        with clock.stage("logprob"):
            ref = run.trainer.ref_logprobs(whole)
    return Known(old=old, ref=ref)


def credit_of(
    run: Run, step: int, rollouts: Sequence[Rollout], known: Known, metrics: dict[str, float]
) -> dict[int, float]:
    """Advantage of each rollout by id, from its reward with what the config adds to it."""
    config, n = run.config, len(rollouts)
    lengths = np.array([len(r.span) for r in rollouts])
    reward = np.array([r.reward for r in rollouts], dtype=np.float64)
    limit, overlong = config.sampling.max_new_tokens, config.reward.overlong
    added = np.zeros(n)
    if overlong.buffer:
        penalty = overlong_penalty(lengths, limit, overlong.buffer, overlong.penalty)
        metrics |= {
            "reward/overlong_penalty": abs(float(penalty.mean())),
            "reward/overlong_share": float((penalty < 0).mean()),
        }
        added += penalty
    if config.train.kl_in == "reward" and known.old is not None and known.ref is not None:
        per_token = ESTIMATORS[config.train.kl_estimator](known.old.logprobs.double(), known.ref.double())
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        penalty = config.train.kl_coefficient * np.add.reduceat(per_token.cpu().numpy(), starts)
        metrics["reward/kl_penalty"] = float(penalty.mean())
        added -= penalty
    if added.any():
        metrics["reward/shaped_mean"] = float((reward + added).mean())
    partial = config.run.loop == "budgeted" and config.rollout.budget.group == "partial"
    name = config.advantages.name or ("rloo" if partial else run.objective.advantage)
    credit = advantages.compute(name, reward + added, [r.group for r in rollouts])
    if config.advantages.shuffle:
        credit = advantages.shuffle(credit, config.run.seed, step)
    return {r.id: float(c) for r, c in zip(rollouts, credit, strict=True)}


def update(run: Run, parts: Sequence[TrainingBatch], known: Known, metrics: dict[str, float]) -> list[UpdateOutput]:
    """One optimizer update per part; adds their metrics, see `merge_updates`."""
    outputs, start = [], 0
    for part in parts:
        window = slice(start, start + len(part))
        start += len(part)
        current = "old_logprobs" in run.objective.needs and known.old is None
        first = not outputs
        outputs.append(
            run.trainer.update(part, run.objective, **known.of(window), old_is_current=current, experts=first)
        )
    # The controllers' bounds go by two names.
    bounds = {f"mask/{owner}/{rule.parameter}" for owner, rule in run.objective.rules() if rule.threshold.adaptive}
    metrics |= merge_updates([o.metrics for o in outputs], [len(p) for p in parts], bounds)
    return outputs


def watch(
    run: Run,
    whole: TrainingBatch,
    parts: Sequence[TrainingBatch],
    known: Known,
    outputs: Sequence[UpdateOutput],
    version: int,
) -> dict[str, float]:
    """Engine against trainer, at the weights `version` that sampled; what p alone says, at those of every update."""
    credited = replace(whole, advantages=torch.cat([p.advantages for p in parts]).to(whole.advantages.device))

    def measured(seen: Sequence[UpdateOutput]) -> dict[str, float]:
        logprobs = torch.cat([o.logprobs for o in seen])
        tokens = credited.tokens(
            logprobs,
            old_logprobs=known.old.logprobs if known.old else None,
            ref_logprobs=known.ref,
            indices=torch.arange(len(logprobs), device=logprobs.device),
        )
        weight = torch.cat([o.weight for o in seen]) if run.objective.weight is not None else None
        return mismatch_metrics(tokens, version, weight=weight)

    found = measured(outputs)
    if known.old is None and len(outputs) > 1:
        # Without an old pass only the first update's pass saw the weights that sampled.
        found = {name: value for name, value in found.items() if not name.startswith("mismatch/")}
        found |= {name: value for name, value in measured(outputs[:1]).items() if name.startswith("mismatch/")}
    engine, experts = parts[0].experts, outputs[0].experts
    return found | routing_metrics(engine if experts is None or engine is None else engine.to(experts.device), experts)


def describe(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Lengths and endings of a step's rollouts."""
    if not rollouts:
        return {}
    lengths = np.array([len(r.span) for r in rollouts])
    return {
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
    """Write the step's rollouts with what the trainer thought of every token of those it was trained on."""
    trained: dict[int, np.ndarray] = {}
    masks: dict[int, np.ndarray] = {}
    if logprobs is not None and keep is not None:
        p, k, start = logprobs.cpu().numpy(), keep.cpu().numpy(), 0
        for r in chosen:
            window = slice(start, start + len(r.span))
            trained[r.id], masks[r.id] = p[window], k[window]
            start += len(r.span)
    spread = {r.id: np.full(len(r.span), credit[r.id], np.float32) for r in chosen}
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
