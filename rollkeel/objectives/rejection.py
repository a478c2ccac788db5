"""Random rejection of trajectories: the control that every filter must beat, at the acceptance of another rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rollkeel.objectives import draws
from rollkeel.objectives.draws import Draw
from rollkeel.objectives.masks import CURRENT, Mask, Rule, from_rules
from rollkeel.objectives.statistics import Gather, Statistic
from rollkeel.objectives.terms import Anchor, Terms, make_terms
from rollkeel.objectives.thresholds import Share
from rollkeel.types import TokenBatch

if TYPE_CHECKING:
    from rollkeel.objectives.objective import Objective


@dataclass(frozen=True)
class RandomRule(Rule):
    """Reject the trajectories with the smallest hash of (seed, batch count, rollout id)."""

    draw: Draw = None  # type: ignore[assignment]
    like: Objective | None = None
    """The rule whose acceptance of a batch is copied."""

    def prepare(self, terms: Terms, gather: Gather) -> None:
        self.draw.advance()
        if self.like is not None:
            self.like.prepare(terms.tokens, gather=gather)
            _share(self).acceptance = gather(accepted(self.like, terms.tokens)).mean().item()
        super().prepare(terms, gather)

    def keep(self, terms: Terms) -> torch.Tensor:
        if self.threshold.value is None and self.like is not None:
            _share(self).acceptance = accepted(self.like, terms.tokens).mean().item()
        return super().keep(terms)

    @property
    def topk(self) -> int:
        return 0 if self.like is None else self.like.topk

    def needs(self, anchor: Anchor) -> frozenset[str]:
        if self.like is None:
            return frozenset()
        masks = self.like.masks
        read = frozenset().union(*(m.reads(self.like.anchor) for m in masks)) | self.like.needs
        return read | {"prepare"} if CURRENT & read else read

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"draw": self.draw.state_dict()}
        return {**state, "like": self.like.state_dict()} if self.like is not None else state

    def load_state_dict(self, state: Any) -> None:
        self.draw.load_state_dict(state["draw"])
        if self.like is not None:
            self.like.load_state_dict(state["like"])


def random_rejection_mask(acceptance: float | None, like: Objective | None, seed: int) -> Mask:
    """Keep exactly round(acceptance·N) of the N trajectories of a batch; `like`: at that rule's acceptance of the batch."""
    draw = Draw(seed)

    def value(terms: Terms) -> torch.Tensor:
        return draws.uniform(draw.key, draws.trajectory_ids(terms.tokens))

    statistic = Statistic("hash", value, level="sequence", pair=False)
    return from_rules("random", RandomRule("cutoff", statistic, Share(acceptance), draw=draw, like=like))


def accepted(objective: Objective, tokens: TokenBatch) -> torch.Tensor:
    """float64 0/1 of what an objective's masks keep: per sequence where it has sequence masks, else per token."""
    terms = make_terms(tokens, objective.anchor)
    whole = [terms.per_sequence(m.keep(terms)) for m in objective.masks if m.level == "sequence"]
    kept = whole or [m.keep(terms) for m in objective.masks]
    if not kept:
        return torch.ones_like(tokens.logprobs, dtype=torch.float64, requires_grad=False)
    return torch.stack(kept).all(0).double()


def _share(rule: Rule) -> Share:
    assert isinstance(rule.threshold, Share)
    return rule.threshold
