"""A terminal session, seen from its supervisor: one shell that takes command after command, until a limit or the caller ends it.

The job of a session is a loop that starts a shell, and another one when that ends. The supervisor writes commands to the
shell's standard input, and the shell says on a named pipe in the scratch folder that it is there and how a command ended.
Whatever a command writes into that pipe can only spoil its own session: it names processes of the job, and no others are signalled.
"""

from __future__ import annotations

import _socket
import fcntl
import os
import select
import signal
import time
from dataclasses import dataclass, field

from rollkeel_sandbox import group, watch, wire
from rollkeel_sandbox.job import Job, Status

STATUS_NAME = ".status"
SHELL = b"""rm -f "$0"
exec 4>"$TMPDIR/.status"
rm -f "$TMPDIR/.status"
exec 5>&2 2>/dev/null
if command -v bash >/dev/null; then set -- bash --noprofile --norc --noediting -i; else set -- sh -i; fi
while :; do
    PS1= PS2= HISTFILE= "$@"
    echo "ended $?" >&4
done
"""
"""The session's program. Interactive, so that an interrupt ends a command and not the shell; what a shell says at its
start about a terminal that is none goes nowhere."""
HELLO = (b"set +o history +o histexpand\n", b'exec 2>&5 5>&-; echo "shell $$" >&4\n')
"""The first line is an error, and without effect, where there are no such options."""
DONE = b'(command echo done %b "$?") >&4\n'
"""In a process of its own: an interrupted shell prints the rest of its own buffer where the next command prints. What is left of
the line when its beginning was dropped is an error, and does not reach into the next one."""
FIONREAD = 0x541B
NO_TERMINAL = b"] tcsetattr: Inappropriate ioctl for device"
"""End of a line that an interactive bash prints about itself whenever a signal ends a process."""
MAX_COMMAND = 1 << 20
INTERRUPT_S, KILL_S, GIVE_UP_S = 0.2, 1.0, 4.0
"""After a command's time: its processes are interrupted, killed, the shell replaced, the session given up."""
FEED_S, IDLE_LOOK_S = 0.001, 0.05
MAX_SAID = 1 << 10
ROUNDS = 200

Ending = tuple[Status, str]
"""Why a session ends: as a status, and in words."""


@dataclass(kw_only=True)
class _Command:
    token: bytes
    start: float
    deadline: float
    before: frozenset[tuple[int, int]]
    """Processes that were there already, by number and start."""
    cpu_s: float
    """CPU of the whole session before it."""
    stopping: bool = False
    asked_again: bool = False


