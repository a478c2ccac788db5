"""The benchmarks that the Ring-1T, DPPO and AC-MIS-PO papers report and whose answers can be verified. Files are read, never shipped."""

from __future__ import annotations

from rollkeel.errors import BadInput, nearest
from rollkeel.evals.benchmarks import choices, instructions, maths, programs, reasoning
from rollkeel.evals.benchmarks.base import Benchmark, Item, Loaded, Options
from rollkeel.evals.graders import register_all

__all__ = ["BENCHMARKS", "Benchmark", "Item", "Loaded", "Options", "get"]

register_all()

BENCHMARKS: dict[str, Benchmark] = {
    b.name: b
    for b in (
        *maths.BENCHMARKS,
        *choices.BENCHMARKS,
        *reasoning.BENCHMARKS,
        *programs.BENCHMARKS,
        *instructions.BENCHMARKS,
    )
}


def get(name: str) -> Benchmark:
    """Benchmark `name`. Raises `BadInput` naming the nearest."""
    if name not in BENCHMARKS:
        raise BadInput(f"benchmark {name!r}: unknown{nearest(name, list(BENCHMARKS))}")
    return BENCHMARKS[name]
