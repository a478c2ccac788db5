"""The tokens that masks and clips drop most often, by the sign of the advantage (DPPO paper, Appendix E)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from rollkeel.errors import RollkeelError
from rollkeel.record.rollout_store import read_step
from rollkeel.record.runfolder import rollout_files
from rollkeel.report.samples import visible

MOST = 20
"""Tokens of each sign that are shown."""
_COLUMNS = ("id", "token_ids", "advantages", "keep", "cut", "pieces")


@dataclass(frozen=True)
class Dropped:
    """One token, as often as it was dropped."""

    token: int
    text: str
    """As people read it; the id where the file has no text."""
    count: int
    share: float
    """Of its occurrences with that sign of the advantage."""


@dataclass
class _Counts:
    """Tokens of one sign by id."""

    dropped: Counter[int] = field(default_factory=Counter)
    seen: Counter[int] = field(default_factory=Counter)

    def most(self, texts: dict[int, str]) -> list[Dropped]:
        order = sorted(self.dropped.items(), key=lambda pair: (-pair[1], pair[0]))[:MOST]
        shown = {token: visible(texts.get(token, f"⟨{token}⟩")).replace("\n", "") for token, _ in order}
        return [Dropped(token, shown[token], count, count / self.seen[token]) for token, count in order]


def dropped_tokens(run: Path, steps: int) -> tuple[list[Dropped], list[Dropped]]:
    """The most frequent dropped tokens with a positive advantage, and with a negative one.

    Of at most so many steps, evenly over the run, the first and the last among them. A token is dropped if a mask or the clip
    of the objective takes its gradient away. Files without these columns, and damaged ones, are left out.
    """
    files = [path for _, path in rollout_files(run)]
    if len(files) > steps:
        files = [files[i] for i in np.linspace(0, len(files) - 1, steps).round().astype(int)]
    signs, texts = (_Counts(), _Counts()), dict[int, str]()
    for path in files:
        try:
            table = read_step(path, _COLUMNS)
        except RollkeelError:  # named where the page shows rollouts
            continue
        if {"advantages", "keep"} <= set(table.column_names):
            _count(table, signs, texts)
    return signs[0].most(texts), signs[1].most(texts)


def _count(table: pa.Table, signs: tuple[_Counts, _Counts], texts: dict[int, str]) -> None:
    table = table.filter(table["advantages"].is_valid())
    lists = {name: _flat(table, name) for name in table.column_names if name not in ("id", "pieces")}
    ids, advantage, keep = (lists[name] for name in ("token_ids", "advantages", "keep"))
    if any(len(values) != len(ids) for values in lists.values()):
        return
    dropped = ~keep.astype(bool)
    if "cut" in lists:
        dropped |= lists["cut"].astype(bool)
    for counts, here in zip(signs, (advantage > 0, advantage < 0), strict=True):
        for into, which in ((counts.seen, here), (counts.dropped, here & dropped)):
            tokens, times = np.unique(ids[which], return_counts=True)
            into.update(dict(zip(tokens.tolist(), times.tolist(), strict=True)))
    pieces = table["pieces"].combine_chunks().flatten() if "pieces" in table.column_names else None
    if pieces is not None and len(pieces) == len(ids):
        tokens, first = np.unique(ids, return_index=True)
        texts |= dict(zip(tokens.tolist(), pieces.take(pa.array(first)).to_pylist(), strict=True))


def _flat(table: pa.Table, name: str) -> np.ndarray:
    return table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
