"""Which rows repeat an earlier one: exactly by the hash of the prompt, nearly by candidates from LSH and their true similarity.

Rows are judged in input order, so the first of its kind is the one that is kept, whatever the number of processes was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollkeel.data.features import U32, U64
from rollkeel.data.options import ExactOptions, NearOptions

KEPT, EXACT, CONFLICT, NEAR, MIX = range(5)
"""What became of a row."""
_REACH = 8
"""Rows with one LSH key are compared with the first ones and the last ones before them, this many: no key makes n² pairs."""
_PAIRS = 20_000


@dataclass
class Verdicts:
    """For each of n rows what became of it and, for a repeat, the row it repeats (−1: none)."""

    state: NDArray[np.uint8]
    other: NDArray[np.int64]
    similarity: dict[int, float] = field(default_factory=dict)

    @staticmethod
    def of(rows: int) -> Verdicts:
        return Verdicts(np.zeros(rows, np.uint8), np.full(rows, -1, np.int64))


def exact(prompts: U64, answers: U64, options: ExactOptions, verdicts: Verdicts) -> None:
    """Judge rows by hashes of prompt and answer `[n]`: a later row of a prompt repeats it, or contradicts its answer."""
    order = np.argsort(prompts, kind="stable")
    ordered, same = prompts[order], answers[order]
    fresh = np.ones(len(order), bool)
    fresh[1:] = ordered[1:] != ordered[:-1]
    group = np.cumsum(fresh) - 1
    leader = np.flatnonzero(fresh)[group]
    contradicts = same != same[leader]
    later = ~fresh
    state = np.where(contradicts, CONFLICT, EXACT).astype(np.uint8)
    if options.conflicts == "drop":
        disputed = np.bincount(group, weights=contradicts, minlength=1)[group] > 0
        state[disputed], later = CONFLICT, later | disputed
    verdicts.state[order[later]] = state[later]
    verdicts.other[order[later]] = np.where(leader == np.arange(len(order)), -1, order[leader])[later]


class ShingleStore:
    """Sets of shingles of all rows, on disk: a folder per shard with `shingles.npy` and `starts.npy`."""

    def __init__(self, folders: list[Path], offsets: NDArray[np.int64]) -> None:
        """`offsets [shards + 1]`: first row of each shard."""
        self._folders, self._offsets = folders, offsets

    def gather(self, rows: NDArray[np.int64]) -> tuple[U32, NDArray[np.int64]]:
        """Sets of `rows` (ascending), end to end, and their lengths."""
        parts, lengths = [np.zeros(0, np.uint32)], []
        cuts = np.searchsorted(rows, self._offsets)
        for folder, first, a, b in zip(self._folders, self._offsets[:-1], cuts[:-1], cuts[1:], strict=True):
            if a < b:
                data, starts = np.load(folder / "shingles.npy", mmap_mode="r"), np.load(folder / "starts.npy")
                for row in (rows[a:b] - first).tolist():
                    parts.append(np.array(data[starts[row] : starts[row + 1]]))
                    lengths.append(len(parts[-1]))
        return np.concatenate(parts), np.array(lengths, np.int64)


def near(
    bands: Callable[[int], U64],
    store: ShingleStore,
    options: NearOptions,
    verdicts: Verdicts,
    progress: Callable[[int], None],
) -> int:
    """Judge the rows kept so far by `bands(i) [n]`, the LSH keys of band i; returns how many pairs were compared.

    A row goes if its similarity to an earlier row that is kept reaches the threshold. `progress(i)` after band i.
    """
    alive = np.flatnonzero(verdicts.state == KEPT)
    pairs = np.zeros(0, np.uint64)
    for band in range(options.bands):
        pairs = np.union1d(pairs, _candidates(bands(band)[alive], alive))
        progress(band + 1)
    order = np.lexsort((pairs >> np.uint64(32), pairs & np.uint64(0xFFFFFFFF)))  # by the later row, then the earlier
    pairs = pairs[order]
    for a in range(0, len(pairs), _PAIRS):
        part = pairs[a : a + _PAIRS]
        early, late = (part >> np.uint64(32)).astype(np.int64), (part & np.uint64(0xFFFFFFFF)).astype(np.int64)
        for i, j, value in zip(early.tolist(), late.tolist(), _similarities(store, early, late).tolist(), strict=True):
            if value >= options.threshold and verdicts.state[i] == KEPT and verdicts.state[j] == KEPT:
                verdicts.state[j], verdicts.other[j], verdicts.similarity[j] = NEAR, i, value
    return len(pairs)


def _candidates(keys: U64, rows: NDArray[np.int64]) -> U64:
    """Pairs of `rows` with equal `keys`, as earlier << 32 | later."""
    order = np.argsort(keys, kind="stable")
    same = keys[order][1:] == keys[order][:-1]
    order = order[np.append(same, False) | np.append(False, same)]
    ordered = keys[order]
    place = np.arange(len(order))
    found = [np.zeros(0, np.uint64)]
    fresh = np.append(True, ordered[1:] != ordered[:-1])[: len(order)]
    leader = np.maximum.accumulate(np.where(fresh, place, 0))
    for reach in range(1, _REACH + 1):
        for earlier in (place - reach, leader + reach - 1):
            ok = (earlier >= leader) & (earlier < place)
            ok[ok] = ordered[earlier[ok]] == ordered[ok]
            a, b = rows[order[earlier[ok]]].astype(np.uint64), rows[order[ok]].astype(np.uint64)
            found.append(a << np.uint64(32) | b)
    return np.unique(np.concatenate(found))


def _similarities(store: ShingleStore, early: NDArray[np.int64], late: NDArray[np.int64]) -> NDArray[np.float64]:
    """Jaccard similarity of the shingle sets of each pair; 0 for two empty ones."""
    rows, place = np.unique(np.concatenate([early, late]), return_inverse=True)
    data, lengths = store.gather(rows)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    sizes = lengths[place]
    owner = np.repeat(np.arange(len(place)) % len(early), sizes).astype(np.uint64)
    inside = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    members = owner << np.uint64(32) | data[np.repeat(starts[place], sizes) + inside].astype(np.uint64)
    members.sort()
    twice = (members[1:][members[1:] == members[:-1]] >> np.uint64(32)).astype(np.int64)
    both = np.bincount(twice, minlength=len(early))
    union = sizes[: len(early)] + sizes[len(early) :] - both
    return both / np.maximum(union, 1)


def read_rows(folders: list[Path], name: str, row: int) -> Iterator[U64]:
    """Row `row` of the array `name` of every shard."""
    for folder in folders:
        yield np.array(np.load(folder / name, mmap_mode="r")[row])
