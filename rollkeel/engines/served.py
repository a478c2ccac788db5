"""An inference server behind the engine protocol: any `Backend`, one server, many concurrent streams.

    caller ── submit, poll, interrupt ──▶ flights ── at most `slots` streams ──▶ server
       │                                     │ ◀── token, log-prob; end, or loss ──┘
       └── weights ──▶ boxes or folder ──▶ keeper: pause ▸ load ▸ resume, proof; restart after a loss, streams go on from their prefixes

One background thread runs an event loop; flights and the server are touched there alone. Public methods hand over and wait;
one caller at a time. After a publication no stream starts before the caller's next `submit` or `poll`, so that probes are
scored before anything is sampled. Random numbers are the server's own, from a seed per request and stay: reproducible as far
as the server is, which for batched arithmetic means not bit for bit.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rollkeel.config import EngineConfig
from rollkeel.engines.backend import Backend, Generation, Refused, ServerSettings
from rollkeel.engines.background import Background
from rollkeel.engines.flights import Flight
from rollkeel.engines.keeper import CONTROL_S, Keeper, Weights
from rollkeel.engines.requests import check_requests, longest, room
from rollkeel.engines.server import RESTARTS, SILENCE_SHARE, START_SHARE
from rollkeel.engines.weight_folder import scratch_folder
from rollkeel.errors import BadInput, EngineFailure, RollkeelError
from rollkeel.types import Capabilities, FloatArray, IntArray, Proof, Request, Segment, Status, TokenSpan, WeightUpdate

LAND_S = 30.0
"""Longest time for streams to end after an abort; then they are cut."""
ABORT_EVERY_S = 0.5
WATCH_S = 0.5
STEP_S = 0.5
"""Longest wait for a chunk, so that the caller can look at Ctrl-C."""


class ServedEngine:
    """Implements `ProbedEngine` and `SteppedEngine` of `rollkeel.protocols`. The server starts with the first weights."""

    def __init__(
        self,
        hf_config: Any,
        config: EngineConfig,
        backend: Backend,
        *,
        device: str = "cpu",
        max_length: int | None = None,
        python: str = "python",
        log_path: Path | None = None,
        planned: int = 0,
        sleeps: bool = False,
    ) -> None:
        """`python` has the server installed; `log_path` gets the server's output (default: a file in the scratch folder);
        `planned`: bytes of `device` that training holds beside the server; `sleeps`: whether the server can `rest`."""
        text = hf_config.get_text_config()
        length = longest(hf_config, config, max_length)
        self._hf_config, self._config = hf_config, config
        self._backend = backend
        self._vocab_size = int(text.vocab_size)
        self._capabilities = Capabilities(
            name=backend.name,
            dtype=config.dtype,
            max_length=length,
            returns_experts=backend.returns_experts(config, hf_config),
            returns_topk=backend.returns_topk,
        )
        self._version = -1
        self._scratch = scratch_folder()

        more = {"python": python, "device": device, "threads": torch.get_num_threads(), "sleeps": sleeps}
        settings = ServerSettings.of(config, max_length=length, **more)
        self._keeper = Keeper(backend, config, settings, hf_config, planned, self._scratch, log_path)
        self.boxes = self._keeper.boxes
        self._silence_s = SILENCE_SHARE * config.deadline_s
        self._changed = threading.Condition()
        self._flying: set[int] = set()
        self._done: list[Segment] = []
        self._broken: RollkeelError | None = None
        self._closed = False
        self._waiting: deque[Flight] = deque()
        self._running: dict[Flight, asyncio.Task[None]] = {}
        self._open = self._held = False
        self._landing = False
        self._stays = self._publications = self._chunks = 0
        self._heard = time.monotonic()
        self._behind = Background(backend.name, self._break)
        self._behind.call(lambda: self._behind.job(self._watch()))
        atexit.register(self.close)

    @property
    def version(self) -> int:
        return self._version

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def server_pid(self) -> int | None:
        """Leader of the server's process group, None before the first weights and for a server that is not ours."""
        return self._keeper.pid

    def submit(self, requests: Sequence[Request]) -> None:
        self._check_sound()
        check_requests(requests, self._flying, self._capabilities, self._vocab_size)
        for request in requests:
            if complaint := self._backend.objection(request.sampling):
                raise BadInput(f"request {request.id}: {complaint}")
        flights = []
        for request in requests:
            left = room(request, 0, self._capabilities.max_length)
            if left <= 0:
                with self._changed:
                    self._done.append(Segment(request_id=request.id, span=TokenSpan.empty(), status=Status.LENGTH))
            else:
                flights.append(Flight(request, left))
        with self._changed:
            self._flying |= {flight.request.id for flight in flights}
        self._behind.call(self._release, flights)

    def poll(self, timeout_s: float) -> list[Segment]:
        return self._ended(timeout_s, math.inf)

    def advance(self, steps: int) -> list[Segment]:
        """See `SteppedEngine.advance`; a step here is a chunk of any stream. Returns as soon as something ended."""
        return sorted(self._ended(STEP_S, self._chunks + steps), key=lambda segment: segment.request_id)

    def progress(self) -> dict[int, int]:
        """Response tokens that each request in flight has so far, its prefix included, by id: fewer than before where a lost
        stream had brought tokens of weights that nobody vouches for."""
        flights = [*list(self._waiting), *list(self._running)]
        return {f.request.id: len(f.request.prefix) + len(f.tokens) for f in flights}

    def _ended(self, timeout_s: float, chunks: float) -> list[Segment]:
        """What ended, waited for until streams have brought so many `chunks`."""
        self._check_sound()
        if self._flying and self._version < 0 and not self._keeper.awaits:
            raise EngineFailure(f"engine {self._backend.name}: no proven weights to serve; publish weights first")
        self._behind.call(self._release, [])
        with self._changed:
            self._changed.wait_for(
                lambda: self._done or self._broken or not self._flying or self._chunks >= chunks, timeout_s
            )
            done, self._done = self._done, []
        if not done:
            self._check_sound()
        return done

    def interrupt(self, ids: Sequence[int] | None = None) -> None:
        self._check_sound()
        limit_s = LAND_S + self._config.deadline_s
        self._behind.wait(self._interrupt(None if ids is None else set(ids)), limit_s, "to interrupt")

    def update_weights(self, update: WeightUpdate) -> Proof:
        """Make the server serve the weights, by boxes, handles or a folder, see `Keeper.publish`."""
        self._check_sound()
        self._publications += 1
        weights = Weights(update, self._scratch / f"weights-{self._publications}", self._publications)
        if self._keeper.needs_folder(update):
            weights.write(self._hf_config)
        lives = (RESTARTS + 1) * (1 + START_SHARE) * self._config.deadline_s
        checksum = self._behind.wait(self._publish(weights), LAND_S + 2 * lives, "to serve new weights")
        return Proof(version=update.version, checksum=checksum)

    def rest(self) -> None:
        """See `RestingEngine.rest`: a server that can sleep gives its device away."""
        self._check_sound()
        if self._flying:
            count, name = len(self._flying), self._backend.name
            raise EngineFailure(f"engine {name}: {count} requests are in flight, it cannot rest")
        self._behind.wait(self._rest(), LAND_S + CONTROL_S, "to rest")

    def score(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        """See `ProbedEngine.score`. What was scored last is scored again when the server had to be restarted."""
        self._check_sound()
        for ids in sequences:
            if not 2 <= len(ids) < self._capabilities.max_length or int(max(ids)) >= self._vocab_size or min(ids) < 0:
                raise BadInput(
                    f"score: expected 2 … {self._capabilities.max_length - 1} token ids below {self._vocab_size}, got {len(ids)}"
                )
        wanted = [[int(i) for i in ids] for ids in sequences]
        return self._behind.wait(self._score(wanted), self._config.deadline_s * (1 + RESTARTS), "to score")

    def close(self) -> None:
        """End the server and whatever is in flight. May be called twice."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        with contextlib.suppress(EngineFailure):
            self._behind.wait(self._close(), 30.0, "to close")
        self._keeper.kill()
        self._behind.stop()
        shutil.rmtree(self._scratch, ignore_errors=True)

    # -- between the caller and the loop -------------------------------------------------------------------------------

    def _check_sound(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._closed:
            raise EngineFailure(f"engine {self._backend.name}: it is closed")

    def _emit(self, flight: Flight, status: Status, detail: str = "") -> None:
        segment = Segment(request_id=flight.request.id, span=flight.span(), status=status, detail=detail)
        with self._changed:
            self._flying.discard(flight.request.id)
            self._done.append(segment)
            self._changed.notify_all()

    def _break(self, error: BaseException) -> None:
        """The engine stops: the caller's next call raises the first such `error`."""
        known = error if isinstance(error, RollkeelError) else EngineFailure(f"engine {self._backend.name}: {error!r}")
        with self._changed:
            self._broken = self._broken or known
            self._changed.notify_all()

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def _release(self, flights: Sequence[Flight]) -> None:
        self._waiting.extend(flights)
        self._held = False
        self._pump()

    def _pump(self) -> None:
        """Start streams for as many waiting flights as there are slots."""
        while self._open and not (self._held or self._landing) and self._waiting:
            if len(self._running) >= self._config.slots:
                return
            if not self._running:
                self._heard = time.monotonic()
            flight = self._waiting.popleft()
            self._running[flight] = self._behind.job(self._stay(flight))

    async def _stay(self, flight: Flight) -> None:
        """One stream, from its begin to what follows from its end."""
        self._stays += 1
        wanted = flight.wanted(f"{id(self):x}-{flight.request.id}-{self._stays}", self._version)
        epoch, before, starts, why = self._keeper.epoch, len(flight.tokens), (), "a stream was cut short"
        finish = word = ""
        try:
            word, starts = await self._receive(flight, wanted)
            finish = word
        except Refused as error:
            del self._running[flight]
            self._emit(flight, Status.ENGINE_FAILURE, str(error))
            self._pump()
            return
        except asyncio.CancelledError:
            if self._closed:
                raise
            finish = "abort"  # it did not end in time after an abort: cut here, with what it delivered
        except self._keeper.errors as error:
            why = str(self._keeper.failure(error))
        del self._running[flight]
        if not word and not self._keeper.owned:
            flight.cut(before)  # nobody vouches for the weights of a server that we cannot watch
        elif doubt := flight.settle(starts, self._version):
            finish, why = "", doubt
        if len(flight.tokens) > before:
            flight.fruitless = 0
        elif not self._landing:
            flight.fruitless_since = flight.fruitless_since if flight.fruitless else time.monotonic()
            flight.fruitless += 1
        self._land(flight, finish, epoch, why)
        self._pump()

    async def _receive(self, flight: Flight, wanted: Generation) -> tuple[str, Sequence[tuple[int, int]]]:
        """Take a stream's chunks. Returns the server's word at its end; empty when the stream ended without one."""
        async with contextlib.aclosing(self._backend.generate(self._keeper.http, wanted)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                self._heard = time.monotonic()
                flight.take(chunk, self._version, self._vocab_size)
                with self._changed:
                    self._chunks += 1
                    self._changed.notify_all()
                if chunk.finish:
                    return chunk.finish, chunk.version_starts
        return "", ()

    def _land(self, flight: Flight, finish: str, epoch: int, why: str) -> None:
        """Hand out a flight whose stream ended, or queue it again."""
        status = flight.status(finish if finish in ("stop", "length") else flight.ended())
        if status is not None:
            self._keeper.fruitful()
            self._emit(flight, status)
        elif flight.interrupted:
            self._emit(flight, Status.INTERRUPTED)
        elif finish in ("stop", "length"):
            ended = f"the server ended it with {finish!r} after {len(flight.tokens)} of {flight.room} tokens"
            self._emit(flight, Status.ENGINE_FAILURE, f"{ended}, but its last token is no stop token")
        elif flight.given_up(self._silence_s):
            self._emit(flight, Status.ENGINE_FAILURE, f"{flight.fruitless} streams in a row brought no token: {why}")
        else:
            self._waiting.appendleft(flight)
            if not finish:
                self._open = False
                self._behind.job(self._recover(epoch, why))

    async def _recover(self, epoch: int, why: str) -> None:
        await self._keeper.recover(epoch, why)
        self._version = -1 if self._keeper.awaits else self._version
        if not self._keeper.lock.locked() and self._version >= 0:
            self._heard = time.monotonic()
            self._open = True
            self._pump()

    async def _watch(self) -> None:
        """Kill a server of ours that streams nothing while it should."""
        limit = self._silence_s
        while True:
            await asyncio.sleep(min(WATCH_S, limit / 4))
            silent = time.monotonic() - self._heard
            if self._running and self._open and silent > limit:
                self._heard = time.monotonic()
                self._open = False
                if self._keeper.owned:
                    self._keeper.kill()
                    continue
                for task in list(self._running.values()):
                    task.cancel()
                why = f"no token for {silent:.0f} s (a fifth of engine.deadline_s)"
                self._behind.job(self._recover(self._keeper.epoch, why))

    async def _down(self, flights: Callable[[], list[Flight]]) -> None:
        """Abort `flights()` until their streams have ended; cut those that do not."""
        end = time.monotonic() + LAND_S
        while (left := flights()) and time.monotonic() < end:
            with contextlib.suppress(*self._keeper.errors):
                keys = [flight.key for flight in left if flight.key]
                await asyncio.wait_for(self._backend.abort(self._keeper.http, keys), ABORT_EVERY_S * 4)
            if tasks := [self._running[flight] for flight in flights()]:
                await asyncio.wait(tasks, timeout=ABORT_EVERY_S)
        tasks = [self._running[flight] for flight in flights()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _interrupt(self, ids: set[int] | None) -> None:
        mine = [f for f in (*self._running, *self._waiting) if ids is None or f.request.id in ids]
        for flight in mine:
            flight.interrupted = True
        for flight in [f for f in self._waiting if f.interrupted]:
            self._waiting.remove(flight)
            self._emit(flight, Status.INTERRUPTED)
        await self._down(lambda: [f for f in self._running if f.interrupted])

    async def _publish(self, weights: Weights) -> int:
        keep = self._config.kv == "keep"
        self._landing = True
        try:
            if not keep:
                await self._down(lambda: list(self._running))
            async with self._keeper.lock:
                for flight in self._running:
                    flight.certain = len(flight.tokens) if flight.certain is None else flight.certain
                before, self._version = self._keeper.weights, -1 if not keep else self._version
                self._open, self._held = False, True
                checksum = await self._keeper.publish(weights, keep)
                if before is not None:
                    shutil.rmtree(before.folder, ignore_errors=True)
            good = checksum == weights.checksum
            self._version = weights.version if good else -1
            self._heard = time.monotonic()
            self._open = good
            return checksum
        except BaseException as error:
            self._version = -1  # nobody knows what it serves
            if isinstance(error, self._keeper.errors):
                raise self._keeper.failure(error) from None
            raise
        finally:
            self._landing = False

    async def _rest(self) -> None:
        async with self._keeper.lock:
            if await self._keeper.sleep():
                self._version, self._open = -1, False

    async def _score(self, sequences: Sequence[Sequence[int]]) -> list[FloatArray]:
        if self._version < 0 or self._keeper.weights is None:
            raise EngineFailure(f"engine {self._backend.name}: no proven weights to score with; publish weights first")
        return await self._keeper.score(sequences, self._version, self._recover)

    async def _close(self) -> None:
        self._open = False
        await self._behind.cancel_all()
        await self._keeper.close()
