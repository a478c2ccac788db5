"""Other programs that build sandboxes: bubblewrap and gVisor. Each job gets one of its own, with an agent as process 1.

They stand in for a fork server and its cages (`client.py`), with the same jobs, limits and results. What they isolate is
tried with a job that looks around, and only what it did not find is reported.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollkeel.errors import BadInput, nearest
from rollkeel.sandbox import client, identity, kinds, root, server, spawn, wire
from rollkeel.sandbox.job import Job, Level, Limits
from rollkeel.sandbox.plan import MAPPED, NAMESPACES, OWN

BACKENDS = ("auto", "native", "bubblewrap", "gvisor")
PROGRAMS = {"bubblewrap": "bwrap", "gvisor": "runsc"}
AGENT = "/agent"
_CODE = f"import sys; sys.path.insert(0, {AGENT!r}); from rollkeel.sandbox.agent import main; main(sys.argv[1])"
SCRATCH_MB = Limits.scratch_mb
ROOT_KEEPS = ("CHOWN", "DAC_OVERRIDE", "KILL", "SETGID", "SETPCAP", "SETUID")
"""Capabilities of an agent that gives its job another uid; the job has none."""
CLOSE_DEADLINE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Enclosure:
    """What such a program was seen to do on this machine. Takes the place of a `Plan`."""

    backend: str
    identity: str
    level: Level
    layers: dict[str, str] = field(default_factory=dict)
    """Layer → how it holds."""
    why_not: str = ""
    """Why it cannot be used, or why its level is below `namespaces`."""
    namespaces = frozenset(NAMESPACES)
    """No job works in a folder of the host."""

    def isolation(self, uid: int) -> dict[str, str]:
        """Layer → how it holds, for a job with this uid on the host."""
        out = dict(self.layers)
        if self.identity == OWN and "user" in out:
            out["user"] = f"own uid {uid}"
        return out


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How to start one sandbox."""

    command: tuple[str, ...]
    folder: str = ""
    """A temporary folder that goes with it."""
    end: tuple[str, ...] = ()
    """Command that ends it and removes what the program keeps of it."""


def agent_command(uid: int | None) -> list[str]:
    """`uid`: the job's own, None for that of the agent."""
    return [sys.executable, "-I", "-B", "-X", "utf8", "-c", _CODE, json.dumps({"uid": uid})]


def _agent_files() -> dict[str, str]:
    """Path inside → file or folder of the host: no more of this package than the agent imports."""
    package = f"{spawn.PACKAGE_ROOT}/rollkeel"
    return {f"{AGENT}/rollkeel/{name}": f"{package}/{name}" for name in ("__init__.py", "errors.py", "sandbox")}


def environment() -> dict[str, str]:
    return spawn.ENVIRONMENT | {"PATH": kinds.search_path()}


