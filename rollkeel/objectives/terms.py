"""What every factor of an objective reads: the three policies at each token, and the ratios an anchor makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from rollkeel.objectives import segments
from rollkeel.types import TokenBatch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this before `exp`, so that one token can never overflow a batch."""


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of the log-ratio clamped to ±`LOG_RATIO_LIMIT`; the gradient is that of exp at the clamped value.

    A plain clamp would also set the gradient to 0 there: a silent mask on the most extreme tokens.
    """
    return _bounded(log_ratio).exp()


def bounded_expm1(log_ratio: torch.Tensor) -> torch.Tensor:
    """`bounded_exp` − 1 without cancellation for ratios near 1."""
    return _bounded(log_ratio).expm1()


def _bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    clamped = log_ratio.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return clamped + (log_ratio - log_ratio.detach()) if log_ratio.requires_grad else clamped


@dataclass(frozen=True)
class Anchor:
    """Which policies an objective compares. Values are field names of `TokenBatch`.

    `base` stands under p in the surrogate's ratio; masks look at the pair (`target`, `reference`).
    """

    name: str
    base: str
    target: str
    reference: str

    @property
    def fields(self) -> frozenset[str]:
        return frozenset({self.base, self.target, self.reference})

    @property
    def corrects_gap(self) -> bool:
        """True if the surrogate's own ratio already is p/q, so that a ρ weight would correct the gap twice."""
        return self.base == "rollout_logprobs"


OLD = Anchor("old", "old_logprobs", "logprobs", "old_logprobs")
"""Everything uses r = p/o (PPO, GRPO)."""
DECOUPLED = Anchor("decoupled", "old_logprobs", "old_logprobs", "rollout_logprobs")
"""Masks and weights look at ρ = o/q, the surrogate uses r = p/o (IcePop, KPop, TIS)."""
ROLLOUT = Anchor("rollout", "rollout_logprobs", "logprobs", "rollout_logprobs")
"""Everything uses u = p/q; no recomputed o is needed."""
MASK_OLD = Anchor("mask_old", "rollout_logprobs", "logprobs", "old_logprobs")
"""The ratio is u = p/q and masks judge p against o (MiniRL; the DPPO paper's Fig. 4 ablation)."""
ANCHORS = {anchor.name: anchor for anchor in (OLD, DECOUPLED, ROLLOUT, MASK_OLD)}
TOPK_OF = {
    "logprobs": "topk_logprobs",
    "old_logprobs": "old_topk_logprobs",
    "rollout_logprobs": "rollout_topk_logprobs",
}
"""Log-probs of the sampled tokens → those of the same policy at `topk_ids`."""


LEVELS = ("token", "segment", "geometric", "sequence")
"""What a ratio may be taken over; see `Terms.at_level`."""
WHOLE = ("geometric", "sequence")
"""Those that give all tokens of a sequence the same number."""


@dataclass(frozen=True)
class Terms:
    """Flat `[T]` tensors of a batch under an anchor. Only `logprobs` and `log_ratio` may carry a gradient."""

    logprobs: torch.Tensor
    """log p."""
    advantages: torch.Tensor
    log_ratio: torch.Tensor
    """log p − log base, unclamped."""
    target: torch.Tensor
    """log-probs whose distance to `reference` masks judge, detached, in their own dtype."""
    reference: torch.Tensor
    tokens: TokenBatch
    """The batch itself, for factors that need other fields or the segment ids."""
    anchor: Anchor
    exponents: list[torch.Tensor] = field(default_factory=list)
    """`[T]` log-ratios that factors took `bounded`, as they were."""

    def bounded(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """The log-ratio as `bounded_exp` takes it, noted: metrics count what was clamped."""
        self.exponents.append(log_ratio.detach())
        return _bounded(log_ratio)

    @cached_property
    def log_correction(self) -> torch.Tensor:
        """log target − log reference, detached, unclamped."""
        return wide(self.target) - wide(self.reference)

    @cached_property
    def correction(self) -> torch.Tensor:
        """target / reference, detached, bounded."""
        return self.bounded(self.log_correction).exp()

    @cached_property
    def lengths(self) -> torch.Tensor:
        """`[N]` int64, tokens of each sequence."""
        ids, known = self.tokens.sequence_ids, self.tokens.lengths
        return segments.lengths(ids) if known is None else torch.tensor(known, device=ids.device)

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """`[T]`: the mean over each token's sequence."""
        return segments.sequence_mean(values, self.tokens.sequence_ids, self.lengths)

    def sequence_sum(self, values: torch.Tensor) -> torch.Tensor:
        """`[T]`: the sum over each token's sequence."""
        return segments.sequence_sum(values, self.tokens.sequence_ids, self.lengths)

    def sequence_max(self, values: torch.Tensor) -> torch.Tensor:
        """`[T]`: the largest value of each token's sequence."""
        return segments.sequence_max(values, self.tokens.sequence_ids, self.lengths)

    @cached_property
    def segment_lengths(self) -> torch.Tensor:
        """`[S]` int64, tokens of each segment: a run of sampled tokens between two texts of an environment (one turn)."""
        ids, index = self.tokens.sequence_ids, self.tokens.token_index
        assert index is not None  # in the part's `needs`
        begins = (ids[1:] != ids[:-1]) | (index[1:] != index[:-1] + 1)
        return segments.lengths(torch.cat([begins.new_zeros(1), begins]).cumsum(0)) if len(ids) else ids

    def at_level(self, log_ratio: torch.Tensor, level: str) -> torch.Tensor:
        """`[T]`: log-ratios at a level of `LEVELS`: the token's own, the mean over its segment, the mean (`geometric`) or
        the sum (`sequence`) over its sequence."""
        if level == "segment":
            return segments.sequence_mean(log_ratio, self.tokens.sequence_ids, self.segment_lengths)
        reduce = {"geometric": self.sequence_mean, "sequence": self.sequence_sum}.get(level)
        return log_ratio if reduce is None else reduce(log_ratio)

    def per_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """`[N]` from `[T]` values that are constant over a sequence."""
        return values[self.lengths.cumsum(0) - self.lengths]


def wide(x: torch.Tensor) -> torch.Tensor:
    """At least float32: ratios of half-precision log-probs would be rounded twice."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def make_terms(tokens: TokenBatch, anchor: Anchor) -> Terms:
    """The view of a (checked) batch under `anchor`."""
    logprobs = wide(tokens.logprobs)
    base = wide(getattr(tokens, anchor.base)).detach()
    return Terms(
        logprobs=logprobs,
        advantages=tokens.advantages.detach(),
        log_ratio=logprobs - base,
        target=getattr(tokens, anchor.target).detach(),
        reference=getattr(tokens, anchor.reference).detach(),
        tokens=tokens,
        anchor=anchor,
    )
