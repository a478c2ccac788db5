"""A decode step, from each slot's last token to the next one noted beside it, as a function of tensors that stay where they are.

On a device nothing in it is read back, batches are padded to a few sizes with a slot that is nobody's, and tables to a few
widths. So a step can be recorded once for each of these shapes and played again, which costs one launch instead of hundreds.
A record stays valid while weights, KV and slots are written in place, and is made anew when a tensor of the slots has grown.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from rollkeel.engines.kv import PagedCache, Step
from rollkeel.engines.rng import uniforms
from rollkeel.engines.sampling import Sampler, SamplingRows, sample
from rollkeel.engines.slots import Now, Slots
from rollkeel.models.forward import FastForward
from rollkeel.types import Request


class Graphs(Protocol):
    """Records steps of a device."""

    def capture(self, step: Callable[[], object]) -> Callable[[], object]:
        """What plays `step` again, in the same memory. `step` runs before it is recorded, to make what is made on first use."""
        ...


class CudaGraphs:
    """CUDA graphs in one pool of memory: they are played one at a time and leave nothing in it that another one needs."""

    def __init__(self) -> None:
        self._alive = weakref.WeakSet[Any]()

    def capture(self, step: Callable[[], object]) -> Callable[[], object]:
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            step()
        main.wait_stream(side)
        # A pool is gone with its last graph.
        pool = next((graph.pool() for graph in self._alive), None)
        graph = torch.cuda.CUDAGraph()
        # A trainer may allocate in another thread meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            step()
        self._alive.add(graph)
        return graph.replay


def graphs_for(forward: Any, device: torch.device) -> tuple[Graphs | None, str]:
    """What records the decode steps of `forward`, and in words for people what becomes of them on a GPU."""
    if device.type != "cuda":
        return None, ""
    why = ""
    if not isinstance(forward, FastForward):
        why = "the transformers forward"
    elif forward.num_moe_layers and (
        forward.dtype != torch.bfloat16 or torch.cuda.get_device_capability(device)[0] < 9
    ):
        why = "grouped products of experts (not in bfloat16, or on a card older than sm90)"
    if why:
        return None, f"; a decode step is many launches, since {why} would wait for the device in a CUDA graph"
    return CudaGraphs(), "; decode steps are CUDA graphs"


class Asked(NamedTuple):
    """What some request of a batch wants. It decides which operations a step has."""

    truncated: bool
    tempered: bool
    topk: int
    experts: bool


@dataclass(frozen=True)
class Batch:
    """The slots that decode together, padded on a device."""

    order: torch.Tensor
    active: torch.Tensor
    """Where a step reads them; steps of one size share it."""
    asked: Asked


def padded(count: int, most: int) -> int:
    """The batch size that stands for `count`: 1, 2, 4, then multiples of 8."""
    return min(1 << (count - 1).bit_length() if count <= 8 else -(-count // 8) * 8, most)


def widened(blocks: int, most: int) -> int:
    """The width of tables that stands for `blocks`: 8, 16, 32 and so on."""
    return min(8 << ((blocks - 1) // 8).bit_length(), most)


class InCache:
    """How one forward pass attends, and where it may write keys and values itself; see `models.forward.Paged`."""

    def __init__(self, cache: PagedCache, step: Step, scale: float) -> None:
        self._cache, self._step, self._scale = cache, step, scale

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        return self._cache.attend(self._step, layer, q, k, v, **{"scale": self._scale, **options})

    def places(self, layer: int, kv_heads: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return *self._cache.room(layer, kv_heads, width), self._step.slots

    def look_up(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        return self._cache.look_up(self._step, layer, q, self._scale)


class Decode:
    """Decode steps of one engine."""

    def __init__(
        self, forward: Any, cache: PagedCache, slots: Slots, graphs: Graphs | None = None, sampler: Sampler = sample
    ) -> None:
        self._forward = forward
        self._cache = cache
        self._slots = slots
        self._graphs = graphs
        self._sample = sampler
        self._active: dict[int, torch.Tensor] = {}
        self._plays: dict[tuple[int, int, Asked], Callable[[], object]] = {}
        self._moves = 0

    def forget(self) -> None:
        """Record steps anew: weights or KV will lie elsewhere."""
        self._plays = {}

    def batch(self, order: Sequence[int], requests: Sequence[Request]) -> Batch:
        """Of the slots `order`, which hold `requests`."""
        sampling = [r.sampling for r in requests]
        asked = Asked(
            truncated=any(s.truncated for s in sampling),
            tempered=any(s.temperature != 1 for s in sampling),
            topk=max(s.return_topk for s in sampling),
            experts=any(s.return_experts for s in sampling),
        )
        slots = self._slots
        if slots.ended is None:
            active = torch.tensor(order)
            return Batch(active, active, asked)
        size = padded(len(order), slots.spare)
        rows = torch.tensor([*order, *[slots.spare] * (size - len(order))], device=slots.device)
        if size not in self._active:
            self._active[size] = rows.clone()
        self._active[size].copy_(rows)
        return Batch(rows, self._active[size], asked)

    def step(self, batch: Batch, blocks: int) -> np.ndarray | None:
        """One token for every slot of `batch`, whose sequences have at most so many blocks; what `Slots.record` returns, or None on
        a device that one should not wait for."""
        slots = self._slots
        forward = self._forward
        asked = batch.asked
        active = batch.active
        if slots.ended is None:
            return self._once(active, blocks, asked).numpy()
        width = widened(blocks, slots.table.shape[1])
        if self._graphs is None or forward.observe is not None:
            self._once(active, width, asked)
            return None
        slots.make_room(asked.topk, (forward.num_moe_layers, forward.top_k) if asked.experts else ())
        if self._moves != slots.moves:
            self._plays, self._moves = {}, slots.moves
        key = (len(active), width, asked)
        if key not in self._plays:
            active.fill_(slots.spare)  # whatever runs on the way to a record happens to nobody
            self._plays[key] = self._graphs.capture(lambda: self._once(active, width, asked))
            active.copy_(batch.order)
        self._plays[key]()
        return None

    def _once(self, active: torch.Tensor, width: int, asked: Asked) -> torch.Tensor:
        slots, size = self._slots, self._cache.block_size
        now, table = slots.now(active), slots.table[:, :width].index_select(0, active)
        block = table.gather(1, (now.position // size)[:, None])[:, 0]
        step = Step(block * size + now.position % size, table, now.position[:, None], None)
        experts: list[torch.Tensor] | None = [] if asked.experts else None
        hidden = self.hidden(now.token, now.position, step, experts)
        return self.draw(active, now, hidden, asked, experts)

    def hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, step: Step, experts: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Final-norm hidden states of `ids`, which attend in the cache as `step` says."""
        attend = InCache(self._cache, step, getattr(self._forward, "scale", 1.0))
        return self._forward.hidden(ids, positions, attend, experts)

    def draw(
        self, active: torch.Tensor, now: Now, hidden: torch.Tensor, asked: Asked, experts: list[torch.Tensor] | None
    ) -> torch.Tensor:
        """Draw and record one token for each of `active` from its hidden state; returns what `Slots.record` does."""
        rows = SamplingRows(now.temperature, now.top_p, now.top_k, now.min_p, asked.truncated, asked.tempered)
        drawn = self._sample(self._forward.logits(hidden), rows, uniforms(now.key, now.drawn))
        best = drawn.best(asked.topk) if asked.topk else None
        self._slots.record_extras(active, now.made, best, experts)
        return self._slots.record(active, now, drawn)
