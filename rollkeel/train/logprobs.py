"""Log-probabilities and entropies of target tokens that never hold `[T, V]` logits.

With V = 150,000 the logits of 16,384 tokens take 10 GB. Here logits exist for one chunk of tokens at a time and the backward
computes them again; when all of them fit a small budget, they are kept instead, because then the extra product is what costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_utils import PreTrainedModel

from rollkeel.batch.packing import MicroBatch
from rollkeel.config import Recompute
from rollkeel.errors import BadInput
from rollkeel.models import gpu, softmax
from rollkeel.models.numerics import add_product, logits_of, product
from rollkeel.models.packed import PackedModel
from rollkeel.models.products import add_mm, mm
from rollkeel.train.head import head_of
from rollkeel.train.scores import Scores

if TYPE_CHECKING:
    from rollkeel.models.parity_packed import ParityModel
    from rollkeel.train.context_parallel import Context
    from rollkeel.train.vocabulary import Vocabulary

CHUNK = 1024
"""Tokens whose logits exist at one time: 600 MB of them with a vocabulary of 150,000, and no slower than more at once."""
WIDE, WIDE_BYTES = 4, 4 * 10**9
"""By how much a chunk may grow for low-precision kernels, which read and write the whole gradient of the head once a chunk, and the most
that its logits and their gradient then take."""
KEEP_BYTES = 48 * 2**20
"""Probabilities up to this size are kept for the backward whatever the chunk."""


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    entropy: bool = True,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    topk_ids: torch.Tensor | None = None,
    parity: bool = False,
    vocabulary: Vocabulary | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """log_softmax(logits / temperature) at `targets` and at `topk_ids`, and the entropy of that distribution in nats.

    Args: `hidden [T, D]`; `weight [V, D]`; `targets [T]` int64 in [0, V); `temperature` > 0, 0 counts as 1 (a greedy
    policy has no gradient, its untempered distribution has); `chunk` ≥ 1 tokens whose logits exist together, `CHUNK` or what
    suits the kernels if not given; `bias [V]`; `scale`, `softcap`: see `Head`; `topk_ids [T, K]` int64 in [0, V); `parity`: log-probs by `models.parity`, of a plain head;
    `vocabulary`: the rows of it that `weight` has, the others' are on other ranks; ids are of the whole.
    Returns: `[T]` float32 log-probs ≤ 0 and `[T]` float32 entropies (None unless asked), both differentiable in `hidden`,
    `weight` and `bias`; `[T, K]` float32 log-probs of `topk_ids` without gradient (None without them): they only feed
    masks. Peak memory above weights, gradients and results is about 2 · chunk · V · 4 bytes + 48 MB, half of the former on a CPU with
    numba; by kernels of low precision 6 · chunk · V bytes.
    Raises `BadInput` for a negative temperature, a chunk below 1 or a shape that does not fit.
    """
    kernels = gpu.taken(hidden) and vocabulary is None and not parity
    if chunk is None:
        chunk = wide(len(weight)) if kernels and _rounds(weight, bias) else CHUNK
    if temperature < 0 or chunk < 1:
        raise BadInput(f"token_logprobs: expected temperature ≥ 0 and chunk ≥ 1, got {temperature} and {chunk}")
    if (
        hidden.dim() != 2
        or weight.dim() != 2
        or hidden.shape[1] != weight.shape[1]
        or targets.shape != hidden.shape[:1]
        or (topk_ids is not None and (topk_ids.dim() != 2 or len(topk_ids) != len(hidden)))
    ):
        extra = "" if topk_ids is None else f" and topk_ids {list(topk_ids.shape)}"
        raise BadInput(
            "token_logprobs: expected hidden [T, D], weight [V, D], targets [T], topk_ids [T, K], got"
            f" {list(hidden.shape)}, {list(weight.shape)}, {list(targets.shape)}{extra}"
        )
    sampled = (temperature or 1.0) if parity else None
    options = _Options(1.0 / (temperature or 1.0), scale, softcap, chunk, entropy, kernels, sampled, vocabulary)
    if vocabulary is not None:
        from rollkeel.train.tensor_parallel import enter

        hidden = enter(hidden, vocabulary.group)
    scores = _TokenLogprobs.apply(hidden, weight, bias, targets, topk_ids, options)
    logprobs, entropies, topk = scores  # type: ignore[misc]
    return logprobs, entropies if entropy else None, None if topk_ids is None else topk


def wide(vocabulary: int) -> int:
    """Tokens of a chunk for low-precision kernels: a multiple of `CHUNK`."""
    return CHUNK * max(1, min(WIDE, WIDE_BYTES // (6 * vocabulary * CHUNK)))


def _rounds(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the gradient of logits is only used in products that round it to the dtype of `weight`."""
    return weight.dtype != torch.float32 and bias is None


