"""Training forward of any causal language model over a packed flat batch, without an `[N, N]` mask.

Many sequences lie end to end in one row of N tokens. Attention is replaced, through transformers' attention interface, by
one that works per sequence: on a CPU in float32 `packed_attention` and on CUDA in half precision `varlen_attn` take the
flat row; elsewhere sequences of similar length are bucketed into `[S, L]` and run causally. Architectures whose attention
cannot be replaced (sliding windows, sinks, recurrent layers, …) run as the padded `[S, Lmax]` batch instead; what comes
out is the same.
"""

from __future__ import annotations

import contextvars
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from rollkeel.config import Recompute
from rollkeel.errors import BadInput
from rollkeel.models import packed_attention, varlen
from rollkeel.models.checkpointing import checkpointed, decoder_layers
from rollkeel.models.experts import SORTED_EXPERTS
from rollkeel.models.fused import fusable, fused, lent
from rollkeel.models.layout import Layout, Shared
from rollkeel.models.routers import RoutingShape, expert_layers, record_experts, replay_experts

VARLEN_ATTENTION = "rollkeel_varlen"
"""Name of the implementation in transformers' attention interface. No mask function is registered under it on purpose:
transformers then builds none."""
_PROBE_LENGTHS = (13, 15)
_PROBE_PARTS, _PROBE_PARENTS = (9, 4, 9, 6), (-1, 0, -1, 2)


