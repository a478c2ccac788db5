"""What an implementation under test is given: a padded batch with names, the layout that most trainers have."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from rollkeel.batch.coefficients import coefficients
from rollkeel.types import TokenBatch

HERE = Path(__file__).parent
REFERENCE = 0.8
"""The reference policy's probability of every token, over the old policy's."""
TOP = {"rollout": (0.4, 0.2), "old": (0.5, 0.25), "train": (0.7, 0.29)}
"""Share of the probability beside the sampled token that two other tokens have under each policy."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One optimizer batch of S answers with at most L tokens, padded on the right.

    Log-probs are natural, at the sampling temperature; position i is about token i. Where `mask` is False stands padding, or
    text of an environment inside an answer: no gradient belongs there, and no count includes it.
    """

    logprobs: torch.Tensor
    """`[S, L]`, log p: the training policy now. The gradient that is judged is that of the loss with respect to this."""
    old_logprobs: torch.Tensor
    """`[S, L]`, log o: the training policy at the start of the batch."""
    rollout_logprobs: torch.Tensor
    """`[S, L]`, log q: the policy that sampled."""
    ref_logprobs: torch.Tensor
    """`[S, L]`, the reference policy."""
    advantages: torch.Tensor
    """`[S, L]`, the same at all tokens of an answer."""
    mask: torch.Tensor
    """`[S, L]` bool."""
    groups: torch.Tensor
    """`[S]` int64: equal for answers to one prompt, which stand together."""
    rewards: torch.Tensor
    """`[S]`."""
    topk_ids: torch.Tensor
    """`[S, L, 2]` int64: tokens whose log-probs follow. Token 0 is the sampled one, 3 stands for all others."""
    topk_logprobs: torch.Tensor
    """`[S, L, 2]` under p, as `rollout_topk_logprobs` under q and `old_topk_logprobs` under o."""
    rollout_topk_logprobs: torch.Tensor
    old_topk_logprobs: torch.Tensor
    sequences: int
    """Answers of the whole optimizer batch: S, unless this is a micro-batch."""
    tokens: int
    """Tokens of the whole optimizer batch where `mask` is True."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The recipe's parameters."""

    @property
    def lengths(self) -> torch.Tensor:
        """`[S]` int64: tokens of each answer where `mask` is True."""
        return self.mask.sum(1)

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        """`[T]`: the tokens where `mask` is True, answer after answer; `values` is `[S, L]` or `[S]`."""
        return (values[:, None].expand_as(self.mask) if values.dim() == 1 else values)[self.mask]

    def coefficients(self, aggregate: str) -> torch.Tensor:
        """`[T]` float64: c of every token, see `batch.coefficients`; in a micro-batch its share of the whole batch's."""
        own = coefficients(aggregate, self.lengths.tolist(), self.groups.tolist()).double()
        rows, tokens = len(self.groups) / self.sequences, int(self.mask.sum()) / self.tokens
        return own * {"token_sum": 1.0, "token_mean": tokens}.get(aggregate, rows)

    def token_batch(self, aggregate: str) -> TokenBatch:
        """What an `Objective` of this package takes."""
        names = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "topk_ids")
        tops = ("topk_logprobs", "rollout_topk_logprobs", "old_topk_logprobs")
        held: dict[str, Any] = {name: self.flat(getattr(self, name)) for name in (*names, *tops)}
        places = torch.arange(self.mask.shape[1]).expand_as(self.mask)
        return TokenBatch(
            **held,
            coefficients=self.coefficients(aggregate).to(self.logprobs.dtype),
            sequence_ids=self.flat(torch.arange(len(self.groups))),
            group_ids=self.flat(self.groups),
            token_ids=torch.zeros(int(self.mask.sum()), dtype=torch.int64),
            token_index=self.flat(places),
        )

    def rows(self, rows: Any) -> Batch:
        """Some answers, in this order, with a gradient of their own; the totals stay those of the whole batch."""
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        own = {name: value.detach()[rows] for name, value in held.items() if isinstance(value, torch.Tensor)}
        return replace(self, **own).fresh()

    def fresh(self) -> Batch:
        """The same batch with a gradient of its own at `logprobs`."""
        return replace(self, logprobs=self.logprobs.detach().clone().requires_grad_())


@functools.cache
def stored() -> dict[str, Any]:
    """`batches.json`: the sequences of each batch, as probabilities."""
    return json.loads((HERE / "batches.json").read_text(encoding="utf-8"))


def labels(name: str) -> list[tuple[int, int, str]]:
    """Answer, position and words of every token of a stored batch where its mask is True."""
    rows = stored()[name]["sequences"]
    return [(s, i, t[0]) for s, row in enumerate(rows) for i, t in enumerate(row["tokens"]) if t is not None]


def load(name: str, options: Mapping[str, Any] | None = None, dtype: torch.dtype = torch.float64) -> Batch:
    """A stored batch. Positions outside of the mask hold log-probs that no right loss can notice."""
    rows = stored()[name]["sequences"]
    width = max(len(row["tokens"]) for row in rows) + 1
    empty = ["", 0.3, 0.6, 0.2]
    padded = [row["tokens"] + [None] * (width - len(row["tokens"])) for row in rows]
    mask = torch.tensor([[t is not None for t in tokens] for tokens in padded])
    values = torch.tensor([[(t or empty)[1:] for t in tokens] for tokens in padded], dtype=torch.float64)
    p, o, q = values.unbind(-1)
    listed = (torch.arange(width) % 2 == 0).expand_as(mask)

    def top(sampled: torch.Tensor, policy: str) -> torch.Tensor:
        first, second = ((1 - sampled) * share for share in TOP[policy])
        return torch.stack((torch.where(listed, sampled, second), first), -1).log().to(dtype)

    def column(key: str) -> torch.Tensor:
        return torch.tensor([row[key] for row in rows])

    return Batch(
        logprobs=p.log().to(dtype),
        old_logprobs=o.log().to(dtype),
        rollout_logprobs=q.log().to(dtype),
        ref_logprobs=(REFERENCE * o).log().to(dtype),
        advantages=column("advantage").to(dtype)[:, None].expand_as(mask).clone(),
        mask=mask,
        groups=column("group"),
        rewards=column("reward").to(dtype),
        topk_ids=torch.stack((torch.where(listed, 0, 2), torch.ones_like(listed, dtype=torch.int64)), -1),
        topk_logprobs=top(p, "train"),
        rollout_topk_logprobs=top(q, "rollout"),
        old_topk_logprobs=top(o, "old"),
        sequences=len(rows),
        tokens=int(mask.sum()),
        options=dict(options or {}),
    ).fresh()


def wider(batch: Batch) -> Batch:
    """The same answers with two more columns of padding, and other numbers wherever the mask is False."""

    def grown(value: torch.Tensor) -> torch.Tensor:
        if value.dim() == 1:
            return value
        return torch.cat((value, value[:, -1:].repeat(1, 2, *([1] * (value.dim() - 2)))), 1)

    held = {f.name: getattr(batch, f.name) for f in fields(batch)}
    tensors = {name: grown(value.detach()) for name, value in held.items() if isinstance(value, torch.Tensor)}
    for i, name in enumerate(("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages")):
        tensors[name] = torch.where(tensors["mask"], tensors[name], -0.5 - 0.7 * i)
    return replace(batch, **tensors).fresh()
