"""Every way rollkeel refuses to go on, each with the exit code a shell sees.

An error message is one line: what was expected, what came, what to do.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

from rollkeel_sandbox import errors as sandbox


class RollkeelError(Exception):
    """Base of all errors a user can cause or must act on. `exit_code` is what the CLI returns."""

    exit_code = 2


class BadInput(RollkeelError):
    """A config key, file, model folder, data set or argument is not what was expected."""

    exit_code = 2


class OwnCodeBroke(BadInput):
    """Somebody's own code raised an error."""


class RunStopped(RollkeelError):
    """A rule ended the run: an alarm, a failure budget, steps that could not be done."""

    exit_code = 3


class Corrupt(RollkeelError):
    """An artefact on disk (checkpoint, rollout file, run folder) is damaged or incomplete."""

    exit_code = 4


class StoppedByCheck(RunStopped):
    """A check ended the run, and its evidence is in the log."""


class Impossible(RunStopped):
    """A number that no sound step has; the weights were left untouched."""

    check = "impossible"
    """Which of `rollkeel.record.checks` it fails."""
    seen: Any = None
    """Ids of rollouts and the trainer's log-probs of their tokens, `[T]` each, where a pass was made."""

    def __init__(self, message: str, *, check: str = "", seen: Any = None) -> None:
        super().__init__(message)
        self.check, self.seen = check or self.check, seen


class NonFinite(Impossible):
    """A log-prob, loss or gradient is NaN or infinite; the weights were left untouched."""

    check = "non_finite"


class NoLogProb(Impossible, BadInput):
    """A log-prob is above 0."""

    check = "positive_logprob"


class EngineFailure(RunStopped):
    """An engine died, hung past its deadline or could not prove the weights it serves."""


class DeltaRefused(EngineFailure):
    """A delta does not lead from the weights that an engine holds to those that were published; a full update does."""


class RankLost(RunStopped):
    """A rank of the trainer died or fell silent, or the last engine of an asynchronous loop; the run can go on from its newest checkpoint
    with other ones."""


class GraderFailure(RunStopped):
    """Graders broke more often than the failure budget allows. Never a reward of 0."""


class Interrupted(RollkeelError):
    """Ctrl-C or SIGTERM: a checkpoint was written and the run can be resumed."""

    exit_code = 130


REFUSALS = (RollkeelError, sandbox.SandboxError)
"""What a command answers with one line and an `exit_code`: ours, and those of the distributions that we stand on."""
BAD_INPUTS = (BadInput, sandbox.BadInput)


def nearest(key: str, known: Sequence[str], where: str = "") -> str:
    """End of a message about an unknown `key` of section `where`: the nearest of `known`, or all of them where they are few."""
    if close := difflib.get_close_matches(key, known, n=1, cutoff=0.5):
        return f"; did you mean {where + '.' if where else ''}{close[0]}?"
    few = known if len(known) <= 30 else difflib.get_close_matches(key, known, n=5, cutoff=0)
    return f"; {'known' if few is known else 'the nearest are'}: {', '.join(few) or 'none'}"


_WORDS = (
    (r"^(?:Input|String|Tuple|List|Dictionary) should (?:be |(?=have|match))", "expected "),
    (r", (?:got|unable) .*| after validation, not \d+$", ""),
    (r"greater than or equal to", "≥"),
    (r"less than or equal to", "≤"),
    (r"greater than", ">"),
    (r"less than", "<"),
    (r"a valid integer", "an integer"),
    (r"a valid tuple|a valid list", "a list"),
    (r"a valid dictionary.*", "a mapping"),
    (r"a valid ", "a "),
    (r"expected have", "expected"),
    (r"expected match", "expected text that matches"),
)
"""From pydantic's words to ours."""


def fault(error: Any) -> tuple[tuple[str, ...], str]:
    """Place of the first fault that pydantic found, and what was expected there and what came."""
    first = error.errors(include_url=False)[0]
    said = "expected a value, got none" if first["type"] == "missing" else first["msg"].removeprefix("Value error, ")
    if first["type"] not in ("missing", "value_error"):  # whose words are ours
        for theirs, ours in _WORDS:
            said = re.sub(theirs, ours, said)
    place = tuple(str(part) for part in first["loc"] if not str(part).startswith("literal["))  # of a union
    return place, said if ", got" in said else f"{said}, got {first['input']!r:.80}"
