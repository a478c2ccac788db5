"""Paged KV cache: reference-counted blocks, and attention over them for flat batches of tokens.

Storage of one layer is `[num_blocks * kv_heads, block_size, head_dim]`: a block's keys of one head are contiguous, so that
gathering a sequence's blocks yields matrices ready for batched products. Addresses never change.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from rollkeel.config import EngineConfig
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.host import untouched
from rollkeel.models import gpu, varlen
from rollkeel.types import KeptKV

KV_GB, KV_SHARE = 4.0, 0.4
"""Memory of the cache where none is asked for: on a CPU, and of what is free on a GPU of which nobody knows what else it is for."""
SPARE = 3
"""Blocks beside those of the longest sequence: padding, and room to start. A device needs one more, for the slot that pads batches."""


class Layout(NamedTuple):
    """How KV is stored and computed: none of it changes what is sampled."""

    block_size: int = 16
    """Tokens of a KV block."""
    prefill_tokens: int = 8192
    """Tokens, with padding, prefilled in one forward pass; twice as many where nothing is padded."""
    scores: int = 2**28
    """Attention scores of one forward pass over prompts, in one layer: 1 GB of them. Longer prompts come in pieces."""
    prefix_sharing: bool = True
    """Compute and store a prompt's KV once for all requests with the same prompt."""


class BlockPool:
    """Hands out blocks and counts who holds them. A block is free again when nobody does."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks

    @property
    def free(self) -> int:
        """Number of blocks nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A block held once. Raises `EngineFailure` when none is free."""
        if not self._free:
            raise EngineFailure("KV cache: no free block; raise engine.slots * engine.max_length or lower the load")
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each of `blocks`."""
        for block in blocks:
            if self._holders[block] < 1:
                raise EngineFailure(f"KV cache: block {block} is shared but nobody holds it")
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder fewer for each of `blocks`."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)
            elif self._holders[block] < 0:
                raise EngineFailure(f"KV cache: block {block} released more often than held")


