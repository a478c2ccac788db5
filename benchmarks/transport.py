"""How fast the boxes of a plan go from one process to another one of the same host, against a copy within one process.

    python -m benchmarks.transport                        # 512 MB of float32 weights: half a minute on two quiet cores
    python -m benchmarks.transport --mb 2 --rounds 1

One process is a rank of two, whose boxes are half of the rows (`rows`) or half of the columns (`columns`) of every weight; another one is an
engine. Rows of the table, in GB of weights a second, medians of all rounds, which take turns:

`copied`      one process copies the boxes to their places in other memory
`carried`     they are written to a ring in shared memory by one process and from there to their places by the other: the way to a server
`written`     one process writes them to their places in the other one's memory, and tells it: the way to an embedded engine
`proven`      the same, and both sum what they have: a publication
`extra`       memory that both processes need meanwhile, beside weights, against the buffer

Percents: carried and written against copied, by the clock and of processor time, a second being one of the busier process, which is what a
process gets on a core of its own. Targets: 80 % of copied, extra 105 % of the buffer.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from rollkeel.engines.intake import Intake, Room, rooms_of
from rollkeel.engines.open_memory import OpenMemory, Views, views_of, write
from rollkeel.engines.shared_memory import Ring, opened, read
from rollkeel.host import keep_freed_memory
from rollkeel.sync import sending
from rollkeel.sync.layouts import Held
from rollkeel.sync.plan import Layout, dealt, plan
from rollkeel.sync.sending import MADE, WINDOW, Outgoing, send_part
from rollkeel.types import WeightSlice, WeightUpdate

ROWS, COLUMNS = 2048, 4096


class Memory:
    """An engine's: zeros of every weight, all of them touched, that the other process may write to."""

    def __init__(self, names: Sequence[str]) -> None:
        self.open, cpu = OpenMemory(), torch.device("cpu")
        zeros = functools.partial(self.open.zeros, ROWS, COLUMNS, dtype=torch.float32, device=cpu)
        self.destinations = {name: zeros().add_(1) for name in names}
        self.adapters = dict[str, torch.Tensor]()
        self.rooms = self.open.rooms(rooms_of(self.destinations), self.destinations)


class Half:
    """Takes boxes of half of each weight without asking where the other half is."""

    def __init__(self, memory: Memory, proven: bool) -> None:
        head = WeightUpdate(kind="full", base_version=None, version=1, slices=(), checksum=0, mode="fp32")
        self._intake = Intake(head, memory, "fp32", -1) if proven else None
        self._memory = memory

    def take(self, pieces: Sequence[WeightSlice]) -> None:
        if self._intake is not None:
            self._intake.take(pieces)
            return
        for piece in pieces:
            if not piece.tensor.is_meta and (view := self._view(piece)).data_ptr() != piece.tensor.data_ptr():
                view.copy_(piece.tensor)

    def live(self, piece: WeightSlice) -> torch.Tensor | None:
        """See `Intake.live`."""
        if self._intake is not None:
            return self._intake.live(piece)
        return view if (view := self._view(piece)).is_contiguous() else None

    def _view(self, piece: WeightSlice) -> torch.Tensor:
        place = tuple(slice(a, a + n) for a, n in zip(piece.starts, piece.tensor.shape, strict=True))
        return self._memory.destinations[piece.name][place]


def engine(pipe: Any, names: Sequence[str]) -> None:
    """The other process."""
    torch.set_num_threads(1)
    keep_freed_memory()
    memory, rings, half = Memory(names), dict[str, torch.Tensor](), None
    pipe.send((resident(), memory.open.path, memory.rooms))
    while (told := pipe.recv()) is not None:
        if isinstance(told, bool):
            half = Half(memory, told)
            pipe.send(True)
            continue
        slot, about = told
        if slot is not None and slot.path not in rings:
            rings[slot.path] = opened(slot.path)
        if about is None:
            pipe.send((resident(), time.process_time()))
            continue
        assert half is not None
        like = [(dtype, shape) for _, dtype, shape, *_ in about]
        found = read(slot, like, rings) if slot else [torch.empty(shape, dtype=d, device="meta") for d, shape in like]
        pieces = [
            WeightSlice(name=n, tensor=t, checksum=c, starts=starts)
            for (n, _, _, c, starts), t in zip(about, found, strict=True)
        ]
        half.take(pieces)
        pipe.send(True)


class Pipes:
    """A carrier that tells through a pipe of slots, or with `views` of what it has written to the other process's memory."""

    def __init__(self, pipe: Any, ring: Ring, rooms: Mapping[str, Room]) -> None:
        self._pipe, self._ring, self._under_way = pipe, ring, deque[bool]()
        self._rooms = rooms
        self.views: Views | None = None

    def put(self, bucket: Sequence[WeightSlice], to: Sequence[int]) -> None:
        if len(self._under_way) == WINDOW:
            self._taken()
        about = [(s.name, s.tensor.dtype, tuple(s.tensor.shape), s.checksum, s.starts) for s in bucket]
        slot = None
        if self.views is None:
            slot = self._ring.put(bucket)
        else:
            assert write(bucket, self._rooms, self.views, "fp32")
        self._pipe.send((slot, about))
        self._under_way.append(True)

    def flush(self) -> None:
        while self._under_way:
            self._taken()

    def _taken(self) -> None:
        self._under_way.popleft()
        assert self._pipe.recv()


