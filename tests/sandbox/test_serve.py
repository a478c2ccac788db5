"""A service that starts with a weak token or the wrong folder does harm later: what `rollkeel-sandbox serve` refuses, and how it keeps its token.

And clients that never finish a request. test_service_http.py talks to a started service.
"""

from __future__ import annotations

import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from rollkeel_sandbox import guard, protocol
from rollkeel_sandbox.errors import BadInput
from rollkeel_sandbox.partition import Partition
from rollkeel_sandbox.serve import Options, partitions, serve
from rollkeel_sandbox.tokens import load_token


def test_a_token_is_made_once_and_kept_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLKEEL_SANDBOX_TOKEN", raising=False)
    token, where = load_token(None, tmp_path / "state")
    kept = tmp_path / "state" / "token"
    assert len(token) >= 40
    assert where == f"{token} (shown once; kept in {kept})"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert load_token(None, tmp_path / "state") == (token, f"in {kept}")
    assert load_token(None, None)[0] != token
    monkeypatch.setenv("ROLLKEEL_SANDBOX_TOKEN", "of-the-environment")
    assert load_token(None, tmp_path / "state") == ("of-the-environment", "in the environment (ROLLKEEL_SANDBOX_TOKEN)")


def test_tokens_that_others_know_or_could_guess_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    with pytest.raises(BadInput, match="no such file; write a token"):
        load_token(file, None)
    file.write_text("0123456789abcdef\n")
    file.chmod(0o644)
    with pytest.raises(BadInput, match="others may read it; chmod 600"):
        load_token(file, None)
    file.chmod(0o600)
    assert load_token(file, None) == ("0123456789abcdef", f"in {file}")
    for weak in ("short", "", "with a space 0123456789", "ümlaut0123456789"):
        file.write_text(weak, encoding="utf-8")
        with pytest.raises(BadInput, match="at least 16 printable ASCII"):
            load_token(file, None)
    monkeypatch.setenv("ROLLKEEL_SANDBOX_TOKEN", "short")
    with pytest.raises(BadInput, match="the environment"):
        load_token(None, None)


def test_partitions_are_named_with_their_workers() -> None:
    assert partitions(Options(workers=3, queue=7)) == [Partition(name="default", workers=3, queue=7)]
    found = partitions(Options(workers=3, partitions=("train=6", "eval")))
    assert [(p.name, p.workers) for p in found] == [("train", 6), ("eval", 3)]
    for wrong in ("train=x", "=3", "train=-1", "a b=1", "train=0"):
        with pytest.raises(BadInput, match="partition"):
            partitions(Options(partitions=(wrong,)))


def test_what_cannot_be_served_gets_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=f"cannot listen at 127.0.0.1:{port}: Address already in use"):
            serve(Options(port=port))
    with pytest.raises(BadInput, match="cannot listen at a"):
        serve(Options(host="a..b"))
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="state"):
        serve(Options(port=0, state=tmp_path / "file" / "state"))
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(BadInput, match=r"needs fastapi; pip install .rollkeel-sandbox\[service\]"):
        serve(Options(port=0))


TOKEN = "a-token-of-the-tests"
ASKED = f"POST / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 2\r\n\r\n".encode()
IN_TIME_S = 0.4


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Of a server that answers after twice the time that a client has for headers, or for a body."""
    monkeypatch.setattr(protocol, "HEADERS_S", IN_TIME_S)
    monkeypatch.setattr(guard, "BODY_S", IN_TIME_S)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await protocol.asyncio.sleep(2 * IN_TIME_S)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    config = uvicorn.Config(guard.Guard(app, TOKEN), http=protocol.Protocol, lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize("before", [b"", ASKED + b"{}"], ids=["first", "second"])
@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"POST / HT", b""),
        (ASKED[:-2], b""),
        (ASKED + b"{", b"408"),
        (ASKED + b"{}", b"200"),
    ],
    ids=["nothing", "half a line", "half of the headers", "half a body", "all"],
)
def test_a_request_that_does_not_come_to_its_end_is_cut_off(
    before: bytes, sent: bytes, answer: bytes, port: int
) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        if before:
            client.sendall(before)
            got = b""
            while not got.endswith(b"ok"):
                got += client.recv(1 << 16)
        began = time.monotonic()
        client.sendall(sent)
        if before and not sent:
            return  # an idle connection may be used again: that is the keep-alive
        got = client.recv(1 << 16)
    assert got[9:12] == answer
    assert time.monotonic() - began >= 0.9 * IN_TIME_S
