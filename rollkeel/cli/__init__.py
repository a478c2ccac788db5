"""The command line: one verb per arrow. Help and bad input answer without importing torch."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from rollkeel.cli import about, conformance, data, diagnose, evaluate, objectives, tasks, train
from rollkeel.errors import REFUSALS, RunStopped
from rollkeel.host import collect_later, keep_freed_memory
from rollkeel_doctor.cli import guarded as answered
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
for part in (about, train, diagnose, evaluate, conformance):
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
    if argv is None:
        collect_later()
    words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    sys.exit(guarded(lambda: _command()(args=words, standalone_mode=False)))


@functools.cache
def _command() -> Any:
    """What `app` would build again at every call."""
    return typer.main.get_command(app)


def guarded(call: Callable[[], Any]) -> int:
    """Run `call`; returns the exit code, having printed one line for an error that a user can act on."""

    def within_memory() -> Any:
        try:
            return call()
        except MemoryError:
            hint = "lower train.micro_batch_tokens, engine.slots or engine.kv_memory_gb"
            raise RunStopped(f"out of memory; {hint}") from None

    return answered(within_memory, "rollkeel", (*REFUSALS, DoctorError))


if __name__ == "__main__":
    main()