@dataclass
class Step:
    """Where the tokens of one forward pass are written and what they attend to.

    A batch of S sequences with Q query tokens each (right-padded); decode is Q = 1. Index tensors serve every layer.
    """

    slots: torch.Tensor
    """`[N]` int64: block * block_size + offset of each new token."""
    table: torch.Tensor
    """`[S, B]` int64 block ids, 0-padded; B * block_size = L keys are looked at."""
    query_positions: torch.Tensor
    """`[S, Q]` int64 position of each query, −1 for padding."""
    scatter: torch.Tensor | None
    """`[N]` int64 index of each token in the padded `[S * Q]` grid; None when N = S * Q in order."""
    prompts: tuple[np.ndarray, np.ndarray] | None = None
    """`[S]` position of each sequence's first query and number of its queries, which a pass over prompts knows on the host."""
    _rows: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    _bias: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)

    @functools.cached_property
    def spans(self) -> varlen.Spans:
        """Of the sequences of a pass over prompts; `keys` are `queries` where there are no earlier keys."""
        assert self.prompts is not None
        starts, counts = self.prompts
        seen = starts + counts
        queries, keys = (
            torch.from_numpy(np.append(0, each.cumsum()).astype(np.int32)).to(self.slots.device)
            for each in (counts, seen)
        )
        return varlen.Spans(queries, keys if starts.any() else queries, int(counts.max()), int(seen.max()))

    def written(self, kv_heads: int, block_size: int) -> torch.Tensor:
        """`[N * kv_heads]` flat rows that the new tokens are written to, built once per pass."""
        if ("written", kv_heads) not in self._rows:
            self._rows["written", kv_heads] = _rows(self.slots, kv_heads, block_size)
        return self._rows["written", kv_heads]

    def seen(self, kv_heads: int, block_size: int) -> torch.Tensor:
        """`[M * kv_heads]` flat rows of all M keys of a pass over prompts, sequence after sequence, built once per pass."""
        if ("seen", kv_heads) not in self._rows:
            assert self.prompts is not None
            first = self.spans.keys
            total = int(sum(map(np.sum, self.prompts)))
            sequence = torch.repeat_interleave(first.diff().long(), output_size=total)
            position = torch.arange(total, device=first.device) - first[sequence]
            slots = self.table[sequence, position // block_size] * block_size + position % block_size
            self._rows["seen", kv_heads] = _rows(slots, kv_heads, block_size)
        return self._rows["seen", kv_heads]

    def gathered(self, kv_heads: int) -> torch.Tensor:
        """`[S * kv_heads * B]` flat rows of blocks that the sequences attend to, built once per pass."""
        if ("gathered", kv_heads) not in self._rows:
            head = torch.arange(kv_heads, device=self.slots.device)
            self._rows["gathered", kv_heads] = (self.table[:, None] * kv_heads + head[:, None]).flatten()
        return self._rows["gathered", kv_heads]

    def bias(self, keys: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """`[S, Q, L]` additive mask: causal, within `window` keys if given. Padding rows see key 0."""
        if (window, dtype) not in self._bias:
            key = torch.arange(keys, device=self.slots.device)
            position = self.query_positions.clamp_min(0)[..., None]
            hidden = key > position
            if window:
                hidden |= key <= position - window
            self._bias[(window, dtype)] = torch.zeros(hidden.shape, dtype=dtype, device=key.device).masked_fill_(
                hidden, torch.finfo(dtype).min
            )
        return self._bias[(window, dtype)]


def _rows(slots: torch.Tensor, kv_heads: int, block_size: int) -> torch.Tensor:
    head = torch.arange(kv_heads, device=slots.device)
    block, offset = slots // block_size, slots % block_size
    return ((block[:, None] * kv_heads + head) * block_size + offset[:, None]).flatten()


class PagedCache:
    """Keys and values of every layer, and attention over them. Layers are allocated when first written."""

    def __init__(
        self, num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._dtype, self._device = dtype, torch.device(device)
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self.region: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Within it keys and values get their memory."""
        self._experts: torch.Tensor | None = None
        """`[num_blocks * block_size, layers, k]` int16: experts of tokens whose keys are here."""

    def tensors(self) -> list[torch.Tensor]:
        """What holds keys and values. Zeros in it are as good as new."""
        return [*self._keys.values(), *self._values.values()]

    def clear(self) -> None:
        """Have no memory until something is written. Nobody may hold blocks, or addresses of this memory."""
        for held in (self._keys, self._values, self._buffers):
            held.clear()
        self._experts = None

    def arrays(self, layer: int, kv_heads: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Key and value blocks of a layer as float32 arrays that share its memory (CPU only)."""
        keys, values = self.room(layer, kv_heads, width)
        return keys.numpy(), values.numpy()

    def room(self, layer: int, kv_heads: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where keys and values of a layer lie, for who writes them there."""
        about = layer, kv_heads, width, self._dtype
        return self._held(self._keys, *about), self._held(self._values, *about)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks in every layer, each (source, target): the last, half-filled blocks of shared prompts. No target is a source."""
        if not copies:
            return
        source, target = torch.tensor(list(zip(*copies, strict=True)), device=self._device)
        experts = [] if self._experts is None else [self._experts]
        for held in (*self._keys.values(), *self._values.values(), *experts):
            blocks = held.view(self.num_blocks, -1)
            blocks.index_copy_(0, target, blocks.index_select(0, source))

    def note(self, slots: torch.Tensor, experts: Sequence[torch.Tensor]) -> None:
        """Remember the experts `[N, k]`, one tensor a layer, that the tokens written to `slots [N]` went to."""
        chosen = torch.stack(tuple(experts), 1).to(torch.int16)
        if self._experts is None:
            self._experts = chosen.new_zeros(self.num_blocks * self.block_size, *chosen.shape[1:])
        self._experts[slots] = chosen

    def noted(self, blocks: Sequence[int], tokens: int) -> np.ndarray:
        """`[tokens, layers, k]`: experts of the first tokens of a sequence, at least one, that was computed in `blocks`."""
        assert self._experts is not None
        held = self._experts.unflatten(0, (self.num_blocks, -1))
        return held[list(blocks[: -(-tokens // self.block_size)])].flatten(0, 1)[:tokens].cpu().numpy()

    def read(self, sequences: Sequence[tuple[Sequence[int], int, int]]) -> list[KeptKV | None]:
        """Copies of sequences, each (blocks, tokens n to take, oldest version in them); None where n is 0. Raises `BadInput` where the
        layers' shapes differ."""
        blocks = [b for owned, _, _ in sequences for b in owned]
        stacked = [self._brought(store, blocks) for store in (self._keys, self._values)]
        out, start = list[KeptKV | None](), 0
        for owned, tokens, version in sequences:
            part, kept = slice(start, start + tokens), None
            if tokens and stacked[0] is not None and stacked[1] is not None:
                kept = KeptKV(keys=stacked[0][:, :, part].copy(), values=stacked[1][:, :, part].copy(), version=version)
            out.append(kept)
            start += len(owned) * self.block_size
        return out

    def _brought(self, store: Mapping[int, torch.Tensor], blocks: Sequence[int]) -> np.ndarray | None:
        """Those blocks of every layer, `[layers, heads, tokens, width]` on the host; the device copies one layer at a time."""
        if len({held.shape for held in store.values()}) > 1:
            raise BadInput("engine.kv=keep: expected layers whose keys have one shape; use recompute for this model")
        parts = list[np.ndarray]()
        for _, held in sorted(store.items()):
            chosen = held.view(self.num_blocks, -1, *held.shape[1:])[list(blocks)]
            parts.append(chosen.transpose(0, 1).flatten(1, 2).cpu().float().numpy())
        return np.stack(parts) if parts else None

    def write(self, sequences: Sequence[tuple[Sequence[int], KeptKV]]) -> None:
        """Put back what `read` returned, into these blocks. Raises `BadInput` when it has another shape than this cache."""
        blocks = [b for owned, _ in sequences for b in owned]
        for store, name in ((self._keys, "keys"), (self._values, "values")):
            arrays = [getattr(kept, name) for _, kept in sequences]
            layers, heads, _, width = arrays[0].shape
            rows = torch.zeros(layers, heads, len(blocks) * self.block_size, width)
            start = 0
            for (owned, _), array in zip(sequences, arrays, strict=True):
                rows[:, :, start : start + array.shape[2]] = torch.from_numpy(array)
                start += len(owned) * self.block_size
            parts = rows.view(layers, heads, len(blocks), self.block_size, width).transpose(1, 2)
            for layer in range(layers):
                cache = self._held(store, layer, heads, width, self._dtype)
                if cache.shape[0] != self.num_blocks * heads or cache.shape[-1] != width:
                    raise BadInput(
                        f"engine.kv=keep: expected {cache.shape[0] // self.num_blocks} heads of {cache.shape[-1]} in layer"
                        f" {layer}, got {heads} of {width}; the KV is that of another model"
                    )
                cache.view(self.num_blocks, heads, self.block_size, width)[blocks] = (
                    parts[layer].to(cache.dtype).to(self._device)
                )

    def attend(
        self,
        step: Step,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write `key`, `value` `[N, KV, d]` and return `[N, H * dv]` attention of `query [N, H, d]`.

        `sinks [H]` are extra logits that take probability and give no value (GPT-OSS).
        """
        written = step.written(key.shape[1], self.block_size)
        self._store(self._keys, layer, key, written)
        self._store(self._values, layer, value, written)
        return self.look_up(step, layer, query, scale, window, sinks, (key, value))

    def look_up(
        self,
        step: Step,
        layer: int,
        query: torch.Tensor,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """`attend`, once keys and values are written; `new` are those, where they are at hand."""
        keys, values = self._keys[layer], self._values[layer]
        kv_heads, width = len(keys) // self.num_blocks, keys.shape[-1]
        plain = sinks is None and not window and width == values.shape[-1]
        if step.prompts is not None and plain and varlen.suits(query.device, query.dtype, width):
            if new is None or step.spans.keys is not step.spans.queries:
                rows = step.seen(kv_heads, self.block_size)
                keys, values = (
                    c.view(-1, width).index_select(0, rows).view(-1, kv_heads, width) for c in (keys, values)
                )
                new = keys, values
            return varlen.attend(query, *new, step.spans, scale).flatten(1)
        if step.query_positions.shape[1] == 1 and step.scatter is None and gpu.taken(query):
            from rollkeel.models.gpu.attention import decode_attention

            at, options = step.query_positions[:, 0], {"window": window, "sinks": sinks}
            return decode_attention(query, keys, values, step.table, at, kv_heads=kv_heads, scale=scale, **options)
        return self._padded(step, query, keys, values, scale, window, sinks)

    def _padded(
        self, step: Step, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *masks: Any
    ) -> torch.Tensor:
        """Over the keys of each sequence, padded to those of the longest."""
        window, sinks = masks
        heads, kv_heads = query.shape[1], len(keys) // self.num_blocks
        sequences, per_sequence = step.query_positions.shape
        gathered = step.gathered(kv_heads)
        keys, values = self._gather(0, keys, gathered), self._gather(1, values, gathered)
        keys = keys.view(sequences * kv_heads, -1, keys.shape[-1])
        values = values.view(sequences * kv_heads, -1, values.shape[-1])
        length, group = keys.shape[1], heads // kv_heads
        if step.scatter is None:
            q = query.reshape(sequences, per_sequence, kv_heads, group, -1)
        else:
            q = query.new_zeros(sequences * per_sequence, heads, query.shape[-1])
            q = q.index_copy_(0, step.scatter, query).view(sequences, per_sequence, kv_heads, group, -1)
        q = q.permute(0, 2, 3, 1, 4).reshape(sequences * kv_heads, group * per_sequence, -1)
        bias = step.bias(length, window, torch.float32)
        # Scores stay in float32, as in every fused attention kernel.
        scores = torch.bmm(q.float(), keys.float().transpose(1, 2)).view(
            sequences, kv_heads, group, per_sequence, length
        )
        scores = torch.add(bias[:, None, None], scores, alpha=scale)
        if sinks is None:
            probs = scores.softmax(-1)
        else:
            extra = sinks.float().view(1, kv_heads, group, 1, 1).expand(sequences, -1, -1, per_sequence, 1)
            probs = torch.cat((scores, extra), -1).softmax(-1)[..., :-1]
        out = torch.bmm(probs.to(values.dtype).reshape(sequences * kv_heads, group * per_sequence, length), values)
        out = out.view(sequences, heads, per_sequence, -1).transpose(1, 2).reshape(sequences * per_sequence, -1)
        return out if step.scatter is None else out.index_select(0, step.scatter)

    def _gather(self, which: int, cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Rows of `cache`, on a CPU in a buffer that every layer reuses: fresh pages for each call cost more than the copy."""
        if cache.device.type != "cpu":
            return cache.index_select(0, rows)
        size = rows.numel() * cache[0].numel()
        buffer = self._buffers.get(which)
        if buffer is None or buffer.numel() < size or buffer.dtype != cache.dtype:
            buffer = self._buffers[which] = torch.empty(2 * size, dtype=cache.dtype, device=cache.device)
        return torch.index_select(cache, 0, rows, out=buffer[:size].view(-1, *cache.shape[1:]))

    def _store(self, store: dict[int, torch.Tensor], layer: int, new: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        cache = self._held(store, layer, new.shape[1], new.shape[-1], new.dtype)
        cache.view(-1, new.shape[-1]).index_copy_(0, rows, new.reshape(-1, new.shape[-1]))
        return cache

    def _held(self, store: dict[int, torch.Tensor], layer: int, heads: int, width: int, dtype: torch.dtype) -> Any:
        if layer not in store:
            # Zeros, not empty: masked keys are multiplied by probability 0, and 0 * NaN would spread.
            shape = (self.num_blocks * heads, self.block_size, width)
            with self.region():
                if self._device.type == "cpu":
                    memory = untouched(math.prod(shape) * dtype.itemsize)  # most blocks are never written to
                    store[layer] = torch.frombuffer(memory, dtype=dtype).view(shape)
                else:
                    store[layer] = torch.zeros(shape, dtype=dtype, device=self._device)
        return store[layer]


def affordable_blocks(
    text: Any, config: EngineConfig, block_size: int, dtype: torch.dtype, max_length: int, device: torch.device
) -> tuple[int, int]:
    """How many KV blocks fit into the memory for the architecture `text`, and how many tokens one sequence may then have.

    Raises `BadInput` for a model without attention, and when not even one sequence of `max_length` tokens fits.
    """
    if not getattr(text, "num_attention_heads", None):
        raise BadInput(f"engine: {text.model_type} has no attention; the embedded engine cannot serve it")
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    width = max(width, getattr(text, "qk_head_dim", None) or 0)
    per_block = 2 * text.num_hidden_layers * heads * width * block_size * dtype.itemsize
    memory_gb = config.kv_memory_gb or KV_GB
    if config.kv_memory_gb is None and device.type == "cuda":  # the rest is for what a trainer allocates later
        memory_gb = torch.cuda.mem_get_info(device)[0] / 2**30 * KV_SHARE
    affordable = int(memory_gb * 2**30 / per_block)
    spare = SPARE + (device.type != "cpu")
    needed = -(-max_length // block_size) + spare
    if affordable < needed:
        raise BadInput(
            f"engine.kv_memory_gb={memory_gb:.3g}: one sequence of {max_length} tokens needs "
            f"{needed * per_block / 2**30:.2f} GB; raise it or lower engine.max_length"
        )
    return affordable, (affordable - spare) * block_size
