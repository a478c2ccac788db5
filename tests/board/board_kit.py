"""Run folders made by hand, with numbers that a reader can check."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HOSTILE = "<script>window.bad = 1</script>"


def run_folder(path: Path, rows: Sequence[Mapping[str, Any]] = (), events: Sequence[Mapping[str, Any]] = ()) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text(f"run: {{name: {path.name}, steps: 9}}\ntrain: {{lr: 0.1}}\n")
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (path / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return path


def step_file(
    run: Path, step: int, lengths: Sequence[int], *, group_rows: int = 2, without: Sequence[str] = (), piece: str = "w"
) -> Path:
    """Rollout i of step s has id 100 s + i and token ids 1000 s, 1000 s + 1, … over all rollouts of the step in order.

    log q is −1 everywhere, log o −1 + 0.1 i; the first token of every odd rollout was dropped.
    Rollout 2 was not trained on.
    """
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    ids = [list(range(1000 * step + end - n, 1000 * step + end)) for n, end in zip(lengths, ends, strict=True)]
    trained = [i != 2 for i in range(len(lengths))]

    def each(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
        return pa.array(list(values), pa.list_(kind))

    columns: dict[str, pa.Array] = {
        "step": pa.array([step] * len(ids), pa.int32()),
        "id": pa.array([100 * step + i for i in range(len(ids))], pa.int64()),
        "group": pa.array([i // 2 for i in range(len(ids))], pa.int64()),
        "member": pa.array([i % 2 for i in range(len(ids))], pa.int32()),
        "reward": pa.array([None if i == 1 else float(i) for i in range(len(ids))], pa.float64()),
        "train_version": pa.array([step if there else None for there in trained], pa.int64()),
        "status": pa.array(["finished"] * len(ids)),
        "prompt_text": pa.array([f"prompt {i} {HOSTILE}" for i in range(len(ids))]),
        "answer": pa.array(["42"] * len(ids)),
        "detail": pa.array([""] * len(ids)),
        "token_ids": each(ids, pa.int64()),
        "logprobs": each([[-1.0] * n for n in lengths], pa.float32()),
        "versions": each([[step - 1] * n for n in lengths], pa.int64()),
        "train_logprobs": each(
            [[-1 + 0.1 * i] * n if trained[i] else None for i, n in enumerate(lengths)], pa.float32()
        ),
        "keep": each(
            [[not (i % 2 and k == 0) for k in range(n)] if trained[i] else None for i, n in enumerate(lengths)],
            pa.bool_(),
        ),
        "entropy": each([[0.5] * n if trained[i] else None for i, n in enumerate(lengths)], pa.float32()),
        "pieces": each([[f" {piece}{token}" for token in row] for row in ids], pa.string()),
    }
    path = run / "rollouts" / f"step_{step:06d}.parquet"
    path.parent.mkdir(exist_ok=True)
    table = pa.table({name: column for name, column in columns.items() if name not in without})
    pq.write_table(table, path, row_group_size=group_rows)
    return path
