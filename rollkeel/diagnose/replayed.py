"""A recorded step against the same step done again: where they part first, and what one changed factor did.

Numbers are compared bit for bit; what measures the machine (times, throughput, memory) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

VOLATILE = ("time/", "throughput/", "memory/", "async/wait_s", "sync/")
"""Metrics of the machine and not of the run."""
SAMPLED = (
    "id",
    "group",
    "member",
    "prompt_index",
    "prompt_id",
    "prompt_token_ids",
    "status",
    "text",
    "reward",
    "token_ids",
    "logprobs",
    "kept_mass",
    "versions",
    "kv_versions",
    "sampled",
    "experts",
    "prompt_experts",
    "topk_ids",
    "topk_logprobs",
)
"""Columns of the rollouts file that sampling and grading fill."""
TRAINED = ("train_version", "train_logprobs", "entropy", "keep", "advantages", "flipped_layers")
"""Columns that the update fills."""
EXAMPLES = 12


@dataclass(frozen=True, kw_only=True)
class MetricChange:
    """A metric whose recorded and replayed values are not the same; None where one side lacks it."""

    name: str
    recorded: Any
    replayed: Any

    @property
    def difference(self) -> float | None:
        """Replayed − recorded."""
        if isinstance(self.recorded, int | float) and isinstance(self.replayed, int | float):
            return self.replayed - self.recorded
        return None

    @property
    def relative(self) -> float:
        """|difference| over the larger magnitude, in [0, 2]; infinite where one side lacks the metric."""
        if (gap := self.difference) is None:
            return float("inf")
        scale = max(abs(self.recorded), abs(self.replayed))
        return abs(gap) / scale if scale else 0.0


def metric_changes(
    recorded: Mapping[str, Any], replayed: Mapping[str, Any], *, whole: bool = False
) -> list[MetricChange]:
    """Metrics that differ, largest relative difference first. `whole`: a metric that only the record has counts too, but not those
    of evaluations, and of checks, which judge all steps before."""
    names = [n for n in replayed if not n.startswith(VOLATILE)]
    if whole:
        names += [n for n in recorded if n not in replayed and not n.startswith((*VOLATILE, "eval/", "checks/"))]
    found = [
        MetricChange(name=n, recorded=recorded.get(n), replayed=replayed.get(n))
        for n in names
        if n not in ("step", "version") and recorded.get(n) != replayed.get(n)
    ]
    return sorted(found, key=lambda change: (-change.relative, change.name))


@dataclass(frozen=True, kw_only=True)
class Place:
    """The first value of a column that differs."""

    column: str
    rollout: int | None
    """Id; None where the files do not hold the same rollouts."""
    token: int | None
    """Position in the response; None for what is not said per token."""
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        where = "" if self.rollout is None else f" of rollout {self.rollout}"
        where += "" if self.token is None else f", token {self.token}"
        return f"{self.column}{where}: recorded {_said(self.recorded)}, replayed {_said(self.replayed)}"


def first_difference(recorded: pa.Table, replayed: pa.Table, columns: Sequence[str]) -> Place | None:
    """Where two rollouts files part first, by column in the order given, then by rollout; None if every bit is equal.

    A column that only one of them has counts as different, unless it is null throughout.
    """
    one, two = recorded["id"].to_pylist(), replayed["id"].to_pylist()
    if one != two:
        return Place(column="ids", rollout=None, token=None, recorded=_ids(one), replayed=_ids(two))
    for name in columns:
        mine, theirs = (_column(table, name) for table in (recorded, replayed))
        for row, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if _bits(a) == _bits(b):
                continue
            token, (a, b) = _token(a, b, len(_column(recorded, "token_ids")[row]))
            return Place(column=name, rollout=one[row], token=token, recorded=a, replayed=b)
    return None


def effects(recorded: pa.Table, replayed: pa.Table) -> dict[str, Any]:
    """What a changed factor did to a step's rollouts, as JSON values.

    `rollouts_equal`: of `rollouts` that both have, those with the same tokens; `first_change_mean`: tokens before the others
    part. Over the tokens of equal rollouts: `keep_differs` and some of those tokens, `examples`, with probabilities
    `q` and `o` as recorded and as replayed. Per side, over its own
    trained tokens: `tokens`, `dropped`, `logprob_gap` (mean |log o − log q|, nats), `kl_k3`.
    """
    rows = {i: n for n, i in enumerate(replayed["id"].to_pylist())}
    pairs = [(n, rows[i]) for n, i in enumerate(recorded["id"].to_pylist()) if i in rows]
    mine, theirs = (_column(t, "token_ids") for t in (recorded, replayed))
    equal = [(a, b) for a, b in pairs if _bits(mine[a]) == _bits(theirs[b])]
    parted = [_common(mine[a], theirs[b]) for a, b in pairs if _bits(mine[a]) != _bits(theirs[b])]
    keeps = [_column(t, "keep") for t in (recorded, replayed)]
    differs, examples = 0, []
    for a, b in equal:
        before, after = keeps[0][a], keeps[1][b]
        if before is None or after is None:
            continue
        changed = np.flatnonzero(np.asarray(before) != np.asarray(after))
        differs += len(changed)
        for at in changed[: EXAMPLES - len(examples)]:
            examples.append(_example(recorded, replayed, (a, b), int(at)))
    return {
        "rollouts": len(pairs),
        "rollouts_equal": len(equal),
        "first_change_mean": float(np.mean(parted)) if parted else None,
        "keep_differs": differs,
        "examples": examples,
        "recorded": _gap(recorded),
        "replayed": _gap(replayed),
    }


def _gap(table: pa.Table) -> dict[str, float]:
    """Of a file's trained tokens."""
    o, q, keep = (_column(table, name) for name in ("train_logprobs", "logprobs", "keep"))
    rows = [n for n, value in enumerate(o) if value is not None and len(value)]
    if not rows:
        return {"tokens": 0.0}
    gap = np.concatenate([o[n] for n in rows]).astype(np.float64) - np.concatenate([q[n] for n in rows])
    gap = gap[np.isfinite(gap)]  # what an environment wrote has no log o
    out = {
        "tokens": float(len(gap)),
        "logprob_gap": float(np.abs(gap).mean()),
        "kl_k3": float((np.exp(gap) - 1 - gap).mean()),
    }
    if all(keep[n] is not None for n in rows):
        out["dropped"] = float((~np.concatenate([keep[n] for n in rows]).astype(bool)).sum())
    return out


