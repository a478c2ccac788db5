"""Every way the doctor refuses to go on, each with the exit code a shell sees; the message is one line."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class DoctorError(Exception):
    """Base of all errors that a caller can cause or must act on. `exit_code` is what a command returns."""

    exit_code = 2


class BadInput(DoctorError):
    """A path, format or argument is not what was expected."""


class Corrupt(DoctorError):
    """A file is damaged or incomplete."""

    exit_code = 4


def nearest(key: str, known: Sequence[str]) -> str:
    """End of a message about an unknown `key`: the nearest of `known`, or all of them."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"
