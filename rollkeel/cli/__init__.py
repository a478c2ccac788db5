"""The command line: one verb per arrow. Help and bad input answer without importing torch."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from rollkeel.cli import about, data, diagnose, evaluate, objectives, tasks, train
from rollkeel.errors import REFUSALS
from rollkeel.host import keep_freed_memory
from rollkeel_doctor.errors import DoctorError
from rollkeel_sandbox import cli as sandbox

# Two spinning threads on a shared core are ten times slower than one; this must be set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

app = typer.Typer(
    name="rollkeel",
    help="RL post-training that stays stable when the sampling engine and the training engine disagree.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for part in (about, train, diagnose, evaluate):
    app.add_typer(part.app)
for part, name in ((sandbox, "sandbox"), (data, "data"), (tasks, "tasks"), (objectives, "objectives")):
    app.add_typer(part.app, name=name)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=about.version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(argv: list[str] | None = None) -> None:
    """Entry point: every refusal is one line on standard error and its exit code."""
    keep_freed_memory()
    words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    sys.exit(guarded(lambda: app(args=words, standalone_mode=False)))


def _unread() -> int:
    """Exit code where the reader of standard output went away, as `head` does: that of a program which SIGPIPE ended."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more on its way out
    return 128 + signal.SIGPIPE


# typer bundles click from some version on; its public exceptions lead to the base class in either case.
_UsageError: Any = typer.BadParameter.__mro__[1]


def guarded(call: Callable[[], Any]) -> int:
    """Run `call`; returns the exit code, having printed one line for an error that a user can act on."""
    try:
        result = call()
        sys.stdout.flush()  # a reader that went away is noticed here and not on the interpreter's way out
        if result == 130:  # typer turns a KeyboardInterrupt into this code and says nothing
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except (*REFUSALS, DoctorError) as error:
        print(f"rollkeel: {error}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print("rollkeel: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return _unread()
    except SystemExit as ended:
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        return _unread()  # typer exits with 1 there, which is the doctor's verdict
    except MemoryError:
        hint = "lower train.micro_batch_tokens, engine.slots or engine.kv_memory_gb"
        print(f"rollkeel: out of memory; {hint}", file=sys.stderr)
        return 3
    except Exception as caught:
        error: Any = caught
        if not isinstance(error, _UsageError):
            raise
        message = error.format_message()  # unlike str(error) it names the option
        print(f"rollkeel: {' '.join(message.split())} (see rollkeel --help)", file=sys.stderr)
        return 2


if __name__ == "__main__":
    main()