def resident() -> int:
    """Bytes of this process: its own, and what it has mapped of shared memory."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[key].split()[0]) << 10 for key in ("RssAnon", "RssShmem"))


@contextmanager
def unsummed() -> Iterator[None]:
    """Inside, slices are made without checksums."""
    with patch.object(sending, "held_checksum", lambda *_: 0):
        yield


class Sides:
    """This process, which sends, and the other one."""

    def __init__(self, names: Sequence[str], buffer_bytes: int) -> None:
        self.names, self.bucket = names, int(buffer_bytes / (WINDOW + MADE))
        self.other = {name: torch.zeros(ROWS, COLUMNS).add_(1) for name in names}
        self.pipe, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("forkserver").Process(target=engine, args=(theirs, names), daemon=True)
        process.start()
        self._empty, path, rooms = self.pipe.recv()
        self._rooms, self._views, self._before = rooms, views_of(path, rooms), 0
        for view in self._views.values():
            view.add_(1)  # pages that are mapped once, at an engine's start
        self._ring = Ring(self.bucket, WINDOW)

    def rounds(self, dim: int) -> Iterator[dict[str, tuple[float, float]]]:
        """GB of each way a second, and a second of processor time of the busier process, again and again; `dim`: that ranks cut."""
        ranks, shape = np.arange(2), (ROWS, COLUMNS)
        source = Layout([dealt(self.names, shape, 4, ranks, ("rank",), [("rank", dim)])], ranks)
        made = plan(source, Layout([dealt(self.names, shape, 4, ranks[:1], ("engine",))], ranks[:1]))
        half = (ROWS // 2, COLUMNS) if dim == 0 else (ROWS, COLUMNS // 2)
        held: Held = {name: [((0, 0), torch.rand(half))] for name in self.names}
        about = Outgoing({name: Room(torch.float32, shape, (0, 0), shape) for name in self.names}, "fp32", self.bucket)
        gb = len(self.names) * ROWS * COLUMNS * 4 / 2 / 1e9
        self._before, carrier = resident(), Pipes(self.pipe, self._ring, self._rooms)

        def copied() -> None:
            for name, [(_, part)] in held.items():
                self.other[name][: half[0], : half[1]].copy_(part)

        def carried() -> None:
            carrier.views = None
            with unsummed():
                send_part(made, 0, held, about, carrier)

        def written() -> None:
            with unsummed():
                proven()

        def proven() -> None:
            carrier.views = self._views
            send_part(made, 0, held, about, carrier)

        while True:
            speeds = {}
            for way in (copied, carried, written, proven):
                self.pipe.send(way is proven)
                assert self.pipe.recv()
                theirs, ours, start = self._there()[1], time.process_time(), time.perf_counter()
                way()
                wall, ours = time.perf_counter() - start, time.process_time() - ours
                speeds[way.__name__] = gb / wall, gb / max(ours, self._there()[1] - theirs)
            yield speeds

    def extra(self) -> int:
        """Bytes that both processes took since the first round began. Shared memory is in both, and counts once; freed memory stays."""
        return resident() - self._before + self._there()[0] - self._empty - self.bucket * WINDOW

    def _there(self) -> tuple[int, float]:
        """Bytes and processor time of the other process."""
        self.pipe.send((None, None))
        return self.pipe.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mb", type=float, default=512)
    parser.add_argument("--buffer-mb", type=float, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    names = [f"layers.{i}.proj.weight" for i in range(max(1, int(options.mb * 2**20 / 4 / ROWS / COLUMNS)))]
    print(f"{len(names) * ROWS * COLUMNS * 4 / 2**20:.0f} MB in {len(names)} weights, load {os.getloadavg()[0]:.1f}")
    print("boxes      copied  carried  written  proven   carried  of processor   written  of processor  extra/buffer")
    for cut, dim in {"rows": 0, "columns": 1}.items():
        sides = Sides(names, int(options.buffer_mb * 2**20))
        found = list(itertools.islice(sides.rounds(dim), options.rounds + 1))[1:]  # the first one touches fresh memory
        ways = [[median(speeds[way][i] for speeds in found) for way in found[0]] for i in range(2)]
        shares = [f"{by[way] / by[0]:.0%}" for way in (1, 2) for by in ways]
        extra = sides.extra() / options.buffer_mb / 2**20
        print(
            f"{cut:8}"
            + "".join(f"{speed:9.2f}" for speed in ways[0])
            + "".join(f"{share:>{width}}" for share, width in zip(shares, (9, 14, 10, 14), strict=True))
            + f"{extra:14.0%}",
            flush=True,
        )
        sides.pipe.send(None)


if __name__ == "__main__":
    main()
