"""The life of one server behind `ServedEngine`: start, weights, proof, restart. Everything here runs on its event loop.

A server serves known weights or none: tokens are asked for between a proof and the next loss of the server. `epoch` counts
proven lives, so that of many streams that break together the first one starts it again and the others find that done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollkeel.config import EngineConfig
from rollkeel.engines.backend import Backend, Refused, ServerSettings
from rollkeel.engines.boxes import Answers, Boxes
from rollkeel.engines.same_device import lent, place, share_of
from rollkeel.engines.server import RESTARTS, START_SHARE, ServerProcess, free_port
from rollkeel.engines.weight_folder import write_weights
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.models.checksum import tensor_checksum
from rollkeel.types import FloatArray, WeightUpdate

READY_POLL_S = 0.1
SETTLE_S = 1.0
"""A server that is well this long after a broken stream is believed."""
CONTROL_S = 120.0
"""Longest answer to pause, resume, abort."""
SAME_SERVER = 0.05
"""Largest mean |gap| of the probes before and after a restart from the same files; wrong reloads were 0.3 to 0.7 off."""


@dataclass
class Weights:
    """What the server has to serve."""

    update: WeightUpdate
    folder: Path
    """Where `write` puts them."""
    number: int
    """Publications up to it."""
    probes: Sequence[Sequence[int]] = ()
    scores: list[np.ndarray] = field(default_factory=list)
    """Log-probs of `probes` as they were accepted after publication."""

    @property
    def version(self) -> int:
        return self.update.version

    @property
    def checksum(self) -> int:
        return self.update.checksum

    def intact(self) -> bool:
        """Whether they can still be written: the trainer may have changed its tensors since."""
        return self.folder.exists() or all(tensor_checksum(s.name, s.tensor) == s.checksum for s in self.update.slices)

    def write(self, hf_config: Any) -> None:
        """Write the folder, unless it is there. Raises `EngineFailure` if the tensors are no longer those of the update."""
        if not self.folder.exists():
            write_weights(self.update, hf_config, self.folder)


class Keeper:
    """Starts, feeds and restarts the server of `backend`; `settings` tells how, but for model, port and share of the device."""

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        settings: ServerSettings,
        hf_config: Any,
        planned: int,
        scratch: Path,
        log: Path | None,
    ) -> None:
        """`planned`: bytes of `settings.device` that training holds while the server serves."""
        self._backend = backend
        self._config = config
        self._settings = settings
        self._hf_config = hf_config
        self._planned = planned
        self._place = ""
        self._log, self._scratch = log or scratch / "server.log", scratch
        self._client = client_library()
        self._process: ServerProcess | None = None
        self._restarts = 0
        self.http: Any = None
        self.lock = asyncio.Lock()
        """Held while the server starts, or its weights change."""
        self.epoch = 0
        self.weights: Weights | None = None
        self.asleep = False
        self.boxes = Boxes(backend.name, config.dtype, config.deadline_s)
        self.awaits = False
        """Whether the server was lost with weights that are nowhere any more: it starts again with the next ones."""

    @property
    def owned(self) -> bool:
        """Whether the server is ours to start and to kill."""
        return self._config.server.url is None

    @property
    def pid(self) -> int | None:
        """Leader of the server's process group; None where it is not ours."""
        return None if self._process is None else self._process.pid

    def failure(self, error: Exception) -> EngineFailure:
        """`error` of a request as the engine's own: `Refused` if the request is at fault."""
        if isinstance(error, EngineFailure):
            return error
        status = getattr(getattr(error, "response", None), "status_code", 500)
        message = " ".join(str(error).split()) or type(error).__name__
        return (Refused if 400 <= status < 500 else EngineFailure)(f"engine {self._backend.name}: {message[:300]}")

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What talking to a server may raise."""
        return (EngineFailure, self._client.HTTPError, self._client.StreamError, TimeoutError)

    def fruitful(self) -> None:
        """A request finished: restarts are counted anew."""
        self._restarts = 0

    def lends(self, update: WeightUpdate) -> bool:
        """Whether the living server takes `update` by handles."""
        return self._process is not None and self._process.alive and self._place != "" and self._place == place(update)

    def needs_folder(self, update: WeightUpdate) -> bool:
        """Whether it takes `update` neither by handles nor by plan."""
        fills = self._process is not None and self._process.alive and self.boxes.takes(update)
        return not fills and not self.lends(update)

    async def sleep(self) -> bool:
        """Have the server give its device away until the next weights; True if it did. The caller holds `lock`."""
        if not self._settings.sleeps or self._process is None or not self._process.alive:
            return False
        self.asleep = True
        try:
            await self._timed(self._backend.sleep(self.http), CONTROL_S, "to sleep")
        except self.errors:
            self.kill()  # so is its memory free; it is started again with the next weights
        return True

    async def publish(self, weights: Weights, keep_kv: bool) -> int:
        """Make the server serve `weights`, starting it if need be; it decodes again when this returns the checksum that the
        server computed. The caller holds `lock`."""
        self.weights, self.awaits = weights, False
        if self.http is not None and (self._process is None or self._process.alive):
            try:
                return await self._load(weights, keep_kv)
            except Refused:
                raise
            except self.errors as error:
                if not self.owned:
                    raise self.failure(error) from None
                self.kill()
                return await self._again(weights, str(error))
        if self.http is None:
            try:
                return await self._life(weights)
            except Refused:
                raise
            except self.errors as error:
                if not self.owned:  # it was given its time
                    raise self.failure(error) from None
                return await self._again(weights, str(self.failure(error)))
        return await self._again(weights, self._ended())

    async def recover(self, epoch: int, why: str) -> None:
        """After a loss in life `epoch`: find the server well, or start it again with its weights, proven."""
        async with self.lock:
            if self.epoch != epoch or self.weights is None:
                return
            if self.owned and await self._well():
                return
            if self.boxes.takes(self.weights.update) and not await asyncio.to_thread(self.weights.intact):
                self.kill()
                self.awaits = True
                return
            checksum = await self._again(self.weights, f"{why}; {await self._last_words()}")
            await self._prove(self.weights, checksum)

    async def score(
        self, sequences: Sequence[Sequence[int]], version: int, recover: Callable[[int, str], Awaitable[None]]
    ) -> list[FloatArray]:
        """Log-probs of its weights, which are `version`; a server started again is proven by them. `recover` after a loss."""
        weights = self.weights
        assert weights is not None
        places = asyncio.Semaphore(self._config.slots)

        async def one(ids: Sequence[int]) -> FloatArray:
            async with places:
                return await self._backend.score(self.http, ids)

        again = False
        while True:
            epoch = self.epoch
            try:
                scores = await asyncio.gather(*(one(ids) for ids in sequences))
                break
            except Refused:
                raise
            except self.errors as error:
                await recover(epoch, str(self.failure(error)))
                if self.epoch == epoch and again:
                    raise self.failure(error) from None
                again = self.epoch == epoch  # it is well: a connection that it closed was in use
        if any(not np.isfinite(row).all() for row in scores):
            raise EngineFailure(f"engine {self._backend.name}: a log-prob under version {version} is not finite")
        weights.probes, weights.scores = list(sequences), list(scores)
        return list(scores)

    def kill(self) -> None:
        """End a server of ours at once."""
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        if self.http is not None:
            await self.http.aclose()
        if self._process is not None:
            await asyncio.to_thread(self._process.close)
        self.boxes.close()

    async def _again(self, weights: Weights, why: str) -> int:
        """New lives until one serves `weights`. Raises `EngineFailure` after `RESTARTS` of them."""
        name, limit = self._backend.name, RESTARTS if self.owned else 1
        while self._restarts < limit:
            self._restarts += 1
            self.kill()
            try:
                return await self._life(weights)
            except self.errors as error:
                why = str(self.failure(error))
        self.kill()
        raise EngineFailure(
            f"engine {name}: the server was lost, and {limit} restarts in a row without a finished"
            f" request did not help: {why}"
        )

    async def _life(self, weights: Weights) -> int:
        """Start (or find) the server and give it `weights`."""
        await asyncio.to_thread(weights.write, self._hf_config)
        if self.http is not None:
            await self.http.aclose()
        self.asleep, self._place = False, ""
        url = self._config.server.url
        if url is None:
            port, device = free_port(), self._settings.device
            share = share_of(self._config, device, self._planned, weights.update, self._settings.sleeps)
            settings = replace(self._settings, model=weights.folder, port=port, share=share)
            command, environment = self._backend.command(settings)
            self._process = ServerProcess(command, environment, self._log, self._scratch)
            url = f"http://127.0.0.1:{port}"
        limits = self._client.Limits(max_connections=None, max_keepalive_connections=self._config.slots)
        timeout = self._client.Timeout(self._config.deadline_s, connect=10.0, pool=None)
        self.http = self._client.AsyncClient(base_url=url.rstrip("/"), limits=limits, timeout=timeout, trust_env=False)
        await self._until_ready(url, self._config.deadline_s * (START_SHARE if self.owned else 1.0))
        if self._settings.sleeps:
            self._place = await self._timed(self._backend.place(self.http), CONTROL_S, "to name its device")
        by_plan = self.owned and not self._settings.sleeps
        if by_plan:
            await self._timed(self.boxes.prepare(self._ask), CONTROL_S, "to prepare its memory")
        checksum = await self._load(weights, keep_kv=False)
        if by_plan and checksum == weights.checksum:
            await self._timed(self.boxes.look(self._ask, weights.update), self._config.deadline_s, "to read its memory")
        return checksum

    async def _ask(self, what: str, message: str) -> Answers:
        return await self._backend.workers(self.http, what, message)

    async def _until_ready(self, url: str, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while not await self._healthy():
            if self._process is not None and not self._process.alive:
                raise EngineFailure(self._ended())
            if time.monotonic() > end:
                output = f"; it said: {self._process.tail()}" if self._process is not None else ""
                self.kill()
                key = "half of engine.deadline_s" if self.owned else "engine.deadline_s"
                raise EngineFailure(
                    f"engine {self._backend.name}: waited {limit_s:g} s ({key}) for {url} to be ready{output}"
                )
            await asyncio.sleep(READY_POLL_S)

    async def _healthy(self) -> bool:
        try:
            return await asyncio.wait_for(self._backend.ready(self.http), 10.0)
        except self.errors:
            return False

    async def _well(self) -> bool:
        """Whether only a stream broke. A server that has lost its engine says for a moment that it is well."""
        if self._process is None or not await self._healthy():
            return False
        await asyncio.sleep(SETTLE_S)
        return self._process.alive and await self._healthy()

    async def _last_words(self) -> str:
        """The last output of a lost server. Its guard notices an end an instant later than a broken stream does."""
        end = time.monotonic() + 1.0
        while self._process is not None and self._process.alive and time.monotonic() < end:
            await asyncio.sleep(READY_POLL_S / 10)
        return self._ended() if self._process is None or not self._process.alive else "it lives and does not answer"

    def _ended(self) -> str:
        output = self._process.tail() if self._process is not None else "it does not answer"
        return f"engine {self._backend.name}: the server ended: {output}"

    async def _load(self, weights: Weights, keep_kv: bool) -> int:
        if self.asleep:
            torch.cuda.empty_cache()  # what training left of the device is the server's now
            await self._timed(self._backend.wake(self.http, "weights"), CONTROL_S, "to wake")
        else:
            await self._timed(self._backend.pause(self.http, keep_kv), CONTROL_S, "to pause")
        if not weights.folder.exists() and self.boxes.takes(weights.update):
            filling = self._backend.fill(self.http, weights.version, lambda: self.boxes.fill(self._ask, weights.update))
            await self._timed(filling, self._config.deadline_s, "to take weights")
            checksum = weights.checksum
        else:
            by_handles = not weights.folder.exists() and self.lends(weights.update)
            with lent(weights.update, weights.number) if by_handles else nullcontext(weights.folder) as source:
                loading = self._backend.load(self.http, source, weights.version)
                checksum = await self._timed(loading, self._config.deadline_s, "to load weights")
        if self.asleep:
            await self._timed(self._backend.wake(self.http, "kv_cache"), CONTROL_S, "to wake")
            self.asleep = False
        await self._timed(self._backend.resume(self.http), CONTROL_S, "to resume")
        self.epoch += 1
        return checksum

    async def _timed(self, answer: Any, limit_s: float, what: str) -> Any:
        try:
            return await asyncio.wait_for(answer, limit_s)
        except TimeoutError:
            raise EngineFailure(f"engine {self._backend.name}: waited {limit_s:g} s for the server {what}") from None

    async def _prove(self, weights: Weights, checksum: int) -> None:
        """A restarted server must be the one that was accepted: same bytes, same probes."""
        if checksum != weights.checksum:
            raise EngineFailure(
                f"engine {self._backend.name}: restarted with weights of checksum {checksum:016x}, version"
                f" {weights.version} has {weights.checksum:016x}"
            )
        for ids, before in zip(weights.probes, weights.scores, strict=True):
            now = await self._timed(self._backend.score(self.http, ids), self._config.deadline_s, "to score a probe")
            gap = float(np.abs(now - before).mean())
            if not gap <= SAME_SERVER:
                raise EngineFailure(
                    f"engine {self._backend.name}: restarted, but its log-probs of version {weights.version} are {gap:.3g}"
                    f" off those before, expected at most {SAME_SERVER}"
                )


def client_library() -> Any:
    """The HTTP library. Raises `BadInput` if it is not installed."""
    try:
        import httpx2
    except ImportError:
        raise BadInput("engine.kind=vllm: needs httpx2; install rollkeel[vllm]") from None
    return httpx2
