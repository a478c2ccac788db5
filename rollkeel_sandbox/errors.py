"""Every way the sandbox refuses to go on, each with the exit code a shell sees; the message is one line."""

from __future__ import annotations

from collections.abc import Sequence


class SandboxError(Exception):
    """Base of all errors that a caller can cause or must act on. `exit_code` is what a command returns."""

    exit_code = 2


class BadInput(SandboxError):
    """A job, option, file or message is not what was expected."""


class RunStopped(SandboxError):
    """This machine or a rule does not let the work go on; never the fault of a program that was run."""

    exit_code = 3


def nearest(key: str, known: Sequence[str]) -> str:
    """End of a message about an unknown `key`: the nearest of `known`, or all of them."""
    import difflib  # not in the fork server, whose modules cost every cage

    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"
