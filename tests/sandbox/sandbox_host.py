"""What an escape would reach: files, processes and sockets of the host, each with a check that tells whether it was."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from rollkeel_sandbox import libc
from rollkeel_sandbox.syscalls import NUMBERS

ENVIRON_SECRET = "rollkeel-canary-" + secrets.token_hex(8)
SLEEPER = "import time; print(flush=True); time.sleep(600)"


class Host:
    """Canaries in reach of the uid that runs the jobs; `words` fill in a program's @words@."""

    def __init__(self, uid: int | None) -> None:
        self.uid = uid
        self.folder = Path(tempfile.mkdtemp(prefix="canary-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.open_folder = self.folder / "open"
        self.open_folder.mkdir()
        self.open_folder.chmod(0o777)
        self.secret = secrets.token_hex(16)
        (self.folder / "secret").write_text(self.secret)
        self.sockets = {"tcp": socket.create_server(("127.0.0.1", 0))}
        self.sockets["udp"] = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.sockets["udp"].bind(("127.0.0.1", 0))
        for kind, name in (("unix", f"{self.folder}/socket"), ("abstract", "\0" + ENVIRON_SECRET + str(uid))):
            self.sockets[kind] = socket.socket(socket.AF_UNIX)
            self.sockets[kind].bind(name)
            self.sockets[kind].listen()
        os.chmod(self.folder / "socket", 0o777)
        for sock in self.sockets.values():
            sock.setblocking(False)
        self._suid_id()
        self._victim: subprocess.Popen[bytes] | None = None
        self.reset()

    def _suid_id(self) -> None:
        self.suid_id = self.folder / "id"
        shutil.copy("/usr/bin/id", self.suid_id)
        self.suid_id.chmod(0o4755)

    def reset(self) -> None:
        """As before any job."""
        file = self.open_folder / "delete-me"
        file.write_text("x")
        file.chmod(0o644)
        if self.uid is not None:
            os.chown(file, self.uid, self.uid)
        (self.open_folder / "mark").unlink(missing_ok=True)
        for name in ("tcp_reached", "udp_reached", "unix_reached", "abstract_reached"):
            while getattr(self, name)(b""):
                pass
        if self._victim is not None and self.victim_slowed(b""):
            self._victim.kill()
            self._victim.wait()
        if self._victim is None or self._victim.poll() is not None:
            command = [python_for(self.uid), "-c", SLEEPER]
            environment = {"CANARY": ENVIRON_SECRET}
            self._victim = subprocess.Popen(
                command, cwd="/", env=environment, stdout=subprocess.PIPE, **as_user(self.uid)
            )
            assert self._victim.stdout is not None
            self._victim.stdout.readline()

    def words(self) -> dict[str, str]:
        assert self._victim is not None
        column = libc.MACHINES[libc.machine()]
        return {
            "numbers": repr({name: numbers[column] for name, numbers in NUMBERS.items()}),
            "secret_path": str(self.folder / "secret"),
            "open_folder": str(self.open_folder),
            "environ_secret": ENVIRON_SECRET,
            "victim": str(self._victim.pid),
            "tcp": str(self.sockets["tcp"].getsockname()[1]),
            "udp": str(self.sockets["udp"].getsockname()[1]),
            "unix": f"{self.folder}/socket",
            "abstract": ENVIRON_SECRET + str(self.uid),
            "suid_id": str(self.suid_id),
        }

    def secret_printed(self, stdout: bytes) -> bool:
        return self.secret.encode() in stdout

    def mark_written(self, _stdout: bytes) -> bool:
        return (self.open_folder / "mark").exists()

    def file_deleted(self, _stdout: bytes) -> bool:
        return not (self.open_folder / "delete-me").exists()

    def mode_changed(self, _stdout: bytes) -> bool:
        file = self.open_folder / "delete-me"
        return file.exists() and file.stat().st_mode & 0o777 != 0o644

    def time_changed(self, _stdout: bytes) -> bool:
        file = self.open_folder / "delete-me"
        return file.exists() and file.stat().st_mtime == 1

    def victim_slowed(self, _stdout: bytes) -> bool:
        assert self._victim is not None
        return self._victim.poll() is None and os.getpriority(os.PRIO_PROCESS, self._victim.pid) > os.nice(0)

    def victim_dead(self, _stdout: bytes, wait_s: float = 0.5) -> bool:
        assert self._victim is not None
        try:
            self._victim.wait(timeout=wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _accepted(self, kind: str) -> bool:
        try:
            self.sockets[kind].accept()[0].close()
        except BlockingIOError:
            return False
        return True

    def tcp_reached(self, _stdout: bytes) -> bool:
        return self._accepted("tcp")

    def unix_reached(self, _stdout: bytes) -> bool:
        return self._accepted("unix")

    def abstract_reached(self, _stdout: bytes) -> bool:
        return self._accepted("abstract")

    def udp_reached(self, _stdout: bytes) -> bool:
        try:
            return bool(self.sockets["udp"].recv(100))
        except BlockingIOError:
            return False

    def close(self) -> None:
        for sock in self.sockets.values():
            sock.close()
        assert self._victim is not None
        self._victim.kill()
        self._victim.wait()
        assert self._victim.stdout is not None
        self._victim.stdout.close()
        shutil.rmtree(self.folder)


def as_user(uid: int | None) -> dict:
    """Arguments of `subprocess.Popen` that run a program as this user; None for the present one."""
    return {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}


def python_for(uid: int | None) -> str:
    """A Python >= 3.11 that this user may run: this one, or the system's."""
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    for candidate in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            if subprocess.run([candidate, "-c", check], cwd="/", capture_output=True, **as_user(uid)).returncode == 0:
                return candidate
        except OSError:
            continue
    return ""
