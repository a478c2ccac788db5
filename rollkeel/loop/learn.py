"""What the trainer does with a step's rollouts: passes, credit, updates, and what they say about engine and trainer.

Blind to how the rollouts were scheduled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollkeel import advantages, plugins
from rollkeel.batch.build import TrainingBatch, build_batch, split_by_groups
from rollkeel.config import Config, TrainConfig
from rollkeel.errors import BadInput, Impossible, StoppedByCheck
from rollkeel.loop.assemble import estimator
from rollkeel.loop.machines import Trainer
from rollkeel.loop.run import Run
from rollkeel.loop.watch import tell_warnings
from rollkeel.objectives import Objective
from rollkeel.objectives.kl import PLAIN
from rollkeel.record import checks, oddities
from rollkeel.record.clock import Clock
from rollkeel.record.mismatch import mismatch_metrics
from rollkeel.record.rollout_store import write_step
from rollkeel.record.routing import flipped_layers, routing_metrics
from rollkeel.record.updates import merge_updates
from rollkeel.rewards.shaping import shaped
from rollkeel.train.scores import Scores, UpdateOutput
from rollkeel.types import Rollout, StepRollouts

TRACED = 2
"""Rollouts of a step whose tensors are recorded: one may be odd by itself, more cost a model's activations each."""


@dataclass(frozen=True, kw_only=True)
class OldScores:
    """What other policies say about the step's tokens, `[T]` each, where the objective or KL needs it."""

    old: Scores | None = None
    """The weights at the start of the step."""
    ref: torch.Tensor | None = None
    """Log-probs of the frozen start model."""

    def of(self, part: slice) -> dict[str, torch.Tensor | None]:
        """Arguments of `Trainer.update` for a part of the tokens."""
        old = (None, None) if self.old is None else (self.old.logprobs, self.old.topk_logprobs)
        named = {"old_logprobs": old[0], "old_topk_logprobs": old[1], "ref_logprobs": self.ref}
        return {name: None if value is None else value[part] for name, value in named.items()}


def learn(run: Run, drawn: StepRollouts, clock: Clock) -> dict[str, float]:
    """Passes, credit, updates; writes the step's rollouts and returns what was measured. `optimizer/updates` is 0 if nothing
    was learnt. A step that a check stops writes them too, for who asks why."""
    try:
        return _learn(run, drawn, clock)
    except (StoppedByCheck, Impossible) as error:
        seen = error.seen if isinstance(error, Impossible) else None
        with suppress(BadInput, ValueError):  # what stopped the step says more
            stated = oddities.Stated.of(run.config, run.trainer.version, run.source.size)
            tell_warnings(run, run.checks.beside(clock.step, oddities.sampled(drawn.rollouts, drawn.batch, stated)))
            if run.config.report.rollouts:
                store_refused(run, drawn, clock.step, seen)
        if isinstance(error, Impossible):
            checks.tell([checks.refused(error, clock.step)], run.folder.events, run.view.note)
        raise


