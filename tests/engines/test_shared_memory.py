"""What one process writes to a slot is what another one reads there, and nothing of it outlives them.

Matters because memory that is read while it is written, or that stays behind, is wrong weights or a full host. Two real processes. Not
covered: actors (tests/cluster/test_boxes_to_actors.py).
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rollkeel.engines import shared_memory
from rollkeel.engines.shared_memory import ALIGN, AVAILABLE, OpenedFiles, Ring, aligned, opened, read
from rollkeel.types import WeightSlice

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="Linux only")


def bucket_of(seed: int) -> list[WeightSlice]:
    draw = torch.rand(6, 4, generator=torch.Generator().manual_seed(seed))
    tensors = [(draw * 100).to(d) for d in (torch.float32, torch.bfloat16, torch.int64, torch.int8)]
    tensors += [draw.t(), draw[::2], draw[3, 2], draw[:, 1:3], draw[0]]
    return [WeightSlice(name=str(i), tensor=t, checksum=0) for i, t in enumerate(tensors)]


def sizes() -> int:
    return sum(aligned(s.tensor.nbytes) for s in bucket_of(0))


def reader(pipe: Any) -> None:
    rings = dict[str, torch.Tensor]()
    while (told := pipe.recv()) is not None:
        slot, like = told
        rings.setdefault(slot.path, opened(slot.path) if slot.path not in rings else torch.empty(0))
        pipe.send([t.clone() for t in read(slot, like, rings)])


def test_another_process_reads_every_slot_of_every_dtype_and_layout() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=reader, args=(theirs,), daemon=True)
    process.start()
    ring = Ring(sizes(), 3)
    starts = []
    for seed in range(7):
        bucket = bucket_of(seed)
        slot = ring.put(bucket)
        ours.send((slot, [(s.tensor.dtype, s.tensor.shape) for s in bucket]))
        for came, piece in zip(ours.recv(), bucket, strict=True):
            assert torch.equal(came, piece.tensor)
        starts.append(slot.start)
    ours.send(None)
    process.join(10)
    assert starts == [(i % 3) * sizes() for i in range(7)]
    assert all(start % ALIGN == 0 for start in starts)


def test_a_slot_stays_as_it_is_until_the_ring_is_round() -> None:
    ring, like = Ring(sizes(), 2), [(s.tensor.dtype, s.tensor.shape) for s in bucket_of(0)]
    rings = {ring.path: opened(ring.path)}
    first = ring.put(bucket_of(1))
    ring.put(bucket_of(2))
    assert torch.equal(read(first, like, rings)[0], bucket_of(1)[0].tensor)
    ring.put(bucket_of(3))
    assert torch.equal(read(first, like, rings)[0], bucket_of(3)[0].tensor)


def test_nothing_is_left_and_what_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(Path("/dev/shm").iterdir())
    ring = Ring(4096, 2)
    assert set(Path("/dev/shm").iterdir()) == before
    ring.close()
    with pytest.raises(FileNotFoundError):
        opened(ring.path)

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        Ring(4096, 2)


def test_a_ring_for_which_there_is_no_memory_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    files = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        Ring(1 << 20, 2)
    assert os.listdir("/proc/self/fd") == files


def test_what_one_thread_has_opened_another_one_does_not_close() -> None:
    """Rings that are made anew have the numbers of files of those before."""
    held = OpenedFiles[torch.Tensor]()
    both = threading.Barrier(2)

    def attach(path: str) -> bool:
        both.wait(10)
        held.get_or(path, lambda: opened(path))
        both.wait(10)
        return path in held

    with ThreadPoolExecutor(2) as threads:
        rings = [Ring(64, 1), Ring(64, 1)]
        for _ in range(300):
            assert list(threads.map(attach, [ring.path for ring in rings])) == [True, True]
            for ring in rings:
                ring.close()
            rings = [Ring(64, 1), Ring(64, 1)]
    held.forget()
    assert not held


def test_a_bucket_larger_than_a_slot_is_not_written_over_the_next_one() -> None:
    ring = Ring(sizes() - ALIGN, 2)
    with pytest.raises(RuntimeError):
        ring.put(bucket_of(0))
    assert shared_memory.aligned(1) == ALIGN
