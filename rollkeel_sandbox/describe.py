"""What a service can do, as a JSON value: the doctor's findings and its own settings."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rollkeel_sandbox import kinds
from rollkeel_sandbox.job import PRELOADS
from rollkeel_sandbox.probing import probe
from rollkeel_sandbox.service import Service
from rollkeel_sandbox.sessions import Sessions


def describe(service: Service, sessions: Sessions) -> dict[str, Any]:
    """`level`, `minimum` and `layers` (does it hold, and how); `kinds` (does it run, and by what), `preloads`, `partitions`, `terminals`."""
    return {
        "level": service.level.name.lower(),
        "minimum": service.minimum.name.lower(),
        "layers": {f.layer: {"holds": f.holds, "how": f.how} for f in probe().findings},
        "kinds": {name: {"runs": runs, "how": how} for name, (runs, how) in kinds.doctor().items()},
        "preloads": list(PRELOADS),
        "partitions": [asdict(partition) for partition in service.partitions],
        "terminals": sessions.available,
    }
