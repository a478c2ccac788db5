"""Buckets of weights as files of a folder that ranks and engines share: the slowest way, which needs nothing else.

    00002-000017.safetensors    bucket 17 of rank 2, renamed when it is whole; its metadata say what each tensor is and who gets it
    00002.json                  rank 2 has sent so many buckets, and to each receiver slices with this sum of checksums

A receiver reads buckets as they come. The folder is of one publication and holds all of it, up to the end.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rollkeel.errors import EngineFailure
from rollkeel.models.checksum import MASK
from rollkeel.types import WeightSlice

POLL_S = 0.01


class FileCarrier:
    """A `rollkeel.sync.sending.Carrier` of one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._count = 0

    def put(self, bucket: Sequence[WeightSlice], to: Sequence[int]) -> None:
        about = [[s.name, f"{s.checksum:x}", list(s.starts), s.rounded] for s in bucket]
        file = self._folder / f"{self._rank:05}-{self._count:06}.safetensors"
        tensors = {str(i): s.tensor.contiguous() for i, s in enumerate(bucket)}
        save_file(tensors, file.with_suffix(".part"), {"slices": json.dumps(about), "to": json.dumps(list(to))})
        os.replace(file.with_suffix(".part"), file)
        self._count += 1

    def flush(self) -> None:
        """Files are there as soon as they are written."""

    def finish(self, sums: Sequence[int]) -> None:
        """Say that no more will come. `sums`: of what each receiver got, see `sending.send_part`."""
        part = self._folder / f"{self._rank:05}.part"
        part.write_text(json.dumps({"buckets": self._count, "sums": [f"{total:x}" for total in sums]}))
        os.replace(part, part.with_suffix(".json"))


class Files:
    """What a receiver reads."""

    def __init__(self, folder: Path, receiver: int, senders: int, deadline_s: float) -> None:
        """`deadline_s`: longest wait for the next file."""
        self._folder = folder
        self._receiver = receiver
        self._deadline_s = deadline_s
        self._left = dict.fromkeys(range(senders), 0)
        """Number of the next bucket of each rank that has not ended."""
        self.checksum = 0
        """Of all slices, as the senders that have ended said."""

    def __iter__(self) -> Iterator[list[WeightSlice]]:
        """Buckets, until all senders have ended. Raises `EngineFailure` naming a rank that does not go on."""
        last = time.monotonic()
        while self._left:
            before = dict(self._left)
            for rank in before:
                yield from self._of(rank)
            if self._left != before:
                last = time.monotonic()
            elif time.monotonic() - last > self._deadline_s:
                raise EngineFailure(
                    f"weights: waited {self._deadline_s:g} s for bucket {before[min(before)]} of trainer rank {min(before)} in"
                    f" {self._folder}"
                )
            else:
                time.sleep(POLL_S)

    def _of(self, rank: int) -> Iterator[list[WeightSlice]]:
        """What of a rank is there and was not read."""
        end = self._folder / f"{rank:05}.json"
        ended = json.loads(end.read_text()) if end.exists() else None
        while (file := self._folder / f"{rank:05}-{self._left[rank]:06}.safetensors").exists():
            self._left[rank] += 1
            if bucket := self._read(file):
                yield bucket
        if ended is not None and self._left[rank] >= ended["buckets"]:
            self.checksum = (self.checksum + int(ended["sums"][self._receiver], 16)) & MASK
            del self._left[rank]

    def _read(self, file: Path) -> list[WeightSlice]:
        with safe_open(file, "pt") as read:
            metadata = read.metadata()
            if self._receiver not in json.loads(metadata["to"]):
                return []
            slices = json.loads(metadata["slices"])
            tensors: list[torch.Tensor] = [read.get_tensor(str(i)) for i in range(len(slices))]
        return [
            WeightSlice(name=name, tensor=tensor, checksum=int(checksum, 16), starts=tuple(starts), rounded=rounded)
            for (name, checksum, starts, rounded), tensor in zip(slices, tensors, strict=True)
        ]
