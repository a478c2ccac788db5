"""The nodes of a front: connections that are kept, what is under way on each, how loaded each is, and whether it is in use."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.parse
from collections.abc import Callable
from typing import Any

from rollkeel_sandbox.circuit import Circuit, State
from rollkeel_sandbox.errors import BadInput
from rollkeel_sandbox.http1 import Malformed, Message, Reader
from rollkeel_sandbox.metrics import Latencies

IDLE_S = 30.0
"""Seconds after which an unused connection is closed, before the node does it in the middle of a request."""
CONNECT_S, TRIAL_S = 3.0, 60.0
MAX_ANSWER = 1 << 30
TICK_S = 0.05
TRIAL = json.dumps({"source": "", "priority": 1000}).encode()
JSON_HEADER = b"content-type: application/json\r\n"
Done = Callable[["Exchange", Message | None], None]


class Clock:
    """Seconds that this process was awake: while it is stopped or starved, nobody else is late."""

    def __init__(self) -> None:
        self.now, self._seen = 0.0, 0.0

    def tick(self, time_s: float) -> None:
        self.now += min(max(0.0, time_s - self._seen), 2 * TICK_S)
        self._seen = time_s


class Exchange:
    """A request to a node; `done` is called once, with the answer or None for a node that broke off or was late."""

    __slots__ = ("data", "done", "due", "link", "node", "over", "sent", "weight")

    def __init__(self, node: Node, data: bytes, done: Done, due: float, weight: int) -> None:
        self.node = node
        self.data = data
        self.done = done
        self.due = due
        self.weight = weight
        self.link: Link | None = None
        self.sent = self.over = False
        """`sent`: the node may have begun with it."""

    def finish(self, answer: Message | None) -> None:
        if self.drop(answer is None):
            self.done(self, answer)

    def drop(self, broken: bool = True) -> bool:
        """Nobody wants the answer any more; False if it is over already. A node ends a job whose connection breaks."""
        if self.over:
            return False
        self.over = True
        self.node.under_way.discard(self)
        self.node.outstanding -= self.weight
        if self.link and broken:
            self.link.exchange = None
            self.link.transport.abort()
        return True


class Link(asyncio.Protocol):
    """A connection to a node, on which one request is under way at a time."""

    def __init__(self, node: Node) -> None:
        self._node, self._reader = node, Reader(MAX_ANSWER)
        self.exchange: Exchange | None = None
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self, exchange: Exchange) -> None:
        self.exchange = exchange
        exchange.link = self
        exchange.sent = True
        self.transport.write(exchange.data)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            answer = self._reader.next()
        except Malformed:
            self.transport.abort()
            return
        if answer is None:
            return
        exchange, self.exchange = self.exchange, None
        if exchange is None or answer.head.last or self._reader.buffer:
            self.transport.close()
        else:
            self.idle_since = self._node.clock.now
            self._node.idle.append(self)
        if exchange:
            exchange.finish(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        with contextlib.suppress(ValueError):
            self._node.idle.remove(self)
        exchange, self.exchange = self.exchange, None
        if exchange:
            exchange.link = None
            self._node.break_off(exchange)


class Node:
    """One `rollkeel-sandbox serve`. `lost` is called when what it was given is gone: isolated, or begun anew."""

    def __init__(self, url: str, token: str, clock: Clock, every_s: float, lost: Callable[[Node], None]) -> None:
        parts = urllib.parse.urlsplit(url)
        try:
            port = parts.port or 80
        except ValueError:
            port = 0
        if parts.scheme != "http" or not parts.hostname or not port or parts.path.strip("/"):
            raise BadInput(f"sandbox node: expected an address like http://10.0.0.1:8787, got {url[:200]!r}")
        self.url = f"http://{parts.netloc}"
        self._host = parts.hostname
        self._port = port
        self._common = f" HTTP/1.1\r\nhost: {parts.netloc}\r\nauthorization: Bearer {token}\r\n".encode()
        self.clock, self._lost = clock, lost
        self.circuit = Circuit(every_s)
        self.idle: list[Link] = []
        self.under_way: set[Exchange] = set()
        self.outstanding = self.sent = self.failed = self.life = 0
        self.sessions: set[str] = set()
        self.suspect = False
        self.taking = True
        self.full_until = 0.0
        self.hurry = asyncio.Event()
        self.workers = 1
        self.room = 0
        self.foreign = 0
        self.level = "none"
        """As it reports: workers, places (with its queue), jobs of others than this front, isolation."""
        self.abilities: dict[str, Any] = {}
        self.partitions: frozenset[str] = frozenset()
        self.latency = Latencies()
        self._started: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def up(self) -> bool:
        return self.circuit.state is State.CLOSED

    @property
    def load(self) -> float:
        return (self.outstanding + self.foreign) / self.workers

    def ask(
        self,
        method: str,
        target: str,
        body: bytes,
        done: Done,
        *,
        allowed_s: float,
        weight: int = 0,
        headers: bytes = JSON_HEADER,
    ) -> Exchange:
        """Send a request. `weight`: jobs in it."""
        head = f"{method} {target}".encode() + self._common + headers
        data = b"%scontent-length: %d\r\n\r\n%s" % (head, len(body), body)
        exchange = Exchange(self, data, done, self.clock.now + allowed_s, weight)
        self.under_way.add(exchange)
        self.outstanding += weight
        self.sent += weight
        if self.idle:
            self.idle.pop().send(exchange)
        else:
            task = asyncio.get_running_loop().create_task(self._connect(exchange))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return exchange

    def break_off(self, exchange: Exchange) -> None:
        """Its connection is no more, or never was."""
        self.suspect = True
        self.failed += exchange.weight
        if exchange.weight:
            self.hurry.set()
        exchange.finish(None)

    async def get(self, target: str, allowed_s: float, method: str = "GET", body: bytes = b"") -> tuple[int, Any]:
        """Status and JSON; status 0 for none in time, -1 for a node that cannot be reached."""
        future: asyncio.Future[Message | None] = asyncio.get_running_loop().create_future()

        def done(exchange: Exchange, answer: Message | None) -> None:
            if not future.done():
                future.set_result(answer)

        exchange = self.ask(method, target, body, done, allowed_s=allowed_s)
        answer = await future
        if answer is None:
            return (0 if exchange.sent else -1), None
        try:
            return int(answer.head.first[1]), json.loads(answer.body)
        except ValueError:
            return 0, None

    async def watch(self) -> None:
        """Check it for ever; in a hurry when a connection broke."""
        while True:
            await self.check()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.circuit.pause_s):
                    await self.hurry.wait()
            self.hurry.clear()

    async def check(self) -> None:
        """One check, and what follows from it."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        status, health = await self.get("/v1/health", self.circuit.deadline_s)
        if status not in (200, 503) or not self._hears(health):
            if self.circuit.missed(gone=status < 0):
                self._isolate()
            return
        self.taking = status == 200
        self.circuit.answered(loop.time() - began)
        if not self.up and self.taking and await self._proves():
            self.circuit.proved()
        self.suspect = False

    def tick(self) -> None:
        """What is late has failed; what was not used for long is closed."""
        now = self.clock.now
        for exchange in [e for e in self.under_way if e.due <= now]:
            self.failed += exchange.weight
            exchange.finish(None)
        for link in [link for link in self.idle if link.idle_since + IDLE_S <= now]:
            self.idle.remove(link)
            link.transport.close()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for link in self.idle[:]:
            link.transport.abort()

    def _hears(self, health: Any) -> bool:
        """Its own figures; False for what are none. One that was started anew has lost what it was given."""
        try:
            rows, started = health["partitions"].values(), health["started"]
            self.workers = sum(row["workers"] for row in rows) or 1
            self.foreign = max(0, sum(row["queued"] + row["running"] for row in rows) - self.outstanding)
        except (KeyError, TypeError, AttributeError):
            return False
        if self._started not in (None, started):
            self._isolate()
        self._started = started
        return True

    async def _proves(self) -> bool:
        """What it can do is known, and it runs a job."""
        status, abilities = await self.get("/v1/capabilities", self.circuit.deadline_s)
        if status != 200 or not isinstance(abilities, dict):
            return False
        status, _ = await self.get("/v1/run", TRIAL_S, "POST", TRIAL)
        if status not in (200, 403, 429):
            return False
        try:
            self.partitions = frozenset(row["name"] for row in abilities["partitions"])
            self.room = sum(row["workers"] + row["queue"] for row in abilities["partitions"])
            self.abilities, self.level = abilities, abilities["level"]
        except (KeyError, TypeError):
            return False
        return True

    def _isolate(self) -> None:
        self.life += 1
        self.sessions.clear()
        for link in self.idle[:]:
            link.transport.abort()
        for exchange in list(self.under_way):
            self.failed += exchange.weight
            exchange.finish(None)
        self._lost(self)

    async def _connect(self, exchange: Exchange) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                _, link = await asyncio.get_running_loop().create_connection(lambda: Link(self), self._host, self._port)
        except OSError:  # TimeoutError is one
            self.break_off(exchange)
            return
        if exchange.over:
            link.transport.abort()
        else:
            link.send(exchange)
