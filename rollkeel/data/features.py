"""Texts as sets of hashes, whole batches at a time: tokens, n-grams and MinHash signatures in numpy.

A token is a run of letters and marks, a run of digits, one sign of arithmetic, or one character of a script that puts no
spaces between words. Punctuation and case are gone, but drawings (the walls of a maze) are not: other signs count in runs of
four and more, and where they stand alone side by side. The hash of a stretch is a difference of prefix sums of a polynomial
in an odd number modulo 2^64, which has an inverse there: one cumulative sum gives the hashes of all tokens of a batch, and one
more those of all their n-grams.
"""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
U32 = NDArray[np.uint32]

_SPACE, _LETTERS, _DIGITS, _SINGLE, _SIGN = range(5)
_ARITHMETIC = "*/-^%"
_UNSPACED = (0xE00, 0xF00, 0xF40, 0x10A0, 0x1780, 0x17D4, 0x3040, 0x3100, 0x3400, 0x4DC0, 0x4E00, 0xA000, 0xF900, 0xFB00, 0x20000, 0x32000)  # fmt: skip
"""First and next after last letter of scripts that put no spaces between words."""
_BASE, _STEP = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_SPACES = re.compile(r"\s+")
_RAISED = {ord(raised): f"^{plain}" for raised, plain in zip("⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ⁻", "0123456789n-", strict=True)}
"""Otherwise 3² would be 32."""


@dataclass(frozen=True)
class Tokens:
    """Tokens of n texts in a row: their `hashes [T]`, which are `marks [T]` (numbers, drawings) and which `words [T]`
    (letters, two at least, or one of a script without spaces), and `starts [n + 1]` of each text."""

    hashes: U64
    marks: NDArray[np.bool_]
    words: NDArray[np.bool_]
    starts: NDArray[np.int64]

    def ngrams(self, n: int) -> tuple[U64, NDArray[np.int64]]:
        """Hashes of all runs of `n` tokens that lie inside a text, and the text of each."""
        count = len(self.hashes) - n + 1
        if count < 1:
            return np.zeros(0, np.uint64), np.zeros(0, np.int64)
        power, inverse = _powers(_STEP, len(self.hashes) + 1)
        sums = _prefix(self.hashes * power[: len(self.hashes)])
        hashes = mixed((sums[n:] - sums[:-n]) * inverse[:count])
        text = np.searchsorted(self.starts, np.arange(count), side="right") - 1
        inside = np.arange(count) + n <= self.starts[text + 1]
        return hashes[inside], text[inside]

    def mark_sums(self) -> U64:
        """One value `[n]` per text for its marks and which of them stand side by side, wherever in the text; 0 for none."""
        values = np.where(self.marks, mixed(self.hashes ^ np.uint64(_BASE)), np.uint64(0))
        pairs = self.marks[1:] & self.marks[:-1]
        pairs[np.setdiff1d(self.starts[1:-1], [0, len(self.hashes)]) - 1] = False
        values[1:] += np.where(pairs, mixed(self.hashes[:-1] * np.uint64(_STEP) + self.hashes[1:]), np.uint64(0))
        sums = _prefix(values)
        return sums[self.starts[1:]] - sums[self.starts[:-1]]

    def formulas(self) -> NDArray[np.bool_]:
        """Texts `[n]` less than half of whose tokens are words."""
        words = np.concatenate([[0], np.cumsum(self.words)])
        return 2 * (words[self.starts[1:]] - words[self.starts[:-1]]) < np.diff(self.starts)

    def of(self, text: int) -> slice:
        return slice(int(self.starts[text]), int(self.starts[text + 1]))


def canonical(text: str) -> str:
    """What tokens are made of: compatibility forms and case folded, thousands without commas."""
    text = text.lower() if text.isascii() else unicodedata.normalize("NFKC", text.translate(_RAISED)).casefold()
    return _THOUSANDS.sub("", text) if "," in text else text


def squeezed(text: str) -> str:
    """What two texts share that differ in spaces, case and a last full stop only."""
    return "".join(canonical(text).split()).rstrip(".?:。？")


def digest(text: str) -> int:
    """64-bit hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def spaced(text: str) -> str:
    """`text` with every run of white space as one space, without those at its ends."""
    return _SPACES.sub(" ", text).strip()


def tokens(texts: Sequence[str]) -> Tokens:
    """Tokens of texts that went through `canonical`."""
    joined = "\n".join([*texts, ""])
    codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    kinds = _kinds()[codes]
    before = np.concatenate([[np.uint8(_SPACE)], kinds[:-1]]) if len(kinds) else kinds
    begins = (kinds != _SPACE) & ((kinds != before) | (kinds == _SINGLE))
    first = np.flatnonzero(begins)
    last_of_run = np.flatnonzero((kinds != _SPACE) & np.concatenate([begins[1:] | (kinds[1:] == _SPACE), [True]]))
    ends = np.cumsum([len(text) + 1 for text in texts], dtype=np.int64)
    counts = _drawn(kinds, first, last_of_run, np.searchsorted(ends, first, side="right"))
    first, last_of_run = first[counts], last_of_run[counts]
    power, inverse = _powers(_BASE, len(codes) + 1)
    sums = _prefix((codes + np.uint64(1)) * power[: len(codes)])
    hashes = mixed((sums[last_of_run + 1] - sums[first]) * inverse[first])
    starts = np.concatenate([[0], np.searchsorted(first, ends)]).astype(np.int64)
    kind, code = kinds[first], codes[first]
    words = (kind == _LETTERS) & (last_of_run > first)
    words |= (kind == _SINGLE) & ((code >= 0x2E80) | ((code >= 0xE00) & (code < 0x1800)))
    return Tokens(hashes, np.isin(kind, (_DIGITS, _SIGN)), words, starts)


def _drawn(
    kinds: NDArray[np.uint8], first: NDArray[np.int64], last: NDArray[np.int64], text: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which runs are tokens: all but those of signs that look like punctuation."""
    sign = kinds[first] == _SIGN
    padded = np.concatenate([[np.uint8(_SPACE)], kinds])  # the last character is a line feed
    alone = sign & (padded[first] == _SPACE) & (padded[np.minimum(last + 2, len(kinds))] == _SPACE)
    beside = alone[1:] & alone[:-1] & (text[1:] == text[:-1])
    drawn = (last - first >= 3) | np.append(False, beside)[: len(sign)] | np.append(beside, False)[: len(sign)]
    return ~sign | drawn


