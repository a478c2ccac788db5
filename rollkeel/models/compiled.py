"""Decode steps and prefills of a `FastForward` on a CPU by compiled kernels, which read weights and state where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from rollkeel.errors import BadInput
from rollkeel.models import jit, kernels
from rollkeel.models.forward import FastForward


def compiled_decode(forward: object, cache: Blocks, max_length: int) -> CompiledDecode:
    """`CompiledDecode` of `forward`. Raises `BadInput` where it cannot run or would compute something else."""
    if not jit.FOUND:
        raise BadInput("engine.forward=compiled: expected numba on x86-64; pip install rollkeel[cpu] or use fast")
    if not suits(forward):
        raise BadInput(
            "engine.forward=compiled: expected float32 arithmetic on a CPU without output biases and adapters; use auto"
        )
    assert isinstance(forward, FastForward)
    return CompiledDecode(forward, cache, max_length)


def suits(forward: object) -> bool:
    """True if compiled steps compute what `forward` computes, and numba is here to compile them."""
    return (
        jit.FOUND
        and isinstance(forward, FastForward)
        and not forward.fixed_order
        and forward.device.type == "cpu"
        and forward.dtype == torch.float32
        and forward.exact_activations
        and not forward.adapters
        and all(layer.out_bias is None for layer in forward.layers)
    )


ROWS = 512
"""Tokens prefilled in one call."""

Job = tuple[list[int], np.ndarray, int]
"""Blocks, token ids and first position of a prefill."""


class Blocks(Protocol):
    """What the paged cache must tell: how many blocks of how many tokens, and where a layer's keys and values lie."""

    num_blocks: int
    block_size: int

    def arrays(self, layer: int, kv_heads: int, width: int) -> tuple[np.ndarray, np.ndarray]: ...

    def note(self, slots: torch.Tensor, experts: Sequence[torch.Tensor]) -> None: ...


class State(Protocol):
    """Tensors of the engine's slots that a step reads and writes; see `engines.slots`."""

    table: torch.Tensor
    token: torch.Tensor
    position: torch.Tensor
    made: torch.Tensor
    limit: torch.Tensor
    drawn: torch.Tensor
    key: torch.Tensor
    temperature: torch.Tensor
    stop: torch.Tensor
    ids: torch.Tensor
    logprobs: torch.Tensor
    kept: torch.Tensor


