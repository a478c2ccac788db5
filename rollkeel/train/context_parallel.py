"""Rows too long for one rank: ranks have some of a row's tokens each, and in attention some of the heads (Ulysses, Jacobs et al. 2023).

    rank 0: tokens 0 … N/2, all heads ──┐              ┌─▶ all tokens, heads 0 … H/2 ─ attention ──┐              ┌─▶ tokens 0 … N/2
    rank 1: tokens N/2 … N, all heads ──┴─ all to all ─┴─▶ all tokens, heads H/2 … H ─ attention ──┴─ all to all ─┴─▶ tokens N/2 … N

Attention sees the whole row, so that packing, shared prompts and positions are what they are on one rank. A rank's parameters get the
gradient of its tokens; scores are gathered, so that objectives see whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from rollkeel.batch.packing import MicroBatch
from rollkeel.errors import BadInput
from rollkeel.train.expert_parallel import exchange
from rollkeel.train.mesh import Mesh
from rollkeel.train.scores import Scores

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def check_context(model: PreTrainedModel, padded: str, mesh: Mesh) -> None:
    """Raises `BadInput` for a model whose rows cannot be shared by the context ranks of `mesh`; `padded`: why they are, if they are."""
    config = model.config.get_text_config()
    every = int(getattr(config, "num_attention_heads", 1))
    heads, keys = (n // mesh.tensor for n in (every, int(getattr(config, "num_key_value_heads", None) or every)))
    why = ""
    if padded:
        why = f"has rows that are padded ({padded})"
    elif heads % mesh.context:
        why = f"has {heads} attention heads on a rank, which it does not divide"
    elif keys % mesh.context and mesh.context % keys:
        why = f"has {keys} heads of keys on a rank, of which it is neither a part nor a multiple"
    if why:
        raise BadInput(
            f"train.mesh: context={mesh.context}, but {type(model).__name__} {why}; set another context, or 1"
        )


@dataclass(frozen=True)
class Context:
    """The ranks that share rows, as one of them sees them."""

    mesh: Mesh

    @property
    def group(self) -> Any:
        """Their process group."""
        return self.mesh.group("context")

    def part(self, tokens: int, number: int | None = None) -> slice:
        """Which of a row's tokens this rank has, or rank `number` of them."""
        ranks, number = self.mesh.context, self.mesh.place["context"] if number is None else number
        return slice(tokens * number // ranks, tokens * (number + 1) // ranks)

    def attend(self, attend: Attend, tokens: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`attend` over all `tokens` of the row: queries `[n, H, d]`, keys `[n, KV, d]`, values `[n, KV, d_v]` of those here → `[n, H · d_v]`."""
        ranks, own = self.mesh.context, len(q)
        if k.shape[1] % ranks:  # a rank's queries share one head of keys, which others need too
            k, v = (t.repeat_interleave(ranks // t.shape[1], 1) for t in (k, v))
        parts = [self.part(tokens, number) for number in range(ranks)]
        sizes = [part.stop - part.start for part in parts]
        widths = [t.shape[1] // ranks * t.shape[2] for t in (q, k, v)]
        by_rank = torch.cat([t.reshape(own, ranks, w) for t, w in zip((q, k, v), widths, strict=True)], 2)
        rows = exchange(by_rank.transpose(0, 1).flatten(0, 1), [own] * ranks, sizes, self.group)
        heads = [r.unflatten(1, (-1, t.shape[2])) for r, t in zip(rows.split(widths, 1), (q, k, v), strict=True)]
        out = attend(*heads)
        back = exchange(out, sizes, [own] * ranks, self.group)
        return back.view(ranks, own, out.shape[1]).transpose(0, 1).reshape(own, ranks * out.shape[1])

    def own(self, micro: MicroBatch) -> tuple[MicroBatch, torch.Tensor]:
        """`micro` with the response tokens alone that are predicted here, at places among the tokens here; which of its own these are."""
        micro = self._filled(micro)
        part = self.part(micro.input_ids.numel())
        which = ((micro.predict_index >= part.start) & (micro.predict_index < part.stop)).nonzero().squeeze(1)
        about: dict[str, Any] = {"predict_index": micro.predict_index[which] - part.start}
        about["topk_ids"] = None if micro.topk_ids is None else micro.topk_ids[which]
        return replace(micro, targets=micro.targets[which], **about), which

    def _filled(self, micro: MicroBatch) -> MicroBatch:
        """With a token for each rank at least: a part of its own, which nobody predicts from."""
        tokens = micro.input_ids.numel()
        lacking = self.mesh.context - tokens
        if lacking <= 0:
            return micro
        return replace(
            micro,
            input_ids=torch.cat((micro.input_ids, micro.input_ids[:1].expand(lacking))),
            position_ids=torch.cat((micro.position_ids, torch.arange(lacking).to(micro.position_ids))),
            cu_seqlens=torch.cat((micro.cu_seqlens, micro.cu_seqlens.new_tensor([tokens + lacking]))),
            parents=None if micro.parents is None else torch.cat((micro.parents, micro.parents.new_tensor([-1]))),
        )

    def gathered(self, scores: Scores, which: torch.Tensor, total: int) -> Scores:
        """Of all `total` response tokens, from those of `which` here. Collective; a gradient goes to the rank that has the token."""
        every = [None if s is None else _Gathered.apply(s, which, total, self.group) for s in scores[:3]]
        experts = scores.experts
        if experts is not None:  # gloo adds no int16
            experts = _gathered(experts.int(), which, total, self.group).to(torch.int16)
        return Scores(*every, experts)  # type: ignore[arg-type]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, which: torch.Tensor, total: int, group: Any) -> torch.Tensor:
        ctx.save_for_backward(which)
        return _gathered(own, which, total, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None, None


def _gathered(own: torch.Tensor, which: torch.Tensor, total: int, group: Any) -> torch.Tensor:
    import torch.distributed as dist

    out = own.new_zeros(total, *own.shape[1:])
    out[which] = own.detach()
    dist.all_reduce(out, group=group)
    return out
