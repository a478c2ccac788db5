"""The clients' side of a front: their connections, the time they have, and the process around it."""

from __future__ import annotations

import asyncio
import gc
import math
import signal
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path

from rollkeel_sandbox.front import UNAUTHORIZED, Drop, Front
from rollkeel_sandbox.groups import load_nodes
from rollkeel_sandbox.http1 import Malformed, Reader
from rollkeel_sandbox.nodes import TICK_S
from rollkeel_sandbox.orders import Answer, refusal
from rollkeel_sandbox.serve import BACKLOG, KEEP_ALIVE_S, MAX_CONNECTIONS, allow_descriptors, default_state, listen
from rollkeel_sandbox.tokens import load_token

HEADERS_S, BODY_S, LINGER_S = 20.0, 120.0, 2.0
"""Seconds within which a request's headers, and its body, must have come; and for which a refused one is read on."""
LARGE = 64 << 10
LATE = refusal(408, f"the request did not come within {BODY_S:g} s", "timeout")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of the command."""

    nodes: str
    host: str = "127.0.0.1"
    port: int = 8786
    token_file: Path | None = None
    node_token_file: Path | None = None
    """None: the nodes have the front's own."""
    max_request_mb: int = 64
    check_s: float = 1.0
    drain_s: float = 10.0


class Gate:
    """All connections."""

    def __init__(self, front: Front, max_body: int) -> None:
        self.front, self.max_body = front, max_body
        self.clients: set[Client] = set()
        self.ending = False

    def tick(self) -> None:
        now = self.front.clock.now
        for client in [c for c in self.clients if c.due <= now]:
            client.late()


class Client(asyncio.Protocol):
    """A connection; its requests are answered one after the other."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._reader = gate, Reader(gate.max_body)
        self._clock = gate.front.clock
        self._drop: Drop | None = None
        self._busy = self._last = self._slow = self._closing = self._admitted = False
        """`_slow`: it does not read its answers; `_closing`: nothing more is read; `_admitted`: the token of this request is right."""
        self.due = self._clock.now + HEADERS_S

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._gate.clients.add(self)
        if len(self._gate.clients) > MAX_CONNECTIONS:
            transport.abort()

    @property
    def waits(self) -> bool:
        """For an answer."""
        return self._busy

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.clients.discard(self)
        if self._drop:
            self._drop()

    def pause_writing(self) -> None:
        self._slow = True

    def resume_writing(self) -> None:
        self._slow = False
        self._advance()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if not self._reader.buffer and not self._reader.head and not self._busy:
            self.due = self._clock.now + HEADERS_S
        self._reader.feed(data)
        if self._busy and len(self._reader.buffer) > LARGE:
            self._transport.pause_reading()
        self._advance()

    def late(self) -> None:
        if self._reader.head and not self._closing:
            self._end(LATE)
        else:
            self._transport.abort()

    def _advance(self) -> None:
        while not (self._busy or self._slow or self._closing):
            try:
                request = self._reader.next()
            except Malformed as error:
                self._end(refusal(error.status, str(error), error.code))
                return
            if request is None:
                self._await_rest()
                return
            self._busy = True
            self._last = request.head.last
            self._admitted = False
            self.due = math.inf
            drop = self._gate.front.handle(request, self._answer)
            if self._busy:
                self._drop = drop

    def _await_rest(self) -> None:
        """Of a request that has begun."""
        head = self._reader.head
        if head and not self._admitted:
            if not self._gate.front.allows(head):  # before its body takes any room
                self._end(UNAUTHORIZED)
                return
            self._admitted, self.due = True, self._clock.now + BODY_S
            if head.headers.get(b"expect", b"").lower() == b"100-continue":
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _answer(self, answer: Answer) -> None:
        self._busy, self._drop = False, None
        last = self._last or self._gate.ending
        self._write(answer, last)
        if last:
            self._transport.close()
            return
        self.due = self._clock.now + (HEADERS_S if self._reader.buffer else KEEP_ALIVE_S)
        self._transport.resume_reading()
        if self._reader.buffer:
            asyncio.get_running_loop().call_soon(self._advance)

    def _end(self, answer: Answer) -> None:
        """Refuse, and read on for a moment: a connection that is closed with something unread takes the answer along."""
        self._closing, self._reader = True, Reader(0)
        self._write(answer, True)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self.due = self._clock.now + LINGER_S

    def _write(self, answer: Answer, last: bool) -> None:
        if not self._transport.is_closing():
            head = _head(answer.status, answer.kind, answer.retry_after_s, last)
            self._transport.write(b"%s%d\r\n\r\n%s" % (head, len(answer.body), answer.body))


@lru_cache(256)
def _head(status: int, kind: bytes, retry_after_s: float | None, last: bool) -> bytes:
    rows = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"content-type: {kind.decode('latin-1')}"]
    rows += ["www-authenticate: Bearer"] if status == 401 else []
    rows += [f"retry-after: {math.ceil(retry_after_s)}"] if retry_after_s is not None else []
    rows += ["connection: close"] if last else []
    return "\r\n".join([*rows, "content-length: "]).encode("latin-1")


def serve(options: Options) -> int:
    """Until a signal. Raises `BadInput` for options that cannot be and an address that is taken."""
    urls, parts = load_nodes(options.nodes)
    with listen(options.host, options.port) as sock:
        port = sock.getsockname()[1]
        token, where = load_token(options.token_file, default_state(port) if options.port else None)
        node_token = load_token(options.node_token_file, None)[0] if options.node_token_file else token

        async def run() -> None:
            front = Front(urls, parts, token, node_token, every_s=options.check_s)
            shown = f"[{options.host}]" if ":" in options.host else options.host
            await front.open()
            up = sum(node.up for node in front.nodes)
            lines = [
                f"sandbox front at http://{shown}:{port}, {up} of {len(front.nodes)} nodes in use",
                f"token: {where}",
            ]
            print("\n".join(lines), flush=True)
            await _serve(front, sock, options)

        allow_descriptors()
        gc.freeze()
        asyncio.run(run())
    return 0


async def _serve(front: Front, sock: object, options: Options) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    gate = Gate(front, options.max_request_mb << 20)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    server = await loop.create_server(lambda: Client(gate), sock=sock, backlog=BACKLOG)  # type: ignore[call-overload]
    while not stop.is_set():
        gate.tick()
        await asyncio.sleep(TICK_S)
    server.close()
    gate.ending, until = True, loop.time() + options.drain_s
    while loop.time() < until and any(client.waits for client in gate.clients):
        await asyncio.sleep(TICK_S)
    for client in list(gate.clients):
        client.late()
    front.close()