def _example(recorded: pa.Table, replayed: pa.Table, rows: tuple[int, int], token: int) -> dict[str, Any]:
    a, b = rows
    pieces = _column(recorded, "pieces")[a]

    def chance(table: pa.Table, row: int, name: str) -> float | None:
        values = _column(table, name)[row]
        return None if values is None else float(np.exp(values[token]))

    return {
        "id": recorded["id"][a].as_py(),
        "token": token,
        "piece": None if pieces is None else pieces[token],
        "q": [chance(recorded, a, "logprobs"), chance(replayed, b, "logprobs")],
        "o": [chance(recorded, a, "train_logprobs"), chance(replayed, b, "train_logprobs")],
        "advantage": float(recorded["advantages"][a].values[token].as_py()),
        "recorded": "kept" if recorded["keep"][a].values[token].as_py() else "dropped",
        "replayed": "kept" if replayed["keep"][b].values[token].as_py() else "dropped",
    }


def _column(table: pa.Table, name: str) -> list[Any]:
    """One value per row: a numpy array for numbers in lists, a Python value otherwise, None for null or no column."""
    if name not in table.column_names:
        return [None] * table.num_rows
    column = table[name]
    if not pa.types.is_list(column.type) or pa.types.is_string(column.type.value_type):
        return column.to_pylist()
    return [
        None if not cell.is_valid else np.asarray(cell.values.to_numpy(zero_copy_only=False))
        for chunk in column.chunks
        for cell in chunk
    ]


def _bits(value: Any) -> Any:
    return value.tobytes() if isinstance(value, np.ndarray) else value


def _token(a: Any, b: Any, tokens: int) -> tuple[int | None, tuple[Any, Any]]:
    """Token and values of the first difference of two lists, several values per token or one; as they are where they are no
    lists, or not as long."""
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        return None, (a, b)
    at = _common(a, b)
    if at >= min(len(a), len(b)):
        return None, (f"{len(a)} tokens", f"{len(b)} tokens")
    return (at * tokens // len(a) if len(a) >= tokens else None), (a[at].item(), b[at].item())


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Entries that two arrays share at their beginning, bit for bit."""
    n = min(len(a), len(b))
    same = np.frombuffer(a[:n].tobytes(), np.uint8) == np.frombuffer(b[:n].tobytes(), np.uint8)
    return n if not n or same.all() else int(np.argmin(same)) // a.itemsize


def _ids(ids: Sequence[int]) -> str:
    return f"{len(ids)} rollouts" + (f", {ids[0]} to {ids[-1]}" if ids else "")


def _said(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{len(value)} values"
    return "none" if value is None else f"{value:.9g}" if isinstance(value, float) else str(value)[:60]
