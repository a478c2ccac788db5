"""How a rank tells an engine actor of its own host where a bucket lies: a connection. A call of Ray would take a millisecond each way.

    rank: Line ─▶ socket without a name in any folder ─▶ Lines: a thread for each rank ─▶ the actor's queue
               ◀────────────────── an answer for each message, in order ◀─────────────────────────┘

It ends with either process, however that ends.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

GREETED_S = 5.0
"""Longest wait to be let in."""
MOST = 1 << 15
"""Bytes of a message. Four of them fit into what the kernel keeps of a connection, so that telling never waits."""


class Lines:
    """An engine's end of the lines of all ranks on its host."""

    def __init__(self, told: Callable[..., Future[str]]) -> None:
        """`told`: is called with what a message holds, and says by and by what to answer. Raises `OSError`."""
        self.address = f"\0rollkeel-{uuid.uuid4().hex}"
        self._told = told
        self._listener = Listener(self.address, "AF_UNIX", backlog=128)  # a rank does not wait to be accepted
        threading.Thread(target=self._accept, daemon=True, name="lines").start()

    def _accept(self) -> None:
        try:
            while True:
                connection: Any = self._listener.accept()
                if _owner(connection) == os.getuid():
                    connection.send_bytes(b"")
                    threading.Thread(target=self._listen, args=(connection,), daemon=True, name="line").start()
                else:
                    connection.close()
        finally:  # where nothing can be opened any more: a rank is to hear that, and not to wait
            self._listener.close()

    def _listen(self, connection: Connection) -> None:
        whole = threading.Lock()

        def answer(done: Future[str]) -> None:
            with whole, suppress(OSError):  # nobody waits for it any more
                connection.send_bytes(done.result().encode())

        try:
            with suppress(EOFError, OSError):
                while True:
                    self._told(*pickle.loads(connection.recv_bytes())).add_done_callback(answer)
        finally:
            with whole:
                connection.close()


def _owner(connection: Connection) -> int:
    """The user of the process at the other end, as the kernel knows it."""
    with socket.socket(fileno=os.dup(connection.fileno())) as there:
        credentials = there.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1]


class Line:
    """A rank's end of its line to one engine."""

    def __init__(self, address: str) -> None:
        """Raises `OSError`, as for a process in a container of its own, or of another user."""
        self._connection = Client(address, "AF_UNIX")
        try:
            if not self._connection.poll(GREETED_S):
                raise OSError("nobody listens")
            self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            self._connection.close()
            raise OSError("was not let in") from error

    def fileno(self) -> int:
        return self._connection.fileno()

    def tell(self, message: bytes) -> None:
        """Of at most `MOST` bytes, and four at a time. Raises `OSError`."""
        self._connection.send_bytes(message)

    def answer(self) -> str:
        """To the first message that has none yet; waits for it. Raises `EOFError` or `OSError` if the other end is gone."""
        return self._connection.recv_bytes().decode()

    def close(self) -> None:
        self._connection.close()


def silent(lines: Sequence[Line], timeout_s: float) -> list[Line]:
    """Those of which neither an answer nor the end has come, once there is something of another one, or after `timeout_s`."""
    heard = wait([line.fileno() for line in lines], timeout_s)
    return [line for line in lines if line.fileno() not in heard]
