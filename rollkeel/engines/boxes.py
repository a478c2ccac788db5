"""Weights into the memory of a server's processes: boxes of them, by way of memory that both map, without a folder.

    trainer: plan ─▶ bucket ─▶ slot of a ring ─▶ call ─▶ each worker: written and proven in what its kernels read
                                     two slots: one is filled while the other is taken

A server that we start on this host is asked once in its life where it has its weights (`vllm_memory`), and believed if what it reads there
is what it was started with.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from rollkeel.engines.intake import Room
from rollkeel.engines.shared_memory import AVAILABLE, Ring
from rollkeel.errors import EngineFailure
from rollkeel.models.checksum import MASK, pitches_of
from rollkeel.models.numerics import held_checksum
from rollkeel.types import WeightSlice, WeightUpdate

SLOTS = 2
Answers = list[dict[str, str]]
"""Of each process of a server, in the order of ranks."""
Ask = Callable[[str, str], Awaitable[Answers]]
"""Has every process of a server do something: a method of `vllm_worker.Publication`, and what it is given."""


class Feed(Protocol):
    """Cuts an update into the boxes that each process of a server needs, and sends them. `sync.sending.WholeFeed` is one."""

    bucket_bytes: int
    """Most of a bucket."""

    def __call__(
        self, update: WeightUpdate, rooms: Sequence[Mapping[str, Room]], mode: str, carrier: Calls
    ) -> Sequence[int]:
        """Returns the sum of checksums of what each process got."""
        ...


class Boxes:
    """This way to one server, over all of its lives."""

    def __init__(self, name: str, mode: str, deadline_s: float) -> None:
        """`name`: of the engine; `mode`: `engine.dtype`; `deadline_s`: longest wait for a bucket to be taken."""
        self._name = name
        self._mode = mode
        self._deadline_s = deadline_s
        self._ring: Ring | None = None
        self._attempt = 0
        self._rooms: list[dict[str, Room]] = []
        """Of each process of the living server; none where it takes folders."""
        self.feed: Feed | None = None
        self.objection = "nobody feeds it"
        """Why weights go by folder; empty where they do not."""
        self._refused = ""

    async def prepare(self, ask: Ask) -> None:
        """Before a server that was just started loads its first weights."""
        self._rooms, self.objection = [], self._refused
        if self.feed is None:
            self.objection = "nobody feeds it"
        elif not AVAILABLE:
            self.objection = "processes share no memory here"
        if not self.objection:
            await self._tried(self._all(ask, "rollkeel_stay_plain", ""))

    async def look(self, ask: Ask, update: WeightUpdate) -> None:
        """When it has loaded `update`: ask where, and see whether it is there."""
        if not self.objection:
            await self._tried(self._look(ask, update))

    async def _tried(self, step: Awaitable[Any]) -> None:
        try:
            await step
        except (OSError, EngineFailure) as error:
            self.objection = str(error)

    async def _look(self, ask: Ask, update: WeightUpdate) -> None:
        from rollkeel.engines.vllm_memory import rooms_of_words

        answers = await self._all(ask, "rollkeel_rooms", self._mode)
        rooms = [rooms_of_words(answer["rooms"]) for answer in answers]
        by_name = {piece.name: piece for piece in update.slices}
        if apart := set(by_name) ^ set().union(*rooms):
            raise EngineFailure(f"only one of trainer and server has a weight named {min(apart)}")
        for rank, (answer, held) in enumerate(zip(answers, rooms, strict=True)):
            if int(answer["checksum"]) != await asyncio.to_thread(self._expected, by_name, held):
                raise EngineFailure(f"process {rank} has other weights in memory than it loaded")
        assert self.feed is not None
        self._ring = self._ring or Ring(self.feed.bucket_bytes, SLOTS)
        await self._all(ask, "rollkeel_boxes", json.dumps(["open", {"path": self._ring.path}]))
        self._rooms = rooms

    def takes(self, update: WeightUpdate) -> bool:
        """Whether the living server takes `update` this way."""
        fed = self.feed is not None and bool(self._rooms)
        return fed and update.kind == "full" and not any(piece.offset for piece in update.slices)

    async def fill(self, ask: Ask, update: WeightUpdate) -> None:
        """Write all weights of `update`. Raises `EngineFailure` for a process that did not prove all that it has to have; from then on
        weights go by folder."""
        try:
            await self._fill(ask, update)
        except EngineFailure as error:
            self._refused = str(error)
            raise

    async def _fill(self, ask: Ask, update: WeightUpdate) -> None:
        feed, ring = self.feed, self._ring
        assert feed is not None
        assert ring is not None
        self._attempt += 1
        head = {"attempt": self._attempt, "version": update.version, "mode": self._mode}
        await self._all(ask, "rollkeel_boxes", json.dumps(["begin", head]))
        loop = asyncio.get_running_loop()

        def told(message: str) -> Future[Answers]:
            return asyncio.run_coroutine_threadsafe(self._all(ask, "rollkeel_boxes", message), loop)

        calls = Calls(told, ring, self._attempt, self._deadline_s, f"weight update {update.version}")
        sums = await asyncio.to_thread(feed, update, self._rooms, self._mode, calls)
        asked = {"attempt": self._attempt, "sums": [f"{total:x}" for total in sums]}
        proven = await self._all(ask, "rollkeel_boxes", json.dumps(["finish", asked]))
        if [int(answer["checksum"]) for answer in proven] != list(sums):
            raise EngineFailure(f"weight update {update.version}: processes proved {proven}, expected {asked['sums']}")

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def _expected(self, by_name: Mapping[str, WeightSlice], held: Mapping[str, Room]) -> int:
        """Checksum of what a process with these rooms must have."""
        total = 0
        for name, room in held.items():
            whole, pitches = by_name[name].tensor, pitches_of(room.shape)
            if tuple(whole.shape) != room.shape:
                raise EngineFailure(f"{name} is {list(room.shape)} in the server, {list(whole.shape)} in the trainer")
            box = whole[tuple(map(slice, room.starts, room.stops))]
            offset = sum(a * p for a, p in zip(room.starts, pitches, strict=True))
            total += held_checksum(name, box, self._mode, offset, pitches)
        return total & MASK

    async def _all(self, ask: Ask, what: str, message: str) -> Answers:
        answers = await ask(what, message)
        if errors := [answer["error"] for answer in answers if "error" in answer]:
            raise EngineFailure(f"engine {self._name}: {errors[0]}")
        if not answers:
            raise EngineFailure(f"engine {self._name}: no process answered {what}")
        return answers


class Calls:
    """A `rollkeel.sync.sending.Carrier` to the processes of one server, used from another thread than its event loop. One call is under
    way at a time, so that buckets arrive in order."""

    def __init__(
        self, tell: Callable[[str], Future[Answers]], ring: Ring, attempt: int, deadline_s: float, said: str
    ) -> None:
        self._tell = tell
        self._ring = ring
        self._attempt = attempt
        self._deadline_s, self._said = deadline_s, said
        self._under_way: Future[Answers] | None = None

    def put(self, bucket: Sequence[WeightSlice], to: Sequence[int]) -> None:
        start = self._ring.put(bucket).start
        rows = [[s.name, _dtype(s), list(s.tensor.shape), f"{s.checksum:x}", list(s.starts), s.rounded] for s in bucket]
        self.flush()
        asked = {"attempt": self._attempt, "start": start, "to": list(to), "slices": rows}
        self._under_way = self._tell(json.dumps(["take", asked]))

    def flush(self) -> None:
        call, self._under_way = self._under_way, None
        if call is None:
            return
        try:
            call.result(self._deadline_s)
        except TimeoutError:
            call.cancel()
            raise EngineFailure(f"{self._said}: waited {self._deadline_s:g} s for the server to take weights") from None


def _dtype(piece: WeightSlice) -> Any:
    return str(piece.tensor.dtype).removeprefix("torch.")
