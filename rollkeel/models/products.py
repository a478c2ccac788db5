"""Matrix products of the training passes on a CPU: by oneDNN where it is faster than the BLAS behind `torch.mm`.

MKL keeps its AVX-512 code to Intel's processors; oneDNN asks what the processor can do, and is twice as fast on others that have it.
It builds a kernel for every new shape, which takes longer than a small product, and the number of tokens is new in every pass: a
multiple of `ROWS` of them goes to oneDNN, what is left over to BLAS.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

ROWS = 64
LEAST = 2**21
"""Multiplications below which BLAS is as fast: a call of oneDNN costs ten microseconds."""


def _found() -> bool:
    torch_has = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not torch_has or platform.system() != "Linux" or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    maker = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return "GenuineIntel" not in maker and hasattr(torch.ops.mkldnn, "_linear_pointwise")


FASTER = _found()


def mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`a [m, k] @ b [k, n]`, into `out` if there is one; not differentiable. Tokens are the rows of `a`, or its columns if it is a
    transposed view."""
    across = a.stride(0) == 1 and a.stride(1) != 1
    tokens = a.shape[across]
    whole = tokens - tokens % ROWS
    work = whole * b.shape[1] * a.shape[not across]
    if not FASTER or work < LEAST or not (a.dtype == b.dtype == torch.float32) or a.device.type != "cpu":
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    if across:
        # oneDNN copies a transposed first factor: that is to be the smaller one.
        turned = len(a) > b.shape[1]
        main = _by_onednn(b[:whole].t(), a[:, :whole].t()).t() if turned else _by_onednn(a[:, :whole], b[:whole])
        out = main.contiguous() if out is None else out.copy_(main)
        return out if whole == tokens else out.addmm_(a[:, whole:], b[whole:])
    main = _by_onednn(a[:whole], b)
    if out is None and whole == tokens:
        return main
    out = a.new_empty(len(a), b.shape[1]) if out is None else out
    out[:whole] = main
    if whole < tokens:
        torch.mm(a[whole:], b, out=out[whole:])
    return out


def _by_onednn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")


class _Linear(torch.autograd.Function):
    """`x [N, in]`, `weight [out, in]` → `[N, out]`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return mm(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_out = grads[0].contiguous()
        want_x, want_weight = ctx.needs_input_grad
        return mm(d_out, weight) if want_x else None, mm(d_out.t(), x) if want_weight else None


def linear_of(module: torch.nn.Linear) -> Any:
    """A forward of this linear layer by `mm`."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        flat = _Linear.apply(x.reshape(-1, x.shape[-1]), module.weight)
        return flat.view(*x.shape[:-1], -1)  # type: ignore[union-attr]

    return forward


def quick(module: torch.nn.Module) -> bool:
    """True for a layer that `linear_of` may stand in for, and is worth it."""
    if not FASTER or type(module) is not torch.nn.Linear or "forward" in vars(module) or module.bias is not None:
        return False
    return module.weight.numel() * 1024 >= LEAST
