"""Runs inside a vLLM server, in its interpreter: takes weights from a folder or from the trainer's own device, proves what it
read, cures vLLM's reload.

This file is copied beside the server and imported there under the name `rollkeel_vllm_worker`; it needs torch, safetensors
and vLLM, and of rollkeel nothing but for weights by plan (`vllm_memory`, which servers that we start find). vLLM makes its
worker class inherit from `Publication` (`--worker-extension-cls`).

vLLM 0.32 on CPUs packs weights for its kernels after loading, and packs them again on a reload only where it notices: expert
weights keep their old packed copy while `moe_kernel` is set, and so does a head that is tied to the embedding. Log-probs are
then those of a mixture of two versions, without any error. `load_weights` alone does not help: the originals were freed.
"""

from __future__ import annotations

import contextlib
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

njit: Any = None
with contextlib.suppress(ImportError):  # vLLM brings it
    from numba import njit

MASK = 2**64 - 1
PART, DEVICE_PART = 2**16, 2**24
"""Elements at one time: what they need beside themselves stays in the processor's caches; on a GPU few kernels are started."""
_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Publication:
    """What vLLM's worker can do besides its own, called over `collective_rpc`."""

    model_runner: Any

    rollkeel_number = 0
    """Of the last update that came by handles."""
    rollkeel_plain = False
    """Whether linear layers on a CPU compute with plain weights."""
    rollkeel_arrivals: Any = None
    """What takes weights by plan, once it was asked for its rooms."""

    def rollkeel_place(self, _: str = "") -> dict[str, str]:
        """The device that this worker computes on, by its UUID; empty for one that shares no memory with a trainer."""
        cuda = not _on_cpu() and torch.cuda.is_available()
        return {"place": str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if cuda else ""}

    def rollkeel_load(self, folder: str) -> dict[str, str]:
        """Serve the weights of the safetensors files in `folder`. Returns `checksum` (decimal) over every tensor read and
        handed to the model, or `error`: an exception here would end the whole server."""
        return self._rollkeel_serve(lambda: _read(Path(folder)))

    def rollkeel_take(self, message: str) -> dict[str, str]:
        """The same with the weights that `message`, of `rollkeel.engines.same_device.lent`, tells where to find."""

        def opened() -> Iterator[tuple[str, torch.Tensor]]:
            asked = json.loads(message)
            if asked["number"] <= self.rollkeel_number:
                raise ValueError(f"handles of update {asked['number']} came after those of {self.rollkeel_number}")
            self.rollkeel_number = asked["number"]
            given = sum(len(part["rows"]) for part in asked["parts"])
            if given != asked["tensors"]:
                raise ValueError(f"handles for {given} of {asked['tensors']} tensors")
            return (pair for part in asked["parts"] for pair in _opened(part))

        return self._rollkeel_serve(opened)

    def rollkeel_stay_plain(self, _: str = "") -> dict[str, str]:
        """From the next weights on, have them in memory where they can be written and read, see `vllm_memory.plain`."""

        def prepare() -> dict[str, str]:
            self.rollkeel_plain = _on_cpu()
            self._rollkeel_plain()
            return {}

        return _answered(prepare)

    def rollkeel_rooms(self, mode: str) -> dict[str, str]:
        """`rooms` of this worker's memory for weights of `mode`, and the `checksum` of what is in it."""

        def look() -> dict[str, str]:
            from rollkeel.engines import vllm_memory

            model = self.model_runner.get_model()
            self.rollkeel_arrivals = found = vllm_memory.Arrivals(model, mode, getattr(self, "rank", 0))
            return {"rooms": vllm_memory.rooms_in_words(found.rooms), "checksum": str(found.checksum())}

        return _answered(look)

    def rollkeel_boxes(self, message: str) -> dict[str, str]:
        """A step of a publication by plan: a method of `vllm_memory.Arrivals`."""

        def act() -> dict[str, str]:
            what, asked = json.loads(message)
            done = getattr(self.rollkeel_arrivals, what)(asked)
            return {} if done is None else {"checksum": str(done)}

        return _answered(act)

    def _rollkeel_plain(self) -> None:
        if self.rollkeel_plain:
            from rollkeel.engines import vllm_memory

            vllm_memory.plain(self.model_runner.get_model())

    def _rollkeel_serve(self, opened: Any) -> dict[str, str]:
        def serve() -> dict[str, str]:
            seen = _Seen()
            weights = seen.counted(opened())
            model = self.model_runner.get_model()
            _forget_packed_experts(model)
            worker: Any = self  # whose own method also says which config is the current one
            worker.reload_weights(weights_iterator=weights, is_checkpoint_format=True)
            _retie(model, self.model_runner.model_config.hf_config)
            self._rollkeel_plain()  # embeddings and heads were packed again
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # the trainer may write there again
            return {"checksum": str(seen.total & MASK), "tensors": str(seen.count)}

        return _answered(serve)


