"""The last steps before untrusted code, in the process that will run it, and then that code.

Part of the fork server, and so without `threading` and `random`: both do work in every forked child, a hundred page faults each.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import traceback
import types
from dataclasses import dataclass
from typing import NoReturn

from rollkeel_sandbox import identity, landlock, libc, rlimits, root, wire
from rollkeel_sandbox.job import SOURCE_NAMES, Job
from rollkeel_sandbox.kinds import KINDS
from rollkeel_sandbox.plan import OWN, Plan
from rollkeel_sandbox.seccomp import Filter

FIRST_LOOSE_FD = 5
"""Of a program's process in the making: its streams, what it says, and its order come before."""


@dataclass(frozen=True, kw_only=True)
class Cage:
    """What the fork server prepared once for all its jobs."""

    plan: Plan
    rules: landlock.Prepared | None
    """Landlock's, on what all jobs may read."""
    seccomp: Filter | None
    base_bytes: int
    """Address space of the fork server."""
    sys_path: tuple[str, ...]
    own_modules: tuple[str, ...]
    """Modules of this package, which a Python program is not to find imported."""
    group: int
    """Descriptor of the control group in which jobs get theirs, -1 without."""
    path: str
    """Where jobs find programs, this Python's folder aside."""
    scratch_base: str
    """Where jobs get their folders when they cannot have a file system of their own."""


def environment(scratch: str, path: str) -> dict[str, str]:
    """All that a job has in its environment; nothing of the server's."""
    return {
        "PATH": f"{os.path.dirname(sys.executable)}:{path}",
        "HOME": f"{scratch}/box",
        "TMPDIR": f"{scratch}/tmp",
        "LANG": "C.UTF-8",
        "USER": "job",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def confine(cage: Cage, *, uid: int, scratch: str) -> None:
    """Take away what a job may not have. The order matters: each step needs what a later one takes away.

    The uid first (which needs capabilities), then capabilities, then Landlock and descriptors. What remains is `seal`.
    """
    plan = cage.plan
    os.umask(0o022)
    os.chdir(f"{scratch}/box")
    identity.become(uid if plan.identity == OWN else None)
    libc.prctl(libc.PR_SET_DUMPABLE, 1)  # lost with the uid; without it a process may not look into its own /proc/self
    # Landlock and seccomp are only granted to who cannot gain privileges.
    if plan.capabilities or plan.landlock or plan.seccomp:
        libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
    if plan.capabilities:
        libc.set_capabilities()
    if cage.rules:
        landlock.restrict(cage.rules, (scratch, "/proc") if "mount" in plan.namespaces else (scratch,))
    libc.close_range(FIRST_LOOSE_FD)


def seal(cage: Cage, limits: rlimits.Planned) -> None:
    """The job's own limits, and the filter, which no longer lets all of them be set."""
    rlimits.apply(limits)
    if cage.seccomp:
        cage.seccomp.install()


def run(cage: Cage, kind: str, source: bytes, args: tuple[str, ...], scratch: str) -> NoReturn:
    """The program itself, in this process; never returns."""
    env = environment(scratch, cage.path)
    if kind == "python":
        if scratch != root.SCRATCH:  # the fork server's own is that of a job in the private root
            os.environ.clear()
            os.environ.update(env)
        for name in cage.own_modules:
            del sys.modules[name]
        sys.path[:] = [f"{scratch}/box", *cage.sys_path]
        _run_python(source, f"{scratch}/box/{SOURCE_NAMES['python']}", args)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and an exec would hand that on
        libc.on_signal(number, libc.DEFAULT)
    os.execve("/bin/sh", ["sh", "-c", KINDS[kind].command, "sh", *args], env)


def _run_python(source: bytes, path: str, args: tuple[str, ...]) -> NoReturn:
    libc.on_signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # type: ignore[attr-defined]
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    sys.argv = [path, *args]
    code = 1
    try:
        try:
            exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
            code = 0
        except SystemExit as error:
            code = _exit_code(error.code)
        except BaseException as error:
            # Frames of the sandbox are left out: the traceback starts in the program, as it would anywhere.
            frames = error.__traceback__.tb_next if error.__traceback__ else None
            traceback.print_exception(type(error), error, frames)
        if "threading" in sys.modules:  # from here on, what an interpreter does on its way out
            sys.modules["threading"]._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        code = code or 120  # the interpreter's own code for output that could not be flushed
    finally:
        os._exit(code)


def _exit_code(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    print(value, file=sys.stderr)
    return 1


def make_folders(uid: int | None, scratch: str) -> None:
    """Those of a job, empty; `uid`: their owner, None for this process's."""
    for name in root.SCRATCH_FOLDERS:
        path = f"{scratch}/{name}"
        os.mkdir(path, 0o700)
        if uid is not None:
            os.lchown(path, uid, uid)


def write_files(job: Job, uid: int | None, scratch: str) -> None:
    """Source and files, before anything of the job runs that could put a symlink in the way; `uid`: their owner, None for this
    process's."""
    made = []
    for name, data in ((SOURCE_NAMES[job.kind], job.source), *job.files.items()):
        folder = f"{scratch}/box"
        for part in name.split("/")[:-1]:
            folder = f"{folder}/{part}"
            if folder not in made:
                os.mkdir(folder, 0o755)
                made.append(folder)
        path = f"{scratch}/box/{name}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            wire.write_all(descriptor, data)
        finally:
            os.close(descriptor)
        made.append(path)
    if uid is not None:
        for path in made:
            os.lchown(path, uid, uid)
