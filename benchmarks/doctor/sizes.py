"""What a fault can be in one size of it: overrides of the config and broken parts, see `patches` and `alterations`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.doctor import alterations as alter
from benchmarks.doctor import patches as broken
from benchmarks.doctor.workloads import Patch
from rollkeel.types import Rollout

FAST = "engine.forward=fast"
"""The forward in PyTorch: compiled kernels would pass by what is patched in it."""


@dataclass(frozen=True, kw_only=True)
class Magnitude:
    """One size of a fault."""

    name: str
    words: Sequence[str] = ()
    """Overrides of the config."""
    patches: Callable[[int], Sequence[Patch]] = lambda seed: ()
    """What is broken in the run of a seed."""


def altering(change: Callable[[Rollout, np.random.Generator], Rollout]) -> Callable[[int], Sequence[Patch]]:
    return lambda seed: [lambda: broken.altered(change, seed)]


def always(*patches: Patch) -> Callable[[int], Sequence[Patch]]:
    return lambda seed: patches


def temperature(value: float) -> Magnitude:
    return Magnitude(
        name=f"T={value}", words=[FAST, f"sampling.temperature={value}"], patches=always(broken.raw_logprobs)
    )


def truncation(*sampling: str) -> Magnitude:
    return Magnitude(
        name=",".join(sampling),
        words=[f"sampling.{word}" for word in sampling],
        patches=altering(lambda rollout, rng: alter.unnormalised(rollout)),
    )


def alignment(by: int, share: float = 1.0) -> Magnitude:
    """In a part of the rollouts only where one code path of several has it wrong."""
    return Magnitude(
        name=f"shift {by:+d}" + ("" if share == 1 else f" in {share:.0%}"),
        patches=altering(lambda rollout, rng: alter.shifted(rollout, by) if rng.random() < share else rollout),
    )


def prompt(tokens: int) -> Magnitude:
    return Magnitude(
        name=f"{tokens} prompt tokens", patches=altering(lambda rollout, rng: alter.prompt_in_mask(rollout, tokens))
    )


def tool(output: str, after: int) -> Magnitude:
    return Magnitude(
        name=f"tool output {output!r} after {after} tokens",
        patches=lambda seed: [lambda: broken.tool_calls(output, after, seed)],
    )


def retokenised(plain: float, first: str, second: str, count: int, *words: str) -> Magnitude:
    def patches(seed: int) -> Sequence[Patch]:
        pairs = broken.pairs_of(first, second, count)

        def change(rollout: Rollout, rng: np.random.Generator) -> Rollout:
            return alter.retokenised(rollout, lambda ids: broken.merged(ids, pairs))

        return [lambda: broken.two_spellings(pairs, plain), lambda: broken.altered(change, seed)]

    return Magnitude(name=f"{plain:.0%} of pairs spelled out", words=words, patches=patches)


def weights(name: str, change: Any) -> Magnitude:
    return Magnitude(name=name, patches=always(lambda: broken.weights_changed(change)))


def stale_version(name: str, arrives: Callable[[int], bool]) -> Magnitude:
    return Magnitude(name=name, patches=always(lambda: broken.updates_dropped(arrives)))


def stale_kv(lr: float, tokens: int) -> Magnitude:
    words = [
        "run.loop=budgeted",
        "run.steps=36",
        f"rollout.budget.tokens={tokens}",
        "rollout.budget.capacity=128",
        f"train.lr={lr}",
    ]
    return Magnitude(
        name=f"lr {lr:g}, budget {tokens}",
        words=words,
        patches=lambda seed: [
            broken.kv_kept,
            lambda: broken.altered(lambda rollout, rng: alter.kv_denied(rollout), seed),
        ],
    )


def quantised(name: str, dtype: str, **options: Any) -> Magnitude:
    return Magnitude(name=name, patches=always(lambda: broken.secretly(dtype, **options)))


def coarse(step: float) -> Magnitude:
    return Magnitude(
        name=f"router logits in steps of {step}",
        words=[FAST],
        patches=always(lambda: broken.routing_changed(broken.coarse(step))),
    )


def jitter(size: float) -> Magnitude:
    return Magnitude(
        name=f"router logits ± {size}",
        words=[FAST],
        patches=lambda seed: [lambda: broken.routing_changed(broken.noisy(size, seed))],
    )


def lag(steps: int, lr: float, *words: str) -> Magnitude:
    return Magnitude(name=f"lag {steps}, lr {lr:g}", words=[f"rollout.lag={steps}", f"train.lr={lr}", *words])


def entropy_sign(coefficient: float, *words: str) -> Magnitude:
    return Magnitude(
        name=f"entropy coefficient −{coefficient:g}",
        words=[f"train.entropy_coefficient={coefficient}", *words],
        patches=always(broken.entropy_sign),
    )


def reward(share: float, detail: str | None) -> Magnitude:
    return Magnitude(
        name=f"{share:.0%} lost" + (", details as ever" if detail is None else ""),
        patches=altering(lambda rollout, rng: alter.reward_lost(rollout, rng, share, detail)),
    )


def room(tokens: int, *words: str) -> Magnitude:
    return Magnitude(name=f"{tokens} tokens", words=[*words, f"sampling.max_new_tokens={tokens}"])


def room_for_the_end(tokens: int, *words: str) -> Magnitude:
    """Where a cut takes the stop token alone, it is the grader that makes it matter."""
    size = room(tokens, *words)
    return replace(size, patches=altering(lambda rollout, rng: alter.unfinished_is_wrong(rollout)))


def rate(lr: float) -> Magnitude:
    return Magnitude(name=f"lr {lr:g}", words=[f"train.lr={lr}", "train.warmup_steps=0"])
