"""Find prompts that a benchmark holds: by the hash of the whole prompt, and by n-grams shared with an item.

A prompt is contaminated by an item if

1. both are equal but for spaces, case and a last full stop, or
2. the prompt holds one of the item's n-grams (`ngram` tokens; all tokens of a shorter item; none of an item below `min_tokens`) and
   every number and piece of a drawing of the item, as often as the item does: the same words with other numbers are another problem.

n-grams that more than `common` items share are a benchmark's phrasing and do not count, unless an item has no others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np

from rollkeel.data.features import Tokens, canonical, digest, mixed, squeezed, tokens
from rollkeel.data.normalise import clean
from rollkeel.data.options import DecontaminateOptions
from rollkeel.data.reading import SUFFIXES, Malformed, expand, records, text_of
from rollkeel.errors import BadInput

TEXT_COLUMNS = ("prompt", "question", "problem", "Question", "Problem", "text", "query", "instruction")
"""Tried in this order in a benchmark file whose column is not named."""


@dataclass(frozen=True)
class Item:
    """One benchmark item and where it is from."""

    file: str
    row: int
    text: str


@dataclass(frozen=True)
class Hit:
    """Prompt `text` of a batch overlaps with benchmark item `item`; it is contaminated if it has the item's `numbers` too."""

    text: int
    item: int
    how: str
    numbers: bool


def split_spec(spec: str) -> tuple[str, str | None]:
    """Split `file:column`; an existing path that has a colon is a path."""
    path, colon, column = spec.rpartition(":")
    return (spec, None) if not colon or Path(spec).exists() or "/" in column else (path, column)


def benchmark_files(specs: Sequence[str]) -> list[tuple[Path, str | None]]:
    """The files of `decontaminate.benchmarks`, each with the column named for it. Raises `BadInput` for a missing one."""
    return [(file, column) for path, column in map(split_spec, specs) for file in expand([path], (*SUFFIXES, ".txt"))]


def items_of(file: Path, column: str | None) -> Iterator[Item]:
    """Items of one benchmark file. Raises `BadInput` for a file or column that cannot be read."""
    rows = _paragraphs(file) if file.name.endswith(".txt") else _column(file, column)
    return (Item(str(file), row, clean(text).strip()) for row, text in rows)


def _paragraphs(file: Path) -> Iterator[tuple[int, str]]:
    try:
        paragraphs = file.read_text(encoding="utf-8-sig").replace("\r\n", "\n").split("\n\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"benchmark {file}: cannot be read: {error}") from None
    return enumerate((p for p in paragraphs if p.strip()), 1)


def _column(file: Path, column: str | None) -> Iterator[tuple[int, str]]:
    for row, record in records(file):
        name = column or next((c for c in TEXT_COLUMNS if c in record), None)
        if name is None or name not in record:
            expected = repr(column) if column else f"one of {', '.join(TEXT_COLUMNS)}"
            raise BadInput(
                f"benchmark {file} row {row}: expected column {expected}, got {', '.join(map(repr, record))};"
                " name it as file:column"
            )
        try:
            yield row, text_of(record, name)
        except Malformed as fault:
            raise BadInput(f"benchmark {file} row {row}: {fault}") from None


@final
class Benchmarks:
    """The items of all benchmark files, and which prompts they contaminate."""

    def __init__(self, options: DecontaminateOptions) -> None:
        """Raises `BadInput` for files that cannot be read or hold no item."""
        self.options = options
        self.items = [item for file, column in benchmark_files(options.benchmarks) for item in items_of(file, column)]
        if options.benchmarks and not self.items:
            raise BadInput(f"decontaminate.benchmarks: no items in {', '.join(options.benchmarks)}")
        batch = tokens([canonical(item.text) for item in self.items])
        keys = [squeezed(item.text) for item in self.items]
        self._whole = {digest(key): i for i, key in reversed([*enumerate(keys)]) if key}
        self._numbers = [_numbers(batch, i) for i in range(len(self.items))]
        self._index = _Index(batch, options)

    def hits(self, prompts: Sequence[str], batch: Tokens) -> Iterator[Hit]:
        """At most one hit per prompt, in the order of the prompts: a contamination if there is one, else the first overlap.

        `batch`: tokens of the prompts.
        """
        whole = ((text, self._whole.get(digest(squeezed(prompt)))) for text, prompt in enumerate(prompts))
        best = {text: Hit(text, item, "hash", True) for text, item in whole if item is not None}
        compared: set[tuple[int, int]] = set()
        for n, text, item in self._index.overlaps(batch):
            if (text, item) in compared or (text in best and best[text].numbers):
                continue
            compared.add((text, item))
            numbers = not self.options.numbers or self._numbers[item] <= _numbers(batch, text)
            if numbers or text not in best:
                best[text] = Hit(text, item, f"{n} tokens", numbers)
        return iter(best[text] for text in sorted(best))


@final
class _Index:
    """n-gram → items that hold it, sorted by hash."""

    def __init__(self, items: Tokens, options: DecontaminateOptions) -> None:
        lengths = np.diff(items.starts)
        of_item = np.minimum(lengths, options.ngram)
        self._sizes = np.unique(of_item[lengths >= options.min_tokens]).tolist()
        hashes, owners = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        for n in self._sizes:
            grams, text = _ngrams(items, n)
            own = of_item[text] == n
            hashes, owners = np.append(hashes, grams[own]), np.append(owners, text[own])
        self._hashes, self._items = _without_phrases(*_distinct(hashes, owners), options.common)
        # Most n-grams of prompts are in no benchmark: a table of leading bits sorts them out before the search.
        bits = min(max(20, (16 * len(self._hashes)).bit_length()), 27)
        self._shift, self._leading = np.uint64(64 - bits), np.zeros(1 << bits, bool)
        self._leading[self._hashes >> self._shift] = True

    def overlaps(self, batch: Tokens) -> Iterator[tuple[int, int, int]]:
        """`(n, text, item)` of every shared n-gram: by rising n, then in the order of the texts, then of the items."""
        for n in self._sizes:
            hashes, texts = _ngrams(batch, n)
            likely = np.flatnonzero(self._leading[hashes >> self._shift])
            first, last = (np.searchsorted(self._hashes, hashes[likely], side) for side in ("left", "right"))
            for a, b, text in zip(first.tolist(), last.tolist(), texts[likely].tolist(), strict=True):
                yield from ((n, text, item) for item in self._items[a:b].tolist())


def _ngrams(batch: Tokens, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of all n-grams, different for each n, and the text of each."""
    hashes, texts = batch.ngrams(n)
    return mixed(hashes + np.uint64(n)), texts


def _distinct(hashes: np.ndarray, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of n-gram and item, each once, sorted."""
    order = np.lexsort((items, hashes))
    hashes, items = hashes[order], items[order]
    new = (np.diff(items, prepend=-1) != 0) | (np.diff(hashes, prepend=np.uint64(0)) != 0)
    return hashes[new], items[new]


def _without_phrases(hashes: np.ndarray, items: np.ndarray, common: int) -> tuple[np.ndarray, np.ndarray]:
    """Without n-grams that more than `common` items share, except of items that have no others."""
    _, place, sharing = np.unique(hashes, return_inverse=True, return_counts=True)
    rare = sharing[place] <= common
    kept = rare | ~np.isin(items, items[rare])
    return hashes[kept], items[kept]


def _numbers(batch: Tokens, text: int) -> Counter[int]:
    """Numbers and pieces of drawings of a text, with how often each occurs."""
    part = batch.of(text)
    return Counter(batch.hashes[part][batch.marks[part]].tolist())