def bubblewrap(program: str, uid: int | None, scratch_mb: int) -> Launch:
    """`uid` is the job's own as root, None for an ordinary user, who gets a user namespace."""
    links, binds = root.links_and_binds(server.readable_paths(kinds.search_path()))
    out = [program, "--unshare-pid", "--as-pid-1", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    out += ["--unshare-cgroup-try", "--hostname", "sandbox", "--new-session", "--die-with-parent", "--cap-drop", "ALL"]
    if uid is None:
        inside = str(identity.INSIDE_UID)
        out += ["--unshare-user", "--uid", inside, "--gid", inside]
    else:
        out += [word for name in ROOT_KEEPS for word in ("--cap-add", f"CAP_{name}")]
    targets = [*(b.target for b in binds), *links, *_agent_files()]
    for folder in sorted({str(parent) for target in targets for parent in Path(target).parents} - {"/"}):
        out += ["--perms", "0755", "--dir", folder]  # else only the owner of the sandbox may pass
    for bind in binds:
        out += ["--dev-bind" if bind.device else "--ro-bind", bind.source, bind.target]
    for inside, source in _agent_files().items():
        out += ["--ro-bind", source, inside]
    for path, target in links.items():
        out += ["--symlink", target, path]
    out += ["--proc", "/proc", "--size", str(scratch_mb << 20), "--tmpfs", root.SCRATCH, "--remount-ro", "/"]
    out += ["--chdir", "/", "--clearenv", *(w for k, v in environment().items() for w in ("--setenv", k, v))]
    return Launch(command=(*out, "--", *agent_command(uid)))


def gvisor(program: str, uid: int | None, scratch_mb: int) -> Launch:
    """An OCI bundle in a temporary folder, which also holds what runsc keeps of the container."""
    folder = tempfile.mkdtemp(prefix="rollkeel-runsc-")
    for name in ("root", "state"):
        os.mkdir(f"{folder}/{name}")
    Path(folder, "config.json").write_text(json.dumps(bundle(uid, scratch_mb)), encoding="utf-8")
    name = f"rollkeel-{uuid.uuid4().hex[:12]}"
    common = [program, "--root", f"{folder}/state", "--network=none", "--ignore-cgroups"]
    if os.geteuid() != 0:
        common.append("--rootless")
    return Launch(
        command=(*common, "run", "--bundle", folder, name), folder=folder, end=(*common, "delete", "--force", name)
    )


def bundle(uid: int | None, scratch_mb: int) -> dict[str, Any]:
    """`config.json` of the OCI runtime specification 1.0."""
    links, binds = root.links_and_binds(server.readable_paths(kinds.search_path()))
    read = [(b.target, b.source) for b in binds if not b.device] + list(_agent_files().items())
    # Links of the host's top level are folders here: the tree is made by mounts alone.
    read += [
        (path, os.path.realpath(path))
        for path in links
        if os.path.isdir(path) and not path.startswith(("/dev", "/tmp"))
    ]
    mounts: list[dict[str, Any]] = [{"destination": "/proc", "type": "proc", "source": "proc"}]
    mounts += [
        {"destination": target, "type": "bind", "source": source, "options": ["ro", "rbind", "nosuid", "nodev"]}
        for target, source in read
    ]
    size = [f"size={scratch_mb}m", "mode=755", "nosuid", "nodev"]
    mounts.append({"destination": root.SCRATCH, "type": "tmpfs", "source": "tmpfs", "options": size})
    mounts.append({"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["size=1m", "mode=755"]})
    keeps = [f"CAP_{name}" for name in ROOT_KEEPS]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": agent_command(uid),
            "env": [f"{name}={value}" for name, value in environment().items()],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), keeps),
            "noNewPrivileges": False,
        },
        "root": {"path": "root", "readonly": True},
        "hostname": "sandbox",
        "mounts": mounts,
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
    }


BUILDERS: dict[str, Callable[[str, int | None, int], Launch]] = {"bubblewrap": bubblewrap, "gvisor": gvisor}


