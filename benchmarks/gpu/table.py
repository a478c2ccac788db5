"""Rows as lines and as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FIXED = ("stage", "row", "device", "toy", "card", "value", "unit", "ok", "failed", "note")


def number(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def told(row: Mapping[str, Any]) -> list[str]:
    """What a row says beside its name: value, verdict, everything else."""
    value = f"{number(row['value'])} {row.get('unit', '')}".strip() if "value" in row else ""
    verdict = {True: "holds", False: "DOES NOT HOLD"}.get(row.get("ok"), "") if "ok" in row else ""  # type: ignore[arg-type]
    if "failed" in row:
        verdict = row["failed"]
    rest = [f"{k.replace('_', ' ')} {number(v)}" for k, v in row.items() if k not in FIXED]
    return [value, verdict, ", ".join([*rest, *([row["note"]] if "note" in row else [])])]


def line(row: Mapping[str, Any]) -> str:
    marked = " TOY" if row["toy"] else ""
    return f"[{row['device']}{marked}] {row['stage']} | {row['row']} | " + " | ".join(filter(None, told(row)))


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table, and above it what ran it and what went wrong."""
    marks = sorted(
        {
            f"device={r['device']}" + (" toy=true: these numbers say nothing about a card" if r["toy"] else "")
            for r in rows
        }
    )
    bad = [r for r in rows if "failed" in r or r.get("ok") is False]
    out = ["; ".join(marks), "", f"{len(bad)} of {len(rows)} rows failed or do not hold.", ""]
    out += ["| stage | row | value | verdict | more |", "|---|---|---|---|---|"]
    out += ["| " + " | ".join(c.replace("|", "\\|") for c in [r["stage"], r["row"], *told(r)]) + " |" for r in rows]
    return "\n".join(out) + "\n"
