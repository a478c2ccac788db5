"""What k samples of each of many items say: avg@k, pass@k, majority@k, with errors that respect that samples of an item go together.

Every estimate is a mean over items of a number per item. Samples of one item are not independent, items are: all errors are
over items (clusters), never over samples. Functions of one item take its rewards `[n]` or answers; those over items take
the numbers per item `[items]`, float64.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollkeel.errors import BadInput

RESAMPLES = 2000
"""Bootstrap resamples: the end points of a 95 % interval then move by about 1/20 of its width from seed to seed."""
LEVEL = 0.95
MAX_SAMPLES = 512
"""Largest n of majority@k: binomials of larger ones leave the range of float64 products."""
_BLOCK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over items."""

    value: float
    se: float
    """Standard error over items, sample std / √items; 0 for a single item, which has no spread to see."""
    low: float
    high: float
    """Percentile bootstrap over items, 95 %."""
    items: int

    def to_json(self) -> dict[str, float]:
        return {"value": self.value, "se": self.se, "low": self.low, "high": self.high, "items": self.items}


def pass_at_k(rewards: Sequence[float], k: int) -> float:
    """Probability that at least one of k of these n samples, drawn without replacement, is right: unbiased for k fresh ones.

        1 − C(n − c, k) / C(n, k)            (Chen et al. 2021, eq. 1; c samples are right)

    as a product of n − c factors below 1, so that nothing overflows. A sample is right when its reward is 1.
    Raises `BadInput` unless 1 ≤ k ≤ n.
    """
    n, right = len(rewards), sum(reward >= 1.0 for reward in rewards)
    _check_k(k, n)
    if n - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - right + 1, n + 1))


def majority_at_k(answers: Sequence[Hashable | None], rewards: Sequence[float], k: int) -> float:
    """Expected reward of the most frequent answer among k of these n samples drawn without replacement; exact, no resampling.

    `answers`: as extracted, equal ones vote together; None abstains and no abstention wins. Equally frequent answers
    share their rewards' mean, as if one were drawn uniformly; with no answer at all the reward is 0. An answer is worth the mean reward
    of all n samples that gave it. Raises `BadInput` unless 1 ≤ k ≤ n ≤ 512.
    """
    n = len(rewards)
    _check_k(k, n)
    if len(answers) != n or n > MAX_SAMPLES:
        raise BadInput(
            f"majority@k: expected at most {MAX_SAMPLES} samples and as many answers, got {n}, {len(answers)}"
        )
    worth: dict[Hashable, list[float]] = {}
    for answer, reward in zip(answers, rewards, strict=True):
        if answer is not None:
            worth.setdefault(answer, []).append(reward)
    sizes = [len(rewards) for rewards in worth.values()]
    chance = {size: _chance(size, sizes, n - sum(sizes), k) for size in set(sizes)}
    return sum(chance[len(rewards)] * math.fsum(rewards) / len(rewards) for rewards in worth.values())


def _chance(size: int, sizes: Sequence[int], silent: int, k: int) -> float:
    """Probability that an answer given `size` times wins a vote of k, ties shared.

    For each count j it may have: the ways to fill the other k − j places with no answer above j, by how many tie with it.
    """
    others = list(sizes)
    others.remove(size)
    total = 0.0
    for j in range(1, min(size, k) + 1):
        room, most = k - j, (k - j) // j
        ways = np.zeros((room + 1, most + 1))  # [places filled, ties]
        ways[: silent + 1, 0] = [math.comb(silent, i) for i in range(min(silent, room) + 1)]
        for other in others:
            grown = np.zeros_like(ways)
            for i in range(min(other, j, room) + 1):
                part = math.comb(other, i) * ways[: room + 1 - i]
                if i < j:
                    grown[i:] += part
                else:
                    grown[i:, 1:] += part[:, :-1]
            ways = grown
        total += math.comb(size, j) * float((ways[room] / np.arange(1, most + 2)).sum())
    return total / math.comb(sum(sizes) + silent, k)


def estimate(per_item: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES, level: float = LEVEL) -> Estimate:
    """Mean of the numbers per item with its standard error and percentile bootstrap interval, both over items.

    The interval is a function of (numbers in their order, seed). With few items it is a little short: see docs/evaluation.md.
    Raises `BadInput` for no items.
    """
    values = np.asarray(per_item, dtype=np.float64)
    if not values.size:
        raise BadInput("estimate: expected the scores of at least one item, got none")
    means = _resampled_means(values, seed, resamples)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    se = float(values.std(ddof=1) / math.sqrt(values.size)) if values.size > 1 else 0.0
    return Estimate(value=float(values.mean()), se=se, low=float(low), high=float(high), items=values.size)


def paired_difference(
    one: Mapping[str, float], other: Mapping[str, float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Estimate:
    """`other − one` over the items that both have, by item: the items' common difficulty cancels, which two intervals ignore.

    Raises `BadInput` when they have no item in common.
    """
    shared = sorted(set(one) & set(other))
    if not shared:
        raise BadInput(f"comparison: expected items in common, got {len(one)} and {len(other)} that share none")
    return estimate([other[key] - one[key] for key in shared], seed=seed, resamples=resamples)


def wilson(per_item: Sequence[float]) -> Estimate:
    """Mean of numbers in [0, 1], with Wilson's (1927) 95 % interval for a share of so many items: never empty, where all items agree
    either, and no shorter than needed, since nothing in [0, 1] varies more than a share. Raises `BadInput` for no items."""
    found = estimate(per_item, resamples=1)
    n = found.items
    p = found.value
    z = 1.959964
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + (z / (2 * n)) ** 2)
    low, high = ((middle + side) / (1 + z * z / n) for side in (-half, half))
    return replace(found, low=low, high=high)


def powers(n: int) -> list[int]:
    """1, 2, 4, … up to n, and n itself: the k at which curves over k are reported."""
    return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | ({n} if n else set()))


def _resampled_means(values: np.ndarray, seed: int, resamples: int) -> np.ndarray:
    """`[resamples]` means of as many items drawn with replacement, in blocks of bounded memory."""
    rng = np.random.default_rng(seed)
    rows = max(1, _BLOCK // values.size)
    blocks = (min(rows, resamples - at) for at in range(0, resamples, rows))
    return np.concatenate([values[rng.integers(values.size, size=(b, values.size))].mean(axis=1) for b in blocks])


def _check_k(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise BadInput(f"k: expected 1 to {n}, the samples of the item, got {k}")
