"""What every diagnosis reads: the tokens of a run as flat arrays, the facts the run states about itself, its metrics.

Readers fill what their files hold and leave the rest None or NaN; nothing is guessed. What a reader had to skip stands in
`notes`, one line each. `docs/trace.md` says where each field comes from in rollkeel's own files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

IntArray = FloatArray = np.ndarray

TOKENS: dict[str, tuple[str, type[np.generic], Any]] = {
    "token_ids": ("token_ids", np.int64, -1),
    "mask": ("sampled", np.bool_, True),
    "rollout_logprobs": ("logprobs", np.float32, np.nan),
    "train_logprobs": ("train_logprobs", np.float32, np.nan),
    "advantages": ("advantages", np.float32, np.nan),
    "keep": ("keep", np.bool_, True),
    "entropy": ("entropy", np.float32, np.nan),
    "versions": ("versions", np.int64, -1),
    "kept_mass": ("kept_mass", np.float32, 1.0),
    "kv_versions": ("kv_versions", np.int64, -1),
    "flipped_layers": ("flipped_layers", np.int16, -1),
}
"""Token field → column of rollkeel's own files, dtype, and what stands for a token without it."""
PER_TOKEN = frozenset(TOKENS)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a run says about itself; None where it does not say. A statement is not a proof: the doctor tests some of them."""

    engine: str | None = None  # Name of the engine that sampled: `local`, `vllm`.
    engine_dtype: str | None = None
    """Numeric mode of the engine: `fp32`, `bf16`, `fp16`, `fp8`, `fp8_weights`, `int8`, `int4`."""
    train_dtype: str | None = None  # Numeric mode of the trainer, in the same words.
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_new_tokens: int | None = None
    vocab_size: int | None = None
    updates_per_step: int | None = None
    objective: str | None = None
    lr: float | None = None
    entropy_coefficient: float | None = None  # Weight of an entropy bonus in the loss.
    loop: str | None = None  # `sync`, `budgeted`, `async`.
    kv: str | None = None  # `recompute` or `keep`: what new weights do to the KV of unfinished sequences.
    replay_routing: bool | None = None
    shuffled: bool | None = None  # Advantages permuted on purpose, a control.
    unmoved: tuple[int, int] | None = None  # Steps of the first and the last checkpoint, if they hold the same weights.

    @property
    def truncated(self) -> bool | None:
        """Whether sampling was cut to a part of the vocabulary; None if the run does not say."""
        if self.top_p is None and self.top_k is None and self.min_p is None:
            return None
        # top_k of -1 means all in vLLM and SGLang.
        return (self.top_p or 1.0) < 1 or (self.top_k or 0) > 0 or (self.min_p or 0.0) > 0


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Response tokens of S sequences, T in all, flat and in order: sequence i owns `starts[i] : starts[i + 1]`.

    Raises `ValueError` for arrays whose lengths do not fit.
    """

    source: str  # Who wrote the files, for example `rollkeel run`, `slime rollout dump`.
    path: str
    facts: Facts = Facts()
    starts: IntArray  # `[S + 1]` int64, `starts[0] == 0`, `starts[-1] == T`.

    # per sequence
    step: IntArray  # `[S]` int64: step that trained on it, or would have.
    id: IntArray  # `[S]` int64: unique in the trace.
    group: IntArray  # `[S]` int64: sequences of one prompt occurrence share it.
    reward: FloatArray  # `[S]` float64, NaN where there is none.
    prompt_length: IntArray  # `[S]` int64, tokens; −1 if unknown.
    train_version: IntArray | None = None
    """`[S]` int64: version of the weights that `train_logprobs` were computed with."""
    status: Sequence[str] | None = None
    """`[S]`: how it ended, in the words of `rollkeel.types.Status`; empty if unknown."""
    prompt_text: Sequence[str] | None = None  # `[S]`
    text: Sequence[str] | None = None  # `[S]`: decoded response.
    answer: Sequence[str] | None = None  # `[S]`: gold answer.
    detail: Sequence[str] | None = None  # `[S]`: what grader or engine had to say.

    # per token
    token_ids: IntArray  # `[T]` int32 or int64; −1 where the file has none.
    rollout_logprobs: FloatArray
    """`[T]` float32, log q: as the sampling engine reported it. NaN where there is none (tool output, say)."""
    train_logprobs: FloatArray | None = None
    """`[T]` float32, log o: the trainer at `train_version`. NaN where it was not computed."""
    mask: np.ndarray | None = None  # `[T]` bool: tokens the loss was taken over; None if all of them.
    advantages: FloatArray | None = None  # `[T]` float32, NaN where the token was not trained on.
    keep: np.ndarray | None = None
    """`[T]` bool: kept by every mask of the objective; tokens that were not trained on are True."""
    entropy: FloatArray | None = None
    """`[T]` float32, nats: of the trainer's distribution that the token's log o is of. NaN as there."""
    kept_mass: FloatArray | None = None  # `[T]` float32 in (0, 1]: see `rollkeel.types.TokenSpan`.
    versions: IntArray | None = None  # `[T]` int64: version whose weights sampled the token, as stated.
    kv_versions: IntArray | None = None  # `[T]` int64: oldest version in the token's KV, as stated.
    flipped_layers: IntArray | None = None
    """`[T]` int16: MoE layers whose experts differ between engine and trainer; −1 where the trainer's are not known."""
    pieces: Mapping[int, str] = field(default_factory=dict)  # Text of each token id, as far as known.

    # per step
    metrics: Sequence[Mapping[str, Any]] = ()  # Rows of the run's metrics, by step, under rollkeel's names.
    notes: Sequence[str] = ()  # One line for everything that could not be read.

    def __post_init__(self) -> None:
        tokens, sequences = int(self.starts[-1]), len(self.starts) - 1
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None or f.name in OF_ALL:
                continue
            expected = tokens if f.name in PER_TOKEN else sequences
            if len(value) != expected:
                raise ValueError(f"Trace.{f.name}: expected {expected} entries, got {len(value)}")

    def __len__(self) -> int:
        """Tokens."""
        return int(self.starts[-1])

    @property
    def sequences(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> IntArray:
        """`[S]` response tokens."""
        return np.diff(self.starts)

    @property
    def sequence(self) -> IntArray:
        """`[T]` int32: index of each token's sequence."""
        return np.repeat(np.arange(self.sequences, dtype=np.int32), self.lengths)

    @property
    def position(self) -> IntArray:
        """`[T]` int64: position in its response, from 0."""
        return np.arange(len(self)) - np.repeat(self.starts[:-1], self.lengths)

    @property
    def trained(self) -> np.ndarray:
        """`[T]` bool: tokens inside the mask with finite log-probs of both sides. All False without `train_logprobs`."""
        if self.train_logprobs is None:
            return np.zeros(len(self), bool)
        both = np.isfinite(self.rollout_logprobs) & np.isfinite(self.train_logprobs)
        return both if self.mask is None else both & self.mask

    def where(self, index: int) -> dict[str, int]:
        """Step, rollout id and position of token `index`, as evidence names it."""
        s = int(np.searchsorted(self.starts, index, side="right")) - 1
        return {"step": int(self.step[s]), "id": int(self.id[s]), "token": int(index - self.starts[s])}

    def with_(self, **changes: Any) -> Trace:
        """A copy with other fields, checked again."""
        return replace(self, **changes)


OF_ALL = {"source", "path", "facts", "starts", "pieces", "metrics", "notes"}
