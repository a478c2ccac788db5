"""Rollouts on disk: one parquet file per step, every sampled token with its provenance, exact to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollkeel.errors import BadInput, Corrupt
from rollkeel.events import write_atomic
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan

_SPAN = {
    "token_ids": np.int64,
    "logprobs": np.float32,
    "kept_mass": np.float32,
    "versions": np.int64,
    "kv_versions": np.int64,
}
PerToken = Mapping[int, np.ndarray]
"""`Rollout.id` → one value per token of its response."""

_STRINGS = [
    "prompt_id",
    "prompt_text",
    "answer",
    "grader",
    "grader_options",
    "task",
    "metadata",
    "status",
    "engine",
    "dtype",
    "text",
    "detail",
    "sampling",
]


_SHAPED = {"experts": np.int16, "prompt_experts": np.int16, "topk_ids": np.int64, "topk_logprobs": np.float32}
_NUMBERS = {"step", "id", "group", "member", "prompt_index", "reward", "train_version"}
_LISTS = {"prompt_token_ids", *_SPAN, "train_logprobs"}
_LISTS |= {"entropy", "keep", "cut", "advantages", "flipped_layers", "experts", "prompt_experts", "topk_ids"}
_LISTS |= {"topk_logprobs", "sampled"}

_WRITTEN: dict[str, Any] = {
    "compression": "lz4",
    "use_dictionary": [*_STRINGS, "pieces.list.element"],
    "write_statistics": False,
}
_GROUP_TOKENS = 2**17
"""Tokens of a row group, about: what a reader decodes to show one rollout of a file of millions."""


def write_step(
    path: str | Path,
    rollouts: Sequence[Rollout],
    *,
    step: int,
    train_version: Mapping[int, int] | None = None,
    train_logprobs: PerToken | None = None,
    entropy: PerToken | None = None,
    keep: PerToken | None = None,
    cut: PerToken | None = None,
    advantages: PerToken | None = None,
    flipped_layers: PerToken | None = None,
    piece: Callable[[int], str] | None = None,
) -> None:
    """Write all rollouts of one step, atomically.

    `train_logprobs` are the trainer's old log-probs (float32), of the weights `train_version` by rollout id, `entropy` of
    the same distributions (float32, nats), `keep` the product of the objective's masks (bool), `cut` where its clip takes the
    gradient away (bool), `advantages` float32, `flipped_layers` the MoE layers whose experts differ between engine and trainer
    (int16, −1 where unknown); a rollout that was not trained on is absent from them and gets null. `piece` turns a token id
    into the text a person reads, so that the file can be shown without its tokenizer. The file is whole once it has its name,
    but on disk for certain only after `os.fsync`: a killed process loses nothing, a power cut perhaps the last files.
    Raises `BadInput` if the disk is full, `ValueError` if an array's length is not the response's.
    """
    spans = [rollout.span for rollout in rollouts]
    columns: dict[str, pa.Array] = {
        "step": pa.array([step] * len(rollouts), pa.int32()),
        "id": pa.array([r.id for r in rollouts], pa.int64()),
        "group": pa.array([r.group for r in rollouts], pa.int64()),
        "member": pa.array([r.member for r in rollouts], pa.int32()),
        "prompt_index": pa.array([r.prompt.index for r in rollouts], pa.int64()),
        "reward": pa.array([r.reward for r in rollouts], pa.float64()),
    }
    columns |= {name: pa.array(values, pa.string()) for name, values in _strings(rollouts).items()}
    columns["prompt_token_ids"] = _lists([r.prompt.token_ids for r in rollouts], np.int64)
    for name, dtype in _SPAN.items():
        columns[name] = _lists([getattr(s, name) for s in spans], dtype)
    columns |= _optional(spans)
    if train_version is not None:
        columns["train_version"] = pa.array([train_version.get(r.id) for r in rollouts], pa.int64())
    for name, values, dtype in (
        ("train_logprobs", train_logprobs, np.float32),
        ("entropy", entropy, np.float32),
        ("keep", keep, np.bool_),
        ("cut", cut, np.bool_),
        ("advantages", advantages, np.float32),
        ("flipped_layers", flipped_layers, np.int16),
    ):
        if values is not None:
            columns[name] = _lists(_aligned(rollouts, values, name), dtype)
    if piece is not None:
        columns["pieces"] = _pieces(spans, piece)
    buffer = pa.BufferOutputStream()
    fit = _GROUP_TOKENS * len(spans) // max(sum(map(len, spans)), 1)
    pq.write_table(pa.table(columns), buffer, row_group_size=max(fit, 1), **_WRITTEN)
    write_atomic(path, buffer.getvalue().to_pybytes(), sync=False)


def read_step(path: str | Path, columns: Sequence[str] | None = None) -> pa.Table:
    """One row per rollout; `columns` reads only those of them that the file has.

    Raises `BadInput` for a missing file and `Corrupt` for a damaged one, or for columns of another kind, by name.
    """
    path = Path(path)
    if not path.is_file():
        raise BadInput(f"rollouts {path}: no such file")
    try:
        names = pq.read_schema(path).names
        table = pq.read_table(path, columns=None if columns is None else [name for name in columns if name in names])
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise Corrupt(f"rollouts {path}: not a whole parquet file ({reason}); delete it or restore it") from None
    missing = [name for name in ("id", "token_ids", "logprobs", *_STRINGS) if name not in names]
    if missing:
        raise Corrupt(f"rollouts {path}: column {missing[0]} is missing; expected a file written by rollkeel")
    check_types(path, table.schema)
    return table


def check_types(path: Path, schema: pa.Schema) -> None:
    """Raise `Corrupt` for a column of another kind than `docs/trace.md` gives it; one of nothing but null has none."""
    is_list, is_number = pa.types.is_list, (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    for column in schema:
        kind = column.type
        expected = ""
        fits = True
        if column.name in _LISTS:
            expected = "lists of numbers"
            fits = (is_list(kind) or pa.types.is_large_list(kind)) and any(f(kind.value_type) for f in is_number)
        elif column.name in _NUMBERS:
            expected, fits = "numbers", any(f(kind) for f in is_number)
        elif column.name in _STRINGS:
            inner = kind.value_type if pa.types.is_dictionary(kind) else kind
            expected, fits = "text", pa.types.is_string(inner) or pa.types.is_large_string(inner)
        if not fits and not pa.types.is_null(kind):
            raise Corrupt(f"rollouts {path}: column {column.name}: expected {expected}, got {kind}; restore the file")


def to_rollouts(table: pa.Table) -> list[Rollout]:
    """The rollouts that were written, equal in every field and bit. Raises `Corrupt` for what no rollout can be."""
    try:
        return [_rollout(row) for batch in table.to_batches() for row in _rows(batch)]
    except KeyError as error:
        raise Corrupt(f"rollouts: column {error} is missing; expected a file written by rollkeel") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise Corrupt(f"rollouts: values that no engine wrote ({error}); restore the file") from None


def per_token(table: pa.Table, name: str) -> dict[int, np.ndarray]:
    """One of the trainer's columns (`train_logprobs`, `keep` …) by rollout id; empty if the file has none."""
    if name not in table.column_names:
        return {}
    ids = table["id"].to_pylist()
    return {i: value for i, value in zip(ids, _arrays(table[name]), strict=True) if value is not None}


