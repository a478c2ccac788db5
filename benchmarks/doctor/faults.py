"""The faults, each with magnitudes for the two splits: overrides of the config and broken parts, see `patches`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.doctor import alterations as alter
from benchmarks.doctor import patches as broken
from benchmarks.doctor.workloads import ADDITION, LONGER, Patch
from rollkeel.types import Rollout

FAST = "engine.forward=fast"
"""The forward in PyTorch: compiled kernels would pass by what is patched in it."""
DIGITS = "0123456789"
ALL = ("plain", "bf16", "truncated", "tempered", "stale")
UNTRUNCATED = ("plain", "bf16", "tempered", "stale")
BASES: dict[str, dict[str, list[str]]] = {
    "plain": {"dev": [], "test": []},
    "bf16": {"dev": ["engine.dtype=bf16"], "test": ["engine.dtype=bf16", "objective.name=grpo"]},
    "truncated": {"dev": ["sampling.top_p=0.9"], "test": ["sampling.top_p=0.95", "sampling.top_k=20"]},
    "tempered": {"dev": ["sampling.temperature=0.8"], "test": ["sampling.temperature=1.2"]},
    "stale": {"dev": ["rollout.lag=1"], "test": ["rollout.lag=2", "objective.name=grpo"]},
}
"""What a run is without its fault; seeds take turns, so that no fault is judged on one kind of run alone."""


@dataclass(frozen=True, kw_only=True)
class Magnitude:
    """One size of a fault."""

    name: str
    words: Sequence[str] = ()
    """Overrides of the config."""
    patches: Callable[[int], Sequence[Patch]] = lambda seed: ()
    """What is broken in the run of a seed."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A cause that the doctor should name."""

    id: str
    bug: bool
    """True if a program is wrong; False for settings and numbers that do not go together."""
    about: str
    dev: dict[str, Sequence[Magnitude]]
    """By model: `any`, or `moe` and `dense`."""
    test: dict[str, Sequence[Magnitude]]
    bases: tuple[str, ...] = ("plain",)
    models: tuple[str, str] = ("moe", "dense")

    def magnitudes(self, split: str, model: str) -> Sequence[Magnitude]:
        found = {"dev": self.dev, "test": self.test}[split]
        return found.get(model) or found["any"]


def _altering(change: Callable[[Rollout, np.random.Generator], Rollout]) -> Callable[[int], Sequence[Patch]]:
    return lambda seed: [lambda: broken.altered(change, seed)]


def _always(*patches: Patch) -> Callable[[int], Sequence[Patch]]:
    return lambda seed: patches


def _temperature(value: float) -> Magnitude:
    return Magnitude(
        name=f"T={value}", words=[FAST, f"sampling.temperature={value}"], patches=_always(broken.raw_logprobs)
    )


def _truncation(*sampling: str) -> Magnitude:
    return Magnitude(
        name=",".join(sampling),
        words=[f"sampling.{word}" for word in sampling],
        patches=_altering(lambda rollout, rng: alter.unnormalised(rollout)),
    )


def _alignment(by: int) -> Magnitude:
    return Magnitude(name=f"shift {by:+d}", patches=_altering(lambda rollout, rng: alter.shifted(rollout, by)))


def _prompt(tokens: int) -> Magnitude:
    return Magnitude(
        name=f"{tokens} prompt tokens", patches=_altering(lambda rollout, rng: alter.prompt_in_mask(rollout, tokens))
    )


def _tool(output: str, after: int) -> Magnitude:
    return Magnitude(
        name=f"tool output {output!r} after {after} tokens",
        patches=lambda seed: [lambda: broken.tool_calls(output, after, seed)],
    )


def _retokenised(plain: float, first: str, second: str, count: int, *words: str) -> Magnitude:
    def patches(seed: int) -> Sequence[Patch]:
        pairs = broken.pairs_of(first, second, count)

        def change(rollout: Rollout, rng: np.random.Generator) -> Rollout:
            return alter.retokenised(rollout, lambda ids: broken.merged(ids, pairs))

        return [lambda: broken.two_spellings(pairs, plain), lambda: broken.altered(change, seed)]

    return Magnitude(name=f"{plain:.0%} of pairs spelled out", words=words, patches=patches)


def _weights(name: str, change: Any) -> Magnitude:
    return Magnitude(name=name, patches=_always(lambda: broken.weights_changed(change)))


