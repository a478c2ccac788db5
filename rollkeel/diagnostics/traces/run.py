"""rollkeel's own run folders as a `Trace`; `docs/trace.md` is the schema of the files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from rollkeel.diagnostics.rollout_store import read_step
from rollkeel.diagnostics.run_files import RunFiles, read_run
from rollkeel.diagnostics.runfolder import CONFIG, METRICS, rollout_files
from rollkeel.diagnostics.traces.trace import Facts, Trace
from rollkeel.errors import BadInput, RollkeelError

pc: Any = compute  # its functions are made at import time

_TOKENS: dict[str, tuple[str, type[np.generic], Any]] = {
    "token_ids": ("token_ids", np.int64, -1),
    "rollout_logprobs": ("logprobs", np.float32, np.nan),
    "train_logprobs": ("train_logprobs", np.float32, np.nan),
    "advantages": ("advantages", np.float32, np.nan),
    "keep": ("keep", np.bool_, True),
    "entropy": ("entropy", np.float32, np.nan),
    "kept_mass": ("kept_mass", np.float32, 1.0),
    "versions": ("versions", np.int64, -1),
    "kv_versions": ("kv_versions", np.int64, -1),
    "flipped_layers": ("flipped_layers", np.int16, -1),
}
"""Field → column of the file, dtype, and what stands for a token without it."""
_TEXTS = {"status": "status", "prompt_text": "prompt_text", "text": "text", "answer": "answer", "detail": "detail"}
_NUMBERS = {"step": np.int64, "id": np.int64, "group": np.int64, "reward": np.float64}
_ENGINE = ("engine", "dtype", "sampling")
MAX_PIECES = 100_000


def is_run(path: Path) -> bool:
    """Whether a folder looks like one that `rollkeel train` made, or a file like one of its rollouts."""
    if path.is_dir():
        return (path / CONFIG).is_file() or (path / METRICS).is_file()
    return path.suffix == ".parquet"


def read_run_trace(path: Path, *, last: int | None = None, spread: int | None = None) -> Trace:
    """Read a run folder, or a single rollouts file.

    `last`: only the rollouts of the last so many steps; `spread`: of at most so many steps, evenly, the first and the last
    among them. A file that cannot be read is left out and named in `notes`.
    Raises `BadInput` if there is no run, or no rollout that can be read.
    """
    run = read_run(path) if path.is_dir() else None
    files = rollout_files(path) if run else [(0, path)]
    notes = list(run.problems) if run else []
    tables: list[pa.Table] = []
    columns = [*{c for c, _, _ in _TOKENS.values()}, *_TEXTS.values(), *_NUMBERS, *_ENGINE]
    columns += ["prompt_token_ids", "train_version", "pieces"]
    files = files[-last:] if last else files
    if spread and len(files) > spread:
        files = [files[i] for i in np.linspace(0, len(files) - 1, spread).round().astype(int)]
    for _, file in files:
        try:
            table = read_step(file, columns)
        except RollkeelError as error:
            notes.append(str(error))
            continue
        if table.num_rows:
            tables.append(table)
    if not tables:
        reason = f" ({notes[-1]})" if notes else "; run it with report.rollouts=true"
        raise BadInput(f"{path}: no recorded rollouts{reason}")
    return _trace(path, tables, run, notes)


def _trace(path: Path, tables: list[pa.Table], run: RunFiles | None, notes: list[str]) -> Trace:
    lengths = np.concatenate([_lengths(t["token_ids"]) for t in tables])
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens: dict[str, Any] = {}
    for name, (column, dtype, missing) in _TOKENS.items():
        if any(column in t.column_names for t in tables):
            tokens[name] = np.concatenate([_flat(t, column, dtype, missing) for t in tables])
    numbers: dict[str, Any] = {
        name: np.concatenate([_numbers(t[name], dtype) for t in tables]) for name, dtype in _NUMBERS.items()
    }
    if any("train_version" in t.column_names for t in tables):
        parts = [
            _numbers(t["train_version"], np.int64) if "train_version" in t.column_names else np.full(t.num_rows, -1)
            for t in tables
        ]
        numbers["train_version"] = np.concatenate(parts)
    texts = {name: [x for t in tables for x in t[column].to_pylist()] for name, column in _TEXTS.items()}
    return Trace(
        source="rollkeel run" if run else "rollkeel rollouts",
        path=str(path),
        facts=_facts(tables[-1], run.config if run else {}),
        starts=starts,
        prompt_length=np.concatenate([_lengths(t["prompt_token_ids"]) for t in tables]),
        pieces=_pieces(tables),
        metrics=run.rows if run else (),
        notes=notes,
        **numbers,
        **texts,
        **tokens,
    )


def _lengths(column: pa.ChunkedArray) -> np.ndarray:
    return pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)


def _flat(table: pa.Table, column: str, dtype: type[np.generic], missing: Any) -> np.ndarray:
    """Values of a list column token after token; a rollout without them gets `missing` for each of its tokens."""
    wanted = _lengths(table["token_ids"])
    if column not in table.column_names:
        return np.full(int(wanted.sum()), missing, dtype)
    have = _lengths(table[column])
    values = pc.list_flatten(table[column]).to_numpy().astype(dtype)
    if np.array_equal(have, wanted):
        return values
    out = np.full(int(wanted.sum()), missing, dtype)
    out[np.repeat(have == wanted, wanted)] = values[np.repeat(have == wanted, have)]
    return out


def _numbers(column: pa.ChunkedArray, dtype: type[np.generic]) -> np.ndarray:
    missing = np.nan if dtype is np.float64 else -1
    return pc.fill_null(column, missing).to_numpy().astype(dtype)


def _pieces(tables: Sequence[pa.Table]) -> dict[int, str]:
    out: dict[int, str] = {}
    for table in reversed(tables):
        if "pieces" not in table.column_names or len(out) >= MAX_PIECES:
            continue
        ids = pc.list_flatten(table["token_ids"]).to_numpy()
        known, first = np.unique(ids, return_index=True)
        new = [(int(i), int(at)) for i, at in zip(known, first, strict=True) if int(i) not in out]
        if new and len(texts := pc.list_flatten(table["pieces"])) == len(ids):
            found = texts.take(pa.array([at for _, at in new])).to_pylist()
            out |= {i: text for (i, _), text in zip(new, found, strict=True) if text is not None}
    return out


def _facts(table: pa.Table, config: Mapping[str, Any]) -> Facts:
    """From the rollouts themselves where they say it, from the config for the rest."""
    engine, dtype, sampling = (table[name][-1].as_py() for name in _ENGINE)
    sampled = json.loads(sampling) if sampling else {}

    def section(name: str) -> Mapping[str, Any]:
        found = config.get(name)
        return found if isinstance(found, Mapping) else {}

    train, rollout, model = section("train"), section("rollout"), section("model")
    dtypes = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    return Facts(
        engine=engine,
        engine_dtype=dtype,
        train_dtype=dtypes.get(str(model.get("dtype"))),
        temperature=sampled.get("temperature"),
        top_p=sampled.get("top_p"),
        top_k=sampled.get("top_k"),
        min_p=sampled.get("min_p"),
        max_new_tokens=sampled.get("max_new_tokens"),
        updates_per_step=train.get("updates_per_step"),
        objective=section("objective").get("name"),
        lr=train.get("lr"),
        loop=section("run").get("loop"),
        kv=section("engine").get("kv"),
        replay_routing=rollout.get("replay_routing"),
    )
