"""The embedded engine on the device of a trainer: between two steps' rollouts it holds no KV, and no weights of its own if it need not.

On a CPU the kernel takes the pages, addresses stay. Elsewhere the allocator takes storages, and recorded steps are recorded anew; where
`torch_memory_saver` is installed, it takes memory under addresses that stay, and records stay with them.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache, partial
from typing import Any

import torch

from rollkeel import host
from rollkeel.config import EngineConfig, LoraConfig
from rollkeel.engines.forwards import Pieces
from rollkeel.engines.local import LocalEngine
from rollkeel.errors import EngineFailure

WEIGHTS, KV = "rollkeel weights", "rollkeel kv"
"""Tags of memory that can be taken."""


@cache
def saver() -> Any:
    """`torch_memory_saver`; None where it is not installed."""
    if importlib.util.find_spec("torch_memory_saver") is None:
        return None
    found = importlib.import_module("torch_memory_saver").torch_memory_saver
    found.hook_mode = "torch"  # the other mode would need LD_PRELOAD before Python starts
    return found


class RestingLocal(LocalEngine):
    """Implements `rollkeel.protocols.RestingEngine`."""

    def __init__(self, *args: Any, weights: bool, **options: Any) -> None:
        """`weights`: drop these too. They must be the engine's alone, and come whole with every publication."""
        self._drops, self._rests = weights, False
        self._saver = None if torch.device(options.get("device", "cpu")).type == "cpu" else saver()
        self._gone: list[tuple[torch.UntypedStorage, int]] = []
        """Storages without memory, and how many bytes they had."""
        super().__init__(*args, **options)
        if self._saver is not None:
            self._cache.region = partial(self._saver.region, tag=KV)

    @torch.inference_mode()
    def rest(self) -> None:
        """See `RestingEngine.rest`. KV that unfinished rollouts took along is theirs."""
        if self.busy:
            raise EngineFailure(f"engine {self.capabilities.name}: requests are in flight, it cannot rest")
        base = self._base
        self.retire()
        self._base, self._rests = -1 if self._drops else base, True
        held = [*self.weights.values()] if self._drops else []
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        if self._saver is not None:
            for tag in (KV, WEIGHTS) if self._drops else (KV,):
                self._saver.pause(tag)
        elif self._device.type == "cpu":
            for tensor in [*held, *self._cache.tensors()]:
                storage = tensor.untyped_storage()
                host.forget_pages(*host.whole_pages(storage.data_ptr(), storage.nbytes()))
            host.give_back_freed_memory()
        else:
            self._steps.forget()
            self._cache.clear()
            storages = {s.data_ptr(): s for s in (tensor.untyped_storage() for tensor in held)}
            self._gone = [(storage, storage.nbytes()) for storage in storages.values()]
            for storage, _ in self._gone:
                storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def retire(self) -> int:
        for storage, size in self._gone:
            storage.resize_(size)
        self._gone = []
        if self._rests and self._saver is not None:
            for tag in (KV, WEIGHTS) if self._drops else (KV,):
                self._saver.resume(tag)
            for tensor in self._cache.tensors():
                tensor.zero_()  # as it was made
        self._rests = False
        return super().retire()

    def _open(self, text: Any, config: EngineConfig, lora: LoraConfig | None) -> Pieces:
        if self._saver is None or not self._drops:
            return super()._open(text, config, lora)
        # With a copy on the host: what stands beside the weights does not come with a publication.
        with self._saver.region(tag=WEIGHTS, enable_cpu_backup=True):
            return super()._open(text, config, lora)
