"""The contract between stages: what flows along prompt → rollout → reward → batch → objective → update → weights.

Everything here is frozen and keyword-only. Token-level data of one rollout are numpy arrays on the CPU
(they cross process boundaries and files); a `TokenBatch` holds flat torch tensors on the trainer's device.
This module imports neither torch nor transformers at run time, so that reading a config stays instant.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

IntArray = np.ndarray
FloatArray = np.ndarray
BoolArray = np.ndarray


class Status(enum.StrEnum):
    """How a rollout, or the part of it an engine returned, ended."""

    FINISHED = "finished"  # sampled a stop token; the stop token is the last token
    LENGTH = "length"  # reached max_new_tokens or the context length
    INTERRUPTED = "interrupted"  # stopped from outside; can be resumed from what it has
    PARKED = "parked"  # taken out of the engine unfinished; a later step resumes it
    PURGED = "purged"  # given up after too many steps without an end
    ENGINE_FAILURE = "engine_failure"
    GRADER_FAILURE = "grader_failure"

    @property
    def complete(self) -> bool:
        """True if the sequence will not grow any more and may be graded."""
        return self in (Status.FINISHED, Status.LENGTH)


@dataclass(frozen=True, kw_only=True)
class GraderSpec:
    """Names the grader of a prompt. Tasks stand left of rewards, so they point to graders by data."""

    name: str
    """Key in `rollkeel.rewards` (for example `task` or `exact`)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the grader; JSON values only."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One problem: item `index` of a task's split is always the same prompt."""

    id: str
    """Content hash (hex) of task, text and answer; equal ids mean equal problems."""
    index: int
    """Position in the data source; with the task and seed it regenerates the prompt."""
    text: str
    """What the model sees, after the chat template if there is one."""
    token_ids: IntArray
    """`[P]` int64. The only thing an engine is given."""
    answer: str
    """Gold answer in the task's canonical form."""
    grader: GraderSpec
    task: str
    """Task family name, for per-task metrics."""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The distribution tokens are drawn from. Travels with every rollout."""

    temperature: float = 1.0
    """0 means greedy: the distribution is cut to its most likely token, so its log-prob is 0 and `kept_mass` its probability."""
    top_p: float = 1.0
    """Smallest set of most likely tokens with at least this mass; 1 keeps all."""
    top_k: int = 0
    """Number of most likely tokens kept; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the most likely token's probability; 0 keeps all."""
    max_new_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    """Key of the counter-based generator; with `Request.id` and the position it fixes every draw."""
    return_topk: int = 0
    """Number of most likely tokens whose log-probs are returned beside the sampled one."""
    return_experts: bool = False
    """Return the experts each token was routed to."""
    return_prompt_experts: bool = False
    """Return those of the prompt's tokens too; needs `return_experts`."""
    evaluation: bool = False
    """Answers are graded and never trained on, so an engine may leave `kept_mass` unknown (NaN)."""

    @property
    def truncated(self) -> bool:
        """True if some tokens can never be sampled, so that `kept_mass` may be below 1."""
        return self.temperature == 0 or self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, kw_only=True)
