"""A program judged by what it prints for given inputs. The judge stays outside: the program sees the inputs, never the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollkeel_sandbox.job import Job, Result, Status


@dataclass(frozen=True, kw_only=True)
class Case:
    """Standard input, and what must come out of it."""

    stdin: bytes = b""
    expected: bytes = b""


def same(printed: bytes, expected: bytes) -> bool:
    """Equal but for white space at the ends of lines and empty lines at the end, as contest judges compare."""
    return _lines(printed) == _lines(expected)


def jobs(job: Job, cases: Sequence[Case]) -> list[Job]:
    """One run of the program per case."""
    return [replace(job, stdin=case.stdin) for case in cases]


def passed(result: Result, case: Case) -> bool:
    """It ended by itself, with exit code 0, and printed what was expected."""
    return result.status is Status.OK and not result.stdout_truncated and same(result.stdout, case.expected)


def _lines(text: bytes) -> list[bytes]:
    lines = [line.rstrip() for line in text.split(b"\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines
