"""What is piped into `head` must end as other programs do: quietly, and not with the exit code of a verdict.

Not covered: signals other than a closed pipe (test_cli.py).
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAMS = [
    ["rollkeel", "lab"],
    ["rollkeel", "objectives", "list"],
    ["rollkeel", "--help"],
    ["rollkeel_doctor", "--help"],
    ["rollkeel_sandbox", "--help"],
    ["rollkeel_sandbox", "doctor"],
]


@pytest.mark.parametrize("words", PROGRAMS, ids=" ".join)
def test_a_reader_that_goes_away_is_no_failure_of_ours(words: list[str]) -> None:
    """As `| head` does. Exit code 1 would be a verdict of the doctor, a trace of the interpreter noise."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", *words], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
