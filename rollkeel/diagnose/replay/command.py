"""`rollkeel replay`, behind its options: nothing heavy is imported before bad input has had its answer."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rollkeel.errors import BadInput, nearest

PARTS = ("rollout", "update")


def repeat_step(run: Path, step: int, only: str | None, overrides: Sequence[str], as_json: bool) -> bool:
    """Do a step again and print what came of it. False if it, or one before it, left the record though nothing was changed."""
    if only is not None and only not in PARTS:
        raise BadInput(f"--only {only!r}: expected rollout or update{nearest(only, PARTS)}")
    if not run.is_dir():
        raise BadInput(f"run folder {run}: no such folder; --step needs the whole folder of a run")
    from rollkeel.diagnose.replay.step import replay_step
    from rollkeel.diagnose.replay.view import show
    from rollkeel.record.live import LiveView

    # Standard output holds the answer alone, and a log nothing else.
    console = Console(stderr=True) if sys.stderr.isatty() else Console(file=io.StringIO())
    view = LiveView(console=console)
    verdict = replay_step(run, step, only or "both", overrides, view)
    found = verdict.to_json()
    if as_json:
        print(json.dumps(found))
    else:
        show(found, verdict.parting.changes if verdict.parting and not verdict.overrides else verdict.changes)
    return verdict.parting is None or bool(verdict.overrides)


def try_objectives(
    run: Path,
    objectives: Sequence[str],
    steps: str | None,
    html: Path | None,
    as_json: bool,
    trace_format: str = "auto",
) -> None:
    """Judge recorded tokens by other objectives and print, and with `html` draw, what they make of them."""
    if not run.exists():
        raise BadInput(f"{run}: no such file or folder; expected a run folder or a trace")
    from rollkeel.diagnose.counterfactual import counterfactual
    from rollkeel.diagnose.counterfactual_options import candidates, steps_of
    from rollkeel.diagnose.counterfactual_view import show, write_page
    from rollkeel_doctor.traces.read import read_trace

    wanted = None if steps is None else steps_of(steps)
    tried = candidates(objectives)
    found = counterfactual(read_trace(run, format=trace_format), tried, wanted)
    if html is not None:
        write_page(found, html)
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        show(found)
        if html is not None:
            print(html)
