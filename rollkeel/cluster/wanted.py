"""How many engines a run is asked to have while it goes on: a number in its folder. Imports no Ray."""

from __future__ import annotations

from pathlib import Path

from rollkeel.config import Config
from rollkeel.errors import BadInput
from rollkeel.events import write_atomic

FILE = "engines"
"""Of the run folder; the last number asked for, also of a run that is resumed."""


def ask(run: Path, config: Config, count: int) -> None:
    """Have the run of `config` in the folder `run` go on with `count` engines. Raises `BadInput` where it cannot."""
    least = config.cluster.engines_min or 1
    if not config.clustered or config.cluster.placement == "colocated":
        raise BadInput(
            f"scale: expected a run with cluster.engines and cluster.placement=disaggregated; the engines of {run} cannot leave"
        )
    if count < least:
        raise BadInput(f"scale: expected at least {least} engines (cluster.engines_min), got {count}")
    write_atomic(run / FILE, f"{count}\n")


def asked(run: Path, config: Config) -> int:
    """Engines that the run is to have now."""
    try:
        count = int((run / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # nobody asked, or not in this way
        count = 0
    return max(count or config.cluster.engines or 1, config.cluster.engines_min or 1)
