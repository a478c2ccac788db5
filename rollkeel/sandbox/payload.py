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
from dataclasses import dataclass, replace
from typing import NoReturn

from rollkeel.sandbox import identity, landlock, libc, rlimits, root
from rollkeel.sandbox.job import SOURCE_NAMES, Job
from rollkeel.sandbox.kinds import KINDS, STANDARD_PATH
from rollkeel.sandbox.plan import MAPPED, OWN, Plan
from rollkeel.sandbox.seccomp import Filter

CAGE_PROCESSES = 2
"""Supervisor and init, which share the job's user namespace and so its count of processes."""


@dataclass(frozen=True, kw_only=True)
class Cage:
    """What the fork server prepared once for all its jobs."""

    plan: Plan
    paths: tuple[str, ...]
    """Host paths that jobs may read."""
    seccomp: Filter | None
    base_bytes: int
    """Address space of the fork server."""
    sys_path: tuple[str, ...]
    scratch_base: str
    """Where jobs get their folders when they cannot have a file system of their own."""


def environment(scratch: str) -> dict[str, str]:
    """All that a job has in its environment; nothing of the server's."""
    return {
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', STANDARD_PATH)}",
        "HOME": f"{scratch}/box",
        "TMPDIR": f"{scratch}/tmp",
        "LANG": "C.UTF-8",
        "USER": "job",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def confine(cage: Cage, job: Job, *, uid: int, scratch: str, tasks_of_uid: int) -> None:
    """From here on this process can do what a job can. The order matters: each step needs what a later one takes away.

    Limits and files first, then the uid (which needs capabilities), then capabilities, then Landlock, and the filter last,
    as it forbids most of the calls before it.
    """
    plan = cage.plan
    os.umask(0o022)
    os.chdir(f"{scratch}/box")
    if plan.rlimits:
        allowed = job.limits.processes + {OWN: 0, MAPPED: CAGE_PROCESSES}.get(plan.identity, tasks_of_uid)
        base = cage.base_bytes + KINDS[job.kind].address_mb * rlimits.MB
        rlimits.apply(rlimits.plan(replace(job.limits, processes=allowed), base_bytes=base))
    identity.become(uid if plan.identity == OWN else None)
    libc.prctl(libc.PR_SET_DUMPABLE, 1)  # lost with the uid; without it a process may not look into its own /proc/self
    if (
        plan.capabilities or plan.landlock or plan.seccomp
    ):  # the latter two are only granted to who cannot gain privileges
        libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
    if plan.capabilities:
        libc.clear_capabilities()
    if plan.landlock:
        landlock.restrict(root.rules(cage.paths, scratch, private="mount" in plan.namespaces), plan.landlock)
    if cage.seccomp:
        cage.seccomp.install()


def run(cage: Cage, job: Job, scratch: str) -> NoReturn:
    """The program itself, in this process; never returns."""
    env = environment(scratch)
    if job.kind == "python":
        os.environ.clear()
        os.environ.update(env)
        _run_python(job, f"{scratch}/box/{SOURCE_NAMES['python']}", [f"{scratch}/box", *cage.sys_path])
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and an exec would hand that on
        signal.signal(number, signal.SIG_DFL)
    os.execve("/bin/sh", ["sh", "-c", KINDS[job.kind].command, "sh", *job.args], env)


def _run_python(job: Job, path: str, sys_path: list[str]) -> NoReturn:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # type: ignore[attr-defined]
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__)
    for name in [n for n in sys.modules if n.split(".")[0] == "rollkeel"]:
        del sys.modules[name]
    sys.modules["__main__"] = module
    sys.argv = [path, *job.args]
    sys.path[:] = sys_path
    code = 1
    try:
        try:
            exec(compile(job.source, path, "exec", dont_inherit=True), module.__dict__)
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
