"""Which layers a job gets on this machine, and what level they add up to. Pure: a probe's findings in, a plan out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rollkeel_sandbox.errors import BadInput, nearest
from rollkeel_sandbox.job import Level

OWN, MAPPED, SHARED = "own", "mapped", "shared"
"""Whose uid a job has: one of its own, the server's behind a user namespace, or plainly the server's."""
NAMESPACES = ("pid", "mount", "net", "ipc", "uts")
TRUNCATION_SINCE = 3
"""Landlock ABI before which any file of the same user can be emptied by its path."""
PYTHON = "interpreter"
"""Finding: jobs can read this Python without a private root, in which it lies open. Else every program that imports fails."""
LAYERS = ("user", *NAMESPACES, "capabilities", "rlimits", "landlock", "seccomp", "watch", "cgroup")
"""In the order in which they are reported. `user` is the uid, `mount` the private root, `watch` the group's memory and CPU,
`cgroup` the same and processes, by the kernel."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The layers of every job of one fork server."""

    identity: str
    namespaces: frozenset[str]
    capabilities: bool = True
    """Capabilities dropped, and privileges never gained again (no_new_privs)."""
    rlimits: bool = True
    landlock: int = 0
    """ABI, 0 without."""
    seccomp: bool = True
    watch: bool = True
    cgroup: bool = False
    readable: bool = True
    """Jobs can read this Python."""

    @property
    def level(self) -> Level:
        walls = self.seccomp and self.rlimits and self.capabilities and self.watch
        if walls and self.namespaces >= set(NAMESPACES) and self.identity != SHARED:
            return Level.FULL if self.identity == OWN else Level.NAMESPACES
        walls = walls and self.landlock >= TRUNCATION_SINCE and self.readable
        return Level.RESTRICTED if walls else Level.NONE

    @property
    def leads(self) -> bool:
        """A job's supervisor is itself process 1 of the job's process namespace: where their uids keep the job off it."""
        return self.identity == OWN and "pid" in self.namespaces

    def isolation(self, uid: int) -> dict[str, str]:
        """Layer → how it holds, for a job with this uid on the host."""
        user = {OWN: f"own uid {uid}", MAPPED: f"user namespace, uid {uid} on the host"}
        out = {"user": user[self.identity]} if self.identity in user else {}
        out |= {
            name: "private root" if name == "mount" else "namespace" for name in NAMESPACES if name in self.namespaces
        }
        how = {
            "capabilities": "none, no new privileges",
            "rlimits": "per process",
            "landlock": f"ABI {self.landlock}",
            "seccomp": "allow list",
            "watch": "memory and CPU of the group, polled",
            "cgroup": "memory and processes of the group, by the kernel",
        }
        return out | {name: text for name, text in how.items() if getattr(self, name)}

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"namespaces": sorted(self.namespaces)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        return cls(**{**data, "namespaces": frozenset(data["namespaces"])})


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the probe saw of one layer."""

    layer: str
    holds: bool
    how: str
    """How it holds, or why not."""


def choose(findings: Iterable[Finding], *, root: bool, landlock_abi: int, without: Iterable[str] = ()) -> Plan:
    """The strongest plan from layers that hold, less those in `without`, which exist to be measured and tested.

    All namespaces stand or fall together on a machine, but one may be left out on request. Who is not root gets them
    from a user namespace alone, so that leaving `user` out leaves them all out.
    """
    off = set(without)
    for name in off - set(LAYERS):
        raise BadInput(f"sandbox: unknown layer {name!r}{nearest(name, LAYERS)}")
    holds = {f.layer for f in findings if f.holds}
    namespaces = frozenset(NAMESPACES) if holds >= set(NAMESPACES) else frozenset()
    if root:
        identity = OWN if "user" in holds else SHARED
    else:
        identity = MAPPED if namespaces and "user" in holds else SHARED
    if "user" in off:
        identity, namespaces = SHARED, namespaces if root else frozenset()
    if "pid" in off or "mount" in off:
        # A private root without a view of its own processes, or the reverse, has no /proc to show.
        off |= {"pid", "mount"}
    return Plan(
        identity=identity,
        namespaces=namespaces - off,
        capabilities="capabilities" not in off,
        rlimits="rlimits" in holds - off,
        landlock=landlock_abi if "landlock" in holds - off else 0,
        seccomp="seccomp" in holds - off,
        watch="watch" not in off,
        cgroup="cgroup" in holds - off,
        readable="mount" in namespaces - off or PYTHON in holds or identity != OWN,
    )
