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
    """Print the diagnosis and return the exit code. `damage`: what is wrong with a run's files; `refine`: settles what is in doubt.

    Raises `Corrupt` for a damaged run whose rest shows no cause.
    """
    from rollkeel_doctor import CAUSES, diagnose, read_trace
    from rollkeel_doctor.view import show

    diagnosis = diagnose(read_trace(path, last=last, format=trace_format))
    if refine is not None and diagnosis.in_doubt:
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
    """Entry point of `rollkeel-doctor`: every refusal is one line on standard error and its exit code."""
    try:
        code = app(args=sys.argv[1:] or ["--help"], prog_name="rollkeel-doctor", standalone_mode=False)
        sys.stdout.flush()
    except DoctorError as error:
        code = error.exit_code
        print(f"rollkeel-doctor: {error}", file=sys.stderr)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:  # the reader of standard output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 128 + signal.SIGPIPE
    except Exception as caught:
        error: Any = caught
        if not isinstance(error, _UsageError):
            raise
        code = 2
        message = " ".join(error.format_message().split())  # unlike str(error) it names the option
        print(f"rollkeel-doctor: {message} (see rollkeel-doctor --help)", file=sys.stderr)
    sys.exit(code)
