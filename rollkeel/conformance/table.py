"""A verdict as a table for people, and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from rollkeel.conformance.runner import Difference, Verdict

SHOWN = 12
"""Differing tokens that the table shows."""
HEADER = ("batch", "answer.token", "", "p", "o", "q", "A", "recipe", "came", "decided by")


def lines(verdict: Verdict) -> list[str]:
    """What `rollkeel conformance` prints."""
    options = "".join(f" {k}={v}" for k, v in verdict.options.items())
    state = "agrees with" if verdict.passed else "differs from"
    out = [f"{verdict.name} {state} {verdict.recipe}{options}", f"  {verdict.source}"]
    out += [f"  {f.kind}: {f.says}" for f in verdict.findings]
    out += [f"  invariance {name}: {words}" for name, words in verdict.invariances.items() if words]
    out += [f"  note: {words}" for words in verdict.notes]
    if not verdict.aggregated:
        out.append("  note: losses of tokens were compared, so its denominator was not")
    wrong = len(verdict.differences)
    out.append(f"  {verdict.tokens - wrong} of {verdict.tokens} tokens have the recipe's coefficient of ∇log p")
    rows = [HEADER, *(_row(d) for d in verdict.differences[:SHOWN])] if wrong else []
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))] if rows else []
    out += ["    " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return out + ([f"    … and {wrong - SHOWN} more (--json lists all)"] if wrong > SHOWN else [])


def _row(d: Difference) -> Sequence[str]:
    numbers = ("" if math.isnan(x) else f"{x:.9g}" for x in d.probabilities)
    where = f"{d.answer}.{d.position}"
    return (d.batch, where, d.words, *numbers, f"{d.advantage:g}", f"{d.expected:.5g}", f"{d.came:.5g}", d.because)


def as_json(verdict: Verdict) -> dict[str, Any]:
    """The same as JSON values; numbers that are not finite become None."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {"passed": verdict.passed, **plain(dataclasses.asdict(verdict))}