def _stale_version(name: str, arrives: Callable[[int], bool]) -> Magnitude:
    return Magnitude(name=name, patches=_always(lambda: broken.updates_dropped(arrives)))


def _stale_kv(lr: float, tokens: int) -> Magnitude:
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


def _quantised(name: str, dtype: str, **options: Any) -> Magnitude:
    return Magnitude(name=name, patches=_always(lambda: broken.secretly(dtype, **options)))


def _coarse(step: float) -> Magnitude:
    return Magnitude(
        name=f"router logits in steps of {step}",
        words=[FAST],
        patches=_always(lambda: broken.routing_changed(broken.coarse(step))),
    )


def _jitter(size: float) -> Magnitude:
    return Magnitude(
        name=f"router logits ± {size}",
        words=[FAST],
        patches=lambda seed: [lambda: broken.routing_changed(broken.noisy(size, seed))],
    )


def _lag(steps: int, lr: float) -> Magnitude:
    return Magnitude(name=f"lag {steps}, lr {lr:g}", words=[f"rollout.lag={steps}", f"train.lr={lr}"])


def _entropy_sign(coefficient: float, *words: str) -> Magnitude:
    return Magnitude(
        name=f"entropy coefficient −{coefficient:g}",
        words=[f"train.entropy_coefficient={coefficient}", *words],
        patches=_always(broken.entropy_sign),
    )


def _reward(share: float, detail: str) -> Magnitude:
    return Magnitude(
        name=f"{share:.0%} lost",
        patches=_altering(lambda rollout, rng: alter.reward_lost(rollout, rng, share, detail)),
    )


def _room(tokens: int, *words: str) -> Magnitude:
    return Magnitude(name=f"{tokens} tokens", words=[*words, f"sampling.max_new_tokens={tokens}"])


def _room_for_the_end(tokens: int, *words: str) -> Magnitude:
    """Where a cut takes the stop token alone, it is the grader that makes it matter."""
    room = _room(tokens, *words)
    return replace(room, patches=_altering(lambda rollout, rng: alter.unfinished_is_wrong(rollout)))


def _rate(lr: float) -> Magnitude:
    return Magnitude(name=f"lr {lr:g}", words=[f"train.lr={lr}", "train.warmup_steps=0"])


