"""How bubblewrap and gVisor are asked for a sandbox: command lines and configurations, nothing that runs."""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollkeel_sandbox import identity, kinds, libc, root, server, spawn

PROGRAMS = {"bubblewrap": "bwrap", "gvisor": "runsc"}
AGENT = "/agent"
_CODE = f"import sys; sys.path.insert(0, {AGENT!r}); from rollkeel_sandbox.agent import main; main(sys.argv[1])"
ROOT_KEEPS = tuple(f"CAP_{name}" for name in libc.AGENT_CAPABILITIES)
"""Capabilities of an agent that gives its job another uid; the job has none."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How to start one sandbox."""

    command: tuple[str, ...]
    folder: str = ""
    """A temporary folder that goes with it."""
    end: tuple[str, ...] = ()
    """Command that ends it and removes what the program keeps of it."""


def agent_command(uid: int | None, mount_mb: int | None = None) -> list[str]:
    """`uid`: the job's own, None for that of the agent. `mount_mb`: size of a scratch folder that the agent is to mount."""
    config = {"uid": uid, "mount_mb": mount_mb}
    return [sys.executable, "-I", "-B", "-X", "utf8", "-c", _CODE, json.dumps(config)]


def agent_files(folder: str = AGENT) -> dict[str, str]:
    """Path below `folder` → file or folder of the host: this package, and nothing that stands beside it."""
    return {f"{folder}/rollkeel_sandbox": f"{spawn.PACKAGE_ROOT}/rollkeel_sandbox"}


def environment() -> dict[str, str]:
    return spawn.ENVIRONMENT | {"PATH": kinds.search_path()}


def bubblewrap(program: str, uid: int | None, scratch_mb: int) -> Launch:
    """`uid` is the job's own as root, None for an ordinary user, who gets a user namespace.

    The agent mounts the scratch folder, as bubblewrap cannot limit the number of files, and gives the capability up right
    after. A set-uid bubblewrap hands none to an ordinary user: there the folder is its own.
    """
    mounts = os.geteuid() == 0 or not os.stat(program).st_mode & stat.S_ISUID
    links, binds = root.links_and_binds(server.readable_paths(kinds.search_path()))
    out = [program, "--unshare-pid", "--as-pid-1", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    out += ["--unshare-cgroup-try", "--hostname", "sandbox", "--new-session", "--die-with-parent", "--cap-drop", "ALL"]
    if uid is None:
        inside = str(identity.INSIDE_UID)
        out += ["--unshare-user", "--uid", inside, "--gid", inside]
    else:
        out += [word for name in ROOT_KEEPS for word in ("--cap-add", name)]
    if mounts:
        scratch = ["--cap-add", "CAP_SYS_ADMIN", "--perms", "0755", "--dir", root.SCRATCH]
    else:
        scratch = ["--size", str(scratch_mb << 20), "--tmpfs", root.SCRATCH]
    targets = [*(b.target for b in binds), *links, *agent_files()]
    for folder in sorted({str(parent) for target in targets for parent in Path(target).parents} - {"/"}):
        out += ["--perms", "0755", "--dir", folder]  # else only the owner of the sandbox may pass
    for bind in binds:
        out += ["--dev-bind" if bind.device else "--ro-bind", bind.source, bind.target]
    for inside, source in agent_files().items():
        out += ["--ro-bind", source, inside]
    for path, target in links.items():
        out += ["--symlink", target, path]
    out += ["--proc", "/proc", *scratch, "--remount-ro", "/"]
    out += ["--chdir", "/", "--clearenv", *(w for k, v in environment().items() for w in ("--setenv", k, v))]
    return Launch(command=(*out, "--", *agent_command(uid, scratch_mb if mounts else None)))


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
    read = [(b.target, b.source) for b in binds if not b.device] + list(agent_files().items())
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
    # Else runsc would show one of its own there, and for an empty folder that nobody may enter it has no other word.
    mounts.append({"destination": "/sys", "type": "tmpfs", "source": "tmpfs", "options": ["size=4k", "mode=000", "ro"]})
    if "/tmp" in links:
        mounts.append({"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["size=1m", "mode=755"]})
    keeps = list(ROOT_KEEPS)
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
