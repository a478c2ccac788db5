"""Dynamic sampling (DAPO, Yu et al. 2025, §3.2): draw prompts until enough groups have something to teach.

A group whose rewards are all equal has advantage 0 everywhere: it makes the batch smaller without saying so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rollkeel.types import Rollout, StepRollouts

if TYPE_CHECKING:
    from rollkeel.tasks.mixed import MixedProblems

Draw = Callable[[int, int], Sequence[Rollout]]
"""`(first, count)` → graded rollouts of the prompts `first … first + count − 1` of the data source, failures included."""


def draw_varied(draw: Draw, first: int, groups: int, rounds: int, mixed: MixedProblems | None = None) -> StepRollouts:
    """Draw prompts from `first` on until `groups` groups have rewards that differ, in at most `rounds` rounds.

    The first round draws `groups` prompts; each later one draws as many as the share of useful groups so far suggests,
    at most `groups`. Surplus groups are left out, the last first. The draws follow from `first` and the rewards alone,
    so a repeated step draws the same prompts. Of `mixed` sources, all of that holds of each source's part. Measures `rollout/dynamic_rounds`, and
    `rollout/dynamic_discarded`: groups that were sampled and not trained.
    """
    rollouts: list[Rollout] = []
    wanted = mixed.wanted(groups) if mixed else [0] * groups
    asked, tried = Counter(wanted), Counter[int]()
    useful: dict[int, list[int]] = {source: [] for source in asked}
    consumed = done = 0
    while done < rounds and (short := {n for n in asked if len(useful[n]) < asked[n]}):
        counts = {n: _next_count(asked[n], tried[n], len(useful[n])) for n in short}
        now = _in_turn(wanted, counts)
        if mixed:
            mixed.assign(first + consumed, now)
        sampled = list(draw(first + consumed, len(now)))
        rollouts += sampled
        for group in varied_groups(sampled):
            useful[mixed.number(group) if mixed else 0].append(group)
        tried.update(now)
        consumed += len(now)
        done += 1
    chosen = {group for n in asked for group in useful[n][: asked[n]]}
    if mixed:
        mixed.trained({n: min(asked[n], len(useful[n])) for n in asked}, groups)
    batch = [r for r in rollouts if r.group in chosen and r.reward is not None]
    discarded = consumed - len({r.group for r in batch})
    metrics = {"rollout/dynamic_rounds": float(done), "rollout/dynamic_discarded": float(discarded)}
    return _step(rollouts, batch, consumed, metrics)


def _next_count(asked: int, tried: int, useful: int) -> int:
    """Groups to draw next: as many as the share of useful ones so far suggests."""
    return asked if not useful else min(asked, math.ceil((asked - useful) * tried / useful))


def _in_turn(wanted: Sequence[int], counts: Mapping[int, int]) -> list[int]:
    """The sources in the order of `wanted`, each as often as `counts` says."""
    seen, out = Counter[int](), list[int]()
    for n in wanted:
        seen[n] += 1
        out += [n] if seen[n] <= counts.get(n, 0) else []
    return out


def draw_once(draw: Draw, first: int, prompts: int, *, varied_only: bool = False) -> StepRollouts:
    """Draw `prompts` prompts and train on all that was graded, or with `varied_only` on groups whose rewards differ."""
    rollouts = list(draw(first, prompts))
    batch = [r for r in rollouts if r.reward is not None]
    if varied_only:
        useful = set(varied_groups(rollouts))
        batch = [r for r in batch if r.group in useful]
    return _step(rollouts, batch, prompts, {})


def _step(rollouts: list[Rollout], batch: list[Rollout], consumed: int, metrics: dict[str, float]) -> StepRollouts:
    generated = sum(r.span.own_count for r in rollouts)
    return StepRollouts(rollouts=rollouts, batch=batch, consumed=consumed, metrics=metrics, generated=generated)


def varied_groups(rollouts: Sequence[Rollout]) -> list[int]:
    """Groups with at least two different rewards, in order of first appearance; rollouts without a reward do not count."""
    rewards: dict[int, set[float]] = {}
    for r in rollouts:
        if r.reward is not None:
            rewards.setdefault(r.group, set()).add(r.reward)
    return [group for group, seen in rewards.items() if len(seen) > 1]
