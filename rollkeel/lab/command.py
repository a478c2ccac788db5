"""`rollkeel lab`: plan, execute, judge, report."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from rollkeel.errors import BadInput
from rollkeel.events import write_atomic
from rollkeel.lab.measure import Outcome, outcome
from rollkeel.lab.page import as_json, page
from rollkeel.lab.preset import Preset
from rollkeel.lab.runs import Planned, execute, plan


def default_store() -> Path:
    """Where runs are kept for all presets to share."""
    root = os.environ.get("ROLLKEEL_CACHE")
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "rollkeel") / "lab"


def run_preset(
    preset: Preset,
    *,
    out: Path,
    seeds: int | None = None,
    jobs: int | None = None,
    store: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Make what is missing, judge, and write `lab.json` and `lab.html` into `out`.

    `seeds`: runs of each arm (the preset's own number); `jobs`: runs at once (one per core). Raises `BadInput` for a folder
    that cannot be written, `Interrupted` on Ctrl-C.
    """
    count = preset.seeds if seeds is None else seeds
    if count < 1:
        raise BadInput(f"lab --seeds: expected at least 1, got {count}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"lab --out {out}: cannot be written ({error.strerror}); choose another folder") from None
    runs = plan(preset, range(count), store or default_store())
    stopped: dict[tuple[str, int], str] = {}
    began, done = time.monotonic(), 0

    def tell(run: Planned, what: str) -> None:
        nonlocal done
        done += 1
        if what.startswith("stopped: "):
            stopped[run.arm, run.seed] = what.removeprefix("stopped: ")
        say(f"{done}/{len(runs)} {run.arm}, seed {run.seed}: {what} ({time.monotonic() - began:.0f} s)")

    execute(runs, jobs or os.cpu_count() or 1, tell)
    found = outcome(preset, runs, stopped, time.monotonic() - began)
    write_atomic(out / "lab.json", json.dumps(as_json(found), indent=1) + "\n")
    write_atomic(out / "lab.html", page(found))
    return found