@dataclass(frozen=True)
class _Options:
    inverse_temperature: float
    scale: float
    softcap: float | None
    chunk: int
    entropy: bool
    kernels: bool
    parity: float | None = None
    """Temperature of log-probs that are the sampler's to the bit."""
    vocabulary: Vocabulary | None = None

    @property
    def scale_and_cap(self) -> tuple[float, float]:
        """Logits at the sampling temperature are `cap · tanh(scale · z)`, or `scale · z` where the cap is 0."""
        if self.softcap is None:
            return self.scale * self.inverse_temperature, 0.0
        return self.scale / self.softcap, self.softcap * self.inverse_temperature


def _tempered(z: torch.Tensor, options: _Options) -> torch.Tensor:
    """The raw product `z [n, V]`, changed in place: logits at the sampling temperature."""
    scale, cap = options.scale_and_cap
    if cap:
        return z.mul_(scale).tanh_().mul_(cap)
    return z.mul_(scale) if scale != 1.0 else z


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        topk_ids: torch.Tensor | None,
        options: _Options,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        total, vocab = hidden.shape[0], weight.shape[0]
        logprobs = hidden.new_empty(total, dtype=torch.float32)
        normaliser = torch.empty_like(logprobs)
        entropies = hidden.new_empty(total if options.entropy else 0, dtype=torch.float32)
        topk = hidden.new_empty((0, 0) if topk_ids is None else topk_ids.shape, dtype=torch.float32)
        keep = any(ctx.needs_input_grad) and options.softcap is None
        keep = keep and (total <= options.chunk or total * vocab * 4 <= KEEP_BYTES)
        kept = []
        for a in range(0, total, options.chunk):
            part = slice(a, min(a + options.chunk, total))
            ids = None if topk_ids is None else topk_ids[part]
            room = normaliser[part], logprobs[part], entropies[part], topk[part]
            z = (
                _logits(hidden[part], weight, bias)
                if options.parity is None
                else _scores(hidden[part], weight, options)
            )
            z = _statistics(z, targets[part], ids, options, *room)
            if keep:
                kept.append(z)
            del z
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropies, *kept)
        ctx.options = options
        ctx.mark_non_differentiable(topk)
        # The unclamped entropies are those of the backward.
        return logprobs.clamp_(max=0.0), entropies.clamp(min=0.0), topk.clamp_(max=0.0)

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None, None]:
        hidden, weight, bias, targets, normaliser, entropies, *kept = ctx.saved_tensors
        options: _Options = ctx.options
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if want_hidden else None
        # Sums in float32, within a chunk and over chunks: in bfloat16 every further one would lose small contributions.
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if want_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if want_bias and bias is not None else None
        for number, a in enumerate(range(0, hidden.shape[0], options.chunk)):
            part = slice(a, min(a + options.chunk, hidden.shape[0]))
            first, second = (None if grad is None or not grad.numel() else grad[part] for grad in grads[:2])
            about = targets[part], normaliser[part], entropies[part], first, second
            dz = _logit_gradient(hidden[part], weight, bias, *about, options, kept[number] if kept else None)
            if d_hidden is not None:
                _set_product(d_hidden[part], dz, weight)
            if d_weight is not None:
                _add_product(d_weight, dz, hidden[part])
            if d_bias is not None:
                d_bias += dz.sum(0)
            del dz
        # Autograd rounds them for a parameter that does not ask for float32 (`grad_dtype`).
        return d_hidden, d_weight, d_bias, None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return mm(hidden, weight.t()) if bias is None and weight.dtype == torch.float32 else logits_of(hidden, weight, bias)


