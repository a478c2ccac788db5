"""Landlock: which files a job may open for what, whatever the mounts are; TCP; abstract sockets and signals outside.

A second wall behind the private root, and the first one where namespaces are blocked.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from rollkeel_sandbox import libc

FS = (
    "execute", "write_file", "read_file", "read_dir", "remove_dir", "remove_file", "make_char", "make_dir", "make_reg",
    "make_sock", "make_fifo", "make_block", "make_sym", "refer", "truncate", "ioctl_dev",
)  # fmt: skip
"""File system rights in the order of their bits."""
_FS_COUNT = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
NET_TCP = 0b11
SCOPE = 0b11
"""Abstract Unix sockets and signals."""

READ = ("execute", "read_file", "read_dir")
WRITE = (*READ, "write_file", "remove_dir", "remove_file", "make_dir", "make_reg", "make_sock", "make_fifo", "make_sym", "refer", "truncate")  # fmt: skip
DEVICE = ("read_file", "write_file", "ioctl_dev")
_FOR_FILES = ("execute", "write_file", "read_file", "truncate", "ioctl_dev")
_RULE_PATH_BENEATH = 1


Rule = tuple[str, Sequence[str]]
"""A path and what may be done there and below."""


@dataclass(frozen=True, kw_only=True)
class Handled:
    """What a ruleset forbids unless a rule allows it: bit sets for files, TCP, and what leaves the domain."""

    fs: int
    net: int
    scoped: int

    def encode(self) -> bytes:
        """`struct landlock_ruleset_attr`, as long as the oldest kernel that knows these fields expects."""
        if self.scoped:
            return struct.pack("=QQQ", self.fs, self.net, self.scoped)
        return struct.pack("=QQ", self.fs, self.net) if self.net else struct.pack("=Q", self.fs)


def rights(names: Sequence[str], abi: int) -> int:
    """Bit set of file system rights, without those that this ABI does not know."""
    known = _FS_COUNT[min(abi, 5)]
    return sum(1 << bit for name in names if (bit := FS.index(name)) < known)


def handled(abi: int) -> Handled:
    """Everything this ABI can forbid: TCP since 4, abstract sockets and signals since 6."""
    return Handled(fs=rights(FS, abi), net=NET_TCP if abi >= 4 else 0, scoped=SCOPE if abi >= 6 else 0)


def path_rule(allowed: int, descriptor: int) -> bytes:
    """`struct landlock_path_beneath_attr` (packed: 12 bytes)."""
    return struct.pack("=Qi", allowed, descriptor)


def abi() -> int:
    """Version of the kernel's Landlock, 0 where there is none."""
    try:
        return _call("create_ruleset", None, 0, 1)
    except OSError:
        return 0


@dataclass(frozen=True)
class Prepared:
    """Rules in the encoding of the kernel, with paths that are open already; and rights on folders that are still to come."""

    attr: bytes
    encoded: tuple[bytes, ...]
    later: tuple[int, ...]


def prepare(allowed: Sequence[Rule], version: int, lowest: int = 0, later: Sequence[Sequence[str]] = ()) -> Prepared:
    """Open the paths, with numbers from `lowest` on. A path that does not exist, or that other rules keep from this uid
    anyway, is left out: there is nothing to allow."""
    encoded = []
    for path, names in allowed:
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue
        descriptor = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, lowest)
        os.close(opened)
        if not os.path.isdir(path):
            names = [name for name in names if name in _FOR_FILES]
        encoded.append(path_rule(rights(names, version), descriptor))
    return Prepared(handled(version).encode(), tuple(encoded), tuple(rights(names, version) for names in later))


def restrict(prepared: Prepared, folders: Sequence[str] = ()) -> None:
    """Bind this process and its future children: the prepared paths and these `folders`, which get the rights of `later`
    in turn, and nothing else. Needs no_new_privs. Descriptors of paths stay open."""
    ruleset = _call("create_ruleset", prepared.attr, len(prepared.attr), 0)
    try:
        for encoded in prepared.encoded:
            _call("add_rule", ruleset, _RULE_PATH_BENEATH, encoded, 0)
        for path, allowed in zip(folders, prepared.later, strict=False):
            descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            _call("add_rule", ruleset, _RULE_PATH_BENEATH, path_rule(allowed, descriptor), 0)
        _call("restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


def _call(name: str, *arguments: int | bytes | None) -> int:
    return libc.call(f"landlock_{name}", *arguments)
