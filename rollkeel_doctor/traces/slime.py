"""slime's `--dump-details FOLDER`: `rollout_data/N.pt` with what was sampled, `train_data/N_RANK.pt` with what was trained on.

Schema read from THUDM/slime: `slime/utils/types.py` (commit 0d234f3e3a83c81b7d37209994e0b994deacbb24) for the fields of a
sample, `slime/ray/rollout.py` (a51f0714179da87b1abdff81f99ae1e22034be92), `slime/utils/train_dump_utils.py`
(429eb3df668e6dd2aedd01f327e7350683cc9ccf) and `slime/backends/megatron_utils/actor.py`
(028e29090ec82701bd808178c8bdef31a13518e3) for what is written. A rollout file holds `samples`, dicts: `tokens` of prompt and
response, the rest over the response alone: `rollout_log_probs` (SGLang's; 0 on tokens it did not sample), `loss_mask`. A train
file holds `rollout_data`, lists over the sequences of one rank, joined here by `sample_indices`: `log_probs` (the trainer's,
before the update, at the rollout temperature), `advantages`, `loss_masks`, all `[response]`. With context parallelism a rank
has a part of each sequence only, in an order the file does not tell; such log-probs are left out.
`log_probs` are missing where slime reuses those of the update itself (one update per rollout) unless
`--get-mismatch-metrics` is set. Weight versions are those of each request to the engine, not of each token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from rollkeel_doctor.errors import Corrupt
from rollkeel_doctor.traces.build import (
    Notes,
    Response,
    Sequences,
    integer,
    number,
    number_in,
    numbered,
    numbers,
    text,
    without_placeholders,
)
from rollkeel_doctor.traces.tensors_pickle import load, plain
from rollkeel_doctor.traces.trace import Trace
from rollkeel_doctor.traces.unpickle import Record

ROLLOUTS, TRAINED, EVALS = r"(\d{1,15})\.pt", r"(\d{1,15})_\d{1,9}\.pt", r"eval_(\d{1,15})\.pt"
SOURCE = "slime dump"
_STATUS: Final = {
    "completed": "finished",
    "truncated": "length",
    "aborted": "interrupted",
    "failed": "engine_failure",
}
_TRAINED: Final = {"log_probs": "train_logprobs", "advantages": "advantages", "loss_masks": "mask"}
_TAKEN: Final = (*_TRAINED, "rollout_log_probs", "tokens", "response_lengths", "raw_reward", "truncated")


def matches(path: Path) -> bool:
    """Whether this is such a file, one of the two folders, or the dump folder above them."""
    if path.is_dir():
        rollouts, trained = _folders(path)
        return rollouts is not None or trained is not None
    return path.suffix == ".pt" and path.parent.name in ("rollout_data", "train_data")


def read(path: Path, *, last: int | None = None) -> Trace:
    """`last`: only the last so many rollouts. Raises `BadInput` if nothing can be read."""
    notes = Notes()
    sampled, trained = _files(path, last, notes)
    files = [file for held in (*sampled.values(), *trained.values()) for file in held]
    sequences = Sequences(SOURCE, path, notes, room=sum(file.stat().st_size for file in files))
    for step in sorted(sampled.keys() | trained.keys()):
        rows = _train_rows(trained.get(step, []), notes)
        found = False
        for file in sampled.get(step, []):
            for i, sample in enumerate(_samples(file, notes)):
                found = True
                _add(sequences, f"{file.name}[{i}]", step, sample, rows)
        if not found:
            for key, row in rows.items():
                _add_trained(sequences, f"train_data of {step}, sample {key}", step, key, row)
    return sequences.trace()


def _folders(path: Path) -> tuple[Path | None, Path | None]:
    """Folders with rollout files and with train files, where there are any."""

    def folder(name: str, pattern: str) -> Path | None:
        inside = path / name
        if inside.is_dir() and numbered(inside, pattern):
            return inside
        return path if path.name == name and numbered(path, pattern) else None

    return folder("rollout_data", ROLLOUTS), folder("train_data", TRAINED)


def _files(path: Path, last: int | None, notes: Notes) -> tuple[dict[int, list[Path]], dict[int, list[Path]]]:
    if path.is_file():
        return (
            ({}, {number_in(path, TRAINED): [path]})
            if "train" in path.parent.name
            else ({number_in(path, ROLLOUTS): [path]}, {})
        )
    rollouts, trained = _folders(path)
    if rollouts is not None and (evals := numbered(rollouts, EVALS)):
        notes.add(f"{len(evals)} files of evaluations; not read")
    found = (numbered(rollouts, ROLLOUTS) if rollouts else [], numbered(trained, TRAINED) if trained else [])
    steps = sorted({step for files in found for step, _ in files})
    kept = steps if last is None else steps[-last:] if last > 0 else []
    sampled, used = ({s: [p for n, p in files if n == s] for s in kept} for files in found)
    return sampled, used


def _object(value: Any) -> dict[str, Any]:
    """Fields of a dict, or of a record of a plain class."""
    fields = value.attributes if isinstance(value, Record) else value
    return {k: v for k, v in fields.items() if isinstance(k, str)} if isinstance(fields, dict) else {}


def _loaded(file: Path, notes: Notes) -> dict[str, Any]:
    try:
        found = _object(load(file))
    except Corrupt as error:
        notes.add(str(error))
        return {}
    if not found:
        notes.add("not a dict, as slime writes; left out", file.name)
    return found


def _samples(file: Path, notes: Notes) -> list[dict[str, Any]]:
    found = _loaded(file, notes)
    samples = found.get("samples")
    if not isinstance(samples, list):
        if found:
            notes.add("no list of samples; left out", file.name)
        return []
    return [_object(sample) for sample in samples]


def _train_rows(files: list[Path], notes: Notes) -> dict[int, dict[str, Any]]:
    """Sample index → its train fields. Ranks that hold the same sequences fill what others lack."""
    rows: dict[int, dict[str, Any]] = {}
    for file in files:
        data = _object(_loaded(file, notes).get("rollout_data"))
        keys = data.get("sample_indices")
        if not isinstance(keys, list):
            if data:
                notes.add("no sample_indices: its sequences cannot be told apart; left out", file.name)
            continue
        for name in _TAKEN:
            column = data.get(name)
            # Some versions write the raw rewards of all ranks into each file.
            if not isinstance(column, list) or len(column) != len(keys):
                continue
            for key, value in zip(keys, column, strict=True):
                if (index := integer(key)) is not None and value is not None:
                    rows.setdefault(index, {}).setdefault(name, plain(value))
    return rows


def _is_part(value: Any, length: int) -> bool:
    array = None if value is None else numbers(value, np.float32)
    return array is not None and len(array) < length


def _trained_fields(notes: Notes, where: str, row: dict[str, Any], length: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for theirs, ours in _TRAINED.items():
        value = row.get(theirs)
        if _is_part(value, length):
            notes.add(f"{theirs} of a part of the response only, as with context parallelism; left out", where)
        elif value is not None:
            fields[ours] = value
    return fields


def _add(sequences: Sequences, where: str, step: int, sample: dict[str, Any], rows: dict[int, dict[str, Any]]) -> None:
    notes = sequences.notes
    index = integer(sample.get("index"))
    row = rows.get(index, {}) if index is not None else {}
    ids, length = numbers(plain(sample.get("tokens")), np.int64), integer(sample.get("response_length"))
    if ids is None or length is None or not 0 <= length <= len(ids):
        notes.add("no tokens and response_length that fit each other; left out", where)
        return
    start = len(ids) - length
    tokens = _trained_fields(notes, where, row, length)
    if tokens.get("mask") is None:
        tokens["mask"] = plain(sample.get("loss_mask"))
    if sample.get("remove_sample") is True:
        tokens["mask"] = np.zeros(length, bool)
    q = plain(sample.get("rollout_log_probs"))
    tokens["token_ids"] = ids[start:]
    tokens["rollout_logprobs"] = without_placeholders(q, tokens["mask"])
    tokens["versions"] = _versions(notes, where, sample.get("weight_versions"), length)
    group = integer(sample.get("group_index"))
    label = sample.get("label")
    sequences.add(
        Response(
            where=where,
            step=step,
            length=length,
            id=index,
            group=("index", group) if group is not None else ids[:start].tobytes(),
            reward=_reward(notes, where, sample),
            prompt_length=start,
            status=_status(sample.get("status")),
            prompt_text=text(sample.get("prompt")),
            text=text(sample.get("response")),
            answer=text(str(label)) if isinstance(label, str | int | float) else "",
            tokens=tokens,
        )
    )


def _add_trained(sequences: Sequences, where: str, step: int, index: int, row: dict[str, Any]) -> None:
    """A sequence of which there is only the train file."""
    length, q = integer(row.get("response_lengths")), row.get("rollout_log_probs")
    if length is not None and _is_part(q, length):
        sequences.notes.add("rollout_log_probs of a part of the response only; left out", where)
        q = None
    sample = {
        "index": index,
        "tokens": row.get("tokens"),
        "response_length": length,
        "rollout_log_probs": q,
        "reward": row.get("raw_reward"),
        "status": "truncated" if row.get("truncated") == 1 else None,
    }
    _add(sequences, where, step, sample, {index: row})


def _reward(notes: Notes, where: str, sample: dict[str, Any]) -> float:
    reward = plain(sample.get("reward"))
    if not isinstance(reward, dict):
        return number(reward)
    values = [v for v in map(number, reward.values()) if np.isfinite(v)]
    if len(values) == 1:
        return values[0]
    notes.add("reward has several parts, and --reward-key is not in the file; left out", where)
    return float("nan")


def _status(value: Any) -> str:
    """`to_dict` writes the value of an enum; an enum itself is pickled as a call with it."""
    if isinstance(value, Record) and len(value.args) == 1:
        value = value.args[0]
    return _STATUS.get(value, "") if isinstance(value, str) else ""


def _versions(notes: Notes, where: str, versions: Any, length: int) -> np.ndarray | None:
    """Version of every token, which is known where all requests of a sample met the same."""
    if not isinstance(versions, list) or not versions:
        return None
    said = [str(v) for v in versions[:1000] if isinstance(v, str | int)]
    known = {int(v) for v in said if v.isascii() and v.isdecimal() and len(v) < 18}
    if len(known) == 1:
        return np.full(length, known.pop(), np.int64)
    if not known:
        return None
    notes.add("sampled by several weight versions, whose tokens the file does not tell; versions left out", where)
    return None
