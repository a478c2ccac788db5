"""TRL's `completions/completions_NNNNN.parquet`: texts, rewards and advantages of GRPO and RLOO. No tokens, no log-probs.

Schema read from huggingface/trl, release 1.16.0, `trl/trainer/grpo_trainer.py` (`log`): columns `step`, `prompt`, `completion`
(strings, or lists of messages), one column per reward function (NaN where it did not apply), columns that reward functions
logged themselves, `advantage`. A single column `reward` is taken where there is one. Weights of the reward functions are not
written. A file holds the last generation batch, again if no new one was made since.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollkeel_doctor.traces.build import Notes, Response, Sequences, dumped, integer, number, text
from rollkeel_doctor.traces.trace import Trace

FILES = r"completions_(\d{1,15})\.parquet"
FOLDER = "completions"
SOURCE = "TRL completions"
_KNOWN = {"step", "prompt", "completion", "advantage"}


def matches(path: Path) -> bool:
    """Whether this is such a file, their folder, or the output folder above it."""
    if path.is_dir():
        return bool(dumped(path, FOLDER, FILES))
    return path.suffix == ".parquet" and path.name.startswith("completions_")


def read(path: Path, *, last: int | None = None) -> Trace:
    """`last`: only the last so many steps. Raises `BadInput` if nothing can be read."""
    notes = Notes()
    sequences = Sequences(SOURCE, path, notes)
    previous: tuple[Any, ...] = ()
    for step, file in dumped(path, FOLDER, FILES, last):
        try:
            table = pq.ParquetFile(file).read()
            columns: dict[str, list[Any]] = {
                name: table[name].to_pylist() for name in dict.fromkeys(table.column_names)
            }
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            notes.add(f"cannot be read, damaged or cut short ({type(error).__name__})", file.name)
            continue
        batch = tuple(repr(columns.get(name)) for name in ("prompt", "completion"))
        if batch == previous:
            notes.add("the same batch as in the file before it; left out", file.name)
            continue
        previous = batch
        _add(sequences, file.name, step, columns, _reward_columns(table, file.name, notes))
    notes.add("TRL writes texts, rewards and advantages only: nothing about tokens can be examined")
    return sequences.trace()


def _reward_columns(table: pa.Table, where: str, notes: Notes) -> list[str]:
    if "reward" in table.column_names:
        return ["reward"]
    found = [f.name for f in table.schema if f.name not in _KNOWN and pa.types.is_floating(f.type)]
    if len(found) > 1:
        notes.add(f"reward is the plain sum of {', '.join(found[:10])}: weights are not in the file", where)
    return found


def _add(sequences: Sequences, where: str, step: int, columns: dict[str, list[Any]], rewards: list[str]) -> None:
    if "completion" not in columns:
        sequences.notes.add("no column completion; left out", where)
        return
    for i, completion in enumerate(columns["completion"]):
        values = np.array([number(columns[name][i]) for name in rewards])
        own = integer(columns["step"][i]) if "step" in columns else None
        prompt = text(columns["prompt"][i]) if "prompt" in columns else ""
        sequences.add(
            Response(
                where=f"{where}[{i}]",
                step=step if own is None else own,
                length=0,
                group=prompt or None,
                reward=float(np.nansum(values)) if np.isfinite(values).any() else float("nan"),
                prompt_text=prompt,
                text=text(completion),
            )
        )
