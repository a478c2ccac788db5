"""How kernels are compiled and cached; without numba everything here is inert and `FOUND` False.

Only entry points are cached on disk, each with everything it calls, and each has one signature whatever the model: weights
come as addresses. So a process either compiles all of an entry point or loads all of it, and a resumed run repeats the bits
of the run before it. Helpers are always inlined: where two compilations of one are in a process, which of them a call
reaches depends on what was loaded, and they round differently. The cache notices a change of a kernel's own file and of `HELPERS`.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

__all__ = [
    "FOUND",
    "WIDE",
    "array",
    "as_float",
    "carray",
    "entry",
    "exp",
    "fma",
    "jit",
    "pointer",
    "strict",
    "strict_entry",
]
FOUND = False
WIDE = False
"""Whether vectors hold 16 floats, not 8."""
if TYPE_CHECKING:
    njit: Any = None
    carray = intrinsic = types = ir = cgutils = njit
else:
    try:
        import llvmlite.binding
        from llvmlite import ir
        from numba import carray, njit, types
        from numba.core import cgutils
        from numba.extending import intrinsic

        FOUND = platform.machine() == "x86_64"
        WIDE = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
    except ImportError:
        FOUND = False
    if not FOUND:
        carray = types = ir = cgutils = None

        def njit(*_: Any, **__: Any) -> Any:
            return lambda function: function

        def intrinsic(function: Any) -> Any:
            return function


# No `nnan`/`ninf`: a diverged model must show as NaN, not as whatever is left when NaN is assumed away.
OPTIONS = {
    "nogil": True,
    "boundscheck": False,
    "error_model": "numpy",
    "fastmath": {"reassoc", "contract", "arcp", "nsz"},
}
jit = njit(forceinline=True, **OPTIONS)
"""Decorator of a helper."""


HELPERS = ("jit.py", "tiles.py", "vectors.py")
"""Files of this folder that kernels of other files take code from."""
_STATE = hashlib.sha256(b"".join((Path(__file__).parent / name).read_bytes() for name in HELPERS)).hexdigest()


def _entry(arguments: tuple[str, ...], options: dict[str, Any]) -> Any:
    def made(function: Any) -> Any:
        kernel = njit(**options)(function)
        if FOUND:
            kernel.enable_caching()
            index = kernel._cache._cache_file
            index._source_stamp = (index._source_stamp, _STATE)
            kernel.compile(f"void({', '.join(arguments)})")
            kernel.disable_compile()
        return kernel

    return made


def entry(*arguments: str) -> Any:
    """Decorator of an entry point with these argument types, compiled or loaded when its module is imported."""
    return _entry(arguments, OPTIONS)


STRICT = {**OPTIONS, "fastmath": False}
strict = njit(forceinline=True, **STRICT)
"""`jit` whose sums and products are done as they are written, whatever surrounds them."""


def strict_entry(*arguments: str) -> Any:
    """`entry` of `strict` arithmetic."""
    return _entry(arguments, STRICT)


def array(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a tensor on the host, for a kernel."""
    # Not `.numpy()`: after it FSDP could no longer give the memory of a weight back.
    return np.from_dlpack(tensor.detach())


@intrinsic
def fma(context, a, b, c):
    """a · b + c of float32, rounded once."""
    return types.float32(types.float32, types.float32, types.float32), lambda _, builder, __, args: builder.fma(*args)


@intrinsic
def pointer(context, address):
    """float32 pointer of an address."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(address), codegen


@intrinsic
def as_float(context, bits):
    """The float32 with these int32 bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(signature.return_type))

    return types.float32(bits), codegen


@jit
def exp(x):
    """eˣ of a float32 ≤ 87 by a polynomial that vectorises (relative error 2e-7); below −87 it is e⁻⁸⁷."""
    x = max(x, np.float32(-87.0))
    e = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - e * np.float32(0.693359375) - e * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    return (p * r * r + r + np.float32(1.0)) * as_float(np.int32((np.int32(e) + np.int32(127)) << np.int32(23)))
