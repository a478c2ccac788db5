"""Messages between the caller and a cage: a header and byte strings, on a stream socket, with a deadline."""

from __future__ import annotations

import _socket
import json
import marshal
import os
import select
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

MAX_HEADER = 1 << 22
_LENGTHS = struct.Struct("=IQ")


class Codec(NamedTuple):
    """How a header becomes bytes and comes back."""

    dumps: Callable[[Any], bytes]
    loads: Callable[[bytes], Any]


PLAIN = Codec(lambda value: json.dumps(value).encode(), json.loads)
TRUSTED = Codec(marshal.dumps, marshal.loads)
"""Between this Python and a supervisor, which trust each other: in a fresh process a third of what JSON costs. What a job
wrote is in the byte strings alone."""


class Closed(Exception):
    """The other side is gone."""


class Late(Exception):
    """The other side did not answer by the deadline."""


class Mangled(Exception):
    """What came is no message, or larger than any message can be."""


class Pipes:
    """Two pipes as one channel."""

    def __init__(self, reading: int, writing: int) -> None:
        self._in, self._out = reading, writing
        self._timeout_s: float | None = None

    def settimeout(self, seconds: float | None) -> None:
        self._timeout_s = seconds

    def recv(self, size: int) -> bytes:
        if not select.select([self._in], [], [], self._timeout_s)[0]:
            raise TimeoutError
        return os.read(self._in, size)

    def sendall(self, data: bytes) -> None:
        write_all(self._out, data)


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def send(
    sock: _socket.socket | Pipes, header: dict[str, Any], blobs: Sequence[bytes] = (), *, codec: Codec = PLAIN
) -> None:
    head = codec.dumps((header, [len(b) for b in blobs]))
    try:
        sock.sendall(b"".join((_LENGTHS.pack(len(head), sum(map(len, blobs))), head, *blobs)))
    except (BrokenPipeError, ConnectionResetError):
        raise Closed from None
    except TimeoutError:
        raise Late from None


def receive(
    sock: _socket.socket | Pipes, *, timeout_s: float | None, limit: int, codec: Codec = PLAIN
) -> tuple[dict[str, Any], list[bytes]]:
    """Next message, whole. `limit`: most bytes of all byte strings together."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    head_size, body_size = _LENGTHS.unpack(_exactly(sock, _LENGTHS.size, deadline))
    if head_size > MAX_HEADER or body_size > limit:
        raise Mangled(f"a message of {head_size} + {body_size} bytes")
    whole = _exactly(sock, head_size + body_size, deadline)
    header, sizes = codec.loads(whole[:head_size])
    if sum(sizes) != body_size:
        raise Mangled("lengths that do not add up")
    blobs, at = [], head_size
    for size in sizes:
        blobs.append(whole[at : at + size])
        at += size
    return header, blobs


def _exactly(sock: _socket.socket | Pipes, size: int, deadline: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Late
            sock.settimeout(left)
        try:
            part = sock.recv(min(size - len(parts), 1 << 20))
        except TimeoutError:
            raise Late from None
        except ConnectionResetError:
            raise Closed from None
        if not part:
            raise Closed
        parts += part
    return bytes(parts)