def _faults() -> list[Fault]:
    return [
        Fault(
            id="temperature",
            bug=True,
            about="sampled at T ≠ 1, log-probs logged at T = 1",
            dev={"any": [_temperature(0.7), _temperature(1.3)]},
            test={"any": [_temperature(0.85), _temperature(0.6), _temperature(1.2)]},
            bases=("plain", "bf16", "stale"),
        ),
        Fault(
            id="truncation",
            bug=True,
            about="sampled from a cut distribution, log-probs not renormalised and the kept mass not recorded",
            dev={"any": [_truncation("top_p=0.9"), _truncation("top_k=4")]},
            test={"any": [_truncation("top_p=0.95"), _truncation("top_p=0.8"), _truncation("min_p=0.1")]},
            bases=("plain", "bf16", "stale"),
        ),
        Fault(
            id="alignment",
            bug=True,
            about="log-probs of the neighbouring token",
            dev={"any": [_alignment(1)]},
            test={"any": [_alignment(1), _alignment(-1), _alignment(2)]},
            bases=ALL,
        ),
        Fault(
            id="mask",
            bug=True,
            about="tokens that the policy did not sample count as its response, with log-prob 0",
            dev={"any": [_prompt(4), _tool(" ok\n", 3)]},
            test={"any": [_prompt(1), _prompt(8), _tool("<r>", 2)]},
            bases=("plain", "bf16", "tempered"),
        ),
        Fault(
            id="retokenised",
            bug=True,
            about="the response's text was encoded anew; log-probs stay at their positions",
            dev={
                "any": [
                    _retokenised(0.1, DIGITS, DIGITS, 8, "sft.steps=400"),
                    _retokenised(0.3, DIGITS, DIGITS, 8, "sft.steps=400"),
                ]
            },
            test={"any": [_retokenised(0.2, "+-*/", DIGITS, 24), _retokenised(0.05, "+-*/", DIGITS, 24)]},
            bases=("plain", "bf16"),
        ),
        Fault(
            id="wrong_weights",
            bug=True,
            about="the engine computes with other weights than it was given",
            dev={
                "moe": [
                    _weights("experts of layer 1 rolled by one", broken.experts_rolled(1, 1)),
                    _weights("head of the first publication", broken.keep_first(r"lm_head")),
                ],
                "dense": [
                    _weights("query heads of layer 1 rolled", broken.heads_rolled(1, 32)),
                    _weights("head of the first publication", broken.keep_first(r"lm_head")),
                ],
            },
            test={
                "moe": [
                    _weights("experts of layer 2 rolled by four", broken.experts_rolled(2, 4)),
                    _weights("experts of the first publication", broken.keep_first(r"experts")),
                    _weights("final norm not loaded", broken.constant(r"^model\.norm\.weight", 1.0)),
                ],
                "dense": [
                    _weights("query heads of layer 2 rolled", broken.heads_rolled(2, 32)),
                    _weights("MLPs of the first publication", broken.keep_first(r"mlp")),
                    _weights("final norm not loaded", broken.constant(r"^model\.norm\.weight", 1.0)),
                ],
            },
            bases=("plain", "bf16"),
        ),
        Fault(
            id="stale_version",
            bug=True,
            about="the engine stamps versions whose weights did not arrive",
            dev={
                "any": [
                    _stale_version("none after the sixth", lambda n: n < 6),
                    _stale_version("every fourth arrives", lambda n: n % 4 == 0),
                ]
            },
            test={
                "any": [
                    _stale_version("none after the tenth", lambda n: n < 10),
                    _stale_version("every third arrives", lambda n: n % 3 == 0),
                ]
            },
            bases=("plain", "bf16"),
        ),
        Fault(
            id="stale_kv",
            bug=True,
            about="resumed sequences keep old KV, stated to be recomputed",
            dev={"any": [_stale_kv(5e-4, 700), _stale_kv(3e-4, 1000)]},
            test={"any": [_stale_kv(4e-4, 350), _stale_kv(4e-4, 500)]},
        ),
        Fault(
            id="quantisation",
            bug=False,
            about="the engine computes in fewer bits than it states",
            dev={"any": [_quantised("int4", "int4"), _quantised("fp8", "fp8")]},
            test={"any": [_quantised("int4 per row", "int4", int4_group=7), _quantised("fp8 weights", "fp8_weights")]},
            bases=("plain", "tempered", "truncated"),
        ),
        Fault(
            id="routing",
            bug=False,
            about="the engine's routers choose other experts than the trainer's",
            dev={"any": [_coarse(0.5), _jitter(0.3)]},
            test={"any": [_coarse(0.25), _jitter(0.2)]},
            bases=("plain", "bf16"),
            models=("moe", "moe2"),
        ),
        Fault(
            id="policy_lag",
            bug=False,
            about="batches many steps old at a high learning rate, stated",
            dev={"any": [_lag(6, 5e-4), _lag(10, 3e-4)]},
            test={"any": [_lag(8, 5e-4), _lag(14, 4e-4)]},
        ),
        Fault(
            id="entropy_collapse",
            bug=False,
            about="the policy becomes nearly deterministic before it is good",
            dev={
                "any": [_entropy_sign(4.0, *ADDITION, "run.steps=40"), _entropy_sign(10.0, *ADDITION, "run.steps=40")]
            },
            test={"any": [_entropy_sign(0.7), _entropy_sign(2.0)]},
        ),
        Fault(
            id="reward_failures",
            bug=True,
            about="a grader's failures count as wrong answers",
            dev={"any": [_reward(0.1, ""), _reward(0.3, "")]},
            test={"any": [_reward(0.05, ""), _reward(0.2, "TimeoutError")]},
            bases=ALL,
        ),
        Fault(
            id="length_truncation",
            bug=False,
            about="too little room for the answers",
            dev={"any": [_room_for_the_end(3, *ADDITION, "run.steps=40")]},
            test={"any": [_room(7, *LONGER), _room(8, *LONGER)]},
            bases=("plain", "bf16", "tempered"),
        ),
        Fault(
            id="learning_rate",
            bug=False,
            about="steps so large that the policy gets worse",
            dev={"any": [_rate(5e-3), _rate(1e-2)]},
            test={"any": [_rate(4e-3), _rate(8e-3)]},
            bases=("plain", "bf16"),
        ),
    ]


FAULTS: dict[str, Fault] = {fault.id: fault for fault in _faults()}