class _Channel:
    """Pipes of a process as one channel, for `wire`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin
        assert process.stdout
        self._in, self._out = process.stdin.fileno(), process.stdout.fileno()
        self._timeout_s: float | None = None

    def settimeout(self, seconds: float | None) -> None:
        self._timeout_s = seconds

    def recv(self, size: int) -> bytes:
        import select

        if not select.select([self._out], [], [], self._timeout_s)[0]:
            raise TimeoutError
        return os.read(self._out, size)

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._in, view) :]


class Box:
    """One started sandbox, which will run one job. Takes the place of a `Slot`."""

    def __init__(self, owner: Boxes, uid: int, launch: Launch, process: subprocess.Popen[bytes]) -> None:
        self.server, self.uid = owner, uid
        self._launch, self._process = launch, process
        self._lock = threading.Lock()
        self._closed = False
        self.missing: list[str] = []

    @property
    def built(self) -> bool:
        return True

    def run(self, job: Job, *_hooks: object) -> tuple[dict[str, Any], list[bytes]]:
        """Header and byte strings of the result."""
        channel: Any = _Channel(self._process)
        header = {
            "kind": job.kind,
            "files": list(job.files),
            "args": job.args,
            "collect": job.collect,
            "limits": asdict(job.limits),
        }
        try:
            wire.send(channel, header, [job.source, job.stdin, *job.files.values()])
            limit = 4 * job.limits.output_bytes + (1 << 20)
            wait = job.limits.wall_s + 2 * client.GRACE_S
            answer, blobs = wire.receive(channel, timeout_s=wait, limit=limit)
        except wire.Closed:
            raise client.Broken(f"the sandbox ended: {self._complaint()}") from None
        except (wire.Late, wire.Mangled, ValueError) as error:
            raise client.Broken(f"the sandbox hung or spoke nonsense ({error})") from None
        if "failed" in answer:
            raise client.CageFailure(f"sandbox: {self.server.backend} could not run a job: {answer['failed']}")
        self.missing = answer.pop("missing")
        return answer, blobs

    def start_session(self, job: Job, *, idle_s: float) -> None:
        raise BadInput(f"sandbox: terminal sessions need backend native, not {self.server.backend}")

    def interrupt(self) -> None:
        """From another thread: `run` raises `Broken` soon."""
        self._kill()

    def close(self) -> None:
        """End it, whatever it does, and what is kept of it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self._launch.end:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(self._launch.end, capture_output=True, timeout=CLOSE_DEADLINE_S)
        if self._launch.folder:
            shutil.rmtree(self._launch.folder, ignore_errors=True)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    def _complaint(self) -> str:
        """The last line that the program printed about itself."""
        self._kill()
        self._process.wait()
        assert self._process.stderr
        lines = self._process.stderr.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:200] if lines else f"exit code {self._process.returncode}"


