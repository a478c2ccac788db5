"""AdamW over bfloat16 weights and what restores their float32 masters, in one read and one write: 28 bytes a parameter.

The arithmetic is that of torch's fused AdamW on CUDA, operation by operation: float32, with the same products fused into sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Elements of a program: with more, the registers of a multiprocessor hold too few programs to wait for memory in."""
COLUMNS = tl.constexpr(8)
"""Of a tensor: addresses of its weight, rest, gradient and moments; its elements, those in whole blocks, its first block."""


@triton.jit
def _elements(row, column: tl.constexpr, dtype: tl.constexpr, i, WHOLE: tl.constexpr):
    start = tl.load(row + column).to(tl.pointer_type(dtype))  # type: ignore[arg-type]
    if WHOLE:
        start = tl.multiple_of(start, 16)
    return start + i


@triton.jit
def _block(
    row,
    i,
    count,
    lr,
    weight_decay,
    beta1,
    beta2,
    eps,
    correction1,
    root2,
    WHOLE: tl.constexpr,
    DECAYS: tl.constexpr,
):
    """`WHOLE`: all elements `i` are there, and memory begins at a multiple of 16 bytes; without a mask, accesses are wide."""
    weights = _elements(row, 0, tl.int16, i, WHOLE)
    rests = _elements(row, 1, tl.int16, i, WHOLE)
    gradients = _elements(row, 2, tl.float32, i, WHOLE)
    firsts = _elements(row, 3, tl.float32, i, WHOLE)
    seconds = _elements(row, 4, tl.float32, i, WHOLE)
    mask = None if WHOLE else i < count
    low = tl.load(rests, mask=mask)
    high = tl.load(weights, mask=mask) + (low >> 15)
    p = ((high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)).to(tl.float32, bitcast=True)
    g = tl.load(gradients, mask=mask)
    if DECAYS:
        p = tl.fma(-(lr * weight_decay), p, p)
    first = tl.fma(beta1, tl.load(firsts, mask=mask), tl.fma(-beta1, g, g))
    second = tl.fma(beta2, tl.load(seconds, mask=mask), tl.fma(-beta2, g * g, g * g))
    p -= tl.div_rn(tl.div_rn(lr, correction1) * first, tl.div_rn(tl.sqrt_rn(second), root2) + eps)
    bits = p.to(tl.int32, bitcast=True)
    low = bits.to(tl.int16)
    tl.store(rests, low, mask=mask)
    tl.store(weights, (bits >> 16).to(tl.int16) - (low >> 15), mask=mask)
    tl.store(firsts, first, mask=mask)
    tl.store(seconds, second, mask=mask)


@triton.jit
def _update(
    table,
    owners,
    corrections,
    lr,
    weight_decay,
    beta1,
    beta2,
    eps,
    DECAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one tensor, that which `owners` gives."""
    program = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners + program)
    row = table + owner * COLUMNS
    start = (program - tl.load(row + 7)) * BLOCK
    i = start + tl.arange(0, BLOCK)
    count = tl.load(row + 5)
    correction1 = tl.load(corrections + 2 * owner)
    root2 = tl.load(corrections + 2 * owner + 1)
    if start < tl.load(row + 6):
        _block(row, i, count, lr, weight_decay, beta1, beta2, eps, correction1, root2, True, DECAYS)
    else:
        _block(row, i, count, lr, weight_decay, beta1, beta2, eps, correction1, root2, False, DECAYS)


def update(
    tensors: Sequence[Sequence[torch.Tensor]],
    steps: Sequence[torch.Tensor],
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Apply gradients to `tensors`, of each parameter: weight bfloat16, rest int16, gradient and both moments float32, all flat and
    contiguous. `steps`: of each parameter, float32 in its memory, the updates so far."""
    torch._foreach_add_(list(steps), 1)  # type: ignore[attr-defined]
    rows, counts, blocks = list[list[int]](), list[int](), 0
    for each in tensors:
        addresses, count = [tensor.data_ptr() for tensor in each], len(each[0])
        whole = 0 if any(address % 16 for address in addresses) else count - count % BLOCK
        counts.append(-(-count // BLOCK))
        rows.append([*addresses, count, whole, blocks])
        blocks += counts[-1]
    if not blocks:
        return
    # Without waiting for the copies: host memory that is not pinned is read before they return.
    device = tensors[0][0].device
    table, lengths = (torch.tensor(numbers).to(device, non_blocking=True) for numbers in (rows, counts))
    owners = torch.repeat_interleave(lengths, output_size=blocks)
    step = torch.stack(list(steps))
    corrections = torch.stack([1 - torch.pow(betas[0], step), (1 - torch.pow(betas[1], step)).sqrt()], 1)
    kernel: Any = _update[(blocks,)]
    kernel(
        table,
        owners,
        corrections,
        lr,
        weight_decay,
        *betas,
        eps,
        DECAYS=weight_decay != 0,
        BLOCK=BLOCK,
        num_warps=8,
    )
