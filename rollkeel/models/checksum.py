"""A checksum of weights that depends on position and adds up over parts."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import torch

from rollkeel.models import gpu
from rollkeel.models.jit import FOUND, entry, jit

MASK = 2**64 - 1
PART = 2**19
"""Elements at one time: what a part needs beside the weights stays below 32 MB, and in the processor's caches."""
BLOCK = 2**10
"""Elements that are copied before they are summed, which the nearest cache holds."""
PART_OF_KERNEL = 2**27
"""The same on a GPU: one launch for most tensors."""
SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by bytes per element, that every device computes with."""
_LOW, _STEP, _HIGH, _FLIP = 2**32 - 1, 0x9E3779B1, 0x85EBCA77, 0x5BD1E995


@jit
def _key(i, first):  # type: ignore[no-untyped-def]
    x = np.uint64(np.uint32(np.uint32(i) * np.uint32(_STEP) + first))
    return ((x * x) >> np.uint64(16)) & np.uint64(_LOW) | np.uint64(1)


def _sum(bits, source, rows, run, pitch, apart, offset, base, out):  # type: ignore[no-untyped-def]
    """Adds to out[0] the checksum of `rows` runs of elements in one pass, where PyTorch makes ten. Runs begin `pitch` elements
    apart in `bits` and `apart` positions apart in the tensor, the first at `offset`. `source`: what is written to `bits` before, if it is
    one run; or nothing. A block is summed while the next one is written, for the one waits for memory and the other computes."""
    total = np.uint64(0)
    for i in range(min(len(source), BLOCK)):
        bits[i] = source[i]
    for row in range(rows):
        done = 0
        while done < run:  # once, but where positions pass a multiple of 2**32
            position = offset + row * apart + done
            low = position & _LOW
            count = min(run - done, _LOW + 1 - low)
            if len(source):
                count = min(count, BLOCK)
            high = np.uint64(position >> 32) * np.uint64(_HIGH)
            first = np.uint32(np.uint64(base) + np.uint64(low) * np.uint64(_STEP) + high)
            begin = row * pitch + done
            part = bits[begin : begin + count]
            new = source[done + BLOCK : done + BLOCK + count]
            there = bits[begin + BLOCK : begin + BLOCK + len(new)]
            for i in range(len(new)):
                there[i] = new[i]
                total += (np.uint64(part[i]) ^ np.uint64(_FLIP)) * _key(i, first)
            rest = part[len(new) :]
            first = np.uint32(np.uint64(first) + np.uint64(len(new)) * np.uint64(_STEP))
            for i in range(len(rest)):
                total += (np.uint64(rest[i]) ^ np.uint64(_FLIP)) * _key(i, first)
            done += count
    out[0] += total


_ARGUMENTS = (*["int64"] * 5, "uint32", "uint64[::1]")
_COMPILED = {w: entry(*2 * [f"uint{8 * w}[::1]"], *_ARGUMENTS)(_sum) for w in ((1, 2, 4, 8) if FOUND else ())}
"""By bytes per element."""
UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def tensor_checksum(
    name: str,
    tensor: torch.Tensor,
    offset: int = 0,
    dtype: torch.dtype | None = None,
    pitches: Sequence[int] = (),
    source: torch.Tensor | None = None,
) -> int:
    """Checksum of `tensor` as elements `offset …` of the flattened tensor `name`; parts add up modulo 2**64.

    Each element's bits, read as an integer, are multiplied by an odd key of its position, so that a changed, shifted or
    missing element changes the sum. Keys are no linear function of positions (middle squares of a Weyl sequence, Widynski,
    arXiv:1704.00358), or two rows with equal sums could change places. It guards against bugs, not against an adversary.
    `dtype`: of the tensor's values in that dtype. `pitches`: of a box, how many positions of the whole lie between neighbours
    along each dimension (`pitches_of`); whole rows need none. `source`: is copied to `tensor` before; what is summed is read from there.
    """
    return read([begun(name, tensor, offset, dtype, pitches, source)])[0]


Begun = tuple[int, torch.Tensor | None]
"""The part of a checksum that is known, and another that its device computes."""


def read(sums: Sequence[Begun]) -> list[int]:
    """Checksums that were begun: one wait for each device, however many there are."""
    out = [known for known, _ in sums]
    there: dict[torch.device, dict[int, torch.Tensor]] = {}
    for i, (_, waiting) in enumerate(sums):
        if waiting is not None:
            there.setdefault(waiting.device, {})[i] = waiting
    for each in there.values():
        found = torch.stack(list(each.values())).tolist()
        for i, part in zip(each, found, strict=True):
            out[i] += part
    return [checksum & MASK for checksum in out]


def begun(
    name: str,
    tensor: torch.Tensor,
    offset: int = 0,
    dtype: torch.dtype | None = None,
    pitches: Sequence[int] = (),
    source: torch.Tensor | None = None,
) -> Begun:
    """The sum of `tensor_checksum`, on its way: `read` waits for the device that computes it."""
    dtype = dtype or tensor.dtype
    base = zlib.crc32(f"{name}:{dtype.itemsize}".encode())
    compiled = _COMPILED.get(dtype.itemsize) if tensor.device.type == "cpu" else None
    runs = _in_one_run(tensor.shape, pitches)
    on_host, on_device = np.zeros(1, np.uint64), None
    kernel = runs == 0 and gpu.taken(tensor)
    if compiled is not None and runs == 0 and not kernel and tensor.dtype == dtype and tensor.is_contiguous():
        bits = _bits(tensor)
        new = bits[:0]
        if source is not None and _alike(tensor, source):
            new = _bits(source)
        elif source is not None:
            tensor.copy_(source)
        compiled(bits, new, 1, len(bits), 0, 0, offset, base, on_host)
        return int(on_host[0]), None
    if source is not None:
        tensor.copy_(source)
    for first, part, apart in _placed(tensor.detach(), offset, pitches, runs, PART_OF_KERNEL if kernel else PART):
        plain = part.to(dtype)
        if kernel:
            from rollkeel.models.gpu.checksum import block_sums

            found = block_sums(plain[0].view(SIGNED[dtype.itemsize]), first, base, _STEP, _HIGH, _FLIP).sum()
            on_device = found if on_device is None else on_device + found
        elif compiled is not None:
            plain = plain if plain.stride(1) == 1 or plain.shape[1] == 1 else plain.contiguous()
            (rows, run), pitch = plain.shape, plain.stride(0)
            flat = plain[0] if rows == 1 else plain.as_strided(((rows - 1) * pitch + run,), (1,))
            bits = _bits(flat)
            compiled(bits, bits[:0], rows, run, pitch, apart, first, base, on_host)
        else:
            found = _plain_sum(plain, base, first, apart)
            on_device = found if on_device is None else on_device + found
    return int(on_host[0]), on_device


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """A contiguous tensor as integers."""
    return tensor.detach().view(-1).view(UNSIGNED[tensor.element_size()]).numpy()


def _alike(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the bits of `source`, one after the other, are to be in `tensor`."""
    same = source.dtype == tensor.dtype and source.shape == tensor.shape and source.device == tensor.device
    return same and source.is_contiguous()


