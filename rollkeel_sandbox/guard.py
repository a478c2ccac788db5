"""What every request must pass before anything reads it: the token, the size, the time it may take to arrive.

Plain ASGI around the whole application, so that no route, mounted or added later, can be reached without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from rollkeel_sandbox.tokens import error_body

MAX_BODY_BYTES = 64 << 20
BODY_S = 120.0
"""Seconds within which a request's body must have come."""
DISCARD_BYTES, DISCARD_S = 1 << 28, 10.0
Refusal = tuple[int, str, str]
"""Status, a word for programs, a line for people."""


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