class _Told:
    """JSON of prompts' and sampling's settings, which the rollouts of a step share, as objects or as equal ones."""

    def __init__(self) -> None:
        self._by_id: dict[int, str] = {}
        self._sampling: dict[SamplingParams, str] = {}

    def __call__(self, thing: Any) -> str:
        key = id(thing)  # alive as long as the rollouts that hold it, so unique in the call
        if key not in self._by_id:
            self._by_id[key] = self._text(thing)
        return self._by_id[key]

    def _text(self, thing: Any) -> str:
        if not isinstance(thing, SamplingParams):
            return json.dumps(dict(thing))
        if thing not in self._sampling:
            self._sampling[thing] = json.dumps(asdict(thing))
        return self._sampling[thing]


def _strings(rollouts: Sequence[Rollout]) -> dict[str, list[str]]:
    """The text columns. A lone surrogate cannot be stored; texts are for people, training uses the ids."""
    told, prompts = _Told(), [r.prompt for r in rollouts]
    columns = {
        "prompt_id": [p.id for p in prompts],
        "prompt_text": [p.text for p in prompts],
        "answer": [p.answer for p in prompts],
        "grader": [p.grader.name for p in prompts],
        "grader_options": [told(p.grader.options) for p in prompts],
        "task": [p.task for p in prompts],
        "metadata": [told(p.metadata) for p in prompts],
        "status": [r.status.value for r in rollouts],
        "engine": [r.engine for r in rollouts],
        "dtype": [r.dtype for r in rollouts],
        "text": [r.text for r in rollouts],
        "detail": [r.detail for r in rollouts],
        "sampling": [told(r.sampling) for r in rollouts],
    }
    return {
        name: [v if v.isascii() else v.encode("utf-8", "replace").decode() for v in values]
        for name, values in columns.items()
    }


