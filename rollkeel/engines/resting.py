"""The embedded engine on the device of a trainer: between two steps' rollouts it holds no KV, and no weights of its own if it need not."""

from __future__ import annotations

from typing import Any

import torch

from rollkeel import host
from rollkeel.engines.local import LocalEngine
from rollkeel.errors import EngineFailure


class RestingLocal(LocalEngine):
    """Implements `rollkeel.protocols.RestingEngine`. On a CPU addresses never change; elsewhere recorded steps are recorded anew."""

    def __init__(self, *args: Any, weights: bool, **options: Any) -> None:
        """`weights`: drop these too. They must be the engine's alone, and come whole with every publication."""
        super().__init__(*args, **options)
        self._drops = weights
        self._gone: list[tuple[torch.UntypedStorage, int]] = []
        """Storages without memory, and how many bytes they had."""

    @torch.inference_mode()
    def rest(self) -> None:
        """See `RestingEngine.rest`. KV that unfinished rollouts took along is theirs."""
        if self.busy:
            raise EngineFailure(f"engine {self.capabilities.name}: requests are in flight, it cannot rest")
        base = self._base
        self.retire()
        self._base = -1 if self._drops else base
        held = [*self.weights.values()] if self._drops else []
        if self._device.type == "cpu":
            for tensor in [*held, *self._cache.tensors()]:
                storage = tensor.untyped_storage()
                host.forget_pages(*host.whole_pages(storage.data_ptr(), storage.nbytes()))
            host.give_back_freed_memory()
            return
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
        return super().retire()
