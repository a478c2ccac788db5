"""What the doctor says of the runs on the board: one diagnosis at a time, in a process of its own, at low priority."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollkeel.board.runs import Run
from rollkeel.record.runfolder import rollout_files
from rollkeel.report.verdict import last_steps

AGAIN_S = 30.0
"""Seconds between two diagnoses of a run that goes on, at least; five times what the last one took, if that is more."""


class Doctor:
    """Diagnoses runs in the order in which they were last asked for. `rollkeel-doctor RUN` does the work."""

    def __init__(self) -> None:
        self._said: dict[int, dict[str, Any]] = {}
        self._asked: dict[int, Run] = {}
        self._due: dict[int, float] = {}
        self._changed = threading.Condition()
        self._process: subprocess.Popen[str] | None = None
        self._closed = False
        self._at_work: int | None = None
        threading.Thread(target=self._work, daemon=True, name="doctor").start()

    def ask(self, run: Run) -> dict[str, Any]:
        """What is known of the run: `state` is `none` (no rollouts), `waiting`, `said` or `failed`; beside `said` stand the
        fields of `rollkeel doctor --json`. A new diagnosis follows if there are new steps."""
        files = rollout_files(run.path)
        if not files:
            return {"state": "none"}
        if problem := run.leads_out():
            return {"state": "failed", "reason": problem}
        with self._changed:
            said = self._said.get(run.number, {"state": "waiting"})
            new = said.get("newest") != files[-1][0] and run.number != self._at_work
            if new and time.monotonic() >= self._due.get(run.number, 0.0):
                self._asked.pop(run.number, None)
                self._asked[run.number] = run
                self._changed.notify()
            return said

    def known(self, run: Run) -> dict[str, Any]:
        """The last answer, without asking."""
        return self._said.get(run.number, {})

    def close(self) -> None:
        """Ends a diagnosis that goes on."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            if self._process is not None:
                self._process.kill()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._closed)
                if self._closed:
                    return
                number, run = self._asked.popitem()  # the last asked for: it is the one that is looked at
                self._at_work = number
            began = time.monotonic()
            said = self._diagnose(run)
            with self._changed:
                self._at_work = None
                self._said[number] = said
                self._due[number] = time.monotonic() + max(AGAIN_S, 5 * (time.monotonic() - began))

    def _diagnose(self, run: Run) -> dict[str, Any]:
        files = rollout_files(run.path)
        newest = files[-1][0] if files else 0
        try:
            last = last_steps([file for _, file in files])
            out, error = self._run(run.path, last)
            found = json.loads(out)
        except (OSError, ValueError) as caught:
            return {"state": "failed", "newest": newest, "reason": " ".join(str(caught).split())[:300]}
        return {"state": "said", "newest": newest, "part": last < len(files) and last, "damage": error, **found}

    def _run(self, path: Path, last: int) -> tuple[str, str]:
        """Standard output and the line on standard error. Raises `OSError` with that line where there is no diagnosis."""
        command = [sys.executable, "-m", "rollkeel_doctor", str(path.resolve()), "--json", "--last", str(last)]
        with self._changed:
            if self._closed:
                raise OSError("the board was closed")
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        with suppress(OSError):  # it may have ended
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 10)
        out, error = self._process.communicate()
        if not out:
            raise OSError(error.strip().splitlines()[-1] if error.strip() else f"ended with {self._process.returncode}")
        return out, error.strip()
