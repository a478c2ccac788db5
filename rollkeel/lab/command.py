"""`rollkeel lab`: plan, execute, judge, report."""

from __future__ import annotations

import json
import os
import tempfile
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
    first_seed: int | None = None,
    jobs: int | None = None,
    store: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Make what is missing, judge, and write `lab.json` and `lab.html` into `out`.

    `seeds`: runs of each arm, from `first_seed` on (both the preset's own); `jobs`: runs at once (one per core). Raises `BadInput` for a folder
    that cannot be written, `Interrupted` on Ctrl-C.
    """
    count = preset.seeds if seeds is None else seeds
    for option, value in (("--seeds", count), ("--jobs", jobs)):
        if value is not None and value < 1:
            raise BadInput(f"lab {option}: expected at least 1, got {value}")
    first = preset.first_seed if first_seed is None else first_seed
    if first < 0:
        raise BadInput(f"lab --first-seed: expected at least 0, got {first}")
    store = store or default_store()
    _writable(out, "lab --out {}: cannot be written ({}); choose another folder")
    _writable(store, "lab: runs are kept in {}, which cannot be written ({}); set ROLLKEEL_CACHE to another folder")
    runs = plan(preset, range(first, first + count), store)
    began, done = time.monotonic(), 0

    def tell(run: Planned, what: str) -> None:
        nonlocal done
        done += 1
        say(f"{done}/{len(runs)} {run.arm}, seed {run.seed}: {what} ({time.monotonic() - began:.0f} s)")

    execute(runs, jobs or os.cpu_count() or 1, tell)
    stopped = {(run.arm, run.seed): why for run in runs if (why := run.stopped) is not None}
    found = outcome(preset, runs, stopped, time.monotonic() - began)
    write_atomic(out / "lab.json", json.dumps(as_json(found), indent=1) + "\n")
    write_atomic(out / "lab.html", page(found))
    return found


def _writable(folder: Path, message: str) -> None:
    """Make `folder` and a file in it. Raises `BadInput` with `message`, which has a place for the folder and the reason."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInput(message.format(folder, error.strerror or error)) from None