class TokenSpan:
    """Tokens of a response with the truth about each of them. All arrays have the length of `token_ids`.

    Raises `ValueError` when lengths differ or a log-prob is not finite or is positive.
    """

    token_ids: IntArray
    """`[n]` int64."""
    logprobs: FloatArray
    """`[n]` float32, natural log, ≤ 0: under the distribution that sampled the token."""
    kept_mass: FloatArray
    """`[n]` float32 in (0, 1]: probability of the kept set before truncation renormalised it."""
    versions: IntArray
    """`[n]` int64: version of the weights that sampled the token: how many optimizer updates had made them."""
    kv_versions: IntArray
    """`[n]` int64: oldest version that computed any KV entry the token attended to."""
    experts: IntArray | None = None
    """`[n, layers, k]` int16: experts chosen at the position that produced the token, or None."""
    topk_ids: IntArray | None = None
    """`[n, K]` int64: most likely tokens under the sampling distribution, or None."""
    topk_logprobs: FloatArray | None = None
    """`[n, K]` float32, log-probs of `topk_ids`."""
    sampled: BoolArray | None = None
    """`[n]` bool: False for what an environment wrote between two turns, which nothing trains on; None if all were sampled."""
    prompt_experts: IntArray | None = None
    """`[m, layers, k]` int16: experts at all earlier tokens but the last one, whose experts are `experts[0]`; None unless asked for."""

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        for name in SPAN_FACTS:
            value = getattr(self, name)
            if value is not None and len(value) != n:
                raise ValueError(f"TokenSpan.{name}: expected {n} entries, one per token, got {len(value)}")
        bad = np.flatnonzero(~np.isfinite(self.logprobs) | (self.logprobs > 0))
        if bad.size:
            raise ValueError(
                f"TokenSpan.logprobs: expected finite values ≤ 0, got {self.logprobs[bad[0]]} at position {bad[0]}"
            )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def own(self) -> IntArray:
        """Positions of the tokens that the policy sampled, ascending."""
        return np.arange(len(self)) if self.sampled is None else np.flatnonzero(self.sampled)

    @property
    def own_count(self) -> int:
        """How many tokens the policy sampled."""
        return len(self.token_ids) if self.sampled is None else int(np.count_nonzero(self.sampled))

    @staticmethod
    def empty() -> TokenSpan:
        """A span of no tokens, the start of every rollout."""
        i, f = np.zeros(0, np.int64), np.zeros(0, np.float32)
        return TokenSpan(token_ids=i, logprobs=f, kept_mass=f, versions=i, kv_versions=i)

    def append(self, other: TokenSpan) -> TokenSpan:
        """This span followed by `other`. Both carry the same optional arrays, unless one is empty.

        `other.prompt_experts` covers this span's tokens too: text of environments gets its experts from there."""
        if len(self) == 0:
            return other
        if len(other) == 0:
            return self

        def cat(name: str) -> Any:
            a, b = getattr(self, name), getattr(other, name)
            if name == "sampled" and (a is None) != (b is None):
                a, b = (np.ones(len(s), bool) if s.sampled is None else s.sampled for s in (self, other))
            if (a is None) != (b is None):
                raise ValueError(f"TokenSpan.append: one part carries {name} and the other does not")
            return None if a is None else np.concatenate([a, b])

        joined = {n: cat(n) for n in ("token_ids", *SPAN_FACTS)}
        prompt, read = self.prompt_experts, other.prompt_experts
        if read is not None:
            before = len(read) - len(self)
            text = np.flatnonzero(joined["experts"][: len(self), 0, 0] < 0)
            joined["experts"][text] = read[before + text]
            prompt = read[:before] if prompt is None else prompt
        return TokenSpan(**joined, prompt_experts=prompt)

    def given(self, token_ids: IntArray, version: int) -> TokenSpan:
        """This span followed by an environment's tokens. Their log-prob is 0 and their kept mass 1; nothing reads either."""
        n = len(token_ids)

        def like(value: np.ndarray | None, fill: float) -> np.ndarray | None:
            return None if value is None else np.full((n, *value.shape[1:]), fill, value.dtype)

        text = TokenSpan(
            token_ids=np.asarray(token_ids, np.int64),
            logprobs=np.zeros(n, np.float32),
            kept_mass=np.ones(n, np.float32),
            versions=np.full(n, version, np.int64),
            kv_versions=np.full(n, version, np.int64),
            experts=like(self.experts, -1),
            topk_ids=like(self.topk_ids, 0),
            topk_logprobs=like(self.topk_logprobs, -np.inf),
            sampled=np.zeros(n, bool),
        )
        return self.append(text)


SPAN_FACTS = (
    "logprobs", "kept_mass", "versions", "kv_versions", "experts", "topk_ids", "topk_logprobs", "sampled",
)  # fmt: skip
"""What a span tells about each of its tokens."""


