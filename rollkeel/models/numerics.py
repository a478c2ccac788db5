"""Numeric modes of a sampling engine: what is rounded, to what, and with which scales.

`fp32`, `bf16` and `fp16` are real arithmetic in that dtype, but for logits, which are float32 in all of them. The quantised modes round values to the grid the hardware format has
and compute with the rounded values in the engine's base dtype: the error is real, the speed is not. Router, norms,
embeddings and output head stay in high precision, as deployments keep them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from rollkeel.models import jit, kernels_rounding
from rollkeel.models.checksum import Begun, begun, read, tensor_checksum
from rollkeel.models.routers import is_router

MODES = ("fp32", "bf16", "fp16", "fp8", "fp8_weights", "int8", "int4")
INT4_GROUP = 32


def compute_dtype(mode: str) -> torch.dtype:
    """Dtype of activations and of the arithmetic in `mode`."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mode, torch.float32)


def mode_of(dtype: torch.dtype) -> str:
    """The mode that computes in `dtype`: `compute_dtype` the other way round."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")


OVERRIDE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
"""What processes that begin later do: 1 or 0."""


def multiply_in_tf32(on: bool) -> None:
    """Whether this process multiplies float32 matrices in TF32 on a GPU, and those that it starts."""
    torch.set_float32_matmul_precision("high" if on else "highest")
    if on:
        os.environ[OVERRIDE] = "1"
    else:
        os.environ.pop(OVERRIDE, None)


def precision(model: torch.nn.Module) -> dict[str, Any]:
    """What decides how the trainer of `model` multiplies, for the record; `highest` is float32 without TF32."""
    weight, backend = next(model.parameters()), torch.backends.cuda.matmul
    return {
        "weights": str(weight.dtype).removeprefix("torch."),
        "device": str(weight.device),
        "float32_products": torch.get_float32_matmul_precision(),
        "autocast": torch.is_autocast_enabled(weight.device.type),
        "bf16_reduced_sums": bool(backend.allow_bf16_reduced_precision_reduction),
        "fp16_reduced_sums": bool(backend.allow_fp16_reduced_precision_reduction),
    }


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` with float32 sums and a float32 result. On CUDA `a` is rounded to the dtype of `b`, elsewhere nothing is."""
    if b.is_cuda and b.dtype != torch.float32:
        return torch.mm(a.to(b.dtype), b, out_dtype=torch.float32)
    return a.float() @ b.float()


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """`total` += `product(a, b)`; on CUDA without another tensor of its size."""
    if b.is_cuda and b.dtype != torch.float32 and _adds(b.dtype):
        torch.ops.aten.addmm.dtype_out(total, a.to(b.dtype), b, torch.float32, out=total)
    else:
        total += product(a, b)


@functools.cache
def _adds(dtype: torch.dtype) -> bool:
    """Whether this torch adds products of `dtype` to a float32 sum where it lies, found out once."""
    ones, total = torch.ones(16, 16, dtype=dtype, device="cuda"), torch.ones(16, 16, device="cuda")
    try:
        torch.ops.aten.addmm.dtype_out(total, ones.t(), ones, torch.float32, out=total)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return bool((total == 17).all())


