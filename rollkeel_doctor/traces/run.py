"""rollkeel's own run folders as a `Trace`; `docs/trace.md` is the schema of the files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as pq

from rollkeel_doctor.errors import BadInput, DoctorError
from rollkeel_doctor.traces.folder import CONFIG, METRICS, Folder, read_folder, read_table, rollout_files
from rollkeel_doctor.traces.trace import TOKENS, Facts, Trace

pc: Any = compute  # its functions are made at import time

_TEXTS = {"status": "status", "prompt_text": "prompt_text", "text": "text", "answer": "answer", "detail": "detail"}
_NUMBERS = {"step": np.int64, "id": np.int64, "group": np.int64, "reward": np.float64}
_ENGINE = ("engine", "dtype", "sampling")
_KINDS = {"prompt_token_ids": "list", **{column: "list" for column, _, _ in TOKENS.values()}}
_KINDS |= dict.fromkeys((*_NUMBERS, "train_version"), "number") | dict.fromkeys((*_TEXTS.values(), *_ENGINE), "text")
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
    Raises `BadInput` if there is no run or no rollout, `Corrupt` if there are files and none can be read.
    """
    if path.is_file() and path.suffix != ".parquet":
        raise BadInput(f"{path}: expected a run folder or one of its rollouts/*.parquet")
    run = read_folder(path) if path.is_dir() else None
    files = [file for _, file in rollout_files(path)] if run else [path]
    notes = list(run.problems) if run else []
    parts: list[_Part] = []
    damaged: DoctorError | None = None
    files = files[-last:] if last else files
    if spread and len(files) > spread:
        files = [files[i] for i in np.linspace(0, len(files) - 1, spread).round().astype(int)]
    for file in files:
        try:
            part = _part(file)
        except DoctorError as error:
            notes.append(str(error))
            damaged = error
            continue
        if len(part.lengths):
            parts.append(part)
    if not parts and damaged is not None:
        raise damaged
    if not parts:
        raise BadInput(f"{path}: no recorded rollouts; run it with report.rollouts=true")
    return _trace(path, parts, run, notes)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One file as arrays; its table is gone, which at 10⁷ tokens is a gigabyte."""

    file: Path
    lengths: np.ndarray
    prompt_length: np.ndarray
    tokens: dict[str, np.ndarray]
    numbers: dict[str, np.ndarray]
    texts: dict[str, list[Any]]
    facts: tuple[Any, ...]


def _part(file: Path) -> _Part:
    table = read_table(
        file, _KINDS, [*_NUMBERS, *_TEXTS.values(), *_ENGINE, "prompt_token_ids", "token_ids", "logprobs"]
    )
    numbers = {name: _numbers(table[name], dtype) for name, dtype in _NUMBERS.items()}
    if "train_version" in table.column_names:
        numbers["train_version"] = _numbers(table["train_version"], np.int64)
    return _Part(
        file=file,
        lengths=_lengths(table["token_ids"]),
        prompt_length=_lengths(table["prompt_token_ids"]),
        tokens={
            name: _flat(table, column, dtype, missing)
            for name, (column, dtype, missing) in TOKENS.items()
            if column in table.column_names
        },
        numbers=numbers,
        texts={name: [text or "" for text in table[column].to_pylist()] for name, column in _TEXTS.items()},
        facts=tuple(table[name][-1].as_py() for name in _ENGINE) if table.num_rows else (),
    )


def _trace(path: Path, parts: list[_Part], run: Folder | None, notes: list[str]) -> Trace:
    lengths = np.concatenate([p.lengths for p in parts])
    pieces = _pieces(parts)
    tokens: dict[str, Any] = {}
    for name, (_, dtype, missing) in TOKENS.items():
        if any(name in p.tokens for p in parts):
            # Parts give up their arrays as they are joined: never two copies of more than one field.
            each = [p.tokens.pop(name, None) for p in parts]
            filled = [
                np.full(int(p.lengths.sum()), missing, dtype) if values is None else values
                for p, values in zip(parts, each, strict=True)
            ]
            tokens[name] = np.concatenate(filled)
            del each, filled
    if "mask" in tokens:  # nobody sampled what an environment wrote
        tokens["rollout_logprobs"][~tokens["mask"]] = np.nan
    numbers: dict[str, Any] = {name: np.concatenate([p.numbers[name] for p in parts]) for name in _NUMBERS}
    if any("train_version" in p.numbers for p in parts):
        unknown = (np.full(len(p.lengths), -1) for p in parts)
        each = [p.numbers.get("train_version", u) for p, u in zip(parts, unknown, strict=True)]
        numbers["train_version"] = np.concatenate(each)
    return Trace(
        source="rollkeel run" if run else "rollkeel rollouts",
        path=str(path),
        facts=_facts(parts[-1].facts, run.config if run else {}, _unmoved(path) if run else None),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        prompt_length=np.concatenate([p.prompt_length for p in parts]),
        pieces=pieces,
        metrics=run.rows if run else (),
        notes=notes,
        **numbers,
        **{name: [x for p in parts for x in p.texts[name]] for name in _TEXTS},
        **tokens,
    )


def _lengths(column: pa.ChunkedArray) -> np.ndarray:
    return pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)


def _flat(table: pa.Table, column: str, dtype: type[np.generic], missing: Any) -> np.ndarray:
    """Values of a list column token after token; a rollout without them gets `missing` for each of its tokens."""
    wanted = _lengths(table["token_ids"])
    have = _lengths(table[column])
    flat = pc.list_flatten(table[column])
    values = (pc.fill_null(flat, missing) if flat.null_count else flat).to_numpy().astype(dtype)
    if np.array_equal(have, wanted):
        return values
    out = np.full(int(wanted.sum()), missing, dtype)
    out[np.repeat(have == wanted, wanted)] = values[np.repeat(have == wanted, have)]
    return out


def _numbers(column: pa.ChunkedArray, dtype: type[np.generic]) -> np.ndarray:
    missing = np.nan if dtype is np.float64 else -1
    return pc.fill_null(column, missing).to_numpy().astype(dtype)


def _pieces(parts: Sequence[_Part]) -> dict[int, str]:
    """Read only from files with an id that no later file has shown: a vocabulary is soon complete."""
    out: dict[int, str] = {}
    for part in reversed(parts):
        if len(out) >= MAX_PIECES:
            break
        ids = part.tokens["token_ids"]
        known, first = np.unique(ids, return_index=True)
        new = [(int(i), int(at)) for i, at in zip(known, first, strict=True) if int(i) not in out]
        if not new:
            continue
        table = pq.read_table(part.file, columns=["pieces"] if "pieces" in pq.read_schema(part.file).names else [])
        if table.num_columns and len(texts := pc.list_flatten(table["pieces"])) == len(ids):
            found = texts.take(pa.array([at for _, at in new])).to_pylist()
            out |= {i: text for (i, _), text in zip(new, found, strict=True) if text is not None}
    return out


def _sampled(text: str | None) -> dict[str, Any]:
    """Numbers of the sampling parameters; empty for text that is no JSON object, which states nothing."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    items = found.items() if isinstance(found, dict) else ()
    return {k: v for k, v in items if isinstance(v, int | float) and not isinstance(v, bool)}


