"""Tensors leave their device for a while and come back with the same bits, in a thread beside what goes on meanwhile.

    cuda      to pinned host memory and back, on a stream of their own; the allocator gets the storage back
    cpu       to a file without a name: the pages of a storage become pages of that file, at the same addresses. The kernel reads
              them back one by one if somebody looks all the same
    others    to host memory

Nothing is kept twice behind a move, but that torch keeps page-locked host memory for the next one. After an error everything is where it was.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Iterable, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from rollkeel import host
from rollkeel.errors import RunStopped
from rollkeel.train.mesh import local

Named = MutableMapping[str, torch.Tensor]
SLABS, ALIGNED = tuple(2**n for n in range(27, 35)), 64
"""Bytes of host memory that may be asked for at once, and multiples of which a tensor begins at."""


class Away(Protocol):
    """A group of tensors that can leave. `begin_…` in the caller's thread, the rest in another one."""

    bytes: int

    def leave(self) -> None: ...
    def begin_back(self) -> None: ...
    def back(self) -> None: ...


class InFile:
    """Storages of a CPU."""

    def __init__(self, groups: Sequence[Named], folder: Path) -> None:
        spans = (host.whole_pages(s.data_ptr(), s.nbytes()) for s in _storages(groups).values())
        self._alive = [dict(group) for group in groups]  # their memory must not be given to others while it is away
        self._spans = [(address, size) for address, size in spans if size]
        self.bytes = sum(size for _, size in self._spans)
        self._folder = folder
        self._file = None

    def leave(self) -> None:
        file, done = tempfile.TemporaryFile(dir=self._folder), 0  # noqa: SIM115
        try:
            for address, size in self._spans:
                host.write_pages(file.fileno(), done, address, size)
                done += size
            self._file = file
            self._each(host.put_pages_in, host.take_pages_out)
        except BaseException:
            self._file = None
            file.close()
            raise

    def begin_back(self) -> None:
        pass

    def back(self) -> None:
        self._each(host.take_pages_out, host.put_pages_in)
        assert self._file is not None
        self._file.close()

    def _each(self, do: Any, undo: Any) -> None:
        assert self._file is not None
        places, start = list[tuple[int, int, int, int]](), 0
        try:
            for address, size in self._spans:
                places.append((self._file.fileno(), start, address, size))
                do(*places[-1])
                start += size
        except BaseException:
            for one in places[:-1]:
                undo(*one)
            raise


@functools.cache  # what leaves its device does so at every step, in the same sizes
def packed(sizes: tuple[int, ...]) -> tuple[list[int], list[tuple[int, int]]]:
    """Slabs that hold so many bytes each, and the slab and first byte of each. Slabs are powers of two, because torch gives out page-locked
    memory in those: a tensor of its own takes a third more on average."""
    return min((_packed(sizes, slab) for slab in SLABS), key=lambda way: sum(way[0]))


