"""A sandbox server in a process of its own, for tests that talk to it, kill it and start it again."""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rollkeel_sandbox import cage

REPOSITORY = Path(__file__).resolve().parent.parent.parent
TOKEN = "a-token-of-the-tests-0123456789"
START_S = 60.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def children(pid: int) -> list[int]:
    """Process ids of the children of all of its threads; none of a process that has ended meanwhile."""
    out: list[int] = []
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except FileNotFoundError:
        return out
    for task in tasks:
        try:
            out += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return out


def at_work(server: int) -> list[int]:
    """Supervisors below a fork server whose job's program has started: it no longer holds the pipe of its orders."""
    out = []
    for supervisor in children(server):
        last = supervisor
        while below := children(last):  # an init stands between in some cages
            last = below[0]
        ordered = not os.path.lexists(f"/proc/{last}/fd/{cage.ORDER_FD}")
        if last != supervisor and ordered and os.path.lexists(f"/proc/{last}/fd/1"):  # not on its way out
            out.append(supervisor)
    return out


class Server:
    """`rollkeel-sandbox serve` at one address, with one state folder over all its lives."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self.words = folder, words
        self.state = folder / "state"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.said: list[str] = []
        token = folder / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        self.start()

    def start(self) -> None:
        """Returns when it listens."""
        command = [sys.executable, "-m", "rollkeel_sandbox", "serve", "--port", str(self.port)]
        command += ["--state", str(self.state), "--token-file", str(self.folder / "token"), *self.words]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0, env=environment, cwd="/")
        assert self.process.stdout is not None
        self.said = []
        while not self.said or not self.said[-1].startswith("state:"):
            assert select.select([self.process.stdout], [], [], START_S)[0], (
                f"the server is silent; it said {self.said}"
            )
            line = self.process.stdout.readline()
            assert line, f"the server ended; it said {self.said}"
            self.said.append(line.decode().strip())

    @property
    def pid(self) -> int:
        return self.process.pid

    def launchers(self) -> list[int]:
        """Of its fork servers."""
        return children(self.pid)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=30)

    def end(self, number: int = signal.SIGTERM) -> int:
        """The exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout=30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()

    def ask(self, method: str, path: str, body: Any = None, *, token: str | None = TOKEN) -> tuple[int, dict[str, Any]]:
        """Status and JSON."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        status, _, text = self.raw(method, path, json.dumps(body).encode() if body is not None else None, headers)
        return status, json.loads(text)

    def raw(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()

    def until(self, wanted: Any, within_s: float = 10.0) -> dict[str, Any]:
        """Metrics, once `wanted` holds of them."""
        until = time.monotonic() + within_s
        while True:
            _, figures = self.ask("GET", "/v1/metrics")
            if wanted(figures):
                return figures
            assert time.monotonic() < until, figures
            time.sleep(0.02)

    def ledger(self) -> list[dict[str, Any]]:
        """All lines of all pieces, whoever wrote them."""
        rows = []
        for path in sorted(self.state.glob("ledger-*.jsonl")):
            rows += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return rows


def ends(rows: list[dict[str, Any]]) -> Counter[str]:
    """How often each id got a result."""
    return Counter(row["id"] for row in rows if row["event"] == "done")
