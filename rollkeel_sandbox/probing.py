"""What holds on this machine: each layer is tried for real, in a child that can be thrown away, and seen to bite."""

from __future__ import annotations

import errno
import functools
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NoReturn

from rollkeel_sandbox import cgroup, identity, landlock, libc, rlimits, root, spawn
from rollkeel_sandbox.errors import RunStopped
from rollkeel_sandbox.job import Limits
from rollkeel_sandbox.plan import NAMESPACES, PYTHON, Finding, Plan, choose
from rollkeel_sandbox.seccomp import Filter
from rollkeel_sandbox.server import readable_paths

DEADLINE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What was found, and for whom."""

    root: bool
    landlock_abi: int
    findings: tuple[Finding, ...]

    def plan(self, without: tuple[str, ...] = ()) -> Plan:
        return choose(self.findings, root=self.root, landlock_abi=self.landlock_abi, without=without)


@functools.cache
def probe() -> Probe:
    """Try every layer, once per process, in a Python started for it (this one may have threads and be large)."""
    if not libc.supported():
        why = "needs Linux on x86-64 or aarch64"
        return Probe(root=False, landlock_abi=0, findings=(Finding(layer="user", holds=False, how=why),))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = spawn.python("probing", theirs.fileno())
        theirs.close()
        ours.settimeout(DEADLINE_S)
        try:
            text = b"".join(iter(lambda: ours.recv(1 << 16), b""))
        except TimeoutError:
            text = b""
        finally:
            process.kill()
            process.wait()
    if not text:
        raise RunStopped(f"sandbox: the probe of this machine's layers did not answer within {DEADLINE_S:g} s, or died")
    data = json.loads(text)
    return Probe(**{**data, "findings": tuple(Finding(**f) for f in data["findings"])})


def main(descriptor: int, _package_root: str) -> NoReturn:
    """Entry point of the child that tries."""
    with socket.socket(fileno=descriptor) as sock:
        found = Probe(root=os.geteuid() == 0, landlock_abi=landlock.abi(), findings=tuple(_try_all()))
        sock.sendall(json.dumps(asdict(found)).encode())
    os._exit(0)


def _try_all() -> list[Finding]:
    trials: dict[str, Callable[[], str]] = {"user": _user}
    trials |= {name: functools.partial(_namespace, name) for name in NAMESPACES}
    trials |= {
        "capabilities": _capabilities,
        "rlimits": _rlimits,
        "landlock": _landlock,
        "seccomp": _seccomp,
        "cgroup": _cgroup,
        PYTHON: _python,
    }
    return [_in_child(layer, trial) for layer, trial in trials.items()]


def _in_child(layer: str, trial: Callable[[], str]) -> Finding:
    """Run a trial in a forked child: it returns how the layer holds, or raises why not."""
    try:
        return Finding(layer=layer, holds=True, how=_forked(trial))
    except OSError as error:
        return Finding(layer=layer, holds=False, how=str(error))


def _map_if_needed(flags: int) -> None:
    identity.unshare(flags, mapped=os.geteuid() != 0)


def _user() -> str:
    if os.geteuid() != 0:
        _map_if_needed(0)
        return "user namespace: jobs have this user's uid on the host"
    identity.become(identity.FIRST_UID)
    return f"own uid per job, from {identity.FIRST_UID} on"


def _python() -> str:
    if os.geteuid() == 0:
        identity.become(identity.FIRST_UID)
    for path in (sys.prefix, sys.base_prefix):
        _expect(os.access(path, os.R_OK | os.X_OK), f"in a private root alone: other users have no way to {path}")
    return "jobs can read it where it is installed"


def _namespace(name: str) -> str:
    if name == "mount":
        return _private_root()
    before = os.readlink(f"/proc/self/ns/{name}")
    _map_if_needed(libc.NAMESPACES[name])
    if name == "pid":
        _expect(_forked(os.getpid) == "1", "the first process of a new process namespace is not number 1")
    else:
        _expect(os.readlink(f"/proc/self/ns/{name}") != before, f"the {name} namespace did not change")
    return "namespace"


def _private_root() -> str:
    """As a fork server does it, and then as a cage inside it."""
    host = os.stat("/").st_dev
    _map_if_needed(libc.CLONE_NEWNS | libc.CLONE_NEWPID)

    def inside() -> str:
        root.enter(readable_paths())
        _map_if_needed(libc.CLONE_NEWNS | libc.CLONE_NEWPID)
        return _forked(cage)

    def cage() -> bool:
        root.mount_proc()
        root.mount_scratch(1, None)
        alone = [n for n in os.listdir("/proc") if n.isdigit()] == ["1"]
        return alone and os.stat("/").st_dev != host and not os.path.exists("/etc/shadow")

    _expect(_forked(inside) == "True", "the host's files or processes can still be seen in the private root")
    return "private root"


def _capabilities() -> str:
    identity.forswear()
    libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
    libc.set_capabilities()
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    left = {name: fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb") if int(fields[name], 16)}
    _expect(not left, f"capabilities are left: {left}")
    _expect(fields["NoNewPrivs"] == "1", "no_new_privs did not take hold")
    return "none, no new privileges"


def _rlimits() -> str:
    planned = rlimits.plan(Limits(memory_mb=64), base_bytes=1 << 31)
    rlimits.apply(planned)
    for name, (_, hard) in planned.items():
        _expect(resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1] <= hard, f"{name} not set")
    return f"{len(planned)} limits per process"


def _landlock() -> str:
    version = landlock.abi()
    _expect(version > 0, "the kernel has no Landlock, or it is switched off")
    libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
    landlock.restrict(landlock.prepare([("/dev/null", landlock.DEVICE)], version))
    _refused(errno.EACCES, lambda: os.listdir("/"))
    os.close(os.open("/dev/null", os.O_RDWR))
    missing = [name for name, since in (("TCP", 4), ("abstract sockets and signals", 6)) if version < since]
    return f"ABI {version}" + (f", without {' and '.join(missing)}" if missing else "")


def _seccomp() -> str:
    libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
    Filter(libc.machine()).install()
    _refused(errno.EPERM, lambda: libc.unshare(libc.CLONE_NEWUSER))
    _refused(errno.EAFNOSUPPORT, lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    return "allow list"


def _cgroup() -> str:
    """A job's group that is too small for what its process does: the kernel must kill it, and refuse it a child."""
    path = cgroup.make()
    try:
        parent = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        group = cgroup.Group.make(parent, "probe")
        group.limit(cgroup.limits_of(Limits(memory_mb=8, scratch_mb=1, processes=1)))
        refused = _in_group(group, lambda: _refused(errno.EAGAIN, os.fork))
        _expect(refused == 0, "a process more than allowed was not refused")
        killed = _in_group(group, lambda: bytearray(b"x") * (128 << 20))
        _expect(killed == -signal.SIGKILL and group.ran_out_of_memory(), "memory over the limit was not refused")
        _expect(group.cpu_s() > 0, "CPU time is not counted")
        group.close()
    finally:
        cgroup.remove(path)
    return "memory and processes of the group, by the kernel"


def _in_group(group: cgroup.Group, attempt: Callable[[], object]) -> int:
    """How a child that joins the group and tries something ends: 0, 1 for an error, or the signal that killed it, negative."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            group.join()
            attempt()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _refused(number: int, attempt: Callable[[], object]) -> None:
    try:
        attempt()
    except OSError as error:
        _expect(error.errno == number, f"expected {errno.errorcode[number]}, got {error}")
        return
    raise OSError(f"expected {errno.errorcode[number]}, but nothing was refused")


def _expect(truth: bool, otherwise: str) -> None:
    if not truth:
        raise OSError(otherwise)


def _forked(function: Callable[[], object]) -> str:
    """What `function` returns in a forked child, as text; an error there is this process's error too."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
            try:
                text = f"+{function()}"
            except Exception as error:
                text = f"-{error}"
            os.write(write, text.encode()[:4096])
        finally:
            os._exit(0)
    os.close(write)
    with open(read, encoding="utf-8", errors="replace") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    _expect(text.startswith("+"), text[1:] or "the trial died")
    return text[1:]