def _learn(run: Run, drawn: StepRollouts, clock: Clock) -> dict[str, float]:
    config = run.config
    objective = run.objective
    step = clock.step
    graded = [r for r in drawn.rollouts if r.reward is not None]
    metrics = advantages.group_metrics([r.reward for r in graded], [r.group for r in graded])
    stated = oddities.Stated.of(config, run.trainer.version, run.source.size)
    metrics |= oddities.sampled(drawn.rollouts, drawn.batch, stated) | run.checks.trained(
        step, [r.id for r in drawn.batch]
    )
    checks.tell(run.checks.refuse(step, {**drawn.metrics, **metrics}), run.folder.events, run.view.note)
    groups = split_by_groups(drawn.batch, config.train.updates_per_step)
    chosen = [r for group in groups for r in group]
    credit: dict[int, float] = {}
    seen: dict[str, torch.Tensor] = {}
    if chosen:
        version, trace = run.trainer.version, config.trace
        if trace.tensors_every and step % trace.tensors_every == 0:
            with clock.stage("trace"):
                about = {"step": step, "version": version, "layers": trace.layers, "parity": config.run.parity}
                run.machines.record(run.folder.tensors(step), chosen[:TRACED], about)
        whole = build_batch(chosen, None, objective.aggregate).to(run.trainer.device)
        scores = passes(config.train, objective, run.trainer, whole, len(groups), clock)
        credit, measured = credit_of(config, objective, step, chosen, scores)
        metrics |= measured
        metrics["advantages/nonzero"] = float(np.mean([c != 0 for c in credit.values()]))
        with clock.stage("update"):
            parts = whole.parts([[credit[r.id] for r in g] for g in groups], objective.aggregate)
            whole = replace(whole, advantages=torch.cat([p.advantages for p in parts]))
            metrics |= (paid := credited(config, objective, parts, chosen))
            checks.tell(run.checks.refuse(step, paid), run.folder.events, run.view.note)
            name = config.objective.name
            updated = functools.partial(update, run.trainer, objective, parts, scores)
            own = plugins.is_own(name)
            outputs = plugins.tried(updated, f"objective.name {name!r}", between=True) if own else updated()
        run.enter("publish")  # what updates alone need leaves while their numbers are looked at
        metrics |= updates_metrics(objective, parts, outputs)
        metrics |= watch(objective, whole, parts, scores, outputs, version)
        if scores.ref is None and config.train.kl_every and step % config.train.kl_every == 0:
            with clock.stage("monitor"):
                metrics["policy/kl_base"] = kl_to_start(run.trainer, chosen[: -(-len(chosen) // 2)], outputs)
        seen = seen_of(parts, scores, outputs, version)
        metrics["advantages/kept"] = float((seen["keep"].bool() & (whole.advantages != 0)).double().mean())
    metrics["optimizer/updates"] = float(len(groups))
    if config.report.rollouts:
        with clock.stage("record"):
            store(run.folder.rollouts(step), step, graded, chosen, credit, seen, run.policy.tokenizer)
    return metrics


def credited(
    config: Config, objective: Objective, parts: Sequence[TrainingBatch], chosen: Sequence[Rollout]
) -> dict[str, float]:
    """Whether advantages follow rewards, where nothing but the reward makes them."""
    added = (
        config.reward.overlong.buffer or config.train.kl_in == "reward" or config.experiment.advantages == "shuffled"
    )
    own = plugins.is_own(estimator(config, objective))  # may pay for what it likes
    over_batch = estimator(config, objective) in advantages.OVER_BATCH
    return {} if added or own else oddities.credited(parts, chosen, over_batch=over_batch)


def passes(
    train: TrainConfig, objective: Objective, trainer: Trainer, whole: TrainingBatch, updates: int, clock: Clock
) -> OldScores:
    """Compute old and reference log-probs of the batch, only if the objective or KL needs them."""
    needs, in_reward = objective.needs, train.kl_in == "reward" and train.kl_coefficient > 0
    old = ref = None
    # One update on all tokens sees exactly the weights that "old" means: its own first pass is the old pass, unless
    # a rule must look at the whole batch before that.
    if in_reward or ((updates > 1 or objective.looks_ahead) and needs & {"old_logprobs", "old_topk_logprobs"}):
        with clock.stage("logprob"):
            old = trainer.score(whole)
    if in_reward or "ref_logprobs" in needs:
        with clock.stage("logprob"):
            ref = trainer.ref_logprobs(whole)
    return OldScores(old=old, ref=ref)


def kl_to_start(trainer: Trainer, rollouts: Sequence[Rollout], outputs: Sequence[UpdateOutput]) -> float:
    """KL to the start model where the step's batch begins with `rollouts`: some show it, and cost less."""
    ref = trainer.ref_logprobs(build_batch(rollouts, None, "token_mean"))
    seen = torch.cat([o.logprobs for o in outputs])[: len(ref)]
    return float(PLAIN["k3"](seen.double(), ref.double()).mean())


def credit_of(
    config: Config, objective: Objective, step: int, rollouts: Sequence[Rollout], scores: OldScores
) -> tuple[dict[int, float], dict[str, float]]:
    """Advantage of each rollout by id, from its shaped reward; metrics of the shaping."""
    lengths = np.array([r.span.own_count for r in rollouts])
    kl = None
    if config.train.kl_in == "reward" and scores.old is not None and scores.ref is not None:
        per_token = PLAIN[config.train.kl_estimator](scores.old.logprobs.double(), scores.ref.double())
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        kl = config.train.kl_coefficient * np.add.reduceat(per_token.cpu().numpy(), starts)
    rewards = np.array([r.reward for r in rollouts], dtype=np.float64)
    rewards, metrics = shaped(rewards, lengths, config.reward.overlong.buffer, config.sampling.max_new_tokens, kl)
    credit = advantages.compute(estimator(config, objective), rewards, [r.group for r in rollouts], lengths)
    if config.experiment.advantages == "shuffled":
        credit = advantages.shuffle(credit, config.run.seed, step)
    credit = advantages.one_sided(credit, config.experiment.advantages)
    return {r.id: float(c) for r, c in zip(rollouts, credit, strict=True)}, metrics


def update(
    trainer: Trainer, objective: Objective, parts: Sequence[TrainingBatch], scores: OldScores
) -> list[UpdateOutput]:
    """One optimizer update per part."""
    outputs, start = [], 0
    for part in parts:
        window = slice(start, start + len(part))
        start += len(part)
        current = "old_logprobs" in objective.needs and scores.old is None
        first = not outputs
        outputs.append(trainer.update(part, objective, **scores.of(window), old_is_current=current, experts=first))
    return outputs


def updates_metrics(
    objective: Objective, parts: Sequence[TrainingBatch], outputs: Sequence[UpdateOutput]
) -> dict[str, float]:
    """Metrics of the updates together, see `merge_updates`."""
    # The controllers' bounds go by two names.
    bounds = {f"mask/{owner}/{rule.parameter}" for owner, rule in objective.rules() if rule.threshold.adaptive}
    metrics = merge_updates([o.metrics for o in outputs], [len(p) for p in parts], bounds)
    return metrics | {"mask/dropped_share": 1.0 - metrics["objective/kept"]}


def watch(
    objective: Objective,
    whole: TrainingBatch,
    parts: Sequence[TrainingBatch],
    scores: OldScores,
    outputs: Sequence[UpdateOutput],
    version: int,
) -> dict[str, float]:
    """Engine against trainer, at the weights `version` that sampled; what p alone says, at those of every update."""

    def measured(seen: Sequence[UpdateOutput]) -> dict[str, float]:
        logprobs = torch.cat([o.logprobs for o in seen])
        tokens = whole.tokens(
            logprobs,
            old_logprobs=scores.old.logprobs if scores.old else None,
            ref_logprobs=scores.ref,
            indices=torch.arange(len(logprobs), device=logprobs.device),
        )
        weight = torch.cat([o.weight for o in seen]) if objective.weight is not None else None
        return mismatch_metrics(tokens, version, weight=weight)

    metrics = measured(outputs)
    if scores.old is None and len(outputs) > 1:
        # Without an old pass only the first update's pass saw the weights that sampled.
        metrics = {name: value for name, value in metrics.items() if not name.startswith("mismatch/")}
        metrics |= {name: value for name, value in measured(outputs[:1]).items() if name.startswith("mismatch/")}
    engine, experts = parts[0].experts, outputs[0].experts
    return metrics | routing_metrics(
        engine if experts is None or engine is None else engine.to(experts.device), experts
    )


def seen_of(
    parts: Sequence[TrainingBatch], scores: OldScores, outputs: Sequence[UpdateOutput], version: int
) -> dict[str, torch.Tensor]:
    """What the trainer saw of each token, `[T]` each, under the names of the rollouts file: at the weights `version` that
    began the step, or without an old pass at those of each update."""
    old = scores.old
    updates = torch.cat([torch.full((len(part),), i) for i, part in enumerate(parts)])
    seen = {
        "train_logprobs": old.logprobs if old else torch.cat([o.logprobs for o in outputs]),
        "entropy": old.entropy if old else torch.cat([o.entropy for o in outputs]),
        "train_version": torch.full_like(updates, version) if old else version + updates,
        "keep": torch.cat([o.keep for o in outputs]),
    }
    cuts = [o.cut for o in outputs if o.cut is not None]
    if len(cuts) == len(outputs):
        seen["cut"] = torch.cat(cuts)
    engine, trainer = parts[0].experts, outputs[0].experts  # asked for in the first update alone
    if engine is not None and trainer is not None:
        seen["flipped_layers"] = torch.full((len(updates),), -1, dtype=torch.int16)
        seen["flipped_layers"][: len(parts[0])] = flipped_layers(engine.to(trainer.device), trainer).cpu()
    return seen


ABSENT = {"train_logprobs": np.nan, "entropy": np.nan, "keep": True, "cut": False, "flipped_layers": -1}
"""What stands in the file for a token that an environment wrote: no column says anything about it but `sampled`."""


def _at(rollout: Rollout, values: np.ndarray, absent: float) -> np.ndarray:
    """`values` of the sampled tokens in their places in the response."""
    if rollout.span.sampled is None:
        return values
    out = np.full(len(rollout.span), absent, values.dtype)
    out[rollout.span.own] = values
    return out


def store_refused(run: Run, drawn: StepRollouts, step: int, seen: tuple[np.ndarray, np.ndarray] | None) -> None:
    """Write the rollouts of a step without an update. `seen`: rollout ids and the trainer's log-probs of some of its tokens, if there
    was a pass."""
    known = [r for r in drawn.batch if seen is not None and (seen[0] == r.id).sum() == r.span.own_count]
    values = {r.id: _at(r, seen[1][seen[0] == r.id], np.nan) for r in known} if seen is not None else None
    versions = dict.fromkeys(values or (), run.trainer.version)
    every = list({r.id: r for r in (*drawn.batch, *drawn.rollouts)}.values())
    piece = run.policy.tokenizer
    write_step(
        run.folder.rollouts(step),
        [r for r in every if r.reward is not None],
        step=step,
        train_logprobs=values,
        train_version=versions or None,
        piece=lambda i: piece.decode([i]),
    )


def store(
    path: Path,
    step: int,
    rollouts: Sequence[Rollout],
    chosen: Sequence[Rollout],
    credit: dict[int, float],
    seen: dict[str, torch.Tensor],
    tokenizer: Any,
) -> None:
    """Write the step's rollouts with what the trainer thought of every token of those it was trained on."""
    sizes = [r.span.own_count for r in chosen]
    starts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    windows = {r.id: slice(a, b) for r, a, b in zip(chosen, starts[:-1], starts[1:], strict=True)}
    per_token = {name: value.cpu().numpy() for name, value in seen.items()}
    columns: dict[str, Any] = {
        name: {r.id: _at(r, value[windows[r.id]], ABSENT[name]) for r in chosen}
        for name, value in per_token.items()
        if name != "train_version"
    }
    if "train_version" in per_token:
        columns["train_version"] = {i: int(per_token["train_version"][w.start]) for i, w in windows.items()}
    spread = {r.id: _at(r, np.full(n, credit[r.id], np.float32), np.nan) for r, n in zip(chosen, sizes, strict=True)}
    write_step(
        path,
        rollouts,
        step=step,
        advantages=spread,
        piece=lambda i: tokenizer.decode([i]),
        **columns,
    )
