"""What a delta of weights costs and saves: bytes beside the entropy of the changes, and GB/s of model per core.

    python -m benchmarks.deltas                        # 17 million weights, seven rows: a minute
    python -m benchmarks.deltas --elements 100000 --rounds 1

Weights are normal numbers of standard deviation 0.02, in matrices of 1,024 columns, with float32 masters that AdamW moves along
noisy gradients; what an engine holds of them is bfloat16, or float32 in the last row. `first` is the first step of a fresh AdamW, which moves every
element by the whole learning rate; the other rows begin 20 steps later. `bound` is the entropy of which elements changed, each on
its own with one probability, and of their differences. `pairs` are an int32 index and a value for each changed element, `xor` all
elements XORed and compressed by zstd; both are other people's ways. Every time is the median processor time of rounds in which all
parts take turns with a plain copy of the same bytes (`memcpy`), in one thread.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pyarrow as pa
import torch

from rollkeel.host import keep_freed_memory
from rollkeel.models import delta
from rollkeel.models.checksum import tensor_checksum

Pair = tuple[torch.Tensor, torch.Tensor]
WARM = 20
ROWS = (("first", 0, 1e-6, 1), ("1 step", WARM, 1e-6, 1), ("10 steps", WARM, 1e-6, 10), ("1 step", WARM, 1e-5, 1))
ROWS += (("10 steps", WARM, 1e-5, 10), ("1 step", WARM, 1e-4, 1))
"""What is said of a row, steps before it, learning rate, steps."""


def weights(elements: int, before: int, lr: float, steps: int) -> Pair:
    """Float32 masters `before` AdamW's steps, and `steps` later."""
    torch.manual_seed(0)
    master = torch.nn.Parameter(torch.randn(elements).mul_(0.02))
    optimizer = torch.optim.AdamW([master], lr=lr, weight_decay=0.0, foreach=False)
    drift, old = torch.randn(elements).mul_(0.3), master.detach().clone()
    for step in range(before + steps):
        if step == before:
            old = master.detach().clone()
        master.grad = torch.randn(elements).add_(drift)
        optimizer.step()
    return old, master.detach()


def entropy_bytes(old: delta.Bits, new: delta.Bits) -> float:
    """Bytes of the changes if each element changes with one probability, by a difference drawn from one distribution."""
    different = old != new
    _, counts = np.unique((new - old)[different], return_counts=True)
    counts = np.append(counts, len(old) - counts.sum())
    shares = counts[counts > 0] / len(old)
    return float(-(shares * np.log2(shares)).sum()) * len(old) / 8


def timed(parts: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median processor seconds of each part; they take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds + 1):
        for name, part in parts.items():
            start = time.thread_time()
            part()
            seconds[name].append(time.thread_time() - start)
    return {name: median(found[1:]) for name, found in seconds.items()}  # the first round touches fresh memory


def codec_rows(elements: int, rounds: int) -> Iterator[str]:
    yield "                      changed   bytes   bound  ratio   pairs     xor | encode   apply  squash  memcpy GB/s"
    zstd = pa.Codec("zstd", compression_level=1)
    for dtype, rows in ((torch.bfloat16, ROWS), (torch.float32, ROWS[1:2])):
        for said, before, lr, steps in rows:
            tensors = [t.to(dtype) for t in weights(elements, before, lr, steps)]
            old, new = (delta.bits_of(t) for t in tensors)
            made, target = delta.encode(old, new), old.copy()
            delta.apply(target, made)
            assert np.array_equal(target, new)
            count, size = delta.changed(made), old.nbytes
            parts = {
                "encode": lambda old=old, new=new: delta.encode(old, new),
                "apply": lambda target=target, made=made: delta.apply(target, made),
                "squash": lambda made=made: delta.squash([made, made]),
                "memcpy": lambda target=target, new=new: np.copyto(target, new),
            }
            speed = {name: size / s / 1e9 for name, s in timed(parts, rounds).items()}
            bound = entropy_bytes(old, new)
            xor = len(zstd.compress(old ^ new))
            yield (
                f"{said:8} {lr:g} {str(dtype)[6:]:8} {count / elements:7.2%} {len(made) / size:7.2%} {bound / size:7.2%}"
                f" {len(made) / bound:6.3f} {count * (4 + old.itemsize) / size:7.2%} {xor / size:7.2%} |"
                + "".join(f" {speed[name]:6.2f} " for name in parts)
            )


def checksum_rows(elements: int, rounds: int) -> Iterator[str]:
    yield "checksum    GB/s  memcpy"
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        tensor = torch.randn(elements).to(dtype)
        target, size = tensor.clone(), tensor.numel() * tensor.element_size()
        parts = {
            "sum": lambda t=tensor: tensor_checksum("w", t),
            "memcpy": lambda a=target, b=tensor: a.copy_(b),
        }
        found = {name: size / s / 1e9 for name, s in timed(parts, rounds).items()}
        yield f"{str(dtype)[6:]:9} {found['sum']:6.1f} {found['memcpy']:7.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--elements", type=int, default=2**24)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    print(f"{options.elements:,} elements, one thread, numba {'found' if delta.FOUND else 'not found'}")
    for rows in (codec_rows, checksum_rows):
        for line in rows(options.elements, options.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
