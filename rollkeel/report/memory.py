"""What a run planned to hold of its device in each phase, beside what it held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PHASES = ("rollout", "score", "update", "publish", "evaluate", "checkpoint")
LEAST = 1.0
"""Megabytes below which a component is not named."""


@dataclass(frozen=True)
class Phase:
    """A row of the table; numbers in MB and seconds, NaN for what is not known."""

    name: str
    device: str
    """Components on the device by size, with their MB."""
    away: str
    """Those in host memory, or in a file."""
    planned: float
    held: float
    """What the processes held at its end, on the median."""
    peak: float
    """Most that they held in it."""
    moved: float
    """Of one step, on the median."""
    seconds: float
    waited: float


@dataclass(frozen=True)
class Memory:
    """The table of a run."""

    offload: str
    phases: Sequence[Phase]
    beside: float
    """MB that no phase of the trainer is without beside its plan: Python, libraries, code."""


def memory(events: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> Memory | None:
    """The newest plan (event `residency`) and what `memory/<phase>/…` say; None for a run without `memory.offload`."""
    event = next((e for e in reversed(events) if e.get("event") == "residency"), None)
    if event is None:
        return None
    plan = event.get("phases")
    plan = plan if isinstance(plan, dict) else {}
    phases = [found for name in PHASES if (found := _phase(name, plan.get(name), rows)).peak == found.peak]
    # Planned KV is what may be used: a CPU gives it memory block by block.
    spare = [p.peak - p.planned for p in phases if "KV" not in p.device and p.planned == p.planned]
    return Memory(str(event.get("offload", "?")), phases, min(spare, default=float("nan")))


def _phase(name: str, planned: Any, rows: Sequence[Mapping[str, Any]]) -> Phase:
    places = planned if isinstance(planned, dict) else {}

    def seen(what: str) -> list[float]:
        values = [row.get(f"memory/{name}/{what}") for row in rows]
        return sorted(float(v) for v in values if isinstance(v, int | float)) or [float("nan")]

    def named(where: str) -> str:
        sizes = places.get(where)
        sizes = sizes if isinstance(sizes, dict) else {}
        kept = sorted(
            ((mb, key) for key, mb in sizes.items() if isinstance(mb, int | float) and mb >= LEAST), reverse=True
        )
        return ", ".join(f"{key} {mb:,.0f}" for mb, key in kept)

    device = places.get("device")
    total = sum(device.values()) if isinstance(device, dict) else float("nan")
    middle = {what: seen(what)[len(seen(what)) // 2] for what in ("held_mb", "moved_mb", "moved_s", "waited_s")}
    held, *moves = middle.values()
    return Phase(name, named("device"), named("host"), total, held, seen("peak_mb")[-1], *moves)
