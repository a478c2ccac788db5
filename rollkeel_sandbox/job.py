"""What goes into the sandbox and what comes out. Bytes stay bytes: what a job prints may hold NUL, ANSI or broken UTF-8."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Self

from rollkeel_sandbox import kinds
from rollkeel_sandbox.errors import BadInput, SandboxError, nearest

KINDS = tuple(kinds.KINDS)
PRELOADS = ("code", "math", "stem")
SOURCE_NAMES = {name: kind.source for name, kind in kinds.KINDS.items()}
MAX_NAME_BYTES = 255
MAX_JOB_BYTES = 1 << 28
PAGE = 4096
"""A file or folder takes whole pages of the scratch folder."""


class Closes:
    """`with` ends it by `close`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


class Refused(SandboxError):
    """The isolation that holds on this machine is below what was asked for, or cannot be had at all."""

    exit_code = 3


class Level(enum.IntEnum):
    """How far a job is from the host, in words and in order."""

    NONE = 0
    """A process with limits. Never for model output."""
    RESTRICTED = 1
    """Landlock, seccomp, limits; the host's process numbers and network stack are the job's too."""
    NAMESPACES = 2
    """Private root, processes, network and IPC, behind a user namespace; on the host the job has the server's uid."""
    FULL = 3
    """The same with a uid that nothing else on the host has."""


class Status(enum.StrEnum):
    """How a job ended. Only `ok` and `error` are the program's own doing."""

    OK = "ok"
    ERROR = "error"
    """Non-zero exit code, or a signal that the program earned itself."""
    TIMEOUT = "timeout"
    CPU = "cpu"
    MEMORY = "memory"
    OUTPUT = "output"
    KILLED = "killed"
    """From outside: the machine or an operator ended it, and so it was with its retry."""
    REFUSED = "refused"
    """Not run: untrusted, and the isolation is below the configured level."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one job with all its processes, unless said otherwise. MB are 2**20 bytes."""

    wall_s: float = 10.0
    """Seconds from the program's start until all of it is killed."""
    cpu_s: float = 10.0
    """CPU seconds of all its processes."""
    memory_mb: int = 512
    """Resident memory of all its processes, shared pages counted once; files in the scratch folder come on top."""
    processes: int = 32
    """Processes and threads at one time."""
    file_mb: int = 64
    """Largest file."""
    scratch_mb: int = 128
    """All files together."""
    output_bytes: int = 1 << 20
    """Of standard output and of standard error, each; one byte more ends the job. Also of all collected files together."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            whole = not f.name.endswith("_s")
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise BadInput(
                    f"sandbox limit {f.name}: expected {'an integer' if whole else 'a number'}, got {value!r}"
                )
            if not (math.isfinite(value) and 0 < value <= 2**31):
                raise BadInput(f"sandbox limit {f.name}: expected a positive number up to 2**31, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One program, run once in a cage of its own, in a folder that is thrown away."""

    source: bytes
    kind: str = "python"
    """One of `KINDS`. Compilers and interpreters are the machine's, and run inside within the same limits."""
    preload: str = "code"
    """Python only: what is imported already when the program starts: `code` nothing, `math` sympy, `stem` numpy, scipy."""
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Relative path → content, written into the working folder before the start."""
    args: tuple[str, ...] = ()
    collect: tuple[str, ...] = ()
    """Relative paths of files to bring back; those that are missing, no regular files or too large are left out."""
    limits: Limits = field(default_factory=Limits)
    untrusted: bool = True
    """False only for programs that you would run outside as well: they are not held to the minimum level."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadInput(f"sandbox job: kind {self.kind!r} is unknown{nearest(self.kind, KINDS)}")
        if self.preload not in PRELOADS:
            raise BadInput(f"sandbox job: preload {self.preload!r} is unknown{nearest(self.preload, PRELOADS)}")
        for name, value in (("source", self.source), ("stdin", self.stdin), *self.files.items()):
            if not isinstance(value, bytes):
                raise BadInput(f"sandbox job: {name} must be bytes, got {type(value).__name__}; encode it")
        for name in (*self.files, *self.collect):
            check_name(name)
        self._check_files()
        for argument in self.args:
            if "\0" in argument or not _encodes(argument):
                raise BadInput("sandbox job: an argument holds NUL or a lone surrogate, which no program can be given")

    def _check_files(self) -> None:
        """What can be seen not to work is refused here and not in the cage."""
        source = SOURCE_NAMES[self.kind]
        if source in self.files:
            raise BadInput(f"sandbox job: files must not hold {source}, which is the source itself")
        names = {*self.files, source}
        for name in names:
            parts = name.split("/")
            for i in range(1, len(parts)):
                if (folder := "/".join(parts[:i])) in names:
                    raise BadInput(f"sandbox job: {display(folder.encode(), 80)!r} is a file and a folder at once")
        contents = (self.source, *self.files.values())
        pages = sum(1 + math.ceil(len(data) / PAGE) for data in contents) + 16 * len(names)
        if pages * PAGE > self.limits.scratch_mb << 20:
            raise BadInput(
                f"sandbox job: source and files do not fit into scratch_mb={self.limits.scratch_mb}; raise it"
            )
        if sum(map(len, contents)) + len(self.stdin) > MAX_JOB_BYTES:
            raise BadInput(f"sandbox job: source, stdin and files are over {MAX_JOB_BYTES >> 20} MB together")


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a job ended and what it left."""

    status: Status
    exit_code: int | None = None
    """None when a signal ended it, or it did not run."""
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)
    """What `Job.collect` asked for and was there."""
    wall_s: float = 0.0
    """Seconds from the program's start to the death of its last process."""
    cpu_s: float = 0.0
    """CPU seconds of all its processes that were waited for, the cage's own share of a few milliseconds included."""
    peak_memory_mb: float = 0.0
    """Highest resident memory seen by looking every few milliseconds: a lower bound."""
    level: Level = Level.NONE
    isolation: Mapping[str, str] = field(default_factory=dict)
    """Layer → how it held for this job; layers that did not hold are absent."""
    reason: str = ""
    """One line for `refused` and `killed`."""
    attempts: int = 1


def check_name(name: str) -> None:
    """Refuses a path that is not plainly inside the working folder."""
    parts = name.split("/")
    long = any(len(p.encode("utf-8", "replace")) > MAX_NAME_BYTES for p in parts) or len(parts) > 16
    if "\0" in name or long or not _encodes(name) or any(p in ("", ".", "..") for p in parts):
        raise BadInput(
            f"sandbox file {display(name.encode('utf-8', 'replace'), 80)!r}: expected a relative path without '..'"
        )


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def display(data: bytes, limit: int = 2000) -> str:
    """`data` for a terminal or a log: control characters, broken UTF-8 and direction marks are escaped, newlines and tabs stay."""
    text = data[:limit].decode("utf-8", "backslashreplace")
    shown = "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown if len(data) <= limit else f"{shown}… ({len(data)} bytes)"