def _scores(hidden: torch.Tensor, weight: torch.Tensor, options: _Options) -> torch.Tensor:
    from rollkeel.models.parity import scores  # here alone: nobody else waits for its kernels

    return scores(hidden, weight, options.parity or 1.0)


def _exact(z: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    from rollkeel.models.parity import logprobs

    return logprobs(z, ids)


def _statistics(
    z: torch.Tensor,
    targets: torch.Tensor,
    topk_ids: torch.Tensor | None,
    options: _Options,
    normaliser: torch.Tensor,
    logprobs: torch.Tensor,
    entropies: torch.Tensor,
    topk: torch.Tensor,
) -> torch.Tensor:
    """Fill the last four from the raw product `z [n, V]`; gives what a backward may keep, probabilities or `z`."""
    if options.kernels:
        from rollkeel.models.gpu.logprobs import statistics

        room: Any = {"normaliser": normaliser, "logprobs": logprobs, "entropies": entropies, "topk": topk}
        statistics(z, targets, topk_ids, *options.scale_and_cap, **room)
        return z
    z = _tempered(z, options) if options.parity is None else z
    if options.vocabulary is not None:
        return options.vocabulary.statistics(z, targets, topk_ids, normaliser, logprobs, entropies, topk)
    if options.parity is None and softmax.suits(z):
        return softmax.statistics(z, targets, topk_ids, normaliser, logprobs, entropies, topk)
    # softmax's largest entry is 1/Σexp(z − max): the normaliser comes without a second pass over [n, V].
    p = torch.softmax(z, -1)
    torch.sub(z.amax(-1), p.amax(-1).log(), out=normaliser)
    if options.parity is not None:
        logprobs.copy_(_exact(z, targets[:, None])[:, 0])
    else:
        torch.sub(z.gather(1, targets[:, None]).squeeze(1), normaliser, out=logprobs)
    if topk_ids is not None and options.parity is not None:
        topk.copy_(_exact(z, topk_ids))
    elif topk_ids is not None:
        torch.sub(z.gather(1, topk_ids), normaliser[:, None], out=topk)
    if options.entropy:
        torch.sub(normaliser, z.mul_(p).sum(-1), out=entropies)
    return p


def _logit_gradient(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    normaliser: torch.Tensor,
    entropies: torch.Tensor,
    d_logprobs: torch.Tensor | None,
    d_entropy: torch.Tensor | None,
    options: _Options,
    kept: torch.Tensor | None,
) -> torch.Tensor:
    """Gradient with respect to the raw product h Wᵀ + b, `[n, V]` float32; by kernels in the dtype that products round it to.

    d log p_y / dz = 1[y] − p and dH/dz = −p · (log p + H); both for z at the sampling temperature.
    """
    factor = options.scale * options.inverse_temperature
    if options.kernels:
        from rollkeel.models.gpu.logprobs import gradient

        z = _logits(hidden, weight, bias) if kept is None else kept
        low = _rounds(weight, bias)
        out = z if kept is None and not low else torch.empty_like(z, dtype=weight.dtype if low else z.dtype)
        about = targets, normaliser, entropies, d_logprobs, d_entropy
        return gradient(z, *about, *options.scale_and_cap, out)
    own = d_logprobs  # of the targets whose logits are here
    if options.vocabulary is not None and d_logprobs is not None:
        targets, others = options.vocabulary.places(targets)
        own = d_logprobs.masked_fill(others, 0.0)
    if kept is not None and d_entropy is None:
        assert d_logprobs is not None  # one of the two brought us here
        assert own is not None
        dz = kept * -(d_logprobs * factor).unsqueeze(1)
        return dz.scatter_add_(1, targets[:, None], (own * factor).unsqueeze(1))
    z = _tempered(_logits(hidden, weight, bias), options)
    dtanh = None if options.softcap is None else _dtanh(z, options)
    if softmax.suits(z):
        dz = softmax.gradient(z, normaliser, entropies, d_logprobs, d_entropy, factor)
    else:
        log_p = torch.log_softmax(z, -1) if options.vocabulary is None else z - normaliser[:, None]
        del z
        p = log_p.exp()
        if d_entropy is None:
            dz = log_p.zero_()
        else:
            # p·log p is 0 where p underflows to 0, and log p stays finite, so no special case is needed.
            h = -torch.linalg.vecdot(p, log_p) if options.vocabulary is None else entropies
            dz = log_p.add_(h.unsqueeze(1)).mul_(-d_entropy.unsqueeze(1))
        if d_logprobs is not None:
            dz.sub_(d_logprobs.unsqueeze(1))
        dz.mul_(p).mul_(factor)
    if own is not None:
        dz.scatter_add_(1, targets[:, None], (own * factor).unsqueeze(1))
    return dz if dtanh is None else dz.mul_(dtanh)


def _dtanh(z: torch.Tensor, options: _Options) -> torch.Tensor:
    """1 − (capped / cap)² of the soft cap, from tempered capped logits."""
    cap = (options.softcap or math.inf) * options.inverse_temperature
    return z.div(cap).square_().neg_().add_(1.0)


def _add_product(total: torch.Tensor, dz: torch.Tensor, hidden: torch.Tensor) -> None:
    if hidden.dtype == torch.float32 and total.numel() <= dz.numel():
        add_mm(total, dz, hidden)
    elif hidden.dtype == torch.float32:
        total.addmm_(dz.t(), hidden)  # which takes no other [V, D]
    else:
        add_product(total, dz.t(), hidden)


def _set_product(out: torch.Tensor, dz: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.dtype == torch.float32:
        mm(dz, weight, out)
    else:
        out.copy_(product(dz, weight))  # a low-precision result may be one of low-precision sums


def packed_model(
    model: PreTrainedModel, recompute: Recompute, compiled: bool, parity: bool
) -> PackedModel | ParityModel:
    """The packed forward of one arithmetic or the other."""
    if not parity:
        return PackedModel(model, recompute=recompute, compiled=compiled)
    from rollkeel.models.parity_packed import ParityModel

    return ParityModel(model, recompute=recompute)


class PolicyForward:
    """Packed forward and token log-probs of one model, kept together because both must agree on the head."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        chunk: int | None = None,
        recompute: Recompute = Recompute(),
        compiled: bool = False,
        parity: bool = False,
    ) -> None:
        """`parity`: in the arithmetic of `models.parity`, which is not compiled."""
        self.packed = packed_model(model, recompute, compiled, parity)
        head = head_of(model)
        self.scale, self.softcap = head.scale, head.softcap
        self._output: Any = model.get_output_embeddings()
        self.chunk, self._parity = chunk, parity
        self.vocabulary: Vocabulary | None = None
        """Which of its rows the head has, where it is cut over ranks."""
        self._shared: Context | None = None

    def share(self, context: Context) -> None:
        """Run micro-batches together with other ranks from now on."""
        assert isinstance(self.packed, PackedModel)  # the other is refused on several ranks
        self._shared = self.packed.shared = context

    def score(self, micro: MicroBatch, *, temperature: float = 1.0, experts: bool = False) -> Scores:
        """What the model says about a micro-batch's response tokens, at its `topk_ids` too; with `experts`, its routing.

        A micro-batch with experts is sent to those; `experts` then tells what the routers would have chosen.
        """
        shared = self._shared
        own, which = (micro, None) if shared is None else shared.own(micro)
        chosen: list[torch.Tensor] | None = [] if experts and self.packed.num_moe_layers else None
        replay = None if own.experts is None or own.routed is None else (own.experts, own.routed)
        hidden = self.packed(own.input_ids, own.position_ids, own.cu_seqlens, chosen, replay, own.parents)
        logprobs, entropy, topk = token_logprobs(
            hidden.index_select(0, own.predict_index),
            self._output.weight,  # as it is now: sharded weights lie elsewhere in every pass
            own.targets,
            temperature=temperature,
            chunk=self.chunk,
            bias=self._output.bias,
            scale=self.scale,
            softcap=self.softcap,
            topk_ids=own.topk_ids,
            parity=self._parity,
            vocabulary=self.vocabulary,
        )
        assert entropy is not None
        routed = None
        if chosen:
            routed = torch.stack([c.index_select(0, own.predict_index) for c in chosen], 1).to(torch.int16)
        scores = Scores(logprobs, entropy, topk, routed)
        if shared is None or which is None:
            return scores
        return shared.gathered(scores, which, len(micro.targets))
