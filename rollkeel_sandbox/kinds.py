"""Kinds of programs: what each needs on this machine, and how it is run in a cage.

Read by the fork server too, and so without imports that its children would pay for.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from rollkeel_sandbox.errors import RunStopped

STANDARD_PATH = "/usr/local/bin:/usr/bin:/bin"
_RUN = (
    'p="$TMPDIR/out"; '
    # Where modes cannot be set, a copy of something executable lends its own.
    '[ -x "$p" ] || { cp /bin/true "$TMPDIR/program" && cat "$p" >"$TMPDIR/program" && p="$TMPDIR/program"; }; '
    'exec "$p" "$@"'
)
_HEAP = 'v=$(ulimit -v); [ "$v" = unlimited ] && v=4194304; m=$((v / 4096)); '
"""`m`: a quarter of the address space in MB, half of the memory limit and a little more."""


class MissingTool(RunStopped):
    """This machine has no compiler or interpreter for a kind of program."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How programs of one language are run."""

    source: str
    """The file that holds the source, in the working folder."""
    suffixes: tuple[str, ...]
    tools: tuple[str, ...] = ()
    """Programs that have to be installed."""
    command: str = ""
    """For `sh -c`, with the arguments as `$@`; empty: the fork server runs it itself."""
    address_mb: int = 0
    """Address space that its runtime reserves and does not use."""


KINDS = {
    "python": Kind(source="main.py", suffixes=(".py",)),
    "shell": Kind(source="main.sh", suffixes=(".sh",), tools=("sh",), command='exec sh main.sh "$@"'),
    "c": Kind(
        source="main.c",
        suffixes=(".c",),
        tools=("gcc",),
        command=f'gcc -O1 -o "$TMPDIR/out" main.c -lm </dev/null && {{ {_RUN}; }}',
    ),
    "c++": Kind(
        source="main.cpp",
        suffixes=(".cpp", ".cc"),
        tools=("g++",),
        command=f'g++ -O1 -o "$TMPDIR/out" main.cpp </dev/null && {{ {_RUN}; }}',
    ),
    "rust": Kind(
        source="main.rs",
        suffixes=(".rs",),
        tools=("rustc", "cc"),
        command=f'rustc --edition 2021 -C opt-level=1 -o "$TMPDIR/out" main.rs </dev/null && {{ {_RUN}; }}',
        address_mb=1024,
    ),
    "javascript": Kind(
        source="main.js",
        suffixes=(".js", ".mjs"),
        tools=("node",),
        command='export OPENSSL_CONF=/dev/null; exec node main.js "$@"',  # it reads that of the machine otherwise, or fails
        address_mb=2048,
    ),
    "java": Kind(
        source="Main.java",
        suffixes=(".java",),
        tools=("java", "javac"),
        # Compiled by the same machine that runs it: one start, and the class may have any name.
        command=f'{_HEAP}exec java -Xmx"$m"m -Xshare:auto -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData '
        '-XX:ReservedCodeCacheSize=64m -XX:CompressedClassSpaceSize=64m Main.java "$@"',
        address_mb=1024,
    ),
}


def require(kind: str) -> None:
    """Raise `MissingTool` when a program of this kind cannot be run here."""
    for tool in KINDS[kind].tools:
        if not locate(tool):
            raise MissingTool(
                f"sandbox: {kind} programs need {tool}, which is not installed here; install it (rollkeel-sandbox doctor lists the rest)"
            )


@functools.cache
def locate(tool: str) -> str:
    """Path of a tool as jobs will find it, empty where there is none. The caller's own PATH counts as well."""
    import shutil

    found = shutil.which(tool, path=STANDARD_PATH)
    if found is None and (found := shutil.which(tool)):
        found = _behind_rustup(found) if tool == "rustc" else os.path.realpath(found)
    return found or ""


def _behind_rustup(proxy: str) -> str:
    """The compiler itself, as rustup's stand-in needs the folder of its user."""
    import subprocess

    try:
        asked = subprocess.run([proxy, "--print", "sysroot"], capture_output=True, timeout=20, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    path = f"{asked.stdout.strip()}/bin/rustc"
    return path if os.path.exists(path) else ""


@functools.cache
def search_path() -> str:
    """PATH of jobs: the machine's standard folders, and those of tools that are installed elsewhere."""
    tools = sorted({tool for kind in KINDS.values() for tool in kind.tools})
    folders = [os.path.dirname(path) for path in map(locate, tools) if path]
    standard = STANDARD_PATH.split(":")
    return ":".join([*standard, *dict.fromkeys(f for f in folders if f not in standard)])


def prefixes(path: str) -> list[str]:
    """Where the tools of a PATH beyond the standard one are installed."""
    return [os.path.dirname(folder) for folder in path.split(":") if folder not in STANDARD_PATH.split(":")]


def doctor() -> dict[str, tuple[bool, str]]:
    """Kind → can it be run, and the paths of its tools, or the first that is missing."""
    out = {}
    for name, kind in KINDS.items():
        missing = [tool for tool in kind.tools if not locate(tool)]
        how = f"needs {missing[0]}" if missing else ", ".join(locate(tool) for tool in kind.tools) or "the fork server"
        out[name] = (not missing, how)
    return out
