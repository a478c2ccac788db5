"""The command `rollkeel-doctor`; `rollkeel doctor` is the same, and tries a run's checkpoints as well."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollkeel_doctor.errors import Corrupt, DoctorError

if TYPE_CHECKING:
    from rollkeel_doctor.diagnosis import Diagnosis

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

# typer bundles click from some version on; its public exceptions lead to the base class in either case.
_UsageError: Any = typer.BadParameter.__mro__[1]

TracePath = Annotated[
    Path, typer.Argument(help="A run folder, one of its rollouts files, or a dump of another trainer.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Last = Annotated[int | None, typer.Option(min=1, help="Only the last so many steps.")]
Format = Annotated[
    str, typer.Option("--format", help="Who wrote it, where that is not clear: rollkeel, nemo-rl, slime, …")
]


@app.command()
def doctor(
    path: TracePath,
    as_json: AsJson = False,
    last: Last = None,
    trace_format: Format = "auto",
    recompute: Annotated[bool, typer.Option(help="Of `rollkeel doctor`, which has the models; nothing here.")] = False,
) -> int:
    """Why a run went bad, from its recorded tokens: causes with evidence (exit code 1), or healthy (0).

    Exit code 2: bad input, or no cause was found and most could not be examined. 4: the run's files are damaged, and what is left shows no cause.
    """
    from rollkeel_doctor.traces.folder import damage

    if recompute:
        print("rollkeel-doctor: nothing is recomputed here; `rollkeel doctor` has the models", file=sys.stderr)
    return answer(path, as_json, last, trace_format, damage)


def answer(
    path: Path,
    as_json: bool,
    last: int | None,
    trace_format: str,
    damage: Callable[[Path], list[str]],
    refine: Callable[[Diagnosis, Path], Diagnosis] | None = None,
) -> int:
    """Print the diagnosis and return the exit code. `damage`: what is wrong with a run's files; `refine`: decides what tokens alone do not.

    Raises `Corrupt` for a damaged run whose rest shows no cause.
    """
    from rollkeel_doctor import CAUSES, diagnose, read_trace
    from rollkeel_doctor.view import show

    diagnosis = diagnose(read_trace(path, last=last, format=trace_format))
    if refine is not None:
        diagnosis = refine(diagnosis, path)
    problems = [] if diagnosis.causes else damage(path)
    if problems:  # what is gone could have shown any of them
        diagnosis = replace(diagnosis, not_examined=dict.fromkeys(CAUSES, f"the run is damaged: {problems[0]}"))
    if as_json:
        print(json.dumps(diagnosis.to_json(), ensure_ascii=False, allow_nan=False))
    else:
        show(diagnosis)
    if problems:
        more = f"; {len(problems) - 1} more" if len(problems) > 1 else ""
        raise Corrupt(f"{path}: damaged, what is left was read: {problems[0]}{more}")
    return 2 if diagnosis.healthy is None else int(not diagnosis.healthy)


def main() -> None:
    """Entry point of `rollkeel-doctor`."""
    words = sys.argv[1:] or ["--help"]
    sys.exit(guarded(lambda: app(args=words, standalone_mode=False), "rollkeel-doctor", (DoctorError,)))


def guarded(call: Callable[[], Any], name: str, refusals: tuple[type[Exception], ...]) -> int:
    """Run `call` of the program `name`; returns the exit code, having printed one line for an error that a user can act on.

    `refusals`: types of such errors, which carry their `exit_code`.
    """
    try:
        result = call()
        sys.stdout.flush()  # a reader that went away is noticed here and not on the interpreter's way out
        if result == 130:  # typer turns a KeyboardInterrupt into this code and says nothing
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except refusals as caught:
        error: Any = caught
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print(f"{name}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return _unread()
    except SystemExit as ended:
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        return _unread()  # typer exits with 1 there, which is the doctor's verdict
    except Exception as caught:
        error = caught
        if not isinstance(error, _UsageError):
            raise
        message = error.format_message()  # unlike str(error) it names the option
        print(f"{name}: {' '.join(message.split())} (see {name} --help)", file=sys.stderr)
        return 2


def _unread() -> int:
    """Exit code where the reader of standard output went away, as `head` does: that of a program which SIGPIPE ended."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more on its way out
    return 128 + signal.SIGPIPE
