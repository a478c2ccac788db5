"""HTTP/1.1 cut from a stream of bytes, requests and answers alike, for a process that stands between the two.

Strict: what two readers could understand in two ways is refused, since the one behind must see the request that this one saw.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import NamedTuple

MAX_HEAD = 32 << 10
MAX_LENGTH_DIGITS = 15
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\r(?!\n)|(?<!\r)\n")
_TARGET = re.compile(rb"/[\x21-\x7e]*")
_SIZE = re.compile(rb"[0-9A-Fa-f]{1,8}")
_SINGLE = (b"content-length", b"transfer-encoding", b"host", b"authorization")
CHUNKED = -1


class Malformed(Exception):
    """What came is no message; after the answer the connection is of no use."""

    def __init__(self, message: str, status: int = 400, code: str = "malformed") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Head(NamedTuple):
    """First line and headers (names in lower case) of a message."""

    first: tuple[bytes, bytes, bytes]
    headers: Mapping[bytes, bytes]
    length: int
    """Bytes of the body, or `CHUNKED`."""
    last: bool
    """The connection ends with this message."""


class Message(NamedTuple):
    head: Head
    body: bytes


@functools.lru_cache(1024)  # clients send the same head again and again
def parse(head: bytes) -> Head:
    """Raises `Malformed`."""
    if _CONTROL.search(head):
        raise Malformed("control characters in the headers")
    line, *rest = head.split(b"\r\n")
    first = line.split(b" ", 2)
    answer = first[0].startswith(b"HTTP/")
    version = first[0] if answer else first[-1]
    if len(first) != 3 or version not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise Malformed("the first line is not of HTTP/1.1")
    if answer and not (first[1].isdigit() and len(first[1]) == 3):
        raise Malformed("the status is no number")
    if not answer and not (_NAME.fullmatch(first[0]) and _TARGET.fullmatch(first[1])):
        raise Malformed("method or path of the request cannot be")
    headers: dict[bytes, bytes] = {}
    for row in rest:
        name, colon, value = row.partition(b":")
        name, value = name.lower(), value.strip(b" \t")
        if not colon or not _NAME.fullmatch(name):
            raise Malformed("a header has no proper name")
        if name in headers and name in _SINGLE:
            raise Malformed(f"header {name.decode()} twice")
        headers[name] = headers[name] + b", " + value if name in headers else value
    if not answer and version == b"HTTP/1.1" and b"host" not in headers:
        raise Malformed("no Host header")
    said = headers.get(b"connection", b"").lower()
    last = b"close" in said or (version == b"HTTP/1.0" and b"keep-alive" not in said)
    return Head((first[0], first[1], first[2]), headers, _length(headers), last)


def _length(headers: Mapping[bytes, bytes]) -> int:
    length, coding = headers.get(b"content-length"), headers.get(b"transfer-encoding")
    if coding is not None:
        if length is not None or coding.lower() != b"chunked":
            raise Malformed("Transfer-Encoding: expected chunked, and no Content-Length beside it")
        return CHUNKED
    if length is None:
        return 0
    if not length.isdigit() or len(length) > MAX_LENGTH_DIGITS:
        raise Malformed("Content-Length is no number")
    return int(length)


class Reader:
    """Of one connection: `feed` what came, then ask for `next` until there is none."""

    def __init__(self, max_body: int) -> None:
        self.buffer = bytearray()
        self.head: Head | None = None
        """Of a message whose body is not here in full."""
        self._max_body = max_body
        self._chunks = bytearray()
        self._looked = 0

    def feed(self, data: bytes) -> None:
        self.buffer += data

    def next(self) -> Message | None:
        """A whole message, or None. Raises `Malformed`."""
        if self.head is None and not self._take_head():
            return None
        head, buffer = self.head, self.buffer
        assert head is not None
        if head.length == CHUNKED:
            if not self._take_chunks():
                return None
            body, self._chunks = bytes(self._chunks), bytearray()
        else:
            if len(buffer) < head.length:
                return None
            body = bytes(buffer[: head.length])
            del buffer[: head.length]
        self.head = None
        return Message(head, body)

    def _take_head(self) -> bool:
        end = self.buffer.find(b"\r\n\r\n", self._looked)
        if (end if end >= 0 else len(self.buffer)) > MAX_HEAD:
            raise Malformed(f"the headers are over {MAX_HEAD} bytes", 431, "too_large")
        if end < 0:
            self._looked = max(0, len(self.buffer) - 3)
            return False
        self.head, self._looked = parse(bytes(self.buffer[:end])), 0
        del self.buffer[: end + 4]
        self._bound(self.head.length)
        return True

    def _take_chunks(self) -> bool:
        """True once the last chunk and its trailers are here."""
        buffer, at = self.buffer, 0
        try:
            while (end := buffer.find(b"\r\n", at)) >= 0:
                size = bytes(buffer[at:end]).split(b";", 1)[0].strip(b" \t")
                if not _SIZE.fullmatch(size):
                    raise Malformed("the size of a chunk is no number")
                count = int(size, 16)
                self._bound(len(self._chunks) + count)
                stop = end + 2 + count
                if count == 0 and buffer[stop : stop + 2] != b"\r\n":
                    if len(buffer) >= stop + 2:
                        raise Malformed("trailers after the last chunk")
                    return False
                if len(buffer) < stop + 2:
                    return False
                if buffer[stop : stop + 2] != b"\r\n":
                    raise Malformed("a chunk is not of its size")
                self._chunks += buffer[end + 2 : stop]
                at = stop + 2
                if count == 0:
                    return True
            if len(buffer) - at > MAX_HEAD:
                raise Malformed("the size of a chunk has no end")
            return False
        finally:
            del buffer[:at]

    def _bound(self, size: int) -> None:
        if size > self._max_body:
            said = f"the body is over {self._max_body} bytes; send less or raise --max-request-mb"
            raise Malformed(said, 413, "too_large")
