"""What the proof of the served weights costs: publication with it, and with the proof of what was received that it replaced.

    python -m benchmarks.publication                     # 4.9 M parameters, every numeric mode: half a minute
    python -m benchmarks.publication --layers 1 --width 64 --rounds 1

Both take turns in one process of one thread; a row is the median processor time of each and their ratio. Target: at most 1.3. The
row `shared` is fp32 where trainer and engine compute with one copy of the weights.
"""

from __future__ import annotations

import argparse
import os
import time
import zlib
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from rollkeel.config import EngineConfig
from rollkeel.engines.local import LocalEngine
from rollkeel.host import keep_freed_memory
from rollkeel.models import numerics
from rollkeel.models.checksum import MASK
from rollkeel.models.jit import entry
from rollkeel.models.names import checkpoint_views, move_into
from rollkeel.models.numerics import MODES, is_quantised, weight_rounder
from rollkeel.models.presets import build_preset
from rollkeel.sync.publish import DirectPublisher
from rollkeel.types import WeightSlice

Weights = dict[str, torch.Tensor]


@entry("int32[::1]", "int64", "int64[::1]")
def _sum(bits, key, out):  # type: ignore[no-untyped-def]
    total = np.int64(0)
    for i in range(len(bits)):
        total += (np.int64(bits[i]) + np.int64(0x9E3779B9)) * (np.int64(2) * i + key)
    out[0] = total


def earlier_checksum(name: str, tensor: torch.Tensor) -> int:
    """The checksum as it was computed for the earlier proof."""
    bits = tensor.detach().contiguous().view(torch.int32).flatten()
    out = np.empty(1, np.int64)
    _sum(bits.numpy(), (zlib.crc32(name.encode()) << 1 | 1) + (4 << 40), out)
    return int(out[0]) & MASK


def received(weights: Weights, destinations: Weights, mode: str) -> int:
    """Write `weights` and prove what was received; the engine's memory only where it holds the same bits."""
    slices = [WeightSlice(name=n, tensor=t.detach(), checksum=earlier_checksum(n, t)) for n, t in weights.items()]
    rounder, total = weight_rounder(mode), 0
    for piece in slices:
        view, arrived = destinations[piece.name], earlier_checksum(piece.name, piece.tensor)
        assert arrived == piece.checksum
        rounded = rounder is not None and is_quantised(piece.name, piece.tensor)
        view.copy_(rounder(piece.tensor.to(view.device)) if rounder and rounded else piece.tensor)
        exact = not rounded and view.dtype == piece.tensor.dtype
        total += earlier_checksum(piece.name, view) if exact else arrived
    return total & MASK


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--plain", action="store_true", help="rounding without compiled kernels on both sides")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    size = {"num_hidden_layers": options.layers, "hidden_size": options.width, "moe_intermediate_size": options.width}
    model, _ = build_preset("tiny-qwen3-moe", 0, size)
    weights = dict(checkpoint_views(model))
    compiled = numerics._compiled
    print(f"{sum(w.numel() for w in weights.values()):,} parameters in {len(weights)} tensors, one thread")
    print("mode         received_ms  served_ms  ratio")
    for row in (*MODES, "shared"):
        mode = "fp32" if row == "shared" else row
        engine = LocalEngine(model.config, EngineConfig(dtype=mode), max_length=32)  # type: ignore[arg-type]
        publisher, seconds = DirectPublisher([engine], shared=row == "shared"), ([], [])
        other = {name: view.clone() for name, view in engine.weights.items()}
        if row == "shared":
            assert not move_into(model, engine.weights)
            weights = dict(checkpoint_views(model))
        for version in range(options.rounds + 1):
            start = time.process_time()
            numerics._compiled = lambda x: False  # the plain rounding that the earlier proof went with
            received(weights, other, mode)
            middle = time.process_time()
            numerics._compiled = compiled if not options.plain else numerics._compiled
            publisher.publish(weights.items(), version)
            seconds[0].append(middle - start)
            seconds[1].append(time.process_time() - middle)
        old, new = (median(part[1:]) * 1e3 for part in seconds)  # the first round touches fresh memory
        print(f"{row:12} {old:11.2f} {new:10.2f} {new / old:6.2f}")


if __name__ == "__main__":
    main()
