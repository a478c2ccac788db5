"""Recorded tokens from any path that a reader knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from rollkeel_doctor.errors import BadInput, nearest
from rollkeel_doctor.traces import nemo_rl, prime_rl, skyrl, slime, trl, verl
from rollkeel_doctor.traces.run import is_run, read_run_trace
from rollkeel_doctor.traces.trace import Trace


class _Read(Protocol):
    def __call__(self, path: Path, /, *, last: int | None = None) -> Trace: ...


@dataclass(frozen=True)
class _Format:
    matches: Callable[[Path], bool]
    read: _Read
    files: str


def _is_rollkeel(path: Path) -> bool:
    return is_run(path) and not trl.matches(path)


FORMATS: Final = {
    "rollkeel": _Format(_is_rollkeel, read_run_trace, "a run folder, or a file of its rollouts/"),
    "nemo-rl": _Format(nemo_rl.matches, nemo_rl.read, "train_data_step*.jsonl"),
    "slime": _Format(slime.matches, slime.read, "rollout_data/*.pt and train_data/*.pt of --dump-details"),
    "prime-rl": _Format(prime_rl.matches, prime_rl.read, "token_exports/step_*/rank_*.jsonl"),
    "skyrl": _Format(skyrl.matches, skyrl.read, "dumped_data/*_training_input.pkl"),
    "verl": _Format(verl.matches, verl.read, "N.jsonl with input, output, score"),
    "trl": _Format(trl.matches, trl.read, "completions/completions_*.parquet"),
}
"""Name for `format=` and `--format` → how to recognise and read it."""


def read_trace(path: str | Path, *, last: int | None = None, format: str = "auto") -> Trace:
    """The trace at `path`: a run folder of rollkeel, one of its rollouts files, or another framework's dump.

    `last`: only the last so many steps. `format`: a key of `FORMATS`; "auto" recognises it by names and the first record.
    Raises `BadInput` or `Corrupt` where there is nothing to read, in one line.
    """
    path = Path(path)
    if last is not None and last < 1:
        raise BadInput(f"last={last}: expected at least 1 step")
    if format != "auto" and format not in FORMATS:
        raise BadInput(f"unknown trace format {format!r}{nearest(format, ['auto', *FORMATS])}")
    if not path.exists():
        raise BadInput(f"{path}: no such file or folder; expected a run folder or a trace")
    try:
        return FORMATS[_recognised(path) if format == "auto" else format].read(path, last=last)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from error


def _recognised(path: Path) -> str:
    found = [name for name, known in FORMATS.items() if known.matches(path)]
    if len(found) == 1:
        return found[0]
    if found:
        raise BadInput(f"{path}: could be {' or '.join(found)}; say which with --format")
    known = "; ".join(f"{name}: {known.files}" for name, known in FORMATS.items())
    raise BadInput(f"{path}: no known trace; expected one of {known}")
