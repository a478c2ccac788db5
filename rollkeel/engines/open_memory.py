"""The weights of an engine in memory that senders of the same host write to: a publication is one copy, from the trainer's to the engine's.

    engine: `zeros` ─▶ told: its path, and where in it each weight lies ─▶ sender: `views_of`, `write` ─▶ engine: proves what is there

A sender writes to it between the beginning of a publication and its proof, while nothing is served. One that was given up may not know
that it was, and writes on: behind a publication that was not proven the engine moves its weights to other memory, with `renew`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence

import torch

from rollkeel import host
from rollkeel.engines.intake import Place, Room, inside, unchanged
from rollkeel.engines.shared_memory import named, opened
from rollkeel.errors import EngineFailure
from rollkeel.types import WeightSlice

Views = Mapping[str, torch.Tensor]
"""What an engine holds of each weight, as a sender has it in its own address space."""


class OpenMemory:
    """Of one engine, in its process."""

    def __init__(self) -> None:
        self._file = self._new()
        self._areas: dict[int, tuple[int, int]] = {}
        """By address: where in the file it begins, and its bytes."""
        self._size = 0

    @property
    def path(self) -> str:
        """As other processes of this host open it; empty if nothing lies there. It ends with this process, however that ends."""
        return named(self._file) if self._size else ""

    def zeros(self, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As `torch.zeros`; in memory of this process alone on another device, and where there is not so much to share."""
        count = torch.Size(shape).numel()
        size = -(-count * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            if not size or device.type != "cpu":
                raise OSError
            os.posix_fallocate(self._file, self._size, size)  # or a write to it could end the process
            whole = torch.frombuffer(mmap.mmap(-1, size), dtype=dtype, count=count)
            host.share_pages(
                self._file, self._size, whole.data_ptr(), size
            )  # a mapping of Python's would keep the file
        except OSError:
            return torch.zeros(*shape, dtype=dtype, device=device)
        self._areas[whole.data_ptr()] = self._size, size
        self._size += size
        return whole.view(shape)

    def rooms(self, rooms: Mapping[str, Room], held: Mapping[str, torch.Tensor]) -> dict[str, Room]:
        """The same rooms, of weights that are `held`, with the places of those that lie here."""
        out = dict(rooms)
        for name, view in held.items():
            if area := self._areas.get(view.untyped_storage().data_ptr()):
                first = area[0] + int(view.storage_offset()) * view.element_size()
                out[name] = out[name]._replace(place=Place(first, view.stride()))
        return out

    def renew(self) -> None:
        """Put other memory with the same bytes under all that lies here; addresses stay, and the path changes."""
        file = self._new()
        try:
            if self._size:
                os.posix_fallocate(file, 0, self._size)
            for address, (start, size) in self._areas.items():
                host.write_pages(file, start, address, size)
        except OSError as error:
            os.close(file)
            raise EngineFailure(
                f"weights: no memory to move to after a publication that failed ({error.strerror})"
            ) from None
        for address, (start, size) in self._areas.items():
            host.share_pages(file, start, address, size)
        os.close(self._file)
        self._file = file

    @staticmethod
    def _new() -> int:
        return os.memfd_create("rollkeel-engine", os.MFD_CLOEXEC)


def views_of(path: str, rooms: Mapping[str, Room]) -> Views:
    """What another process has there. Raises `OSError`."""
    memory, views = opened(path), dict[str, torch.Tensor]()
    for name, room in rooms.items():
        if room.place is None:
            continue
        shape = [b - a for a, b in zip(room.starts, room.stops, strict=True)]
        first = room.place.start // room.dtype.itemsize
        views[name] = memory.view(room.dtype).as_strided(shape, room.place.strides, first)
    return views


def write(bucket: Sequence[WeightSlice], rooms: Mapping[str, Room], views: Views, mode: str) -> bool:
    """Copy slices to where an engine of `mode` holds them. Whether it is right for all of them; else nothing is written."""
    places = list[torch.Tensor]()
    for piece in bucket:
        view, box = views.get(piece.name), inside(piece, rooms[piece.name])
        if view is None or box is None or not unchanged(piece, view.dtype, mode):
            return False
        places.append(view[box.within])
    for piece, place in zip(bucket, places, strict=True):
        place.copy_(piece.tensor)
    return True