def _answered(act: Any) -> dict[str, str]:
    try:
        return act()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


class _Seen:
    """Counts what passes through."""

    def __init__(self) -> None:
        self.total = self.count = 0

    def counted(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self.total += tensor_checksum(name, tensor)
            self.count += 1
            yield name, tensor


def _read(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no safetensors files in {folder}")
    for file in files:
        with safe_open(str(file), framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a mapping
                yield name, weights.get_tensor(name)


def _opened(part: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one buffer of another process, as views of it: its memory is given back when the last is gone."""
    values = [value.encode("latin-1") if isinstance(value, str) else value for value in part["handle"]]
    if part["device"] == "cuda":
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        values[0] = torch.cuda.current_device()
        buffer = rebuild_cuda_tensor(
            torch.Tensor, (part["bytes"],), (1,), 0, torch.storage.TypedStorage, torch.uint8, *values
        )
    else:
        storage = torch.UntypedStorage._new_shared_filename_cpu(*values)
        buffer = torch.empty(0, dtype=torch.uint8).set_(storage)
    for name, dtype, shape, start in part["rows"]:
        kind = getattr(torch, dtype)
        end = start + kind.itemsize * math.prod(shape)
        if end > len(buffer):
            raise ValueError(f"{name} lies outside of its buffer")
        yield name, buffer[start:end].view(kind).view(shape)


def tensor_checksum(name: str, tensor: torch.Tensor) -> int:
    """The same sum as `rollkeel.models.checksum.tensor_checksum`, computed anew on this side, on the tensor's device."""
    size, total = tensor.element_size(), 0
    base = zlib.crc32(f"{name}:{size}".encode())
    flat = tensor.contiguous().view(_WIDTH[size]).flatten()
    part = PART if flat.is_cpu else DEVICE_PART
    for start in range(0, len(flat), part):
        first = base + start * 0x9E3779B1 + (start >> 32) * 0x85EBCA77 & 0xFFFFFFFF
        total += _sum(flat[start : start + part], first)
    return int(total) & MASK


def _sum(bits: torch.Tensor, first: int) -> Any:
    """Sum of a part, a number or a tensor of it: reading that would wait for the device."""
    if njit is not None and bits.is_cpu:
        return int(_pass(bits.numpy().view(f"u{bits.element_size()}"), np.uint32(first)))
    mask = 2 ** (8 * bits.element_size()) - 1 if bits.element_size() < 8 else -1
    x = torch.arange(len(bits), device=bits.device).mul_(0x9E3779B1).add_(first).bitwise_and_(0xFFFFFFFF)
    key = x.square_().bitwise_right_shift_(16).bitwise_and_(0xFFFFFFFF).bitwise_or_(1)
    return ((bits.to(torch.int64) & mask) ^ 0x5BD1E995).mul_(key).sum()


def _in_one_pass(bits, first):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for i in range(len(bits)):
        x = np.uint64(np.uint32(np.uint32(i) * np.uint32(0x9E3779B1) + first))
        key = ((x * x) >> np.uint64(16)) & np.uint64(0xFFFFFFFF) | np.uint64(1)
        total += (np.uint64(bits[i]) ^ np.uint64(0x5BD1E995)) * key
    return total


_pass: Any = None if njit is None else njit(_in_one_pass, nogil=True)


def _forget_packed_experts(model: Any) -> None:
    """On a CPU a kernel holds a packed copy; without a kernel the reload builds both anew."""
    if not _on_cpu():
        return
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _retie(model: Any, config: Any) -> None:
    """Give a tied head the new embedding, and on a CPU its packed copy."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not getattr(text, "tie_word_embeddings", False) or not _on_cpu():
        return
    for module in model.modules():
        head = getattr(module, "lm_head", None)
        body = getattr(module, "model", None)
        embedding = getattr(body, "embed_tokens", None)
        if head is None or embedding is None or not hasattr(head, "quant_method"):
            continue
        head.weight = embedding.weight
        head.quant_method.process_weights_after_loading(head)


def _on_cpu() -> bool:
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    return bool(current_platform.is_cpu())
