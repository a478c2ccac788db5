"""A front and its nodes, each a process of its own, for tests that kill and freeze them."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service_host import REPOSITORY, TOKEN, free_port

START_S = 60.0


def spawn(*words: str, errors: Path | None = None) -> tuple[subprocess.Popen[str], str]:
    """A process, and the address in the first line that it prints; what it complains of goes to `errors`."""
    command = [sys.executable, "-m", *words]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with open(errors or os.devnull, "ab") as complaints:
        said = complaints if errors else None
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, text=True, env=environment, cwd=REPOSITORY
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "http://" in line, line
    return process, "http://" + line.split("http://")[1].split()[0].rstrip(",")


class Stub:
    """A node whose jobs cost nothing, at one address over all its lives."""

    def __init__(self, folder: Path, number: int, *words: str) -> None:
        self.port = free_port()
        self.log = folder / f"runs-{number}"
        self._words = ("benchmarks.sandbox_stub", "--port", str(self.port), "--log", str(self.log), *words)
        self.start()

    def start(self) -> None:
        self.process, self.url = spawn(*self._words)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def runs(self) -> list[str]:
        """Ids of the jobs that it began, over all its lives."""
        return [line.split()[0] for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def close(self) -> None:
        self.thaw()
        self.kill()


class Front:
    """`rollkeel-sandbox front` over these nodes."""

    def __init__(self, folder: Path, nodes: str, *words: str) -> None:
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(TOKEN)
        command = ("front", "--nodes", nodes, "--port", "0", "--token-file", str(token), "--check", "0.2")
        self.errors = folder / "front-errors"
        self.process, self.url = spawn("rollkeel_sandbox", *command, *words, errors=self.errors)
        self.port = int(self.url.rsplit(":", 1)[1])

    def ask(self, method: str, path: str, body: Any = None, *, token: str = TOKEN) -> tuple[int, Any]:
        """Status and JSON, or text where it is none."""
        data = json.dumps(body).encode() if body is not None else None
        status, headers, text = self.raw(method, path, data, {"Authorization": f"Bearer {token}"})
        return status, text.decode() if headers["content-type"].startswith("text/plain") else json.loads(text)

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

    def until(self, wanted: Callable[[dict[str, Any]], bool], within_s: float = 20.0) -> dict[str, Any]:
        """Figures, once `wanted` holds of them."""
        until = time.monotonic() + within_s
        while True:
            figures = self.ask("GET", "/v1/metrics")[1]
            if wanted(figures):
                return figures
            assert time.monotonic() < until, figures
            time.sleep(0.02)

    def up(self, count: int) -> dict[str, Any]:
        """Figures, once so many nodes are in use."""
        return self.until(lambda f: sum(node["up"] for node in f["nodes"].values()) == count)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
