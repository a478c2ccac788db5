"""verl's rollout and validation dumps, `N.jsonl`: texts and scores. No tokens and no log-probs.

Schema read from volcengine/verl `verl/trainer/ppo/ray_trainer.py` (commit 3d9df73353a546a98235b38653c2c163efb51420),
`_dump_generations`: `input`, `output` (decoded, special tokens left out), `gts` (newer), `score` (sum of token scores), `step`,
and one key for every extra output of the reward function. So a trace of it has sequences of no tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollkeel_doctor.traces.build import Notes, Response, Sequences, dumped, integer, number, numbered, text
from rollkeel_doctor.traces.jsonl import first_record, records
from rollkeel_doctor.traces.trace import Trace

FILES = r"(\d{1,15})\.jsonl"
SOURCE = "verl generations"
_KEYS = {"input", "output", "score"}


def matches(path: Path) -> bool:
    """Whether this is such a file or a folder of them, by the first line."""
    if path.is_dir():
        files = numbered(path, FILES)
        return bool(files) and first_record(files[0][1]).keys() >= _KEYS
    return path.suffix == ".jsonl" and first_record(path).keys() >= _KEYS


def read(path: Path, *, last: int | None = None) -> Trace:
    """`last`: only the last so many steps. Raises `BadInput` if nothing can be read."""
    notes = Notes()
    sequences = Sequences(SOURCE, path, notes)
    for step, file in dumped(path, "", FILES, last):
        for where, row in records(file, notes):
            _add(sequences, where, step, row)
    notes.add("verl dumps texts and scores only: nothing about tokens can be examined")
    return sequences.trace()


def _add(sequences: Sequences, where: str, step: int, row: dict[str, Any]) -> None:
    if not isinstance(row.get("output"), str):
        sequences.notes.add("no output text; left out", where)
        return
    own = integer(row.get("step"))
    prompt = text(row.get("input"))
    answer = row.get("gts")
    sequences.add(
        Response(
            where=where,
            step=step if own is None else own,
            length=0,
            group=prompt or None,
            reward=number(row.get("score")),
            prompt_text=prompt,
            text=text(row["output"]),
            answer=text(str(answer)) if isinstance(answer, str | int | float) else "",
        )
    )
