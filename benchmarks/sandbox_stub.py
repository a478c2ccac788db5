"""A node of a sandbox front whose jobs cost nothing: it speaks like `rollkeel-sandbox serve` and runs nothing.

    python -m benchmarks.sandbox_stub --port 9001 --log runs.txt     # one line per job that it begins

An answer to a job holds its standard input and a number that no other run has, so that a second result of a job would be seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import time
from typing import Any

from rollkeel_sandbox.codec import encode_result
from rollkeel_sandbox.http1 import Malformed, Message, Reader
from rollkeel_sandbox.job import Level, Limits, Result, Status

DONE = encode_result(Result(status=Status.OK, exit_code=0, level=Level.NAMESPACES, attempts=1))
ABOUT: dict[str, Any] = {
    "level": "namespaces",
    "minimum": "namespaces",
    "layers": {},
    "kinds": {"python": {"runs": True, "how": "not at all"}},
    "preloads": ["code"],
    "terminals": True,
}


class Connection(asyncio.Protocol):
    def __init__(self, stub: Stub) -> None:
        self._stub, self._reader = stub, Reader(1 << 26)
        self.gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while request := self._reader.next():
                self._stub.answer(self, request)
        except Malformed:
            self._transport.close()

    def send(self, body: bytes, status: int = 200) -> None:
        if not self.gone:
            head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            self._transport.write(head.encode() + body)


class Stub:
    """`delay_s`: of each job; `workers` of them at a time would be honest, and no queue is kept."""

    def __init__(self, workers: int, queue: int, delay_s: float, log: str, partition: str = "default") -> None:
        self._workers, self._queue, self._delay_s, self._partition = workers, queue, delay_s, partition
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if log else -1
        self._running = self._count = 0
        self._begun = time.time()
        self._fixed = b"" if log or delay_s else json.dumps(DONE).encode()
        self._sessions: set[str] = set()

    def answer(self, link: Connection, request: Message) -> None:
        path = request.head.first[1].decode().partition("?")[0]
        if path == "/v1/run":
            if self._fixed:
                link.send(self._fixed)
            else:
                self._run(link, json.loads(request.body))
        elif path == "/v1/health":
            row = {"queued": 0, "running": self._running, "workers": self._workers}
            said = {"ok": True, "partitions": {self._partition: row}, "started": self._begun}
            link.send(json.dumps(said).encode())
        elif path == "/v1/capabilities":
            row = {"name": self._partition, "workers": self._workers, "queue": self._queue, "limits": vars(Limits())}
            link.send(json.dumps(ABOUT | {"partitions": [row]}).encode())
        elif path == "/v1/jobs":
            asked = json.loads(request.body)
            self._note(asked)
            link.send(json.dumps({"id": asked["id"], "state": "queued", "result": None, "error": ""}).encode(), 202)
        elif path == "/v1/terminals":
            name = f"{os.getpid()}-{len(self._sessions)}"
            self._sessions.add(name)
            link.send(json.dumps({"id": name}).encode(), 201)
        elif path.endswith("/exec") and path.split("/")[3] in self._sessions:
            link.send(json.dumps(DONE | {"stdout": f"{os.getpid()}\n", "alive": True}).encode())
        else:
            link.send(json.dumps({"error": "stub: nothing is there", "code": "unknown"}).encode(), 404)

    def _note(self, asked: dict[str, Any]) -> None:
        self._count += 1
        if self._log >= 0 and "id" in asked:
            os.write(self._log, f"{asked['id']} {os.getpid()}\n".encode())

    def _run(self, link: Connection, asked: dict[str, Any]) -> None:
        if self._running >= self._workers + self._queue:
            link.send(json.dumps({"error": "stub: full", "code": "full", "retry_after_s": 0.1}).encode(), 429)
            return
        self._note(asked)
        self._running += 1
        text = f"{asked.get('stdin', '')} {os.getpid()}-{self._count}\n"

        def done() -> None:
            self._running -= 1
            link.send(json.dumps(DONE | {"stdout": text}).encode())

        asyncio.get_running_loop().call_later(self._delay_s, done)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--queue", type=int, default=1000)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds of each job")
    parser.add_argument("--log", default="")
    parser.add_argument("--partition", default="default")
    options = parser.parse_args()
    stub = Stub(options.workers, options.queue, options.delay, options.log, options.partition)
    sock = socket.create_server(("127.0.0.1", options.port))
    server = await asyncio.get_running_loop().create_server(lambda: Connection(stub), sock=sock)
    print(f"http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
