"""What every request must pass before anything reads it: the token, the size, the time it may take to arrive.

Plain ASGI around the whole application, so that no route, mounted or added later, can be reached without it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollkeel_sandbox.errors import BadInput

MAX_BODY_BYTES = 64 << 20
BODY_S = 120.0
"""Seconds within which a request's body must have come."""
DISCARD_BYTES, DISCARD_S = 1 << 28, 10.0
TOKEN_VARIABLE = "ROLLKEEL_SANDBOX_TOKEN"
SHORTEST_TOKEN = 16


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
        self._wanted = token.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if not self._known(headers):
            await _discard(receive)
            message = "expected the header 'Authorization: Bearer TOKEN' with this server's token"
            await _refuse(send, 401, message, "unauthorized", {"www-authenticate": "Bearer"})
            return
        said = [value for name, value in headers if name == b"content-length"]
        if any(value.isdigit() and int(value[:20]) > self._max_bytes for value in said):
            await self._too_large(receive, send)
            return
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return
                    body += message.get("body", b"")
                    if len(body) > self._max_bytes:
                        await self._too_large(receive, send)
                        return
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            await _refuse(send, 408, f"the body did not come within {BODY_S:g} s", "timeout")
            return
        await self._app(scope, _again(bytes(body), receive), send)

    def _known(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._wanted)

    async def _too_large(self, receive: Any, send: Any) -> None:
        await _discard(receive)
        message = f"the body is over {self._max_bytes} bytes; send less or raise --max-request-mb"
        await _refuse(send, 413, message, "too_large")


async def _discard(receive: Any) -> None:
    """Read what is still coming, within reason: most clients look at no answer before they have sent everything."""
    left = DISCARD_BYTES
    try:
        async with asyncio.timeout(DISCARD_S):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _again(body: bytes, receive: Any) -> Any:
    """A body that was read, then what comes after it."""
    given = False

    async def replay() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _refuse(send: Any, status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> None:
    """The connection is closed after it, as the body may not have come to its end."""
    body = error_body(message, code)
    common = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    pairs = [(k.encode(), v.encode()) for k, v in (common | dict(headers or {})).items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