@dataclass
class _Session:
    child: watch.Child
    job: Job
    channel: _socket.socket
    idle_s: float
    said: int
    """The pipe on which the shell speaks."""
    proc: int
    active: bool
    start: float = field(default_factory=time.monotonic)
    command: _Command | None = None
    outgoing: list[bytes] = field(default_factory=lambda: [*HELLO])
    """Lines for the shell. Each is sent when it has taken the last: after an error or an interrupt, sh drops what it has
    read ahead."""
    sent: int = 0
    """Bytes of the first of them."""
    heard: bytes = b""
    shell: int = -1
    shell_started: int = -1
    loop: int = -1
    """The process that starts shells."""
    note: str = ""
    peak: int = 0
    ledger: group.Ledger = field(default_factory=group.Ledger)
    taken: dict[int, bytearray] = field(default_factory=dict)
    cut: set[int] = field(default_factory=set)
    """Streams of which more came than is kept."""

    def __post_init__(self) -> None:
        self.used_at = self.looked_at = self.start
        self.loop = min((p.pid for p in self._members()), default=-1)
        self.taken = {self.child.stdout: bytearray(), self.child.stderr: bytearray()}
        for descriptor in (self.child.stdin, *self.taken):
            os.set_blocking(descriptor, False)

    def serve(self) -> Ending | None:
        """Until the session ends, None when the caller has closed it."""
        while True:
            now = time.monotonic()
            ending = self._over(now)
            if ending is None and self.command and now >= self.command.deadline:
                ending = self._stop(self.command, now)
            if ending:
                return ending
            listen = [self.child.pidfd, self.channel, self.said, *(d for d in self.taken if d not in self.cut)]
            sending = bool(self.outgoing) and self._may_send()
            wait = FEED_S if self.outgoing else watch.POLL_S if self.command else IDLE_LOOK_S
            ready, room, _ = select.select(listen, [self.child.stdin] if sending else [], [], wait)
            for descriptor in self.taken:
                if descriptor in ready or descriptor in self.cut:  # what is thrown away is read once per look
                    self._take(descriptor)
            if room:
                self._feed()
            if self.said in ready:
                self._hear()
            if self.child.pidfd in ready:
                return Status.ERROR, "its first process ended"
            if self.channel in ready:
                try:
                    self._accept()
                except wire.Closed:
                    return None

    def _over(self, now: float) -> Ending | None:
        """The first limit of the whole session that is reached."""
        limits = self.job.limits
        if now - self.start >= limits.wall_s:
            return Status.TIMEOUT, f"it was open for {limits.wall_s:g} s"
        if not self.command and now - self.used_at >= self.idle_s:
            return Status.TIMEOUT, f"it was idle for {self.idle_s:g} s"
        if not self.active or now - self.looked_at < watch.POLL_S:
            return None
        self.looked_at = now
        usage = group.usage(
            self.proc, self._members(), limits.memory_mb * watch.MB // 2, self.ledger, group.reaped_cpu_s()
        )
        self.peak = max(self.peak, usage.memory_bytes)
        if usage.memory_bytes > limits.memory_mb * watch.MB:
            return Status.MEMORY, f"it used more than {limits.memory_mb} MB"
        if usage.cpu_s >= limits.cpu_s:
            return Status.CPU, f"it used {limits.cpu_s:g} s of CPU"
        return None

    def _members(self) -> list[group.Process]:
        """All processes of the job but those of the cage itself."""
        found = group.processes(self.proc)
        if not self.child.alone:
            found = group.below(self.child.pid, found)
        first = 1 if self.child.alone else self.child.pid
        return [p for p in found if p.pid != first]

    def _accept(self) -> None:
        header, blobs = wire.receive(
            self.channel, timeout_s=watch.SETUP_DEADLINE_S, limit=MAX_COMMAND, codec=wire.TRUSTED
        )
        self.channel.settimeout(None)
        if self.command:
            raise wire.Mangled("a command before the last one ended")
        token, now = os.urandom(8).hex().encode(), time.monotonic()
        before = frozenset((p.pid, p.started) for p in self._members())
        self.peak = 0
        self.command = _Command(
            token=token, start=now, deadline=now + header["timeout_s"], before=before, cpu_s=self.ledger.seen_s
        )
        quoted = b"'" + blobs[0].replace(b"'", b"'\\''") + b"'"
        self.outgoing.append(b"eval %b </dev/null 4>&-\n" % quoted)
        self.outgoing.append(DONE % token)

    def _may_send(self) -> bool:
        """A line may be sent, or more of the one that is on its way."""
        if self.sent:
            return True
        waiting = bytearray(4)
        fcntl.ioctl(self.child.stdin, FIONREAD, waiting)
        return not any(waiting)

    def _feed(self) -> None:
        line = self.outgoing[0]
        try:
            self.sent += os.write(self.child.stdin, line[self.sent : self.sent + watch.CHUNK])
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.sent = len(line)
        if self.sent == len(line):
            self.outgoing.pop(0)
            self.sent = 0

    def _take(self, descriptor: int) -> bool:
        """Read once from a stream; False when nothing was there."""
        try:
            data = os.read(descriptor, watch.CHUNK)
        except BlockingIOError:
            return False
        taken = self.taken[descriptor]
        kept = data[: self.job.limits.output_bytes - len(taken)]
        taken += kept
        if len(kept) < len(data):
            self.cut.add(descriptor)
        return bool(data)

    def _hear(self) -> None:
        try:
            self.heard += os.read(self.said, 4096)
        except BlockingIOError:
            return
        *lines, self.heard = self.heard.split(b"\n")
        self.heard = self.heard[-MAX_SAID:]
        for line in lines:
            word, *rest = line.split()[:3] or [b""]
            if word == b"shell" and len(rest) == 1 and rest[0].isdigit() and not self._shell_lives():
                self.shell = int(rest[0])
                found = group.look(self.proc, self.shell)
                self.shell_started = found.started if found else -1
            elif word == b"done" and self.command and rest[:1] == [self.command.token] and rest[-1].isdigit():
                self._finish(int(rest[-1]))
            elif word == b"ended" and not self._shell_lives():
                self.note = "the shell ended; there is a new one, without the variables and the folder of the last"
                self.outgoing[1 if self.sent else 0 :] = HELLO
                if self.command:
                    self._finish(int(rest[0]) if rest and rest[0].isdigit() else 1)

    def _shell_lives(self) -> bool:
        """Whether the shell is there, whatever a command says about it: who is told of a fresh one may rely on it."""
        found = group.look(self.proc, self.shell) if self.shell > 0 else None
        return found is not None and found.started == self.shell_started and not found.ended

    def _stop(self, command: _Command, now: float) -> Ending | None:
        """One more step towards the end of a command whose time is over."""
        late = now - command.deadline
        if late >= GIVE_UP_S:
            return Status.TIMEOUT, "a command could not be stopped"
        if command.stopping and late < INTERRUPT_S:
            return None
        past = command.asked_again or (not self.outgoing and self._may_send())
        if past and late < KILL_S:
            # The shell has left the command: an interrupt could only cut off what it says about it, as one of before may have.
            if late >= INTERRUPT_S and not command.asked_again:
                command.asked_again = True
                self.outgoing.append(DONE % command.token)
            return None
        # The shell first: only then does it take a child's end by the same signal for its own and drop the rest of the line.
        for process in self._members():
            if process.pid == self.shell and (process.pid, process.started) in command.before:
                self._signal(process, signal.SIGKILL if late >= KILL_S else signal.SIGINT)
        if late < INTERRUPT_S:
            self._signal_new(command, signal.SIGINT)
        else:
            self._kill_new(command)
        command.stopping = True
        return None

    def _signal_new(self, command: _Command, number: int) -> int:
        new = [p for p in self._members() if (p.pid, p.started) not in command.before]
        return sum(self._signal(process, number) for process in new if process.parent != self.loop)

    def _kill_new(self, command: _Command) -> bool:
        """Kill what a command started; True when nothing is left of it."""
        return not self._signal_new(command, signal.SIGSTOP) or not self._signal_new(command, signal.SIGKILL)

    def _signal(self, process: group.Process, number: int) -> bool:
        """By the folder in `/proc`, which serves as a descriptor of the process; False if it is gone or as good as that."""
        try:
            folder = os.open(str(process.pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.proc)
        except OSError:
            return False
        try:
            now = group.look(self.proc, process.pid)
            if now is None or now.started != process.started or now.ended:
                return False
            signal.pidfd_send_signal(folder, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(folder)
        return True

    def _finish(self, code: int) -> None:
        """A command has ended: answer."""
        command = self.command
        assert command is not None
        if command.stopping:
            for _ in range(ROUNDS):
                if self._kill_new(command):
                    break
                time.sleep(0.002)
        for descriptor in self.taken:
            for _ in range(ROUNDS):
                if not self._take(descriptor):
                    break
        status = Status.TIMEOUT if command.stopping else Status.ERROR if code else Status.OK
        self.answer(status, self.note, None if command.stopping else code, alive=True)
        self.command = None
        self.used_at = time.monotonic()
        self.note = ""

    def answer(self, status: Status, reason: str, code: int | None, *, alive: bool) -> None:
        command = self.command
        now = time.monotonic()
        if self.active and alive:
            self.ledger.cpu_s(self._members(), group.reaped_cpu_s())
        header = {
            "status": status.value,
            "exit_code": code,
            "reason": reason,
            "wall_s": now - command.start if command else 0.0,
            "cpu_s": max(0.0, self.ledger.seen_s - command.cpu_s) if command else self.ledger.seen_s,
            "peak_memory_mb": self.peak / watch.MB,
            "stdout_truncated": self.child.stdout in self.cut,
            "stderr_truncated": self.child.stderr in self.cut,
            "alive": alive,
        }
        stdout, stderr = self.taken.values()
        wire.send(self.channel, header, [bytes(stdout), _without_complaints(stderr)], codec=wire.TRUSTED)
        for taken in self.taken.values():
            taken.clear()
        self.cut.clear()


def _without_complaints(stderr: bytearray) -> bytes:
    lines = bytes(stderr).splitlines(keepends=True)
    return b"".join(x for x in lines if not (x.startswith(b"bash: [") and x.rstrip().endswith(NO_TERMINAL)))


def make_status_pipe(scratch: str, uid: int | None) -> int:
    """The pipe on which the shell speaks, before any process of the job is there; `uid` is its owner, None for this one."""
    path = f"{scratch}/tmp/{STATUS_NAME}"
    os.mkfifo(path, 0o600)
    if uid is not None:
        os.chown(path, uid, uid, follow_symlinks=False)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)


def converse(child: watch.Child, job: Job, channel: _socket.socket, *, idle_s: float, said: int, active: bool) -> None:
    """See a session through; all its processes are dead when this returns, and when it says that it has ended."""
    proc = -1
    session = None
    ending = None
    try:
        watch.await_setup(child.setup)
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        session = _Session(child, job, channel, idle_s, said, proc, active)
        ending = session.serve()
    finally:
        watch._end(child)
        os.close(said)
        if proc >= 0:
            os.close(proc)
    if session and ending:
        for descriptor in session.taken:
            session._take(descriptor)
        session.answer(ending[0], f"the session ended: {ending[1]}", None, alive=False)
