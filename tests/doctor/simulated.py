"""A policy whose distributions are known exactly: contexts are random logits over a small vocabulary.

Each token's context is fresh, so a fault changes exactly what it is meant to change. `Simulated.trace` is honest; the
test files break one thing at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rollkeel_doctor.traces.trace import Facts, Trace

VOCABULARY = 32
PER_STEP, LENGTH, STEPS = 32, 24, 12


def softmax_log(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def draw(rng: np.random.Generator, logprobs: np.ndarray) -> np.ndarray:
    """One token of each row."""
    return (np.exp(logprobs).cumsum(1) > rng.random((len(logprobs), 1))).argmax(1)


def stopped(trace: Trace) -> Trace:
    """With a stop token at the end of every sequence."""
    ids = trace.token_ids.copy()
    ids[trace.starts[1:] - 1] = VOCABULARY
    return trace.with_(token_ids=ids)


def top_p(logprobs: np.ndarray, mass: float) -> np.ndarray:
    """Which tokens of each row belong to its smallest set of at least `mass`."""
    order = np.argsort(-logprobs, 1)
    before = np.take_along_axis(np.exp(logprobs), order, 1).cumsum(1) - np.take_along_axis(np.exp(logprobs), order, 1)
    kept = np.empty(logprobs.shape, bool)
    np.put_along_axis(kept, order, before < mass, 1)
    return kept


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Logits of every context, by trainer and engine; sequences of different lengths over some steps."""

    rng: np.random.Generator
    starts: np.ndarray
    step: np.ndarray
    train: np.ndarray
    """`[T, V]` logits."""
    engine: np.ndarray
    """`[T, V]` logits."""

    @property
    def sequence(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.step)), np.diff(self.starts))

    @property
    def token_step(self) -> np.ndarray:
        return self.step[self.sequence]

    def trace(
        self,
        *,
        sampled_at: float = 1.0,
        logged_at: float = 1.0,
        trained_at: float = 1.0,
        mass: float = 1.0,
        renormalise: bool = True,
        facts: Facts | None = None,
        **changes: Any,
    ) -> Trace:
        """Sample from the engine at `sampled_at`, log its log-probs at `logged_at`, the trainer's at `trained_at`."""
        sampling = softmax_log(self.engine / sampled_at)
        kept = top_p(sampling, mass)
        kept_mass = np.where(kept, np.exp(sampling), 0).sum(1)
        cut = np.where(kept, sampling, -np.inf) - np.log(kept_mass)[:, None]
        ids = draw(self.rng, cut)
        at = np.arange(len(ids))
        logged = softmax_log(self.engine / logged_at)[at, ids]
        o = softmax_log(self.train / trained_at)
        sequences = len(self.step)
        known: dict[str, Any] = {
            "source": "simulated",
            "path": "nowhere",
            "facts": facts
            or Facts(engine_dtype="fp32", train_dtype="fp32", temperature=1.0, top_p=1.0, max_new_tokens=99),
            "starts": self.starts,
            "step": self.step,
            "id": np.arange(sequences),
            "group": np.arange(sequences) // 4,
            "reward": self.rng.integers(0, 2, sequences).astype(float),
            "prompt_length": np.full(sequences, 5),
            "train_version": self.step - 1,
            "versions": (self.token_step - 1).astype(np.int64),
            "token_ids": ids,
            "rollout_logprobs": (logged - (np.log(kept_mass) if renormalise else 0)).astype(np.float32).clip(max=0),
            "train_logprobs": o[at, ids].astype(np.float32).clip(max=0),
            "entropy": -(np.exp(o) * o).sum(1).astype(np.float32),
            "kept_mass": kept_mass.astype(np.float32),
        }
        return Trace(**(known | changes))


def simulate(
    seed: int = 0, *, noise: float = 0.0, steps: int = STEPS, per_step: int = PER_STEP, sharpness: float = 3.0
) -> Simulated:
    """An honest engine whose logits differ from the trainer's by independent `noise`."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(LENGTH // 2, LENGTH + 1, steps * per_step)
    starts = np.concatenate([[0], lengths.cumsum()]).astype(np.int64)
    scale = rng.gamma(2.0, sharpness / 2, (starts[-1], 1))  # from flat contexts to certain ones
    train = rng.normal(size=(starts[-1], VOCABULARY)) * scale
    engine = train + rng.normal(size=train.shape) * noise
    return Simulated(
        rng=rng, starts=starts, step=np.repeat(np.arange(1, steps + 1), per_step), train=train, engine=engine
    )