class Boxes:
    """Starts one sandbox for each job. Takes the place of a `ForkServer`.

    A thread of its own starts them: they are to die with the thread that started them, which must outlast every job.
    """

    surely_dead = True

    def __init__(self, backend: str, *, own_uids: bool) -> None:
        program = shutil.which(PROGRAMS[backend])
        if program is None:
            raise client.CageFailure(f"sandbox: backend {backend} needs {PROGRAMS[backend]}, which is not installed")
        self.backend, self._program, self._own_uids = backend, program, own_uids
        self._orders: queue.SimpleQueue[tuple[Launch, queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._open = True
        self._thread = threading.Thread(target=self._start_all, name=f"sandbox-{backend}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return os.getpid()

    def alive(self) -> bool:
        return self._open

    def order(self, uid: int, scratch_mb: int = SCRATCH_MB) -> Box:
        """A sandbox whose scratch folder has this size."""
        launch = BUILDERS[self.backend](self._program, uid if self._own_uids else None, scratch_mb)
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._orders.put((launch, answer))
        process = answer.get()
        if isinstance(process, OSError):
            raise client.Broken(f"{self.backend} could not be started: {process}")
        return Box(self, uid, launch, process)

    def kill(self) -> None:
        """No more sandboxes, and the end of those that run."""
        if self._open:
            self._open = False
            self._orders.put(None)
            self._thread.join()

    def _start_all(self) -> None:
        while order := self._orders.get():
            launch, answer = order
            try:
                pipe = subprocess.PIPE
                answer.put(
                    subprocess.Popen(
                        launch.command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment(), cwd="/", umask=0o022
                    )
                )
            except OSError as error:
                answer.put(error)


LOOK = b"""
import json, os, socket, sys
canary, port = sys.argv[1], int(sys.argv[2])
def reads(path):
    try:
        return open(path).read()
    except OSError:
        return ""
def link(name):
    try:
        return os.readlink(f"/proc/self/ns/{name}")
    except OSError:
        return ""
status = dict(line.split(":\\t", 1) for line in reads("/proc/self/status").splitlines() if ":\\t" in line)
try:
    socket.create_connection(("127.0.0.1", port), 1)
    reached = True
except OSError:
    reached = False
print(json.dumps({
    "uid": os.getuid(), "map": reads("/proc/self/uid_map").split(), "canary": reads(canary), "passwd": bool(reads("/etc/passwd")),
    "pids": len([p for p in os.listdir("/proc") if p.isdigit()]), "reached": reached,
    "interfaces": [line.split(":")[0].strip() for line in reads("/proc/net/dev").splitlines()[2:]],
    "ns": {n: link(n) for n in ("pid", "mnt", "net", "ipc", "uts")}, "release": os.uname().release,
    "caps": status.get("CapEff", "?").strip(), "nnp": status.get("NoNewPrivs", "?").strip(), "seccomp": status.get("Seccomp", "?").strip(),
}))
"""
"""A program that looks for what it should not find."""


@functools.cache
def probe(backend: str) -> Enclosure:
    """Run a job in it that looks around, once per process."""
    own = os.geteuid() == 0
    try:
        boxes = Boxes(backend, own_uids=own)
    except client.CageFailure as error:
        return Enclosure(backend=backend, identity=MAPPED, level=Level.NONE, why_not=str(error))
    uids = identity.UidBlock() if own else None
    uid = uids.take() if uids else os.getuid()
    box = None
    with (
        tempfile.NamedTemporaryFile("w", prefix="rollkeel-canary-") as canary,
        socket.create_server(("127.0.0.1", 0)) as tcp,
    ):
        canary.write("seen")
        canary.flush()
        os.chmod(canary.name, 0o644)
        try:
            box = boxes.order(uid)
            job = Job(source=LOOK, args=(canary.name, str(tcp.getsockname()[1])), limits=Limits(wall_s=20))
            header, (stdout, stderr) = box.run(job)
            seen = json.loads(stdout) if header["status"] == "ok" else None
            said = stderr.decode("utf-8", "replace").strip().rsplit("\n", 1)[-1]
            why = f"{header['status']} {header['exit_code']} {header['signal']} {said}"
        except (client.Broken, client.CageFailure) as error:
            seen, why = None, str(error)
        finally:
            missing = box.missing if box else []
            if box:
                box.close()
            boxes.kill()
            if uids:
                uids.close()
    if seen is None:
        return Enclosure(backend=backend, identity=MAPPED, level=Level.NONE, why_not=f"a job that looks around: {why}")
    return judge(backend, seen, missing, uid=uid, own=own)


def judge(backend: str, seen: dict[str, Any], missing: Sequence[str], *, uid: int, own: bool) -> Enclosure:
    """What holds, from what a job saw."""
    foreign = seen["release"] != os.uname().release
    layers: dict[str, str] = {}
    if foreign:
        layers["kernel"] = f"not the host's: {seen['release']}"
    mapped = seen["map"] and seen["map"][:1] != ["0"]
    if own and not foreign and not mapped and seen["uid"] == uid:
        layers["user"] = f"own uid {uid}"
    elif mapped or foreign:
        layers["user"] = f"uid {seen['uid']} inside"
    if seen["pids"] <= 3:
        layers["pid"] = "namespace"
    if not seen["canary"] and not seen["passwd"]:
        layers["mount"] = "private root"
    for name in ("net", "ipc", "uts"):
        here = os.readlink(f"/proc/self/ns/{name}")
        if seen["ns"][name] != here and (seen["ns"][name] or foreign):
            layers[name] = "namespace"
    if seen["reached"] or set(seen["interfaces"]) - {"lo"}:
        layers.pop("net", None)
    if seen["caps"] and set(seen["caps"]) == {"0"} and (seen["nnp"] == "1" or foreign):
        layers["capabilities"] = "none, no new privileges"
    layers["rlimits"] = "per process" + (f", without {', '.join(missing)}" if missing else "")
    if seen["seccomp"] == "2":
        layers["seccomp"] = "allow list"
    layers["watch"] = "memory and CPU of the group, polled"
    wanted = {"user", *NAMESPACES, "capabilities", "seccomp"}
    lacking = sorted(wanted - set(layers) - ({"seccomp"} if foreign else set()))
    level = Level.NONE if lacking else Level.FULL if layers["user"].startswith("own") else Level.NAMESPACES
    return Enclosure(
        backend=backend,
        identity=OWN if own else MAPPED,
        level=level,
        layers=layers,
        why_not=f"without {', '.join(lacking)}" if lacking else "",
    )


def check(backend: str) -> None:
    if backend not in BACKENDS:
        raise BadInput(f"sandbox: backend {backend!r} is unknown{nearest(backend, BACKENDS)}")
