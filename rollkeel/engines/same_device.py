"""A server on the trainer's own device: how much of it the server may take, and weights handed over without a copy on the host.

Weights are packed into buffers on the device, and the server's worker opens those by handles: CUDA's, and for tests the shared
memory of the host. A message is JSON: nothing is pickled. The trainer's own memory is never shared, the buffers are gone when
the server has answered.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rollkeel.config import EngineConfig
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.types import WeightSlice, WeightUpdate

GB = 2**30
SHARE = 0.95
"""Of the free memory that training does not need: the rest is for contexts and fragments of both."""
OVERHEAD = GB
"""What a server takes beside weights and KV: activations of a batch, captured graphs, workspaces."""
PART_BYTES = GB
"""Most bytes of a buffer, unless one tensor is larger: none is split."""
ALIGNED = 16


def memory_share(free: int, total: int, needed: int, weights: int, kv: int, copies: int = 0) -> float:
    """Share of a device of `total` bytes for a server; `needed`: of the `free` ones, what training takes while it serves.

    `weights`: bytes of those it serves; `kv`: least bytes of its KV memory; `copies`: bytes that stand where KV memory will while weights
    arrive. Raises `BadInput` when it cannot fit.
    """
    room, least = int(SHARE * (free - needed)), weights + max(kv, copies) + OVERHEAD
    if room < least:
        raise BadInput(
            f"engine.kind=vllm: {free / GB:.1f} of {total / GB:.1f} GiB of the device are free and training takes"
            f" {needed / GB:.1f} of them beside the server, which needs {least / GB:.1f}; lower engine.kv_memory_gb, set"
            " engine.dtype=bf16, or take a smaller model"
        )
    return math.floor(room / total * 1e4) / 1e4


def share_of(config: EngineConfig, device: str, planned: int, update: WeightUpdate, sleeps: bool) -> float | None:
    """`memory_share` of this device now; None where a server brings its own: on a CPU, and by `engine.server.options`.

    `planned`: all that training holds on it while the server serves, with what it holds already. `sleeps`: while training goes on; it is
    handed copies of the weights on the device. Each of several devices has a part of the weights.
    """
    if not device.startswith("cuda") or "gpu_memory_utilization" in options_of(config):
        return None
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    weights = sum(piece.tensor.numel() for piece in update.slices) * (4 if config.dtype == "fp32" else 2)
    weights //= devices_of(config, ("tensor", "pipeline"))
    copies = sum(piece.tensor.nbytes for piece in update.slices) if sleeps else 0
    needed = max(0, planned - torch.cuda.memory_allocated(device))
    return memory_share(free, total, needed, weights, int((config.kv_memory_gb or 0) * GB), copies)


def can_sleep(config: EngineConfig, device: str) -> bool:
    """Whether the server can give this device away. Raises `BadInput` where torch allocates memory that CUDA IPC cannot share."""
    if not device.startswith("cuda") or config.server.url or options_of(config).get("enable_sleep_mode") is False:
        return False
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower():
            raise BadInput(
                f"{name}: expandable_segments:True, from which no weights can be handed to a server on the same device; unset it"
            )
    return True


def options_of(config: EngineConfig) -> dict[str, Any]:
    """`engine.server.options`, spelt with underscores."""
    return {name.replace("-", "_"): value for name, value in config.server.options.items()}


def devices_of(config: EngineConfig, kinds: Sequence[str] = ("tensor", "pipeline", "data")) -> int:
    """Devices of one engine, along these kinds of parallelism."""
    asked = options_of(config) if config.kind == "vllm" else {}
    return math.prod(int(asked.get(f"{kind}_parallel_size", 1)) for kind in kinds)


def place(update: WeightUpdate) -> str:
    """The one CUDA device that holds every tensor of `update`, by its UUID; empty for several, and for the host."""
    devices = {piece.tensor.device for piece in update.slices}
    device = devices.pop()
    return "" if devices or device.type != "cuda" else str(torch.cuda.get_device_properties(device).uuid)


@contextmanager
def lent(update: WeightUpdate, number: int) -> Iterator[str]:
    """A message with which the server's worker can open copies of the weights, until the end of the block.

    `number` counts the updates: the worker refuses one that comes after a later one. Raises `EngineFailure` for an update
    that is not full or lacks the device's memory.
    """
    if update.kind != "full" or any(piece.offset for piece in update.slices):
        raise EngineFailure(f"weight update {update.version}: a server takes full updates of whole tensors")
    device = update.slices[0].tensor.device
    try:
        buffers, parts = _packed(update.slices, device)
    except torch.OutOfMemoryError:
        raise EngineFailure(
            f"weight update {update.version}: no memory on {device} for the copy that the server reads; lower engine.kv_memory_gb"
        ) from None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    try:
        yield json.dumps({"number": number, "tensors": len(update.slices), "parts": parts})
    finally:
        buffers.clear()
        if device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()


def _packed(slices: Sequence[WeightSlice], device: torch.device) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Buffers with every tensor in them, and for each a handle and what lies where."""
    buffers: list[torch.Tensor] = []
    parts: list[dict[str, Any]] = []
    for group in _groups(slices):
        buffer = torch.empty(sum(_room(t) for _, t in group), dtype=torch.uint8, device=device)
        rows: list[tuple[str, str, list[int], int]] = []
        parts.append({"handle": _handle(buffer), "device": device.type, "bytes": len(buffer), "rows": rows})
        start = 0
        for name, tensor in group:
            size = tensor.numel() * tensor.element_size()
            buffer[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            rows.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start))
            start += _room(tensor)
        buffers.append(buffer)
    return buffers, parts


def _groups(slices: Sequence[WeightSlice]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    group: list[tuple[str, torch.Tensor]] = []
    size = 0
    for piece in slices:
        room = _room(piece.tensor)
        if group and size + room > PART_BYTES:
            yield group
            group, size = [], 0
        group.append((piece.name, piece.tensor.detach()))
        size += room
    yield group


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED


def _handle(buffer: torch.Tensor) -> list[Any]:
    """What torch in another process needs to open `buffer`; its bytes as characters."""
    if buffer.device.type == "cuda":
        from torch.multiprocessing.reductions import reduce_tensor

        # Behind class, size, strides, offset, storage class and dtype, which the worker knows.
        values = reduce_tensor(buffer)[1][6:]
    else:
        values = buffer.untyped_storage()._share_filename_cpu_()
    return [value.decode("latin-1") if isinstance(value, bytes) else value for value in values]
