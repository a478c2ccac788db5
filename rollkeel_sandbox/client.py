"""The caller's side of a fork server and of its cages."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

from rollkeel_sandbox import spawn, wire
from rollkeel_sandbox.errors import RunStopped
from rollkeel_sandbox.job import Job
from rollkeel_sandbox.plan import Plan

START_DEADLINE_S = 120.0
CAGE_DEADLINE_S = 30.0
GRACE_S = 15.0
"""How long after its wall limit (and as long again for its set-up) a cage may stay silent before it counts as hung."""
CLOSE_DEADLINE_S = 5.0


class Broken(Exception):
    """A cage or its server died or hung: nothing is known about the job, which may be run again."""


class Unbuilt(Broken):
    """The cage died before it had the job, which has surely not run."""


class CageFailure(RunStopped):
    """A layer that held when it was probed could not be put up. Never a verdict about the program."""


@contextlib.contextmanager
def _broken() -> Iterator[None]:
    """What goes wrong on the channel is the cage's end."""
    try:
        yield
    except wire.Closed:
        raise Broken("the cage died") from None
    except (wire.Late, wire.Mangled) as error:
        raise Broken(f"the cage hung or spoke nonsense ({error})") from None


def header(job: Job) -> dict[str, Any]:
    """A job without its byte strings, of plain types, as subclasses cannot be marshalled."""
    return {
        "kind": str(job.kind),
        "files": [str(name) for name in job.files],
        "args": tuple(str(argument) for argument in job.args),
        "collect": tuple(str(name) for name in job.collect),
        "limits": {k: int(v) if isinstance(v, int) else float(v) for k, v in vars(job.limits).items()},
    }


class Slot:
    """A cage, ready or about to be, that will run one job."""

    def __init__(self, channel: socket.socket, uid: int, server: ForkServer) -> None:
        self.uid, self.server = uid, server
        self._channel = channel
        self._supervisor = -1

    def run(self, job: Job, meanwhile: Callable[[], None] | None = None) -> tuple[dict[str, Any], list[bytes]]:
        """Header and byte strings of the result. `meanwhile` is called once the cage has its job."""
        with _broken():
            self._await_ready()
            try:
                self._send(job)
            except wire.Closed:
                raise Unbuilt("the cage died before it had the job") from None
            if meanwhile:
                meanwhile()
            limit = 4 * job.limits.output_bytes + (1 << 20)
            wait = job.limits.wall_s + 2 * GRACE_S
            return self._receive(wait, limit)

    def _await_ready(self) -> None:
        self._channel.settimeout(CAGE_DEADLINE_S)
        try:
            said, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
        except TimeoutError:
            self.server.kill()  # it is the server that did not fork, or could not any more
            raise Broken(f"no cage within {CAGE_DEADLINE_S:g} s") from None
        except ConnectionError:
            raise Unbuilt("the cage died") from None
        if not said or not descriptors:
            raise Unbuilt("the cage died before it was ready")
        self._supervisor = descriptors[0]

    def _send(self, job: Job, **more: Any) -> None:
        self._channel.settimeout(CAGE_DEADLINE_S)
        contents = [job.source, job.stdin, *job.files.values()]
        wire.send(self._channel, header(job) | more, contents, codec=wire.TRUSTED)

    @property
    def built(self) -> bool:
        """The fork server has done its part."""
        return self._supervisor >= 0

    def interrupt(self) -> None:
        """From another thread: `run` raises `Broken` soon, whatever the cage does."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def start_session(self, job: Job, *, idle_s: float) -> None:
        """Give the cage a job that stays for many exchanges; see `session.py` for the other side."""
        with _broken():
            self._await_ready()
            self._send(job, session={"idle_s": idle_s})

    def exchange(
        self, header: dict[str, Any], blobs: list[bytes], *, timeout_s: float, limit: int
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Send a message and wait for the answer."""
        with _broken():
            with contextlib.suppress(wire.Closed):  # what it said before it ended is still to be read
                wire.send(self._channel, header, blobs, codec=wire.TRUSTED)
            return self._receive(timeout_s, limit)

    def _receive(self, timeout_s: float, limit: int) -> tuple[dict[str, Any], list[bytes]]:
        header, blobs = wire.receive(self._channel, timeout_s=timeout_s, limit=limit, codec=wire.TRUSTED)
        if "failed" in header:
            raise CageFailure(f"sandbox: no cage could be built: {header['failed']} (see rollkeel-sandbox doctor)")
        return header, blobs

    def hang_up(self, timeout_s: float) -> bool:
        """Close the channel and wait for the supervisor's own end, before which it ends everything in the cage."""
        self._channel.close()
        return bool(select.select([self._supervisor], [], [], timeout_s)[0])

    def close(self) -> None:
        """Let go of the cage; one that is still at work is killed, and its job with it."""
        if self._supervisor >= 0:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself, as one does that has answered
                signal.pidfd_send_signal(self._supervisor, signal.SIGKILL)
            os.close(self._supervisor)
            self._supervisor = -1
        self._channel.close()


class ForkServer:
    """A running fork server for one plan and one set of preloaded modules."""

    def __init__(self, plan: Plan, preload: str, scratch_base: str, group: str = "", image: str = "") -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process: subprocess.Popen[bytes] = spawn.python("server", theirs.fileno())
        self._encloses = "pid" in plan.namespaces
        self._condemned = False
        self.surely_dead = False
        """It has ended, and every process of its cages is known to have ended before."""
        try:
            config = {"caller": os.getpid(), "plan": plan.to_json(), "preload": preload, "scratch_base": scratch_base}
            config |= {"group": group, "image": image}
            self._control.send(json.dumps(config).encode())
            self._control.settimeout(START_DEADLINE_S)
            answer = json.loads(self._control.recv(1 << 16) or b'{"failed": "it died while starting"}')
        except (OSError, TimeoutError) as error:
            answer = {"failed": str(error)}
        if "failed" in answer:
            self.kill()
            raise CageFailure(
                f"sandbox: the fork server did not start: {answer['failed']} (see rollkeel-sandbox doctor)"
            )

    @property
    def pid(self) -> int:
        """Of its launcher, with which it lives and dies."""
        return self._process.pid

    def alive(self) -> bool:
        return not self._condemned and self._process.poll() is None

    def condemn(self) -> None:
        """It hangs: it counts as dead from now on, and soon is. Does not wait for that."""
        self._condemned = True
        self._process.kill()  # the launcher, whose death takes the server along

    def order(self, uid: int) -> Slot:
        """Ask for a cage; it is built while the caller does something else."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [str(uid).encode()], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise Broken(f"the fork server is gone ({error})") from None
        return Slot(ours, uid, self)

    def kill(self) -> None:
        """End it and all its cages now."""
        self._control.close()
        until = time.monotonic() + CLOSE_DEADLINE_S
        while self.alive() and time.monotonic() < until:
            time.sleep(0.002)
        seen = not self.alive()
        if not seen:  # it hangs: the launcher's death takes it along
            self._process.kill()
        # The launcher reaps the server, process 1 of its namespace, before it ends: nothing of the cages is alive then.
        self.surely_dead = self._process.wait() == 0 and seen and self._encloses
