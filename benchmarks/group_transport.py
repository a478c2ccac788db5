"""How near weights over a process group (gloo) come to a raw send of the same bytes.

    python -m benchmarks.group_transport                  # 256 MB, 64 MB of buffer: half a minute
    python -m benchmarks.group_transport --mb 16 --rounds 1 --buffer-mb 4

Two processes on the loopback. `raw`: each part of a weight as one message, from where it is to where an engine has it; `carried`: cut from the trainer's weights by
the plan, in buckets, into the engine's; `proven`: with the checksums of both. GB/s by the clock, medians of rounds that take turns, and
`of processor time` the same ratio by that of the busier process. At least 80 % of raw is asked of `carried`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.transport import COLUMNS, ROWS, Half, Memory, unsummed
from rollkeel.engines.intake import Room
from rollkeel.engines.server import free_port
from rollkeel.host import keep_freed_memory
from rollkeel.sync.group import GroupCarrier, Received
from rollkeel.sync.plan import Layout, dealt, plan
from rollkeel.sync.sending import MADE, WINDOW, Outgoing, send_part

WAYS = ("raw", "carried", "proven")


def side(rank: int, port: int, options: argparse.Namespace, pipe: Any) -> None:
    """Rank 0 trains and has half of the rows, rank 1 is an engine; sends seconds by clock and processor of each way."""
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    names = [f"layers.{i}.proj.weight" for i in range(max(1, int(options.mb * 2**20 / 4 / ROWS / COLUMNS)))]
    bucket = int(options.buffer_mb * 2**20 / (WINDOW + MADE))
    source = Layout([dealt(names, (ROWS, COLUMNS), 4, np.arange(2), ("rank",), [("rank", 0)])], np.zeros(2, int))
    made = plan(source, Layout([dealt(names, (ROWS, COLUMNS), 4, np.arange(1), ("engine",))], np.zeros(1, int)))
    about = Outgoing(
        {name: Room(torch.float32, (ROWS, COLUMNS), (0, 0), (ROWS, COLUMNS)) for name in names}, "fp32", bucket
    )
    held = {name: [((0, 0), torch.rand(ROWS // 2, COLUMNS))] for name in names}
    memory = Memory(names)

    def raw() -> None:
        for name in names:
            if rank == 0:
                dist.send(held[name][0][1], 1)
            else:
                dist.recv(memory.destinations[name][: ROWS // 2], 0)

    def carried(proven: bool = False) -> None:
        if rank == 0:
            carrier = GroupCarrier([1], 60.0)
            carrier.finish(send_part(made, 0, held, about, carrier))
            return
        half = Half(memory, proven)
        for pieces in Received([0], 60.0, into=half.live):
            half.take(pieces)

    def unproven() -> None:
        with unsummed():
            carried()

    for _ in range(options.rounds + 1):
        for way in (raw, unproven, lambda: carried(proven=True)):
            dist.barrier()
            wall, spent = time.perf_counter(), time.process_time()
            way()
            dist.barrier()
            pipe.send((time.perf_counter() - wall, time.process_time() - spent))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mb", type=float, default=256)
    parser.add_argument("--buffer-mb", type=float, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    port = free_port()
    context, ends = multiprocessing.get_context("spawn"), []
    for rank in range(2):
        ours, theirs = context.Pipe()
        ends.append(ours)
        context.Process(target=side, args=(rank, port, options, theirs), daemon=True).start()
    found = [[[end.recv() for end in ends] for _ in WAYS] for _ in range(options.rounds + 1)][1:]
    gb = max(1, int(options.mb * 2**20 / 4 / ROWS / COLUMNS)) * ROWS * COLUMNS * 2 / 1e9
    clock = [median(max(w for w, _ in round_[i]) for round_ in found) for i in range(3)]
    spent = [median(max(s for _, s in round_[i]) for round_ in found) for i in range(3)]
    print(f"{gb:.2f} GB, load {os.getloadavg()[0]:.1f}")
    print("         GB/s  of raw  of processor time")
    for name, wall, cpu in zip(WAYS, clock, spent, strict=True):
        print(f"{name:8}{gb / wall:5.2f}{clock[0] / wall:8.0%}{spent[0] / cpu:19.0%}", flush=True)


if __name__ == "__main__":
    main()