def _unmoved(path: Path) -> tuple[int, int] | None:
    """Steps of the first and the last checkpoint, if their manifests state the same weights."""
    found: list[tuple[int, Any]] = []
    for manifest in sorted(path.glob("checkpoints/step_*/manifest.json")):
        try:
            read = json.loads(manifest.read_text())
            held = {n: f["sha256"] for n, f in read["files"].items() if n.endswith(".safetensors")}
            found.append((int(read["step"]), held))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # a damaged one is the business of `checkpoint.verify`
    same = len(found) > 1 and found[0][1] and found[0][1] == found[-1][1]
    return (found[0][0], found[-1][0]) if same else None


def _facts(stated: tuple[Any, ...], config: Mapping[str, Any], unmoved: tuple[int, int] | None) -> Facts:
    """From the last rollout (`stated`: `_ENGINE`) where it says it, from the config for the rest."""
    engine, dtype, sampling = stated
    sampled = _sampled(sampling)

    def section(name: str) -> Mapping[str, Any]:
        found = config.get(name)
        return found if isinstance(found, Mapping) else {}

    train = section("train")
    rollout = section("rollout")
    model = section("model")
    old = section("advantages")
    routing = rollout.get("routing")
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
        entropy_coefficient=train.get("entropy_coefficient"),
        loop=section("run").get("loop"),
        kv=section("engine").get("kv"),
        replay_routing=routing == "replay" if routing else rollout.get("replay_routing"),  # of older runs, as the next
        shuffled=section("experiment").get("advantages") == "shuffled" or bool(old.get("shuffle")),
        unmoved=unmoved,
    )
