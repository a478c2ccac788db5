"""A process of rollkeel does not look for cycles while it imports, and looks as Python does from the first step on.

Matters because looking at half a million imported objects again and again was a third of the processor time of a short command, and because
a run of days that never looked would fill its memory. Not covered: how long it takes; what an actor imports is in test_imports.py.
"""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
from pathlib import Path

import pytest

from rollkeel.cli import main
from rollkeel.host import collect_as_usual

SMALL = ("run.steps=1", "sft.steps=2", "eval.items=2")
SCRIPT = """
import atexit, gc, sys
usual = gc.get_threshold()
import rollkeel.loop.run
from rollkeel.loop import steps
importing, once = gc.get_threshold(), steps.step_once

def seen(*told):
    print([usual, gc.get_threshold(), gc.get_freeze_count()])
    return once(*told)

steps.step_once = seen
atexit.register(lambda: print([gc.get_freeze_count(), len(gc.get_objects())]))  # is called behind those that come later
from rollkeel.cli import main
main()
"""


@pytest.mark.slow
def test_a_run_looks_for_cycles_as_usual_but_not_among_what_was_imported(tmp_path: Path) -> None:
    words = ["train", "default", *SMALL, f"run.dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, timeout=300, check=True
    )
    usual, in_a_step, kept, *_ = ast.literal_eval(next(row for row in done.stdout.splitlines() if row.startswith("[(")))
    assert in_a_step == usual
    assert kept > 100_000
    at_end, left = ast.literal_eval(done.stdout.splitlines()[-1])
    assert at_end > kept
    assert left < 1_000  # that the interpreter would look at when it ends


def test_a_program_that_calls_a_command_keeps_its_own_ways(capsys: pytest.CaptureFixture[str]) -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert "rollkeel" in capsys.readouterr().out
    collect_as_usual()
    assert gc.get_threshold() == before[0]
    assert gc.get_freeze_count() <= before[1]  # fewer as some of them are given up
