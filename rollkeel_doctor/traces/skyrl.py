"""SkyRL's `dumped_data/global_step_N_training_input.pkl`: the padded batch of a step, as it went into training.

Schema read from NovaSky-AI/SkyRL: `skyrl/train/trainer.py` (commit 40c4ca3ab3b3fff3047f373b9f440c8a76ae1efb) for what is dumped
when, `skyrl/backends/skyrl_train/training_batch.py` (commit 0446435ca3daae8f0f6e0b8a24b661fc63cf0b79) for the pickle: a
`TrainingInputBatch` whose state holds `batch_dict` (each tensor as bytes, shape and dtype, or as the bytes of a torch file)
and `metadata`. Padding: `skyrl/train/dataset/preprocess.py` (commit 07eefd6ce6b6f7510c728a53c079fce3bbf86999) puts all of it
on the left; older versions (`skyrl-train/skyrl_train/dataset/preprocess.py`, commit
297e4672f25811d32f0f73b2bbfad125482d754e) put it left of the prompt and right of the response. In both, the last `R` columns
of `sequences` are those of the response tensors `[B, R]`, position for position, and `response_mask` tells tokens from padding.
`rollout_logprobs` are the engine's, `action_log_probs` the trainer's before the step's first update. The trainer drops
`rewards` and `uids` before it dumps, and the last `pad_size` rows are copies of the first.
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
    dumped,
    integer,
    without_placeholders,
)
from rollkeel_doctor.traces.tensors_pickle import load, load_bytes, plain
from rollkeel_doctor.traces.trace import Trace
from rollkeel_doctor.traces.unpickle import Record, Refused

FILES = r"global_step_(\d{1,15})_training_input\.pkl"
FOLDER = "dumped_data"
SOURCE = "SkyRL dumped_data"
_NUMPY: Final = {"float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"}
_RESPONSE: Final = ("response_mask", "loss_mask", "rollout_logprobs", "action_log_probs", "advantages", "rewards")


def matches(path: Path) -> bool:
    """Whether this is such a file, their folder, or the export folder above it."""
    if path.is_dir():
        return bool(dumped(path, FOLDER, FILES))
    return path.name.endswith("_training_input.pkl")


def read(path: Path, *, last: int | None = None) -> Trace:
    """`last`: only the last so many steps. Raises `BadInput` if nothing can be read."""
    notes = Notes()
    sequences = Sequences(SOURCE, path, notes)
    for step, file in dumped(path, FOLDER, FILES, last):
        try:
            batch, metadata = _batch(load(file), file.name, notes)
        except Corrupt as error:
            notes.add(str(error))
            continue
        _add(sequences, file.name, step, batch, metadata)
    return sequences.trace()


def _batch(value: Any, where: str, notes: Notes) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and metadata of the pickled batch, whichever way its class put them there."""
    state = next((part for part in _parts(value) if isinstance(part, dict) and "batch_dict" in part), None)
    if state is None:
        notes.add("no batch_dict, as a pickled TrainingInputBatch has one; left out", where)
        return {}, {}
    tensors, metadata = state["batch_dict"], state.get("metadata")
    arrays: dict[str, np.ndarray] = {}
    for name, stored in tensors.items() if isinstance(tensors, dict) else ():
        if name in (*_RESPONSE, "sequences", "attention_mask") and stored is not None:
            array = _array(stored)
            if array is None or array.ndim != 2:
                notes.add(f"{name} cannot be read; left out", where)
            else:
                arrays[name] = array
    return arrays, metadata if isinstance(metadata, dict) else {}


def _parts(value: Any) -> tuple[Any, ...]:
    return (value.state, *value.args) if isinstance(value, Record) else (value,)


def _array(stored: Any) -> np.ndarray | None:
    """One tensor: bytes with shape and dtype, or bytes of a torch file, which bfloat16 needs."""
    if not isinstance(stored, dict):
        found = plain(stored)
        return found if isinstance(found, np.ndarray) else None
    data = stored.get("data")
    shape = stored.get("shape")
    dtype = stored.get("dtype")
    if not isinstance(data, bytes):
        return None
    if stored.get("format") == "torch":
        try:
            found = plain(load_bytes(data))
        except Refused:
            return None
        return found if isinstance(found, np.ndarray) else None
    if (
        not isinstance(dtype, str)
        or dtype not in _NUMPY
        or not isinstance(shape, tuple)
        or not all(type(n) is int and 0 <= n < 1 << 32 for n in shape)
    ):
        return None
    flat = np.frombuffer(data, dtype, len(data) // np.dtype(dtype).itemsize)
    return flat.reshape(shape) if len(shape) == 2 and shape[0] * shape[1] == len(flat) else None


def _add(sequences: Sequences, where: str, step: int, batch: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
    ids, response, attention = (batch.get(name) for name in ("sequences", "response_mask", "attention_mask"))
    if ids is None or response is None or response.shape[0] != ids.shape[0] or response.shape[1] > ids.shape[1]:
        if batch:
            sequences.notes.add("no sequences and response_mask that fit each other; left out", where)
        return
    rows, width = response.shape
    padding = integer(metadata.get("pad_size")) or 0
    uids = metadata.get("uids")
    same = {name: array for name, array in batch.items() if name in _RESPONSE and array.shape == response.shape}
    for name in sorted(batch.keys() & set(_RESPONSE) - same.keys()):
        sequences.notes.add(f"{name} has another shape than response_mask; left out", where)
    if "rewards" not in same:
        sequences.notes.add("no rewards, which SkyRL drops before it dumps")
    if not isinstance(uids, list) or len(uids) != rows:
        uids = None
        sequences.notes.add("no uids, which SkyRL drops before it dumps: equal prompts of a step are taken as a group")
    prompt = _prompts(ids, response, attention)
    for i in range(rows - padding if 0 <= padding < rows else rows):
        own = response[i] != 0
        _one(
            sequences,
            f"{where}[{i}]",
            step,
            {name: array[i][own] for name, array in same.items()},
            ids[i, ids.shape[1] - width :][own],
            prompt[i] if prompt else None,
            uids[i] if uids else None,
        )


def _prompts(ids: np.ndarray, response: np.ndarray, attention: np.ndarray | None) -> list[np.ndarray] | None:
    """Attended tokens that are not the response's; beside a short response some stand inside the response's columns."""
    if attention is None or attention.shape != ids.shape:
        return None
    prompt = attention != 0
    prompt[:, ids.shape[1] - response.shape[1] :] &= response == 0
    return [row[own] for row, own in zip(ids, prompt, strict=True)]


def _one(
    sequences: Sequences,
    where: str,
    step: int,
    fields: dict[str, np.ndarray],
    ids: np.ndarray,
    prompt: np.ndarray | None,
    uid: Any,
) -> None:
    mask = fields["loss_mask"] != 0 if "loss_mask" in fields else None
    advantages, rewards = fields.get("advantages"), fields.get("rewards")
    if advantages is not None and mask is not None:
        advantages = np.where(mask, advantages, np.float32(np.nan))
    sequences.add(
        Response(
            where=where,
            step=step,
            length=len(ids),
            group=("uid", str(uid))
            if isinstance(uid, str | int)
            else (prompt.tobytes() if prompt is not None else None),
            reward=float(rewards.sum()) if rewards is not None else float("nan"),
            prompt_length=-1 if prompt is None else len(prompt),
            tokens={
                "token_ids": ids,
                "rollout_logprobs": without_placeholders(fields.get("rollout_logprobs"), mask),
                "train_logprobs": fields.get("action_log_probs"),
                "mask": mask,
                "advantages": advantages,
            },
        )
    )
