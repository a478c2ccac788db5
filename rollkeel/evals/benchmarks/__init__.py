"""The benchmarks that the Ring-1T, DPPO and AC-MIS-PO papers report. Files are read, never shipped."""

from __future__ import annotations

from collections.abc import Iterable

from rollkeel.errors import BadInput, nearest
from rollkeel.evals.benchmarks import bfcl, choices, instructions, judged, maths, programs, reasoning
from rollkeel.evals.benchmarks.base import Benchmark, Item, Loaded, Options
from rollkeel.evals.graders import register_all

__all__ = ["BENCHMARKS", "Benchmark", "Item", "Loaded", "Options", "contexts_of", "get"]

MAX_CONTEXT = 2**24
register_all()

BENCHMARKS: dict[str, Benchmark] = {
    b.name: b
    for b in (
        *maths.BENCHMARKS,
        *choices.BENCHMARKS,
        *reasoning.BENCHMARKS,
        *programs.BENCHMARKS,
        *instructions.BENCHMARKS,
        *bfcl.BENCHMARKS,
        *judged.BENCHMARKS,
    )
}


def contexts_of(chosen: Iterable[Benchmark], asked: str | None) -> dict[str, int]:
    """Context of each by name for `reported` or a number of tokens; none where nothing is asked. Raises `BadInput`."""
    if asked is None:
        return {}
    if asked != "reported" and not (asked.isascii() and asked.isdecimal() and 2 <= int(asked) <= MAX_CONTEXT):
        raise BadInput(f"--context: expected reported or 2 to {MAX_CONTEXT} tokens, got {asked}")
    return {b.name: b.context if asked == "reported" else int(asked) for b in chosen}


def get(name: str) -> Benchmark:
    """Benchmark `name`. Raises `BadInput` naming the nearest."""
    if name not in BENCHMARKS:
        raise BadInput(f"benchmark {name!r}: unknown{nearest(name, list(BENCHMARKS))}")
    return BENCHMARKS[name]
