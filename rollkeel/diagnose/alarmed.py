"""The doctor's word on the last steps of a run that goes on, for its alarms: beside the run, and nothing that goes wrong in it ends it."""

from __future__ import annotations

import threading
from pathlib import Path

LAST, MOST_BYTES = 20, 50_000_000
"""Steps that are read, and of how many bytes of recorded rollouts: two or three seconds."""


def verdict(run: Path, *, alone: bool) -> str:
    """One line. `alone`: of the last step by itself, if it shows a cause."""
    from rollkeel_doctor import diagnose
    from rollkeel_doctor.traces.folder import rollout_files
    from rollkeel_doctor.traces.run import read_run_trace

    count, left = 0, MOST_BYTES
    for _, file in reversed(rollout_files(run)):
        left -= file.stat().st_size
        if count == LAST or (count and left < 0):
            break
        count += 1
    if not count:
        return ""
    found = diagnose(read_run_trace(run, last=1 if alone else count))
    if alone and not found.causes and count > 1:
        found = diagnose(read_run_trace(run, last=count))
    return found.verdict


class AlarmDoctor:
    """Asks in a thread. `run`: whose rollouts are recorded; None where none are, and nobody is asked."""

    def __init__(self, run: Path | None) -> None:
        self._run, self.word = run, ""
        """The last verdict."""
        self._thread: threading.Thread | None = None

    def ask(self, wait_s: float, *, alone: bool = False) -> str:
        """The verdict if it is there within `wait_s`; empty if not, or while another question is open."""
        if self._run is None or self._thread is not None:
            return ""
        self._thread = threading.Thread(target=self._answer, args=(self._run, alone), daemon=True, name="doctor")
        self._thread.start()
        return self.hear(wait_s)

    def hear(self, wait_s: float = 0.0) -> str:
        """The verdict that was asked for, once."""
        if self._thread is None:
            return ""
        self._thread.join(wait_s)
        if self._thread.is_alive():
            return ""
        self._thread = None
        return self.word

    def _answer(self, run: Path, alone: bool) -> None:
        try:
            self.word = verdict(run, alone=alone)
        except Exception as error:  # a run without its doctor is still a run
            self.word = f"could not say: {' '.join(str(error).split())[:200] or type(error).__name__}"
