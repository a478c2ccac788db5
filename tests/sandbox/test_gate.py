"""What reaches the front comes from programs that may be wrong or hostile: no request may break it, hold it up, or be read in two ways.

Sent over plain sockets, as no client library would send most of it. Not covered: floods from many machines.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from front_host import Front, Stub
from service_host import TOKEN

from rollkeel_sandbox import front as fronts
from rollkeel_sandbox import gate
from rollkeel_sandbox.http1 import Malformed, Message, Reader

KEY = f"Authorization: Bearer {TOKEN}\r\n".encode()
START = b"POST /v1/run HTTP/1.1\r\nHost: x\r\n" + KEY


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("gate")
    node = Stub(folder, 0)
    made = Front(folder, node.url, "--max-request-mb", "1")
    yield made
    made.close()
    node.close()


def whole(data: bytes) -> list[Message]:
    reader = Reader(1 << 20)
    reader.feed(data)
    return list(iter(reader.next, None))


def parted(data: bytes) -> list[Message]:
    reader, out = Reader(1 << 20), []
    for i in range(len(data)):
        reader.feed(data[i : i + 1])
        out += list(iter(reader.next, None))
    return out


@pytest.mark.parametrize("cut", [whole, parted])
def test_messages_are_cut_where_they_end(cut: object) -> None:
    assert callable(cut)
    chunked = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: Chunked\r\n\r\n3;a=b\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    plain = b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nX: 1\r\nX: 2\r\n\r\nxyz"
    answer = b"HTTP/1.1 200 All fine\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    found = cut(chunked + plain + answer + b"GET")
    assert [message.body for message in found] == [b"abcde", b"xyz", b""]
    assert found[1].head.headers[b"x"] == b"1, 2"
    assert [message.head.last for message in found] == [False, False, True]


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1",
        b"GET / HTTP/1.1\r\nHost: x\r\nHost: y",
        b"GET  / HTTP/1.1\r\nHost: x",
        b"GET / HTTP/2.0\r\nHost: x",
        b"GET /\x00 HTTP/1.1\r\nHost: x",
        b"GET http://a/ HTTP/1.1\r\nHost: x",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: +1",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked",
        b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked",
        b"GET / HTTP/1.1\r\nHost: x\r\n folded: 1",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length : 1",
        b"GET / HTTP/1.1\r\nHost: x\nContent-Length: 1",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: b\rc",
        b"G\xe9T / HTTP/1.1\r\nHost: x",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: 1\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n200000\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999",
        b"POST / HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 40_000,
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(head: bytes) -> None:
    for cut in (whole, parted):
        with pytest.raises(Malformed):
            cut(head + b"\r\n\r\n")


def exchange(port: int, data: bytes, *, end: bool, slow: bool = False) -> tuple[list[int], bytes]:
    """Statuses of the answers until the server closes, falls silent after one, or 5 s are over; and what came in all."""
    got = b""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        try:
            for piece in [data[i : i + 7] for i in range(0, len(data), 7)] if slow else [data]:
                client.sendall(piece)
            if end:
                client.shutdown(socket.SHUT_WR)
            while piece := client.recv(1 << 16):
                got += piece
                if not end:
                    client.settimeout(0.05)
        except ConnectionError:
            pass
        except TimeoutError:
            assert got or not end, f"neither an answer nor an end for {data[:200]!r}"
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", got)], got


def made(rng: random.Random) -> bytes:
    """A request, right or wrong in one of many ways."""
    bodies = [b"{}", b"[]", b'{"source": "1"}', b'{"source":', b"\xff\xfe", b"[" * 5000, b'{"source": "1", "id": 5}',
              b'{"source": "1", "id": "a b"}', b'{"source": "1", "partition": "\\ud800"}', b'{"source": "1", "partition": []}',
              b'{"jobs": 5}', b'{"jobs": [1, {"id": {}}]}', b'{"source": "", "limits": {"wall_s": NaN}, "queue_s": -Infinity}',
              b'{"limits": [], "kind": {}, "cases": {}}', b'{"a": ' + b"9" * 5000 + b"}", b'{"timeout_s": "x"}', b"null", b""]  # fmt: skip
    paths = [b"/v1/run", b"/v1/jobs", b"/v1/batch", b"/v1/tests", b"/v1/terminals", b"/v1/terminals/x/exec", b"/v1/terminals/x",
             b"/v1/jobs/x", b"/v1/jobs/x?wait_s=0", b"/v1/jobs/%00", b"/v1/jobs/", b"/mcp", b"/metrics", b"/v1/health", b"/v1/capabilities",
             b"/openapi.json", b"/v1/metrics", b"/", b"/../v1/run", b"/v1/run/", b"//", b"/v1/jobs/" + b"x" * 200]  # fmt: skip
    method = rng.choice(
        [b"GET", b"POST", b"POST", b"POST", b"DELETE", b"PUT", b"HEAD", b"OPTIONS", b"CONNECT", b"\x00"]
    )
    body = rng.choice(bodies)
    head = rng.choice(paths).join([method + b" ", b" HTTP/1.1\r\nHost: x\r\n"])
    head += rng.choice([KEY, KEY, KEY, KEY, b"", b"Authorization: Bearer \xff\r\n", KEY + KEY])
    length = len(body) + rng.choice([0, 0, 0, 0, -1, 5])
    head += rng.choice([b"Content-Length: %d\r\n" % length] * 6 + [b"", b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n", b"A: " + b"b" * 33_000 + b"\r\n"])  # fmt: skip
    data = bytearray(head + b"\r\n" + body)
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    if rng.random() < 0.1:
        del data[rng.randrange(len(data)) :]
    return bytes(data) * rng.choice([1, 1, 1, 2])


def test_ten_thousand_requests_and_none_breaks_it(front: Front) -> None:
    rng, seen = random.Random(0), Counter[int]()
    for number in range(10_000):
        statuses, got = exchange(front.port, made(rng), end=True, slow=number % 50 == 0)
        seen.update(statuses or [0])
        assert not got or got.startswith(b"HTTP/1.1 "), got
    assert all(status < 500 for status in seen), seen
    assert {200, 400, 401, 404, 405, 422, 431} <= seen.keys()
    assert seen[400] > 500
    assert front.ask("GET", "/v1/health")[0] == 200
    assert front.errors.read_text() == "", "what it did not expect closes the connection, and is told here"


def test_large_bodies_are_refused_before_they_come(front: Front) -> None:
    statuses, got = exchange(front.port, START + b"Content-Length: 2000000\r\n\r\n" + b" " * 300_000, end=False)
    assert statuses == [413]
    assert b"over 1048576 bytes" in got
    statuses, _ = exchange(front.port, START.replace(KEY, b"") + b"Content-Length: 1000000\r\n\r\n{", end=False)
    assert statuses == [401]
    source = json.dumps({"source": "x" * 900_000}).encode()
    expects = START + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(source)
    with socket.create_connection(("127.0.0.1", front.port), timeout=5) as client:
        client.sendall(expects)
        assert client.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(source)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_requests_sent_ahead_are_answered_in_order(front: Front) -> None:
    bodies = [json.dumps({"source": "", "stdin": str(i)}).encode() for i in range(100)]
    data = b"".join(START + b"Content-Length: %d\r\n\r\n" % len(body) + body for body in bodies)
    with socket.create_connection(("127.0.0.1", front.port), timeout=5) as client:
        client.sendall(data)
        reader, answers = Reader(1 << 20), []
        while len(answers) < 100:
            reader.feed(client.recv(1 << 16))
            answers += list(iter(reader.next, None))
    assert [json.loads(answer.body)["stdout"].split()[0] for answer in answers] == [str(i) for i in range(100)]


@pytest.mark.parametrize(
    ("sent", "answer"),
    [(b"", b""), (b"POST / HT", b""), (START, b""), (START + b"Content-Length: 2\r\n\r\n{", b"408")],
    ids=["nothing", "half a line", "half of the headers", "half a body"],
)
def test_a_request_that_does_not_come_to_its_end_is_cut_off(
    sent: bytes, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HEADERS_S", "BODY_S"):
        monkeypatch.setattr(gate, name, 0.4)

    async def ask() -> tuple[bytes, float]:
        front = fronts.Front(["http://127.0.0.1:9"], [], TOKEN, TOKEN)
        await front.open()
        made = gate.Gate(front, 1 << 20)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: gate.Client(made), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        began = time.monotonic()
        writer.write(sent)
        future = asyncio.ensure_future(reader.read(1 << 16))
        while not future.done() and time.monotonic() < began + 5:
            made.tick()
            await asyncio.sleep(0.02)
        took = time.monotonic() - began
        writer.close()
        server.close()
        front.close()
        try:
            return await future, took
        except ConnectionError:
            return b"", took

    got, took = asyncio.run(ask())
    assert got[9:12] == answer
    assert took >= 0.35
