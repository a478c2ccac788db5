"""A CUDA graph on any machine: what a step did is recorded operation by operation and played again on the very same tensors.

As there, a replay runs nothing of Python: numbers that Python held are constants, a tensor that was replaced is memory that was
freed, and what the record itself made holds rubbish until an operation of the replay writes it. As there, a record refuses to
wait for the device. Not seen: streams, and which kernels a capture allows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from pretend import JOURNAL, PretendTensor, _reads
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WHOLE = set[Any]()


class RecordedGraphs:
    """Stands for `engines.decode.CudaGraphs`."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def capture(self, step: Callable[[], object]) -> Callable[[], object]:
        step()
        record, waited = Record(), JOURNAL.reads.copy()
        with record:
            step()
        record.made.clear()  # views of it keep a tensor alive
        assert JOURNAL.reads == waited, f"a record waited for the device: {JOURNAL.reads - waited}"
        self.records.append(record)
        return record.play


class Record(TorchDispatchMode):
    """The operations while it is active, on the CPU's tensors behind those of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.played = 0
        self._done: list[tuple[Any, Any, Any, list[torch.Tensor | None]]] = []
        self.made: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func not in _WHOLE:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
            _WHOLE.add(func)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        name = func._schema.name.removeprefix("aten::")
        if _reads(func, name, args, kwargs):
            raise RuntimeError(f"{name}: a record cannot wait for the device")
        if any(not isinstance(t, PretendTensor) and t.dim() for t in given):
            raise RuntimeError(f"{name}: a record cannot take what lies on the host")
        old = {_storage(t) for t in given}
        out = func(*args, **kwargs)
        made = [t for t in tree_leaves(out) if isinstance(t, PretendTensor)]
        fresh = [t.held if isinstance(t, PretendTensor) and _storage(t) not in old else None for t in tree_leaves(out)]
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        self._done.append((func, _each(args, self._hold), _each(kwargs, self._hold), fresh))
        self.made |= {id(t): t for t in made}
        return out

    def _hold(self, tensor: Any) -> Any:
        """Memory of others is not kept alive by a record."""
        if not isinstance(tensor, PretendTensor):
            return tensor
        return _Held(tensor.held) if id(tensor) in self.made else _Held(weakref.ref(tensor))

    def play(self) -> None:
        """The operations again, on the same memory, and nothing else."""
        self.played += 1
        for *_, fresh in self._done:
            for made in fresh:
                if made is not None:
                    made.fill_(_rubbish(made.dtype))
        for func, args, kwargs, fresh in self._done:
            out = func(*_each(args, _tensor), **_each(kwargs, _tensor))
            if any(made is not None for made in fresh) and "empty" not in func._schema.name:
                for made, new in zip(fresh, tree_leaves(out), strict=True):
                    if made is not None:
                        made.copy_(new)


class _Held(NamedTuple):
    what: Any


def _tensor(value: Any) -> Any:
    if not isinstance(value, _Held):
        return value
    if not isinstance(value.what, weakref.ref):
        return value.what
    tensor = value.what()
    if tensor is None:
        raise RuntimeError("a replay reads memory that was freed")
    return tensor.held


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {name: _each(v, change) for name, v in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, _Held):
        return type(value)(_each(v, change) for v in value)
    return change(value)


def _rubbish(dtype: torch.dtype) -> float:
    return torch.nan if dtype.is_floating_point else dtype == torch.bool or torch.iinfo(dtype).max // 2


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