class CompiledDecode:
    """Decode steps on the weights of a `FastForward`, whose storage it reads: updates in place are seen at once."""

    def __init__(self, forward: FastForward, cache: Blocks, max_length: int) -> None:
        f = self._forward = forward
        self._cache = cache
        angle = torch.arange(max_length)[:, None].float() * f.inverse_frequency
        self._cos, self._sin = (angle.cos() * f.rope_factor).numpy(), (angle.sin() * f.rope_factor).numpy()
        rows = []
        self._alive: list[Any] = []
        """What the addresses point into."""
        for index, layer in enumerate(f.layers):
            weights = [getattr(layer, name) for name in kernels.WEIGHTS]
            store = cache.arrays(index, f.kv_heads, f.head_dim)
            self._alive.append((weights, store))
            if any(w is not None and not w.is_contiguous() for w in weights):
                raise BadInput("engine.forward=compiled: expected contiguous weights; use fast")
            experts, _, inner = layer.down.shape
            rows.append([0 if w is None else w.data_ptr() for w in weights])
            rows[-1] += [a.ctypes.data for a in store] + [experts, f.top_k if layer.router is not None else 1, inner]
        self._rows = np.array(rows, np.int64)
        self._shape = np.array([f.heads, f.kv_heads, f.head_dim, cache.num_blocks, cache.block_size], np.int64)
        self._scalars = np.array([f.eps, f.scale, f.norm_topk], np.float32)
        heads, widest = f.heads * f.head_dim, max(row[13] for row in rows)
        expert_rows = max(f.top_k, 1) * (f.embedding.shape[1] + 3 * widest)
        self._floats = f.embedding.shape[1] + 2 * heads + 2 * f.kv_heads * f.head_dim + expert_rows
        self._scratch = torch.empty(0)

    def _work(self, sequences: int) -> np.ndarray:
        """Scratch of one step, from torch's allocator, which aligns it."""
        wanted = sequences * self._floats + 16 * 8
        if len(self._scratch) < wanted:
            self._scratch = torch.empty(wanted)
        return self._scratch.numpy()

    def hidden(
        self, active: np.ndarray, state: State, experts: list[torch.Tensor] | None = None, riding: Sequence[Job] = ()
    ) -> np.ndarray:
        """Final-norm hidden states `[N, D]` of the last token of every slot of `active [N]`; its key and value are stored.

        `experts`, when given, receives one `[N, top_k]` tensor of expert ids per MoE layer. `riding`: prefills that are done on
        the way, before the slots' own tokens, which may look at theirs.
        """
        before = 0
        token = state.token.numpy()
        position = state.position.numpy()
        table = state.table.numpy()
        if riding:
            ids, places, tables = _rows(riding, table.shape[1])
            before = len(ids)
            token, position = np.concatenate([ids, token[active]]), np.concatenate([places, position[active]])
            table, active = np.concatenate([tables, table[active]]), np.arange(before + len(active))
        chosen = self._chosen(len(active) if riding or experts is not None else 0)
        hidden = self._layers(active, token, position, table, chosen)
        if riding:
            self._note(position[:before], table[:before], chosen[:, :before])
        if experts is not None:
            experts.extend(torch.from_numpy(chosen[:, before:]).unbind())
        return hidden[before:]

    def prefill(self, jobs: Sequence[Job]) -> None:
        """Store keys and values of each job's tokens.

        The tokens of a sequence are rows of one step: a kernel takes them in order, and each finds the keys of those before.
        """
        token, position, table = _rows(jobs, max(len(blocks) for blocks, _, _ in jobs))
        for first in range(0, len(token), ROWS):
            part = slice(first, first + ROWS)
            chosen = self._chosen(len(token[part]))
            self._layers(np.arange(len(token[part])), token[part], position[part], table[part], chosen)
            self._note(position[part], table[part], chosen)

    def _chosen(self, rows: int) -> np.ndarray:
        """Room for the experts of `rows` tokens; kernels write none where it is empty."""
        return np.empty((self._forward.num_moe_layers if rows else 0, rows, self._forward.top_k), np.int64)

    def _note(self, position: np.ndarray, table: np.ndarray, chosen: np.ndarray) -> None:
        size = self._cache.block_size
        if len(chosen):
            slots = table[np.arange(len(position)), position // size] * size + position % size
            self._cache.note(torch.from_numpy(slots), torch.from_numpy(chosen).unbind())

    def _layers(
        self, active: np.ndarray, token: np.ndarray, position: np.ndarray, table: np.ndarray, chosen: np.ndarray
    ) -> np.ndarray:
        f = self._forward
        hidden = torch.empty(len(active), f.embedding.shape[1]).numpy()
        kernels.layers(
            active, token, position, table, f.embedding.numpy(), self._cos, self._sin, f.norm.numpy(),
            self._rows, self._shape, self._scalars, chosen, self._work(len(active)), hidden,
        )  # fmt: skip
        return hidden

    def draw(self, active: np.ndarray, hidden: np.ndarray, state: State) -> np.ndarray:
        """Head, draw and record of one token per active slot, for sampling without truncation.

        Returns `[3, N]` bool: stopped, out of room, log-prob not finite.
        """
        logits = torch.empty(len(active), self._forward.vocab_size).numpy()
        ended = np.empty((3, len(active)), np.uint8)
        s = state
        arrays = (
            s.temperature,
            s.key,
            s.token,
            s.position,
            s.made,
            s.limit,
            s.drawn,
            s.stop,
            s.ids,
            s.logprobs,
            s.kept,
        )
        kernels.draw(active, hidden, self._forward.head.numpy(), *(t.numpy() for t in arrays), logits, ended)
        return ended.view(bool)


def _rows(jobs: Sequence[Job], width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token, position and `width` blocks of each token of `jobs`, in order."""
    table = np.zeros((len(jobs), width), np.int64)
    for row, (blocks, _, _) in enumerate(jobs):
        table[row, : len(blocks)] = blocks
    token = np.concatenate([tokens for _, tokens, _ in jobs])
    position = np.concatenate([np.arange(start, start + len(tokens)) for _, tokens, start in jobs])
    return token, position, table[np.repeat(np.arange(len(jobs)), [len(tokens) for _, tokens, _ in jobs])]