_LAYOUT: contextvars.ContextVar[Layout] = contextvars.ContextVar("rollkeel_packed_layout")


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sequence of the current layout: `[1, H, N, d]` (GQA allowed) → `[1, N, H, d_v]`."""
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    out = _attend(q, k, v, scaling, dropout)
    return out.view(1, q.shape[0], q.shape[1], -1), None


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None, dropout: float = 0.0
) -> torch.Tensor:
    """Queries `[n, H, d]`, keys `[n, KV, d]`, values `[n, KV, d_v]` of the tokens here → `[n, H * d_v]`."""
    layout = _LAYOUT.get()
    flash = q.shape[-1] == v.shape[-1] and dropout == 0 and varlen.suits(q.device, q.dtype, q.shape[-1])

    def flat(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if flash:
            return _cuda_varlen(q, k, v, layout, scaling).flatten(1)
        return attend_whole(q, k, v, layout, scaling, dropout)

    return layout.attend(flat, q, k, v)


def attend_whole(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scaling: float | None, dropout: float = 0.0
) -> torch.Tensor:
    """Queries `[N, H, d]`, keys `[N, KV, d]`, values `[N, KV, d_v]` of a whole row of this `layout` → `[N, H * d_v]`."""
    if dropout == 0 and packed_attention.suits(q, k, v):
        return packed_attention.attend(q, k, v, layout.spans, scaling)
    if q.is_cuda and q.dtype == torch.float32:
        k, v = _all_heads(k, q), _all_heads(v, q)
    gqa, parts = q.shape[1] != k.shape[1], []
    for bucket in layout.buckets:
        out = F.scaled_dot_product_attention(
            bucket.take(q),
            bucket.keys(k),
            bucket.keys(v),
            attn_mask=bucket.mask,
            dropout_p=dropout,
            is_causal=bucket.mask is None,
            scale=scaling,
            enable_gqa=gqa,
        )
        out = out.transpose(1, 2).reshape(bucket.rows * bucket.length, -1)
        parts.append(out if bucket.real is None else out.index_select(0, bucket.real))
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    if layout.order is not None:
        flat = flat.index_select(0, layout.order)
    return flat


def _all_heads(keys: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """`[N, KV, d]` → `[N, H, d]`. In float32 no fast CUDA kernel takes fewer heads than queries have, and what PyTorch falls back to
    keeps `[H, L, L]` scores."""
    return keys.repeat_interleave(q.shape[1] // keys.shape[1], 1)


def _cuda_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scaling: float | None
) -> torch.Tensor:
    cu_keys = layout.cu_seqlens
    q = q.contiguous()
    k = k.contiguous()
    v = v.contiguous()
    if layout.keys is not None and layout.cu_keys is not None:
        k = k[layout.keys]
        v = v[layout.keys]
        cu_keys = layout.cu_keys
    spans = varlen.Spans(layout.cu_seqlens, cu_keys, max(layout.lengths), layout.furthest)
    return varlen.attend(q, k, v, spans, scaling)


ALL_ATTENTION_FUNCTIONS.register(VARLEN_ATTENTION, varlen_attention)


_Replay = tuple[torch.Tensor, torch.Tensor]


class PackedModel:
    """Hidden states of a causal language model over packed sequences; the model itself is left as it was found.

    Whether its attention can be replaced is decided once: by its config, then by comparing a few packed tokens with the
    padded batch, so that an architecture nobody thought of cannot silently mix sequences. `varlen` tells the outcome.
    """

    def __init__(
        self, model: PreTrainedModel, *, fuse: bool = True, recompute: Recompute = Recompute(), compiled: bool = False
    ) -> None:
        """`fuse=False`: every operation is the model's own module, for hooks that look at them. `recompute`: see
        `decoder_layers`. `compiled`: layers run through torch.compile; raises `BadInput` where that cannot be, or computes
        something else."""
        self.model = model
        self.backbone: Any = getattr(model, model.base_model_prefix, None) or model.get_decoder()
        if self.backbone is model:
            raise BadInput(
                f"model {type(model).__name__}: expected a causal language model with a base model, found none"
            )
        config = model.config.get_text_config()
        self._pad = int(getattr(config, "pad_token_id", None) or 0)
        self._embedding: Any = model.get_input_embeddings()
        self._expert_layers = expert_layers(self.backbone)
        self.num_moe_layers = len(self._expert_layers)
        self._checkpointed = decoder_layers(self.backbone, recompute)
        self._fused = fuse and fusable(model, self.backbone)
        self.padded = "" if _replaceable(model, config) else f"attention of {config.model_type} cannot be replaced"
        """Why sequences are padded instead of packed; empty if they are packed."""
        self._attention = VARLEN_ATTENTION
        self.shared: Shared | None = None
        """Who has which of a row's tokens, where ranks share them."""
        self._compiled: Callable[[], AbstractContextManager[None]] = nullcontext
        self.varlen = not self.padded and self._probe()
        if compiled:
            self._compile()

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cu_seqlens: torch.Tensor | Sequence[int],
        experts: list[torch.Tensor] | None = None,
        replay: _Replay | None = None,
        parents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Final hidden states (after the last norm) `[N, D]` of `input_ids [N]`, `position_ids [N]` restarting at 0.

        `cu_seqlens [S + 1]`: first token of each sequence, then N. Equal, to rounding, to each sequence run alone.
        `experts`, when given, receives one `[N, k]` tensor of expert ids per mixture-of-experts layer: the routers' choice.
        `replay`: expert ids `[t, layers, k]` and the tokens `[t]` that go to them whatever the routers choose (see
        `replay_experts`, which says what it refuses; ids are not checked here).
        Of rows that ranks share (`shared`), hidden states and `experts` are those of the n tokens that are here.
        `parents [S]`: the part that each continues, whose tokens it sees and whose positions it goes on from, −1 for none; needs `varlen`.
        """
        cu = cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else list(cu_seqlens)
        lengths = [b - a for a, b in itertools.pairwise(cu)]
        if not lengths or min(lengths) < 1 or cu[0] != 0 or cu[-1] != input_ids.numel():
            raise BadInput(
                f"packed batch: cu_seqlens expected rising from 0 to {input_ids.numel()}, got {cu[:4]}…{cu[-1:]}"
            )
        if parents is not None and not self.varlen:
            raise BadInput(f"packed batch: model {type(self.model).__name__} runs padded, where parts share nothing")
        # Place of each token among the rows that the experts see.
        rows = None if self.varlen else _inside(lengths, input_ids.device).flatten().nonzero().squeeze(1)
        if replay is not None and rows is not None:
            replay = replay[0], rows.index_select(0, replay[1])
        own = slice(0, cu[-1]) if self.shared is None else self.shared.part(cu[-1])
        if replay is not None and self.shared is not None:
            here = (replay[1] >= own.start) & (replay[1] < own.stop)
            replay = replay[0][here], replay[1][here] - own.start
        if replay is not None:
            routing = replay_experts(self._expert_layers, *replay)
        else:
            routing = record_experts(() if experts is None else self._expert_layers)
        with routing as chosen:
            if self.varlen:
                continued = None if parents is None else parents.tolist()
                hidden = self._packed(input_ids[own], position_ids[own], lengths, continued, replay)
            else:
                hidden = self._padded(input_ids, position_ids, lengths, replay)
        if experts is not None:
            experts += chosen if rows is None else [c.index_select(0, rows) for c in chosen]
        return hidden

    @torch.no_grad()
    def replayable(self) -> RoutingShape:
        """The shape of the experts that `replay` takes, after a proof on a few tokens that this model can replay.

        Raises `BadInput` for a dense model, and for one whose routing weights cannot be computed for given experts.
        """
        if not self._expert_layers:
            raise BadInput(
                f"routing replay: model {type(self.model).__name__} has no routed experts that replay could reach; set"
                " rollout.routing=record"
            )
        device = self._embedding.weight.device
        ids, positions = self._probe_tokens(device)
        cu = list(itertools.accumulate(_PROBE_LENGTHS, initial=0))
        own: list[torch.Tensor] = []
        expected = self(ids, positions, cu, own).float()
        counts, sizes = {c.shape[-1] for c in own}, {int(getattr(m, "num_experts", 0)) for m in self._expert_layers}
        if len(own) != len(self._expert_layers) or len(counts) != 1 or len(sizes) != 1:
            raise BadInput(
                f"routing replay: expected layers of one shape, got {sorted(counts)} of {sorted(sizes)} experts in"
                f" {len(own)} of {len(self._expert_layers)} layers; set rollout.routing=record"
            )
        shape, chosen = RoutingShape(len(own), counts.pop(), sizes.pop()), torch.stack(own, 1)
        every = torch.arange(len(ids), device=device)
        same = self(ids, positions, cu, None, (chosen, every)).float()
        moved = self(ids, positions, cu, None, ((chosen + 1) % shape.experts, every)).float()
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 0.1
        if not (same - expected).norm() <= tolerance * expected.norm() or not torch.isfinite(moved).all():
            raise BadInput(
                f"routing replay: model {type(self.model).__name__} computes something else when its own choice is replayed;"
                " set rollout.routing=record"
            )
        return shape

    def _packed(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        lengths: Sequence[int],
        parents: Sequence[int] | None = None,
        replay: _Replay | None = None,
    ) -> torch.Tensor:
        layout = replace(Layout.build(lengths, input_ids.device, parents), shared=self.shared)
        return self._run(layout, replay, input_ids=input_ids[None], position_ids=position_ids[None])[0]

    def _padded(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, lengths: Sequence[int], replay: _Replay | None = None
    ) -> torch.Tensor:
        inside = _inside(lengths, input_ids.device)
        ids = torch.full(inside.shape, self._pad, dtype=input_ids.dtype, device=input_ids.device)
        positions = torch.zeros_like(ids)
        ids[inside], positions[inside] = input_ids, position_ids
        return self._run(None, replay, input_ids=ids, position_ids=positions, attention_mask=inside.long())[inside]

    def _run(self, layout: Layout | None, replay: _Replay | None, **inputs: torch.Tensor) -> torch.Tensor:
        @contextmanager
        def again(layer: torch.nn.Module) -> Iterator[None]:
            inner = set(layer.modules())
            own = [i for i, experts in enumerate(self._expert_layers) if experts in inner]
            routed = [self._expert_layers[i] for i in own]
            bound = replay_experts(routed, replay[0][:, own], replay[1]) if replay else nullcontext()
            with self._lent(layout), bound:
                yield

        with self._lent(layout), checkpointed(self._checkpointed, again):
            return self.backbone(**inputs, use_cache=False).last_hidden_state

    @contextmanager
    def _lent(self, layout: Layout | None) -> Iterator[None]:
        """Inside, layers compute as in a packed pass of `layout`, or in a padded one."""
        device = self._embedding.weight.device
        if layout is None:
            with _implementations(self.model, None, device):
                yield
            return
        token = _LAYOUT.set(layout)
        try:
            passes = fused(self.backbone, _attend) if self._fused else self._compiled()
            with _implementations(self.model, self._attention, device), passes:
                yield
        finally:
            _LAYOUT.reset(token)

    @torch.no_grad()
    def _probe(self) -> bool:
        """True if packed hidden states, of sequences in parts that continue each other, are those of the padded batch."""
        ids, positions = self._probe_tokens(self._embedding.weight.device)
        training = self.model.training
        self.model.eval()
        try:
            padded = self._padded(ids, positions, _PROBE_LENGTHS).float()
            packed = self._try_packed(ids, positions)
        finally:
            self.model.train(training)
        if packed is None:
            return False
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 0.1
        same = bool((packed - padded).norm() <= tolerance * padded.norm())
        self.padded = "" if same else "packed tokens of this model come out as others"
        return same

    @torch.no_grad()
    def _compile(self) -> None:
        from rollkeel.models.compiled_layers import compiled_layers, outside

        if not self.varlen:
            raise BadInput(f"train.compile: sequences are padded here ({self.padded}); set train.compile=false")
        ids, positions = self._probe_tokens(self._embedding.weight.device)
        plain = self._packed(ids, positions, _PROBE_PARTS, _PROBE_PARENTS).float()
        parts = compiled_layers(self.backbone)
        self._fused = False
        self._attention = outside(VARLEN_ATTENTION)
        self._compiled = lambda: lent(parts)
        try:
            ours = self._packed(ids, positions, _PROBE_PARTS, _PROBE_PARENTS).float()
        except Exception as error:  # a compiler may raise anything, and more than one line of it
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise BadInput(
                f"train.compile: torch.compile fails on {type(self.model).__name__}: {why}; set train.compile=false"
            ) from error
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 0.1
        if not (ours - plain).norm() <= tolerance * plain.norm():
            raise BadInput(
                f"train.compile: compiled layers of {type(self.model).__name__} compute something else; set"
                " train.compile=false"
            )

    def _probe_tokens(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        ids = (torch.arange(sum(_PROBE_LENGTHS), device=device) * 7919 + 11) % self._embedding.weight.shape[0]
        return ids, torch.cat([torch.arange(n, device=device) for n in _PROBE_LENGTHS])

    def _try_packed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """None if the model cannot even run with the attention replaced; the padded form then serves it."""
        try:
            return self._packed(ids, positions, _PROBE_PARTS, _PROBE_PARENTS).float()
        except (RuntimeError, TypeError, ValueError, LookupError) as error:
            self.padded = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return None


def _inside(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """`[S, Lmax]` bool: places of the padded batch that are no padding."""
    return torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device).unsqueeze(1)


def _replaceable(model: PreTrainedModel, config: Any) -> bool:
    """What the config already says: windows longer than the probe, soft caps and sinks would pass unnoticed there."""
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return (
        bool(getattr(type(model), "_supports_attention_backend", False))
        and kinds <= {"full_attention"}
        and not window
        and not getattr(config, "attn_logit_softcapping", None)
        and not getattr(config, "attention_chunk_size", None)
        and config.model_type != "gpt_oss"
    )


@contextmanager
def _implementations(model: PreTrainedModel, attention: str | None, device: torch.device) -> Iterator[None]:
    """Run with these attention and experts implementations; the config is as before afterwards, whatever happens."""
    config = model.config
    before = (config._attn_implementation, config._experts_implementation)
    try:
        if attention is not None:
            config._attn_implementation = attention
        if device.type == "cpu":
            config._experts_implementation = SORTED_EXPERTS
        yield
    finally:
        config._attn_implementation, config._experts_implementation = before
