"""What bubblewrap and gVisor isolate on this machine: a job in one of their sandboxes looks around, and only what it did
not find is reported."""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollkeel_sandbox import client, identity
from rollkeel_sandbox.boxes import Boxes
from rollkeel_sandbox.errors import BadInput, nearest
from rollkeel_sandbox.job import Job, Level, Limits
from rollkeel_sandbox.launch import PROGRAMS
from rollkeel_sandbox.plan import MAPPED, NAMESPACES, OWN

BACKENDS = ("auto", "native", *PROGRAMS)


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


def doctor() -> dict[str, tuple[str, str]]:
    """Backend → its level here, and how or why not; those that are not installed are not tried."""
    out = {}
    for backend, program in PROGRAMS.items():
        out[backend] = ("none", f"{program} is not installed")
        if shutil.which(program):
            seen = probe(backend)
            how = seen.why_not or ", ".join(f"{layer}: {text}" for layer, text in seen.layers.items())
            out[backend] = (seen.level.name.lower(), how)
    return out


def check(backend: str) -> None:
    if backend not in BACKENDS:
        raise BadInput(f"sandbox: backend {backend!r} is unknown{nearest(backend, BACKENDS)}")
