"""Starting a Python that reads nothing from environment, home or the caller, to be or to become a fork server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rollkeel_sandbox import kinds

PACKAGE_ROOT = str(Path(__file__).resolve().parent.parent)
_CODE = "import sys; sys.path.insert(0, sys.argv[1]); from rollkeel_sandbox.{} import main; main(int(sys.argv[2]), sys.argv[1])"
ENVIRONMENT = {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""All of it but the PATH of jobs: a job can read the environment its server was started with in `/proc/self/environ`."""


def python(module: str, descriptor: int) -> subprocess.Popen[bytes]:
    """Run `main(descriptor, package root)` of a module of this package; the descriptor alone is handed down."""
    command = [sys.executable, "-I", "-X", "utf8", "-c", _CODE.format(module), PACKAGE_ROOT, str(descriptor)]
    return subprocess.Popen(
        command,
        env=ENVIRONMENT | {"PATH": kinds.search_path()},
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(descriptor,),
        start_new_session=True,
        umask=0o022,
    )