def _optional(spans: Sequence[TokenSpan]) -> dict[str, pa.Array]:
    """`sampled [n]`; `experts [n, L, k]`, `prompt_experts [m, L, k]` and `topk_* [n, K]`, flattened, with their inner shape
    beside them."""
    columns: dict[str, pa.Array] = {}
    if any(span.sampled is not None for span in spans):
        columns["sampled"] = _lists([span.sampled for span in spans], np.bool_)
    for name, dtype in _SHAPED.items():
        values = [getattr(span, name) for span in spans]
        if any(value is not None for value in values):
            columns[name] = _lists([None if v is None else v.reshape(-1) for v in values], dtype)
            shapes = [None if v is None else np.array(v.shape[1:]) for v in values]
            columns[f"{name}_shape"] = _lists(shapes, np.int32)
    return columns


def _aligned(rollouts: Sequence[Rollout], values: PerToken, name: str) -> list[np.ndarray | None]:
    result = [values.get(rollout.id) for rollout in rollouts]
    for rollout, value in zip(rollouts, result, strict=True):
        if value is not None and len(value) != len(rollout.span.token_ids):
            raise ValueError(f"{name} of rollout {rollout.id}: expected {len(rollout.span)} entries, got {len(value)}")
    return result


def _pieces(spans: Sequence[TokenSpan], piece: Callable[[int], str]) -> pa.Array:
    flat = np.concatenate([span.token_ids for span in spans]) if spans else np.zeros(0, np.int64)
    ids, where = np.unique(flat, return_inverse=True)
    texts = np.array([piece(int(i)).encode("utf-8", "replace").decode() for i in ids], object)
    offsets = np.concatenate([[0], np.cumsum([len(span) for span in spans])]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(texts[where], pa.string()))


def _lists(values: Sequence[np.ndarray | None], dtype: type[np.generic]) -> pa.Array:
    """A list column from arrays, without going through Python numbers; None becomes null."""
    parts = [value for value in values if value is not None]
    lengths = list(map(len, parts)) if len(parts) == len(values) else [0 if v is None else len(v) for v in values]
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    flat = pa.array(np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype), from_pandas=False)
    mask = None if len(parts) == len(values) else pa.array([value is None for value in values], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), flat, mask=mask)


def _arrays(column: pa.ChunkedArray | pa.Array) -> list[np.ndarray | None]:
    """One numpy array per row of a list column, in its own dtype; None for null."""
    if isinstance(column, pa.ChunkedArray) and not column.num_chunks:
        return []
    array = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
    flat = np.array(array.values.to_numpy(zero_copy_only=False))
    offsets = array.offsets.to_numpy()
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return [flat[a:b] if ok else None for a, b, ok in zip(offsets[:-1], offsets[1:], valid, strict=True)]


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    columns = {
        name: _arrays(column) if pa.types.is_list(column.type) and name != "pieces" else column.to_pylist()
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _rollout(row: Mapping[str, Any]) -> Rollout:
    sampling = json.loads(row["sampling"])
    sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    known = {field.name for field in fields(SamplingParams)}
    prompt = Prompt(
        id=row["prompt_id"],
        index=row["prompt_index"],
        text=row["prompt_text"],
        token_ids=row["prompt_token_ids"],
        answer=row["answer"],
        grader=GraderSpec(name=row["grader"], options=json.loads(row["grader_options"])),
        task=row["task"],
        metadata=json.loads(row["metadata"]),
    )
    span = {name: row[name] for name in _SPAN}
    span["sampled"] = row.get("sampled")
    for name in _SHAPED:
        if row.get(name) is not None:
            span[name] = row[name].reshape(-1, *row[f"{name}_shape"])
    return Rollout(
        id=row["id"],
        group=row["group"],
        member=row["member"],
        prompt=prompt,
        span=TokenSpan(**span),
        status=Status(row["status"]),
        sampling=SamplingParams(**{key: value for key, value in sampling.items() if key in known}),
        engine=row["engine"],
        dtype=row["dtype"],
        reward=row["reward"],
        text=row["text"],
        detail=row["detail"],
    )
