"""What every request must pass before anything reads it: the token, the size, the time it may take to arrive.

Plain ASGI around the whole application, so that no route, mounted or added later, can be reached without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from rollkeel_sandbox.errors import BadInput

MAX_BODY_BYTES = 64 << 20
BODY_S = 120.0
"""Seconds within which a request's body must have come."""
DISCARD_BYTES, DISCARD_S = 1 << 28, 10.0
TOKEN_VARIABLE = "ROLLKEEL_SANDBOX_TOKEN"
SHORTEST_TOKEN = 16
Refusal = tuple[int, str, str]
"""Status, a word for programs, a line for people."""


def load_token(file: Path | None, folder: Path | None) -> tuple[str, str]:
    """The token, and where it is in words: of `file`, of the environment, or of `folder`, where it is made once.

    Raises `BadInput` for a file that is missing, open to others or too short.
    """
    if file is None and (given := os.environ.get(TOKEN_VARIABLE)):
        return _checked(given.strip(), f"the environment ({TOKEN_VARIABLE})"), f"in the environment ({TOKEN_VARIABLE})"
    made = (folder / "token") if folder else None
    path = file or made
    if path and path.exists():
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise BadInput(f"{path}: it holds a token and others may read it; chmod 600 it")
        return _checked(path.read_text(encoding="utf-8").strip(), str(path)), f"in {path}"
    if file:
        raise BadInput(f"{file}: no such file; write a token of at least {SHORTEST_TOKEN} characters into it")
    token = secrets.token_urlsafe(32)
    if made is None:
        return token, f"{token} (made for this run, shown once)"
    try:
        made.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as out:
            out.write(token + "\n")
    except OSError as error:
        raise BadInput(f"sandbox: state folder {folder}: {error.strerror}; name another with --state") from None
    return token, f"{token} (shown once; kept in {made})"


def _checked(token: str, where: str) -> str:
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise BadInput(
            f"{where}: expected a token of at least {SHORTEST_TOKEN} printable ASCII characters without spaces"
        )
    return token


def error_body(message: str, code: str, **more: Any) -> bytes:
    """One line of JSON."""
    return json.dumps({"error": " ".join(message.split()), "code": code, **more}).encode()


class Guard:
    """Around an ASGI application: answers itself what may not pass."""

    def __init__(self, app: Any, token: str, *, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app, self._max_bytes = app, max_bytes
        self._token = token.encode()
        self._too_large = 413, "too_large", f"the body is over {max_bytes} bytes; send less or raise --max-request-mb"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        request, body = Request(scope, receive), bytearray()
        try:
            refusal = self._wrong(request.headers) or await self._read(request, body)
        except ClientDisconnect:
            return
        if refusal is None:
            await self._app(scope, _again(bytes(body), receive), send)
            return
        status, code, message = refusal
        if status != 408:
            await _discard(request)
        # The connection is closed after it, as the body may not have come to its end.
        headers = {"connection": "close"} | ({"www-authenticate": "Bearer"} if status == 401 else {})
        await Response(error_body(message, code), status, headers, "application/json")(scope, receive, send)

    def _wrong(self, headers: Headers) -> Refusal | None:
        given = headers.getlist("authorization")
        scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode("latin-1"), self._token):
            return 401, "unauthorized", "expected the header 'Authorization: Bearer TOKEN' with this server's token"
        length = headers.get("content-length", "")
        return self._too_large if length.isdecimal() and int(length[:20]) > self._max_bytes else None

    async def _read(self, request: Request, body: bytearray) -> Refusal | None:
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    body += part
                    if len(body) > self._max_bytes:
                        return self._too_large
        except TimeoutError:
            return 408, "timeout", f"the body did not come within {BODY_S:g} s"
        return None


async def _discard(request: Request) -> None:
    """Read what is still coming, within reason: most clients look at no answer before they have sent everything."""
    left = DISCARD_BYTES
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(DISCARD_S):
            async for part in request.stream():
                left -= len(part)
                if left <= 0:
                    return


def _again(body: bytes, receive: Any) -> Any:
    """A body that was read, then what comes after it."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replay() -> Any:
        return next(messages, None) or await receive()

    return replay