@dataclass(frozen=True, kw_only=True)
class KeptKV:
    """Keys and values of an interrupted sequence, taken out of the engine: of all its tokens but the last."""

    keys: FloatArray  # `[layers, kv_heads, n, d]` float32
    values: FloatArray  # `[layers, kv_heads, n, dv]`
    version: int
    """Oldest policy version that computed any of it."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence an engine is asked to sample."""

    id: int
    """Rollout index, unique in the run; with `sampling.seed` and the position it keys the random draws."""
    prompt_ids: IntArray
    """`[P]` int64, P ≥ 1."""
    sampling: SamplingParams
    prefix: TokenSpan = field(default_factory=TokenSpan.empty)
    """Tokens already sampled for this rollout; sampling goes on behind them. Their KV is recomputed, unless `kv` has it."""
    kv: KeptKV | None = None
    """What `Segment.kv` returned when this sequence was interrupted, or None. An engine that does not keep KV ignores it."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """What an engine returns for a request: the newly sampled tokens (without the request's prefix) and how it ended."""

    request_id: int
    span: TokenSpan
    status: Status
    detail: str = ""
    """One line when `status` is a failure."""
    kv: KeptKV | None = None
    """Of an interrupted sequence, from an engine that keeps KV (`engine.kv=keep`): hand it back with the request to resume."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sampled answer; `span` says where every token comes from."""

    id: int
    """Unique in the run; equals `Request.id`."""
    group: int
    """Group (prompt occurrence) it belongs to, unique in the run."""
    member: int
    """Position inside the group, 0-based."""
    prompt: Prompt
    span: TokenSpan
    status: Status
    sampling: SamplingParams
    engine: str
    """Engine name, for example `local`."""
    dtype: str
    """Numeric mode of the engine, for example `fp32`, `bf16`, `fp8`."""
    reward: float | None = None
    """Scalar reward; None until graded, and for ever when the grader failed."""
    text: str = ""
    """Decoded response, for graders and people; training never re-tokenises it."""
    detail: str = ""
    """What the grader or the engine had to say: the extracted answer, the reason of a failure."""


@dataclass(frozen=True, kw_only=True)
class StepRollouts:
    """The rollouts of one step: what sampling hands to learning."""

    rollouts: Sequence[Rollout]
    """Everything that was sampled and belongs to the step, in order, failures included."""
    batch: Sequence[Rollout]
    """Those of them to train on, all graded. Members that failed are missing; `group=partial` trains parts of groups."""
    consumed: int = 0
    """Prompts taken from the data source for it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What sampling and grading measured."""
    generated: int | None = None
    """Tokens sampled while the step was drawn; None where sampling goes on beside training and has no time of its own."""


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Flat response tokens of a packed batch: what an objective sees. All tensors are `[T]` on one device.

    `logprobs` alone may carry a gradient. `sequence_ids` and `group_ids` name rollout and prompt group of each token
    with small consecutive integers; the tokens of one sequence are contiguous.
    """

    logprobs: torch.Tensor
    """float, log p: training engine, current weights, at the sampling temperature."""
    rollout_logprobs: torch.Tensor
    """float, log q: under the distribution that sampled the token."""
    advantages: torch.Tensor
    """float, detached."""
    coefficients: torch.Tensor
    """float ≥ 0, c_t in docs/objectives.md: the token's share in the loss, fixed for the whole optimizer batch."""
    sequence_ids: torch.Tensor
    """int64, 0-based."""
    group_ids: torch.Tensor
    """int64, 0-based."""
    old_logprobs: torch.Tensor | None = None
    """float, log o: training engine, weights at the start of the batch."""
    ref_logprobs: torch.Tensor | None = None
    """float, frozen reference policy."""
    entropy: torch.Tensor | None = None
    """float, nats, of the training distribution; carries a gradient only if the objective asked for it."""
    kept_mass: torch.Tensor | None = None
    versions: torch.Tensor | None = None
    kv_versions: torch.Tensor | None = None
    rollout_ids: torch.Tensor | None = None
    """int64, `Rollout.id` of each token, for messages and provenance."""
    token_index: torch.Tensor | None = None
    """int64, position inside the response, 0-based."""
    token_ids: torch.Tensor | None = None
    """int64, the sampled tokens."""
    topk_ids: torch.Tensor | None = None
    """`[T, K]` int64."""
    topk_logprobs: torch.Tensor | None = None
    """`[T, K]` float, log p at `topk_ids`."""
    rollout_topk_logprobs: torch.Tensor | None = None
    """`[T, K]` float, log q at `topk_ids`."""
    old_topk_logprobs: torch.Tensor | None = None
    """`[T, K]` float, log o at `topk_ids`."""
    lengths: tuple[int, ...] | None = None
    """Tokens of each sequence, where the caller knows: else they are read off the device."""


@dataclass(frozen=True, kw_only=True)
class WeightSlice:
    """One named tensor (or part of it) of a weight update."""

    name: str
    """Hugging Face checkpoint name."""
    tensor: torch.Tensor
    checksum: int
    """Position-dependent checksum of the bytes that `WeightUpdate.mode` names; checksums of parts add up modulo 2**64."""
    offset: int = 0  # first element of the flattened full tensor that this slice covers, if it is whole rows
    starts: tuple[int, ...] = ()  # of a box of the full tensor: its first index along each dimension
    box: tuple[int, ...] = ()  # its shape, where the tensor is an encoded delta of it (`models.delta`)
    rounded: bool = False  # by the sender, as `WeightUpdate.mode` asks; else by the engine, once it has the whole rows


@dataclass(frozen=True, kw_only=True)
class WeightUpdate:
    """New weights for an engine, as a stream of named slices."""

    kind: str
    """`full`, `delta` or `adapter`."""
    base_version: int | None
    """Version a delta or adapter applies to; None for `full`."""
    version: int
    slices: Sequence[WeightSlice]
    checksum: int
    """Sum of all slice checksums modulo 2**64."""
    mode: str | None = None
    """The checksums are of the weights rounded to this numeric mode, as an engine must hold them. None: of the tensors as they are."""
    shared: bool = False
    """The tensors are the engine's own memory: nothing is copied, and the checksums are of that memory already."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """An engine's evidence of the weights it serves."""

    version: int
    checksum: int
    """Recomputed by the engine over its memory; by a server in another program (`ProbedEngine`) over what it received."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine can do, asked before a run starts rather than found out in the middle of it."""

    name: str
    dtype: str
    max_length: int
    """Longest prompt + response, tokens."""
    returns_experts: bool = False
    returns_topk: bool = False
    forward: str = ""
    """How the embedded engine computes, and why that way; empty for a server."""
    proves_memory: bool = False
    """Its proof is of the memory that it serves from; publications then carry the checksums of its numeric mode."""
    look: int = 1
    """Decode steps that it should be asked to make at once: to ask a device what has ended is to wait for it."""