def pitches_of(shape: Sequence[int]) -> tuple[int, ...]:
    """How many positions lie between neighbours along each dimension of a tensor of this shape."""
    return _pitches(tuple(shape))


@cache
def _pitches(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _in_one_run(shape: Sequence[int], pitches: Sequence[int]) -> int:
    """The first dimension of a box from which on its positions follow one another; 0 for whole rows."""
    own, first = pitches_of(shape), len(shape)
    while first > 0 and (not pitches or shape[first - 1] == 1 or own[first - 1] == pitches[first - 1]):
        first -= 1
    return first


Placed = Iterator[tuple[int, torch.Tensor, int]]
"""Position of the first element, `[rows, run]` elements, positions between the beginnings of two rows."""


def _placed(tensor: torch.Tensor, offset: int, pitches: Sequence[int], runs: int, most: int) -> Placed:
    """The elements of a tensor, about `most` at one time."""
    if not tensor.numel():
        return
    if runs == 0:
        for part in _parts(tensor, most):
            yield offset, part[None], 0
            offset += len(part)
    elif runs > 1:
        for i, part in enumerate(tensor):
            yield from _placed(part, offset + i * pitches[0], pitches[1:], runs - 1, most)
    else:
        for part in tensor.split(max(1, most * len(tensor) // tensor.numel())):
            yield offset, part.flatten(1) if part.dim() > 1 else part[:, None], pitches[0]
            offset += len(part) * pitches[0]


def _parts(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """The elements of a tensor in order, contiguous and flat, at most `most` at one time."""
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        yield from (flat,) if len(flat) <= most else flat.split(most)
        return
    rows = most * len(tensor) // tensor.numel()
    for part in tensor.split(max(1, rows)):
        yield from (part.contiguous().view(-1),) if rows else _parts(part[0], most)


def _plain_sum(part: torch.Tensor, base: int, offset: int, apart: int) -> torch.Tensor:
    size, device = part.element_size(), part.device
    bits = part.contiguous().view(SIGNED[size]).to(torch.int64)
    position = (
        offset + torch.arange(part.shape[1], device=device) + apart * torch.arange(len(part), device=device)[:, None]
    )
    x = (base + (position & _LOW) * _STEP + (position >> 32) * _HIGH) & _LOW
    # int64 products and sums wrap modulo 2**64, which is the arithmetic wanted here.
    key = (x * x >> 16) & _LOW | 1
    return (((bits & (2 ** (8 * size) - 1 if size < 8 else -1)) ^ _FLIP) * key).sum()
