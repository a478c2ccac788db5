"""A device that is not the CPU, on any machine: its tensors hold CPU data, and a journal keeps what an accelerator would refuse or wait for.

torch's hook for backends written in Python registers the device `pretend`. Values are the CPU's, so a whole run computes something
sensible on it; dtype and alignment rules of CUDA kernels, streams, speed and memory are not seen. Import it once per process.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import rollkeel

DEVICE = "pretend"
_PACKAGE = str(Path(rollkeel.__file__).parent) + "/"
_COPIES = {"copy_", "_copy_from", "_to_copy"}
_BY_MASK = {"index", "index_put", "index_put_", "_index_put_impl_"}
_JOINED = {"cat", "stack"}
"""Refuse a CPU scalar too, which arithmetic takes."""
_SHAPED = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


_WHOLE = set[Any]()
"""Operations that are not made of others."""


class Journal:
    """What happened on the device, by place in our code."""

    def __init__(self) -> None:
        self.mixed: Counter[str] = Counter()
        """Operations on tensors of both devices; a CPU scalar may join in, as on CUDA."""
        self.reads: Counter[str] = Counter()
        """Places that waited for the device: values read, copies to the CPU, shapes that depend on values."""
        self.operations: Counter[str] = Counter()

    def clear(self) -> None:
        for counted in (self.mixed, self.reads, self.operations):
            counted.clear()


JOURNAL = Journal()


def place(what: str) -> str:
    """The innermost function of the package on the stack, and what it does: `engines/local.py LocalEngine._look: _to_copy`."""
    frame: Any = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if frame is None:
        return f"outside: {what}"
    code = frame.f_code
    name = re.sub(r"\.<\w+>", "", code.co_qualname)
    return f"{code.co_filename.removeprefix(_PACKAGE)} {name}: {what}, line {frame.f_lineno}"


def _reads(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an accelerator's caller would wait for the answer."""
    if name in _COPIES:
        target = kwargs.get("device") if name == "_to_copy" else args[name == "_copy_from"].device
        return target is not None and torch.device(target).type == "cpu"
    if name in _BY_MASK:
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name == "segment_reduce":
        return not kwargs.get("unsafe", False)
    return any(tag in _SHAPED for tag in func.tags)


class PretendTensor(torch.Tensor):
    """A tensor of the device. `held` holds the values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> PretendTensor:
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        with torch._C._InferenceMode(False):  # wrappers of inference tensors cannot be detached
            made = torch.Tensor._make_wrapper_subclass(cls, held.shape, device=torch.device(DEVICE, 0), **layout)
        made.held = held
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:  # a module then swaps its parameters and keeps ties
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(held: dict[str, torch.Tensor], *_: Any) -> PretendTensor:
        return PretendTensor(held["held"])

    def __deepcopy__(self, memo: dict[int, Any]) -> PretendTensor:
        if id(self) not in memo:
            copied = PretendTensor(self.held.clone()).requires_grad_(self.requires_grad)
            memo[id(self)] = torch.nn.Parameter(copied) if isinstance(self, torch.nn.Parameter) else copied
        return memo[id(self)]

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        JOURNAL.reads[place("tolist")] += 1
        return self.held.tolist()

    def numpy(self, **_: Any) -> Any:
        JOURNAL.mixed[place("numpy")] += 1
        return self.held.detach().numpy()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_inference_mode_enabled() and func not in _WHOLE:  # elsewhere autograd has taken it apart
            parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
            _WHOLE.add(func)
        mixed = list[bool]()
        schema = func._schema
        name = schema.name.removeprefix("aten::")
        least = 0 if name in _JOINED else 1
        given = [_unwrapped(a, mixed, least) for a in args]
        options = {name: _unwrapped(a, mixed, least) for name, a in (kwargs or {}).items()}
        JOURNAL.operations[name] += 1
        if mixed and name not in _COPIES:
            JOURNAL.mixed[place(name)] += 1
        if _reads(func, name, args, options):
            JOURNAL.reads[place(name)] += 1
        here = True
        if options.get("device") is not None:
            here, options["device"] = torch.device(options["device"]).type == DEVICE, "cpu"
        out = _histc(*given, **options) if name == "histc" else func(*given, **options)
        if schema.is_mutable:
            filled = [(kwargs or {})[a.name] for a in schema.arguments if a.is_out]
            return tuple(filled) if len(filled) > 1 else (*filled, args[0])[0] if schema.returns else None
        return _wrapped(out) if here else out


def _unwrapped(value: Any, mixed: list[bool], least: int) -> Any:
    """Its values; notes tensors of the CPU with `least` dimensions or more."""
    if isinstance(value, PretendTensor):
        return value.held
    if isinstance(value, torch.Tensor) and value.dim() >= least:
        mixed.append(True)
    return [_unwrapped(v, mixed, least) for v in value] if isinstance(value, (list, tuple)) else value


def _wrapped(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return PretendTensor(value)
    return type(value)(map(_wrapped, value)) if isinstance(value, (list, tuple)) else value


def _histc(values: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """A CPU counts floats alone."""
    return torch.histc(values.float(), *args, **options).to(values.dtype)


def _made(func: Any) -> Any:
    def make(*args: Any, **options: Any) -> PretendTensor:
        return PretendTensor(func(*args, **{**options, "device": "cpu", "pin_memory": None}))

    return make


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    source, held = (t.held if isinstance(t, PretendTensor) else t for t in (source, target))
    held.copy_(source)
    return target


_LIBRARY = torch.library.Library("aten", "IMPL")


def _register() -> None:
    _setup_privateuseone_for_python_backend(DEVICE)
    module: Any = getattr(torch, DEVICE)
    module.get_rng_state = lambda *_: torch.get_rng_state()
    module.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [
        torch.bfloat16,
        torch.float16,
    ]  # what checkpoints ask of a machine's accelerator
    for name in ("empty.memory_format", "empty_strided", "arange.start_step", "arange.start", "arange"):
        operation, _, overload = name.partition(".")
        _LIBRARY.impl(name, _made(getattr(getattr(torch.ops.aten, operation), overload or "default")), "PrivateUse1")
    _LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")


if not torch.cuda.is_available():  # beside CUDA, autograd would take this device for the machine's accelerator
    _register()