def _packed(sizes: Sequence[int], least: int) -> tuple[list[int], list[tuple[int, int]]]:
    """The same with slabs of `least` bytes, or of one tensor that is larger."""
    slabs, ends = list[int](), list[int]()
    places = [(0, 0)] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fits = (s for s, size in enumerate(slabs) if ends[s] + sizes[i] <= size)
        slab = next(fits, len(slabs))
        if slab == len(slabs):
            slabs.append(max(least, _power(sizes[i])))
            ends.append(0)
        places[i] = slab, ends[slab]
        ends[slab] += -(-sizes[i] // ALIGNED) * ALIGNED
    return [min(size, _power(end)) for size, end in zip(slabs, ends, strict=True)], places


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << max(size - 1, 1).bit_length()


class InHost:
    """Storages of an accelerator. Meanwhile the groups' entries are tensors of the host with the same values."""

    def __init__(self, groups: Sequence[Named]) -> None:
        self._groups = [(group, dict(group)) for group in groups]
        storages = _storages(groups)
        self.bytes = sum(s.nbytes() for s in storages.values())
        self._flat: dict[int, torch.Tensor] = {}
        for _, named in self._groups:
            for tensor in named.values():
                part = local(tensor).detach()
                if (key := part.untyped_storage().data_ptr()) in storages and key not in self._flat:
                    count = storages[key].nbytes() // part.element_size()
                    self._flat[key] = part.as_strided((count,), (1,), 0)
        self._device = next((flat.device for flat in self._flat.values()), torch.device("cpu"))
        self._there: dict[int, torch.Tensor] = {}
        self._ready = _now(self._device)

    @torch.no_grad()
    def leave(self) -> None:
        pinned = self._device.type == "cuda"
        sizes, places = packed(tuple(flat.nbytes for flat in self._flat.values()))
        slabs = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
        copies = {
            key: slabs[slab][start : start + flat.nbytes].view(flat.dtype)
            for (key, flat), (slab, start) in zip(self._flat.items(), places, strict=True)
        }
        with self._beside():
            for key, flat in self._flat.items():
                copies[key].copy_(flat, non_blocking=True)
        self._there = copies
        for group, named in self._groups:
            for name, tensor in named.items():
                part = local(tensor).detach()
                if (key := part.untyped_storage().data_ptr()) in copies:
                    first = int(copies[key].storage_offset()) + part.storage_offset()
                    group[name] = copies[key].as_strided(part.size(), part.stride(), first)
        for flat in self._flat.values():
            flat.untyped_storage().resize_(0)
        if pinned:
            torch.cuda.empty_cache()  # it is for other processes, too

    def begin_back(self) -> None:
        """Allocate: on the caller's stream, whose memory it is."""
        try:
            for key, flat in self._flat.items():
                flat.untyped_storage().resize_(self._there[key].nbytes)
        except BaseException:
            for flat in self._flat.values():
                flat.untyped_storage().resize_(0)
            raise
        self._ready = _now(self._device)

    @torch.no_grad()
    def back(self) -> None:
        with self._beside():
            for key, flat in self._flat.items():
                flat.copy_(self._there[key], non_blocking=True)
        for group, named in self._groups:
            group.update(named)
        self._there = {}

    def _beside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._device.type != "cuda" else _Side(self._device, self._ready)


class _Side:
    """A stream that begins behind `ready` and is waited for at its end."""

    def __init__(self, device: torch.device, ready: Any) -> None:
        self._stream, self._ready = torch.cuda.Stream(device), ready
        self._inside = torch.cuda.stream(self._stream)

    def __enter__(self) -> None:
        self._inside.__enter__()
        self._stream.wait_event(self._ready)

    def __exit__(self, *error: Any) -> None:
        self._stream.synchronize()
        self._inside.__exit__(*error)


class Moves:
    """Moves groups of tensors by name. One at a time is under way, in the order in which they were asked for."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of the files that tensors of a CPU go to; memory that is a file system is no place for them."""
        self._folder, self._worker = folder, ThreadPoolExecutor(1, "moves")
        self._away: dict[str, Away] = {}
        self._pending: list[Future[None]] = []
        self.bytes = 0
        self.seconds = 0.0
        self.waited = 0.0
        """Moved since `measured`, how long that took, and how long somebody waited for it."""

    def out(self, name: str, groups: Iterable[Named]) -> None:
        """Begin to send these tensors away; one that is away already stays there. Nobody may write to them from now on."""
        groups = [group for group in groups if group]
        if name in self._away or not groups:
            return
        device = next(iter(groups[0].values())).device
        away: Away = InFile(groups, self._folder) if device.type == "cpu" else InHost(groups)
        self._away[name] = away
        self._start(away, away.leave, lambda: self._away.pop(name))

    def back(self, name: str) -> None:
        """Begin to bring them back; `settle` before they are used."""
        if (away := self._away.get(name)) is None:
            return
        away.begin_back()
        del self._away[name]

        def again() -> None:
            self._away[name] = away

        self._start(away, away.back, again)

    def away(self, name: str) -> bool:
        """Whether these tensors are away, or on their way there."""
        return name in self._away

    def settle(self) -> None:
        """Wait until all is where it was sent. Raises what went wrong on the way."""
        began, pending = time.perf_counter(), self._pending
        self._pending = []
        errors = [error for future in pending if (error := future.exception()) is not None]
        self.waited += time.perf_counter() - began
        for error in errors:
            if isinstance(error, OSError):
                raise RunStopped(
                    f"memory.offload: {self._folder} does not take what leaves memory ({error.strerror or error}); make room"
                    " there, or set memory.offload=none; resume the run"
                ) from None
            raise error

    def measured(self) -> tuple[int, float, float]:
        """Bytes, seconds and seconds waited since the last call."""
        out = self.bytes, self.seconds, self.waited
        self.bytes = 0
        self.seconds = 0.0
        self.waited = 0.0
        return out

    def close(self) -> None:
        """End the thread. What is in host memory stays there; what is in files comes back, or the allocator would hand out their pages
        when the tensors are gone."""
        try:
            self.settle()
            for name in [name for name, away in self._away.items() if isinstance(away, InFile)]:
                self.back(name)
            self.settle()
        finally:
            self._worker.shutdown()

    def _start(self, away: Away, move: Any, undo: Any) -> None:
        def moved() -> None:
            began = time.perf_counter()
            try:
                move()
            except BaseException:
                undo()
                raise
            self.bytes += away.bytes
            self.seconds += time.perf_counter() - began

        self._pending.append(self._worker.submit(moved))


def _storages(groups: Iterable[Named]) -> dict[int, torch.UntypedStorage]:
    """By address."""
    found = (local(tensor).untyped_storage() for group in groups for tensor in group.values())
    return {storage.data_ptr(): storage for storage in found if storage.nbytes()}


def _now(device: torch.device) -> Any:
    """What has been asked of the device so far; None of one that does not run behind."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
