"""prime-rl's `token_exports/step_N/rank_R.jsonl`: one line per sequence that a rank trained on, everything per token.

Schema read from PrimeIntellect-ai/prime-rl `src/prime_rl/trainer/rl/token_export.py`, commits
d2f82fa63a75a6dbb0fe0a4c724e2578c1f850ea (older: no `export_step`, `run_id`, `losses`) and
004274ec964f016ec9b17b5ae990a4b535314ff1. Lists are over the whole sequence, prompt included, and aligned: position i of
both log-probs is about token i (the trainer's are shifted right before the loss, with log(1/vocabulary) at position 0).
`inference_logprobs` are the engine's, 0 on tokens it did not sample; `trainer_logprobs` and `entropy` are the trainer's at
the sampling temperature in the forward pass of the update. `is_masked` is what the default loss's trust region dropped; null
with other losses. Non-finite numbers are written as null. Sequences without a trained token are not written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rollkeel_doctor.traces.build import (
    Notes,
    Response,
    Sequences,
    integer,
    number_in,
    numbered,
    numbers,
    without_placeholders,
)
from rollkeel_doctor.traces.jsonl import first_record, records
from rollkeel_doctor.traces.trace import Trace

STEPS, RANKS = r"step_(\d{1,15})", r"rank_(\d{1,9})\.jsonl"
FOLDER = "token_exports"
SOURCE = "prime-rl token_exports"
KNOWN_SCHEMA = 1


def matches(path: Path) -> bool:
    """Whether this is such a file, a step's folder, the exports' folder, or the run's folder above it."""
    if path.is_dir():
        return bool(_files(path, None))
    return path.suffix == ".jsonl" and {"inference_logprobs", "trainer_logprobs"} <= first_record(path).keys()


def read(path: Path, *, last: int | None = None) -> Trace:
    """`last`: only the last so many steps. Raises `BadInput` if nothing can be read."""
    notes = Notes()
    sequences = Sequences(SOURCE, path, notes)
    files = [(0, path)] if path.is_file() else _files(path, last)
    steps = {file.parent for _, file in files}
    if path.is_dir() and any((p / "STABLE").exists() for p in steps):
        for folder in sorted(p for p in steps if not (p / "STABLE").exists()):
            notes.add("no STABLE mark, as steps that are still being written have none", folder.name)
    for step, file in files:
        for where, row in records(file, notes):
            _add(sequences, f"{file.parent.name}/{where}", step, row)
    return sequences.trace()


def _files(path: Path, last: int | None) -> list[tuple[int, Path]]:
    exports = path / FOLDER if (path / FOLDER).is_dir() else path
    if numbered(exports, RANKS):
        step = number_in(exports, STEPS)
        return [(step, file) for _, file in numbered(exports, RANKS)]
    steps = [(n, p) for n, p in numbered(exports, STEPS, last) if p.is_dir()]
    return [(step, file) for step, folder in steps for _, file in numbered(folder, RANKS)]


def _add(sequences: Sequences, where: str, step: int, row: dict[str, Any]) -> None:
    if row.get("schema_version") not in (None, KNOWN_SCHEMA):
        sequences.notes.add(f"schema_version is not {KNOWN_SCHEMA}; read as if it were", where)
    ids = numbers(row.get("token_ids"), np.int64)
    if ids is None:
        sequences.notes.add("no token_ids; left out", where)
        return
    mask = numbers(row.get("loss_mask"), np.bool_)
    q = numbers(row.get("inference_logprobs"), np.float32)
    begun = np.zeros(len(ids), bool)
    for known in (mask, q):
        if known is not None and len(known) == len(ids):
            begun |= np.nan_to_num(known) != 0
    if mask is None:
        sequences.notes.add("no loss_mask: the response is taken to start at the first sampled token", where)
    start = int(np.argmax(begun)) if begun.any() else len(ids)
    dropped = row.get("is_masked")
    keep = None
    if isinstance(dropped, list) and any(v is not None for v in dropped):
        keep = [v is not True for v in dropped]
    tokens = {
        "token_ids": ids,
        "rollout_logprobs": without_placeholders(q, begun if mask is None else mask) if q is not None else None,
        "train_logprobs": row.get("trainer_logprobs"),
        "mask": mask,
        "advantages": _advantages(row, mask),
        "keep": keep,
        "entropy": row.get("entropy"),
    }
    own = integer(row.get("export_step"))
    own = integer(row.get("step")) if own is None else own
    sequences.add(
        Response(
            where=where,
            step=step if own is None else own,
            length=len(ids) - start,
            group=ids[:start].tobytes() if start else None,
            reward=_reward(sequences.notes, where, row),
            prompt_length=start,
            tokens={
                k: v[start:] if isinstance(v, list | np.ndarray) and len(v) == len(ids) else v
                for k, v in tokens.items()
            },
        )
    )


def _advantages(row: dict[str, Any], mask: np.ndarray | None) -> Any:
    """NaN outside the mask; None where every value is null, as in batches without an RL loss."""
    value = numbers(row.get("advantages"), np.float32)
    if value is None:
        return row.get("advantages")
    if not np.isfinite(value).any():
        return None
    return np.where(mask, value, np.float32(np.nan)) if mask is not None and len(mask) == len(value) else value


def _reward(notes: Notes, where: str, row: dict[str, Any]) -> float:
    """The sequence's reward, which the export repeats on its tokens."""
    value = numbers(row.get("rewards"), np.float64)
    known = value[np.isfinite(value)] if value is not None else np.empty(0)
    if not known.size:
        return float("nan")
    if np.any(known != known[-1]):
        notes.add("rewards differ between the tokens of a sequence; the last is taken", where)
    return float(known[-1])
