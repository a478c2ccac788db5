"""What healthy steps do not have, counted: repeated rollouts, answers that do not end, advantages that are another's.

Metrics of the step's row, over which `checks.py` has its rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollkeel.batch.build import TrainingBatch
from rollkeel.config import Config
from rollkeel.types import Rollout, Status

CHANCE = 20.0
"""Nats: equal rollouts that chance makes once in 5e8 steps are no chance."""


@dataclass(frozen=True, kw_only=True)
class Stated:
    """What a run says its rollouts are."""

    size: int | None = None
    """Prompts in the data source, None without end."""
    version: int
    """Of the weights that train them."""
    oldest: int | None = None
    """How many versions older a token may be; None without a bound."""
    recomputed: bool = False
    """Whether no token may have attended to KV of older weights than sampled it."""

    @classmethod
    def of(cls, config: Config, version: int, size: int | None) -> Stated:
        updates, engine = config.train.updates_per_step, config.engine
        bounds = {"sync": config.experiment.lag * updates, "async": config.rollout.overlap.max_staleness}
        recomputed = engine.kind == "local" and engine.kv == "recompute"
        return cls(size=size, version=version, oldest=bounds.get(config.run.loop), recomputed=recomputed)


def sampled(rollouts: Sequence[Rollout], batch: Sequence[Rollout], stated: Stated) -> dict[str, float]:
    """Metrics of a step's rollouts, and of those it trains on.

    `rollout/distinct_prompts`; `rollout/duplicates`: rollouts that repeat another, beyond what chance explains; counts of faults
    where they are above 0.
    """
    size = stated.size
    every = {r.id: r for r in (*batch, *rollouts)}
    whole = [r for r in every.values() if r.status.complete]
    repeated = sum(max(len(part) - len({r.id for r in part}), 0) for part in (rollouts, batch))
    groups, prompts = (len({key(r) for r in every.values()}) for key in (lambda r: r.group, lambda r: r.prompt.id))
    faults = {
        "repeated_ids": repeated,
        "unstopped": sum(map(_unstopped, whole)),
        "same_prompt": groups if prompts == 1 < groups and size != 1 else 0,
        "empty": len(empty) if 2 * (len(empty := [r for r in whole if not r.text.strip()])) > len(whole) else 0,
        "no_tokens": sum(r.span.own_count == 0 for r in batch),
        **_stamped(batch, stated),
        **_graded(whole),
    }
    out = {"rollout/distinct_prompts": float(prompts), "rollout/duplicates": float(repeated) or surplus(whole)}
    return out | {f"rollout/{name}": float(count) for name, count in faults.items() if count}


def _stamped(batch: Sequence[Rollout], stated: Stated) -> dict[str, int]:
    """Rollouts with tokens of other versions than the run says they may have."""
    spans = [r.span for r in batch if r.span.own_count]
    lags = [stated.version - s.versions[s.own] for s in spans]
    kept = [(s.kv_versions < s.versions)[s.own].any() for s in spans] if stated.recomputed else []
    return {
        "from_later": sum(lag.min() < 0 for lag in lags),
        "too_old": 0 if stated.oldest is None else sum(lag.max() > stated.oldest for lag in lags),
        "old_kv": sum(map(int, kept)),
    }


def _unstopped(r: Rollout) -> bool:
    """Of one turn; how an episode ends is its environment's to say."""
    stops = r.sampling.stop_token_ids
    ends = r.status is Status.FINISHED and r.span.sampled is None and bool(stops)
    return ends and (not len(r.span) or int(r.span.token_ids[-1]) not in stops)


def _graded(rollouts: Sequence[Rollout]) -> dict[str, int]:
    known = [(r, r.reward) for r in rollouts if r.reward is not None]
    best, least = (f((reward for _, reward in known), default=0.0) for f in (max, min))
    empty = [r for r, reward in known if not r.text.strip() and 0 < reward >= best]
    gold = [(r, reward) for r, reward in known if r.prompt.grader.name in ("task", "exact") and _is_gold(r)]
    unrewarded = [r for r, reward in gold if reward <= min(least, 0.0)]
    return {
        "empty_rewarded": len(empty),
        "right_unrewarded": len(unrewarded) if len(unrewarded) == len(gold) > 1 else 0,
    }


def _is_gold(r: Rollout) -> bool:
    return r.text.strip() == r.prompt.answer.strip() != ""


def surplus(rollouts: Sequence[Rollout]) -> float:
    """How many rollouts repeat another of their prompt beyond what chance makes; 0 while chance may have made them.

    A policy that is sure of itself says the same often. n samples of a prompt have Σ (n − 1)/2 · p(sample) equal pairs on
    average, which the samples estimate without bias; and no fewer pairs than surplus rollouts. So the surplus is compared with
    that Poisson mean by Chernoff's bound on its tail: among the least probable samples, then among more and more of them.
    """
    by_prompt: dict[str, list[Rollout]] = {}
    for r in rollouts:
        by_prompt.setdefault(r.prompt.id, []).append(r)
    if all(len(members) == len({r.span.token_ids.tobytes() for r in members}) for members in by_prompt.values()):
        return 0.0
    samples: list[tuple[float, bool, int]] = []
    for members in by_prompt.values():
        seen: set[bytes] = set()
        for r in members:
            ids = r.span.token_ids.tobytes()
            samples.append((min(0.0, float(r.span.logprobs.sum(dtype=np.float64))), ids in seen, len(members)))
            seen.add(ids)
    out = 0.0
    found = 0
    expected = 0.0
    for logprob, repeats, n in sorted(samples):
        found, expected = found + repeats, expected + (n - 1) / 2 * math.exp(logprob)
        improbable = found * math.log(found / max(expected, 1e-300)) - found + expected if found > expected else 0.0
        out = max(out, float(math.ceil(found - expected))) if improbable > CHANCE else out
    return out


def credited(
    parts: Sequence[TrainingBatch], rollouts: Sequence[Rollout], *, over_batch: bool = False
) -> dict[str, float]:
    """`rollout/miscredited`: rollouts of the update that are given less advantage than one of their group with a lower reward.
    `rollout/uncaused`: those with an advantage in groups of equal rewards, unless they are compared `over_batch`."""
    advantages: dict[int, float] = {}
    for part in parts:
        firsts = np.cumsum([0, *part.response_lengths[:-1]])
        ids, credit = part.rollout_ids[firsts].tolist(), part.advantages[firsts].tolist()
        advantages |= dict(zip(ids, credit, strict=True))
    groups: dict[int, list[tuple[float, float]]] = {}
    for r in rollouts:
        if r.reward is not None and r.id in advantages:
            groups.setdefault(r.group, []).append((r.reward, advantages[r.id]))
    count = 0
    for members in groups.values():
        highest = lowest = -math.inf
        before = -math.inf
        for reward, advantage in sorted(members):
            if reward > before:
                before, lowest = reward, highest
            highest = max(highest, advantage)
            count += advantage < lowest - 1e-6
    still = [g for g in groups.values() if len({reward for reward, _ in g}) == 1 and not over_batch]
    faults = {"miscredited": count, "uncaused": sum(advantage != 0 for g in still for _, advantage in g)}
    return {f"rollout/{name}": float(number) for name, number in faults.items() if number}