def logits_of(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`[n, V]` float32 of `hidden [n, D]` and `weight [V, D]` of one dtype. In bfloat16 a logit of 20 would be off by up to
    0.06, more than engine and trainer differ by otherwise."""
    if weight.dtype == torch.float32:
        return F.linear(hidden, weight, bias)
    logits = product(hidden, weight.t())
    return logits if bias is None else logits.add_(bias)


def stays_precise(name: str) -> bool:
    """True for the projections inside the layers that deployments never round: routers and gates of shared experts.

    Both are a few rows that multiply everything behind them.
    """
    return is_router(name) or "shared_expert_gate" in name


def is_quantised(name: str, tensor: torch.Tensor) -> bool:
    """True for the projection weights that the quantised modes round: attention, MLP and experts inside the layers."""
    return (
        "layers." in name
        and tensor.dim() >= 2
        and "norm" not in name
        and "bias" not in name
        and not stays_precise(name)
    )


def weight_rounder(mode: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Rounding of a `[..., out, in]` weight in `mode`, or None when weights are stored exactly."""
    return _ROUNDERS.get(mode)


def activation_rounder(mode: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Rounding of a `[..., features]` projection input in `mode`, or None."""
    return round_fp8 if mode == "fp8" else None


def rounded(name: str, tensor: torch.Tensor, mode: str) -> torch.Tensor:
    """The weight `name` as `mode` rounds it, if it does."""
    rounder = weight_rounder(mode)
    return tensor if rounder is None or not is_quantised(name, tensor) else rounder(tensor)


def scale_group(mode: str, width: int) -> int:
    """Elements of a row of `width` that share one scale in a mode that rounds."""
    return INT4_GROUP if mode == "int4" and width % INT4_GROUP == 0 else width


def update_checksum(name: str, tensor: torch.Tensor, mode: str | None, offset: int = 0) -> int:
    """Checksum of the weight `name` as a `WeightUpdate` of `mode` carries it: of what an engine of that mode must hold.

    `tensor`: all of it, or the rows that begin at its element `offset`."""
    return read([_update_sum(name, tensor, mode, offset)])[0]


def update_checksums(weights: Iterable[tuple[str, torch.Tensor]], mode: str | None) -> list[int]:
    """`update_checksum` of many, with one wait for their device."""
    return read([_update_sum(name, tensor, mode) for name, tensor in weights])


def _update_sum(name: str, tensor: torch.Tensor, mode: str | None, offset: int = 0) -> Begun:
    if mode is None:
        return begun(name, tensor, offset)
    held = rounded(name, tensor, mode)
    return begun(name, held, offset, _compared(held, mode))


def held_checksum(
    name: str,
    held: torch.Tensor,
    mode: str,
    offset: int = 0,
    pitches: Sequence[int] = (),
    source: torch.Tensor | None = None,
) -> int:
    """Checksum of what an engine of `mode` holds under `name`: `update_checksum` of what it was to hold, if it is that. Of a box:
    with its `pitches`, and after `source` was copied there, see `tensor_checksum`.

    A weight that the engine keeps more precisely than its mode (a router's bias) is compared at the mode's precision.
    """
    return tensor_checksum(name, held, offset, _compared(held, mode), pitches, source)


def _compared(held: torch.Tensor, mode: str) -> torch.dtype | None:
    return compute_dtype(mode) if held.is_floating_point() else None


def round_fp8(x: torch.Tensor) -> torch.Tensor:
    """Nearest e4m3 values with one scale per row (output channel of a weight, token of an activation)."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    if _compiled(x):
        return _grid(x, x.shape[-1], limit, True)
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / limit
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def round_int8(x: torch.Tensor) -> torch.Tensor:
    """Symmetric 8-bit integers with one scale per row."""
    return round_integers(x, x.shape[-1], 8)


def round_int4(x: torch.Tensor) -> torch.Tensor:
    """Symmetric 4-bit integers with one scale per group of `INT4_GROUP` inputs."""
    return round_integers(x, INT4_GROUP, 4)


def round_integers(x: torch.Tensor, size: int, bits: int) -> torch.Tensor:
    """Symmetric integers with one scale per group of `size` inputs (per row where that does not divide them)."""
    size, limit = size if x.shape[-1] % size == 0 else x.shape[-1], 2 ** (bits - 1) - 1
    if _compiled(x):
        return _grid(x, size, limit, False)
    groups = x.float().unflatten(-1, (-1, size))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / limit
    return ((groups / scale).round() * scale).flatten(-2).to(x.dtype)


_ROUNDERS = {"fp8": round_fp8, "fp8_weights": round_fp8, "int8": round_int8, "int4": round_int4}


def _compiled(x: torch.Tensor) -> bool:
    plain = x.device.type == "cpu" and x.dtype == torch.float32 and not x.requires_grad
    return jit.FOUND and plain and x.numel() > 0


def _grid(x: torch.Tensor, size: int, limit: float, fp8: bool) -> torch.Tensor:
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    rows, to = (t.numpy().reshape(-1, size) for t in (x, out))
    kernels_rounding.grid(rows, rows.view(np.int32), np.float32(limit), fp8, to, to.view(np.int32))
    return out
