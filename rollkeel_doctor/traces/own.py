"""Batches of any trainer as a trace: call `save_batch` once a step, then `rollkeel doctor FOLDER` and `rollkeel report FOLDER`.

Needs numpy and pyarrow alone. `docs/integrations.md` has a call for each of seven trainers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollkeel_doctor.errors import BadInput, nearest
from rollkeel_doctor.traces.trace import TOKENS, Trace

NEEDED = ("token_ids", "mask", "rollout_logprobs", "train_logprobs")
_TOKENS = (*NEEDED, "advantages", "keep", "entropy", "versions")  # Arguments with one value per token.
_TEXTS = ("prompt_text", "text", "answer", "status", "detail")
_ROWS = ("rewards", "groups", "train_version", "prompt_ids", *_TEXTS)
_EMPTY = ("prompt_id", "grader", "grader_options", "task", "metadata")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")
_PER_STEP = 1_000_000  # Ids of step s begin at s times this.


def save_batch(
    folder: str | Path,
    step: int,
    *,
    engine: str = "",
    dtype: str = "",
    sampling: Mapping[str, float] | None = None,
    metrics: Mapping[str, float] | None = None,
    **arrays: Any,
) -> Path:
    """Write the S responses of one step into the trace `folder`; returns the file. `arrays`: numpy, torch or lists.

    Needed, `[S, T]`, padded on the right: `token_ids`; `mask`, true where the policy sampled and the loss is taken;
    `rollout_logprobs` (log q) of the engine; `train_logprobs` (log o) of the trainer before the step's first update.
    If there: `advantages` (`[S, T]` or `[S]`), `keep` (true where no mask of the objective dropped the token), `entropy` (nats),
    `versions` of the weights that sampled, all `[S, T]`; `rewards`, `groups` (equal for one prompt), `train_version`,
    `prompt_ids`, `prompt_text`, `text`, `answer`, `status`, `detail`, all `[S]`. `engine`, `dtype` (fp32, bf16, fp8 …) and
    `sampling` (temperature, top_p, top_k, min_p, max_new_tokens) say how it was sampled; `metrics` are further numbers of the step.
    Raises `BadInput` for a name that is unknown or missing, and for another shape.
    """
    known = [*_TOKENS, *_ROWS]
    for name in arrays.keys() - set(known):
        raise BadInput(f"save_batch: unknown column {name!r}{nearest(name, known)}")
    for name in NEEDED:
        if arrays.get(name) is None:
            raise BadInput(f"save_batch: column {name} is missing; needed are {', '.join(NEEDED)}")
    given = {name: value for name, value in arrays.items() if value is not None}
    columns = _tokens(given)
    count = len(columns["token_ids"])
    rewards = np.asarray(_rows(given, "rewards", [np.nan] * count), np.float64)
    columns |= _per_response(given, step, count, rewards)
    told = {"engine": engine, "dtype": dtype, "sampling": json.dumps(dict(sampling or {}))}
    columns |= {name: pa.array([told.get(name, "")] * count, pa.string()) for name in (*told, *_EMPTY)}
    path = Path(folder) / "rollouts" / f"step_{step:06d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    row: dict[str, float] = {"step": step, "rollout/count": count}
    if np.isfinite(rewards).any():
        row |= {"reward/mean": float(np.nanmean(rewards)), "reward/std": float(np.nanstd(rewards))}
    with (Path(folder) / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row | {name: float(value) for name, value in (metrics or {}).items()}) + "\n")
    return path


def save_trace(folder: str | Path, trace: Trace) -> None:
    """Write a trace that a reader made of another framework's files, step by step: what reads run folders can read it then.

    Raises `BadInput` for one without the trainer's log-probs.
    """
    if trace.train_logprobs is None:
        raise BadInput(f"{trace.path}: has no log-probs of the trainer; docs/trace.md says how to have it write them")
    mask = np.ones(len(trace), bool) if trace.mask is None else trace.mask
    about = {name: getattr(trace.facts, name) for name in _SAMPLING}
    for step in np.unique(trace.step).tolist():
        rows = np.flatnonzero(trace.step == step)
        width = int(trace.lengths[rows].max(initial=0))
        at = np.arange(width) < trace.lengths[rows][:, None]

        def padded(values: np.ndarray | None, inside: np.ndarray = at, rows: np.ndarray = rows) -> np.ndarray | None:
            if values is None:
                return None
            out = np.zeros(inside.shape, values.dtype)
            out[inside] = values[np.isin(trace.sequence, rows)]
            return out

        columns: dict[str, Any] = {name: padded(getattr(trace, name)) for name in _TOKENS if name != "mask"}
        columns |= {name: [values[i] for i in rows] for name in _TEXTS if (values := getattr(trace, name))}
        save_batch(
            folder,
            step,
            mask=padded(mask),
            rewards=trace.reward[rows],
            groups=trace.group[rows],
            engine=trace.facts.engine or "",
            dtype=trace.facts.engine_dtype or "",
            sampling={name: value for name, value in about.items() if value is not None},
            **columns,
        )


def _tokens(given: Mapping[str, Any]) -> dict[str, pa.Array]:
    """The token columns as lists, without the padding behind each response's last token inside the mask."""
    mask = _array(given["mask"]).astype(bool)
    if mask.ndim != 2:
        raise BadInput(f"save_batch mask: expected [responses, tokens], got shape {list(mask.shape)}")
    lengths = (mask * np.arange(1, mask.shape[1] + 1)).max(axis=1, initial=0)
    columns = {}
    for name in _TOKENS:
        if name not in given:
            continue
        column, dtype, _ = TOKENS[name]
        values = _array(given[name])
        if name == "advantages" and values.shape == mask.shape[:1]:
            values = np.repeat(values[:, None], mask.shape[1], axis=1)
        if values.shape != mask.shape:
            raise BadInput(f"save_batch {name}: expected {list(mask.shape)} like mask, got {list(values.shape)}")
        rows = [row[:n].astype(dtype) for row, n in zip(values, lengths, strict=True)]
        columns[column] = pa.array(rows, pa.list_(pa.from_numpy_dtype(np.dtype(dtype))))
    return columns


def _per_response(given: Mapping[str, Any], step: int, count: int, rewards: np.ndarray) -> dict[str, pa.Array]:
    groups = _rows(given, "groups", range(count))
    index = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    prompts = [[int(i) for i in ids] for ids in _rows(given, "prompt_ids", [()] * count)]
    return {
        "step": pa.array([step] * count, pa.int32()),
        "id": pa.array([step * _PER_STEP + i for i in range(count)], pa.int64()),
        "group": pa.array([step * _PER_STEP + index[group] for group in groups], pa.int64()),
        "reward": pa.array(rewards, pa.float64(), mask=np.isnan(rewards)),
        "train_version": pa.array(_rows(given, "train_version", [None] * count), pa.int64()),
        "prompt_token_ids": pa.array(prompts, pa.list_(pa.int64())),
        "member": pa.array([0] * count, pa.int32()),
        **{name: pa.array(_rows(given, name, [""] * count), pa.string()) for name in _TEXTS},
    }


def _rows(given: Mapping[str, Any], name: str, default: Sequence[Any]) -> list[Any]:
    found = given.get(name, default)
    found = _array(found).tolist() if hasattr(found, "shape") else list(found)
    if len(found) != len(default):
        raise BadInput(f"save_batch {name}: expected one for each of {len(default)} responses, got {len(found)}")
    return found


def _array(value: Any) -> np.ndarray:
    """A tensor of any dtype and device, an array or lists."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    return np.asarray(value)