def shingle_sets(found: Tokens, n: int) -> tuple[U32, NDArray[np.int64]]:
    """Distinct 32-bit n-gram hashes of each text, sorted, end to end, and their `starts [texts + 1]`.

    A text of fewer than n tokens has one: all of it. One without tokens has none.
    """
    hashes, text = found.ngrams(n)
    short = np.flatnonzero((lengths := np.diff(found.starts)) < n)
    short = short[lengths[short] > 0]
    if len(short):
        sums = _prefix(found.hashes)
        whole = mixed(sums[found.starts[short + 1]] - sums[found.starts[short]] + np.uint64(n))
        hashes, text = np.concatenate([hashes, whole]), np.concatenate([text, short])
    keyed = np.unique(text.astype(np.uint64) << np.uint64(32) | hashes >> np.uint64(32))
    starts = np.searchsorted(keyed >> np.uint64(32), np.arange(len(found.starts), dtype=np.uint64))
    return keyed.astype(np.uint32), starts.astype(np.int64)


def band_hashes(shingles: U32, starts: NDArray[np.int64], bands: int, rows: int, guard: U64) -> U64:
    """LSH keys `[bands, texts]`: texts that agree in `rows` minima and in `guard [texts]` agree in a key.

    The minima are over the images of the shingles under x → a·x + b modulo 2^32 with odd a, one pair per minimum.
    Texts without shingles get keys that nothing shares.
    """
    count = len(starts) - 1
    draws = mixed(np.arange(2 * bands * rows, dtype=np.uint64) + np.uint64(_STEP))
    factors = (draws[::2] >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
    shifts = (draws[1::2] >> np.uint64(32)).astype(np.uint32)
    keys = np.empty((bands, count), np.uint64)
    for a in range(0, count, 256):  # images of some hundred texts stay in the cache
        b = min(a + 256, count)
        part, there = shingles[starts[a] : starts[b]], np.flatnonzero(np.diff(starts[a : b + 1]) > 0)
        image, begins = np.empty_like(part), starts[a:b][there] - starts[a]
        for band in range(bands):
            key = guard[a:b] + np.uint64(band)
            for i in range(band * rows, band * rows + rows):
                np.multiply(part, factors[i], out=image)
                np.add(image, shifts[i], out=image)
                if len(there):
                    key[there] = mixed(key[there] ^ np.minimum.reduceat(image, begins))
            keys[band, a:b] = key
    empty = np.flatnonzero(np.diff(starts) == 0)
    keys[:, empty] = mixed(guard[empty] + np.uint64(_BASE)) ^ np.arange(len(empty), dtype=np.uint64)
    return keys


def mixed(values: U64) -> U64:
    """A bijection of 64-bit numbers that leaves no pattern in any of the bits (finaliser of SplitMix64)."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def _prefix(values: U64) -> U64:
    return np.concatenate([np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)])


_POWERS: dict[int, tuple[U64, U64]] = {}


def _powers(base: int, count: int) -> tuple[U64, U64]:
    """At least `count` powers of `base` and of its inverse modulo 2^64."""
    if base not in _POWERS or len(_POWERS[base][0]) < count:
        size = 1 << max(16, count.bit_length())
        inverse = pow(base, -1, 2**64)
        _POWERS[base] = (
            np.cumprod(np.full(size, base, np.uint64), dtype=np.uint64),
            np.cumprod(np.full(size, inverse, np.uint64), dtype=np.uint64),
        )
    return _POWERS[base]


@functools.cache
def _kinds() -> NDArray[np.uint8]:
    """Kind of every code point `[0x110000]`."""
    kinds = np.zeros(0x110000, np.uint8)
    for code in range(0x32000):  # letters end there; beyond lie tags, selectors and private use
        category = unicodedata.category(chr(code))
        if category[0] in "LM":
            kinds[code] = _LETTERS
        elif category[0] == "N":
            kinds[code] = _DIGITS
        elif category == "Sm" or chr(code) in _ARITHMETIC:
            kinds[code] = _SINGLE
        elif category[0] in "PS":
            kinds[code] = _SIGN
    for low, high in zip(_UNSPACED[::2], _UNSPACED[1::2], strict=True):
        kinds[low:high][kinds[low:high] == _LETTERS] = _SINGLE
    kinds[0x200C] = kinds[0x200D] = _LETTERS
    return kinds
