"""A sandbox that is elsewhere: `RemoteSandbox.run` is `Sandbox.run` over HTTP, and outlives a restart of the server.

Every job gets an id that nothing else has. If the connection breaks, the same job is sent again under the same id: the server answers
with the result it has under it, waits for the run that is under way, or runs the job because it surely has no result.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
import urllib.parse
import uuid
from collections.abc import Mapping
from typing import Any

from rollkeel_sandbox.client import CageFailure
from rollkeel_sandbox.codec import decode_result, encode_job
from rollkeel_sandbox.errors import BadInput, RunStopped
from rollkeel_sandbox.job import Closes, Job, Level, Refused, Result, Status
from rollkeel_sandbox.tokens import TOKEN_VARIABLE

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
SLACK_S = 60.0
"""Beyond what a job may take at most, after which a silent server counts as hung and is asked again."""
RUNS = 2
TAKEN_S, MAX_BREAKS = 1.0, 20
"""A connection that broke later than this had a server behind it; a job that outlives this many of them may be what ends them."""


class RemoteSandbox(Closes):
    """Jobs run by `rollkeel-sandbox serve`; `run` may be called from any number of threads.

    `token`: of the server, or of the environment. `patience_s`: how long a job may be without a server that takes it, before
    `run` raises. `queue_s`: how long it may wait in the server's queue at a time. All jobs are untrusted there.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        partition: str | None = None,
        priority: int = 0,
        patience_s: float = 300.0,
        queue_s: float = 300.0,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise BadInput(f"sandbox: expected an address like http://127.0.0.1:8787, got {url!r}")
        token = token or os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise BadInput(f"sandbox: the server wants its token; pass token= or set {TOKEN_VARIABLE}")
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._placed = {"partition": partition, "priority": priority, "queue_s": queue_s}
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []

    def run(self, job: Job, *, id: str | None = None) -> Result:
        """Run one job and wait for its end. `id`: gives the result of a former call with this id and job, if it is still known.

        Raises `CageFailure` when the server can build no cage, `RunStopped` when no server took the job for `patience_s` seconds or it
        was cancelled, `BadInput` for a job or token that the server rejects.
        """
        body = encode_job(job) | self._placed | {"id": id or uuid.uuid4().hex}
        queue_s = self._placed["queue_s"]
        assert isinstance(queue_s, float | int)
        deadline_s = queue_s + RUNS * (job.limits.wall_s + SLACK_S)
        status, answer = self._ask_until_taken("POST", "/v1/run", body, deadline_s)
        if status == 200:
            return decode_result(answer)
        if status == 403:
            return Result(status=Status.REFUSED, reason=answer["error"], attempts=0)
        raise self._error(status, answer)

    def capabilities(self) -> dict[str, Any]:
        """Level, layers, kinds, partitions of the server."""
        status, answer = self._ask_until_taken("GET", "/v1/capabilities", None, SLACK_S)
        if status != 200:
            raise self._error(status, answer)
        return dict(answer)

    @property
    def level(self) -> Level:
        return Level[self.capabilities()["level"].upper()]

    def require(self) -> None:
        """Raise `Refused` if jobs would be."""
        found = self.capabilities()
        if Level[found["level"].upper()] < Level[found["minimum"].upper()]:
            raise Refused(f"sandbox: the server asks for {found['minimum']}, its machine gives {found['level']}")

    def close(self) -> None:
        """Close idle connections; calls that are under way go on."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _ask_until_taken(
        self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float
    ) -> tuple[int, Mapping[str, Any]]:
        """The answer, once it is neither a broken connection nor "not now": after those the job surely has no result yet."""
        data = json.dumps(body).encode() if body is not None else None
        pause, breaks = FIRST_PAUSE_S, 0
        trouble: float | None = None  # since when nobody takes it
        while True:
            asked, wait = time.monotonic(), 0.0
            try:
                status, answer = self._ask(method, path, data, deadline_s)
                if status not in (429, 503):
                    return status, answer
                why, wait = str(answer.get("error", status)), float(answer.get("retry_after_s", 0.0))
                if answer.get("code") == "broken":
                    raise self._error(status, answer)
                trouble = asked if trouble is None else trouble
            except (OSError, http.client.HTTPException, ValueError) as error:
                why, now = f"{type(error).__name__}: {error}", time.monotonic()
                if trouble is None or now - asked > TAKEN_S:
                    trouble, breaks = now, breaks + 1
            if time.monotonic() - trouble > self._patience_s or breaks > MAX_BREAKS:
                said = f"no server at {self._host} took the job for {self._patience_s:g} s, or all broke off"
                raise RunStopped(f"sandbox: {said} ({why})")
            time.sleep(max(pause, min(wait, LONGEST_PAUSE_S)))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _ask(self, method: str, path: str, data: bytes | None, deadline_s: float) -> tuple[int, Mapping[str, Any]]:
        connection = self._connection(deadline_s)
        try:
            connection.request(method, path, data, self._headers)
            response = connection.getresponse()
            text = response.read()
        except BaseException:
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            with self._lock:
                self._idle.append(connection)
        return response.status, json.loads(text)

    def _connection(self, deadline_s: float) -> http.client.HTTPConnection:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
            connection = kind(self._host, self._port)
        connection.timeout = deadline_s
        if connection.sock:
            connection.sock.settimeout(deadline_s)
        return connection

    def _error(self, status: int, answer: Mapping[str, Any]) -> Exception:
        message = str(answer.get("error", f"HTTP {status}"))
        if status == 503:
            return CageFailure(message)
        if status == 410:
            return RunStopped(message)
        return BadInput(f"sandbox server at {self._host}: {message}")
