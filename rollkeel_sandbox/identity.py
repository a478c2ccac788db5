"""Who a job is: a uid of its own as root, else the server's behind a user namespace; and no privilege either way."""

from __future__ import annotations

import errno
import os
import socket

from rollkeel_sandbox import libc
from rollkeel_sandbox.errors import RunStopped

FIRST_UID, BLOCK, BLOCKS = 0x70000000, 256, 4096
"""Uids that systemd leaves unused (1879048192 and on); each sandbox claims a block of them."""
INSIDE_UID = 1000
"""What a job behind a user namespace sees as its own uid."""
LAST_CAPABILITY = 63


class UidBlock:
    """Uids for one sandbox, handed out in turn; a uid comes again only after it was given back by `release`.

    The block is claimed on this machine by the name of an abstract socket, which the kernel frees when the process ends.
    """

    def __init__(self) -> None:
        for block in range(BLOCKS):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                sock.bind(f"\0rollkeel-sandbox-uids-{block}")
            except OSError as error:
                sock.close()
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            self._claim = sock
            self._free = [FIRST_UID + block * BLOCK + i for i in range(BLOCK)]
            return
        raise RunStopped(f"sandbox: all {BLOCKS} blocks of uids are taken; close other sandboxes")

    def take(self) -> int:
        if not self._free:
            raise RunStopped(f"sandbox: all {BLOCK} uids of this sandbox are in use; open it with fewer workers")
        return self._free.pop(0)

    def release(self, uid: int) -> None:
        """Only when every process with this uid is known to be dead."""
        self._free.append(uid)

    def close(self) -> None:
        self._claim.close()


def unshare(flags: int, *, mapped: bool) -> None:
    """Enter new namespaces. `mapped`: behind a user namespace of one uid and one gid, and no way to change groups."""
    maps = {"setgroups": "deny", "uid_map": f"{INSIDE_UID} {os.getuid()} 1", "gid_map": f"{INSIDE_UID} {os.getgid()} 1"}
    if mapped or flags:
        libc.unshare(flags | (libc.CLONE_NEWUSER if mapped else 0))
    for name, text in maps.items() if mapped else ():
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def forswear() -> None:
    """Give up what an exec could bring back: capability bounding set, ambient set, set-uid programs. Children inherit it."""
    for capability in range(LAST_CAPABILITY + 1):
        try:
            libc.prctl(libc.PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno == errno.EINVAL:  # beyond the last one this kernel knows
                break
            if error.errno != errno.EPERM:  # without CAP_SETPCAP there is nothing to give up either
                raise
    try:
        libc.prctl(libc.PR_CAP_AMBIENT, libc.PR_CAP_AMBIENT_CLEAR_ALL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without them has none
            raise


def become(uid: int | None) -> None:
    """Take on `uid` (with an equal gid and no other group) for good; None keeps the present one."""
    if uid is None:
        return
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if os.getresuid() != (uid,) * 3 or os.getresgid() != (uid,) * 3 or os.getgroups():
        raise OSError(
            f"expected uid and gid {uid} and no groups, got {os.getresuid()}, {os.getresgid()}, {os.getgroups()}"
        )
