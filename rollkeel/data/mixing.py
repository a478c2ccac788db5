"""How many rows of each domain a mixture has, exactly, and which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollkeel.data.features import U64, mixed
from rollkeel.errors import BadInput


@dataclass(frozen=True)
class Mixture:
    counts: dict[str, int]
    """Rows of each domain."""
    limiting: tuple[str, ...]
    """Domains without which the mixture would be larger, or which had to be repeated."""


def apportion(total: int, proportions: Mapping[str, float]) -> dict[str, int]:
    """`total` ≥ 0 split by largest remainder: each domain within one row of its share, ties by order."""
    whole = sum(proportions.values())
    shares = {name: total * share / whole for name, share in proportions.items()}
    counts = {name: int(share) for name, share in shares.items()}
    left = total - sum(counts.values())
    for name in sorted(shares, key=lambda n: counts[n] - shares[n])[:left]:
        counts[name] += 1
    return counts


def plan(available: Mapping[str, int], proportions: Mapping[str, float], rows: int | None, upsample: bool) -> Mixture:
    """The mixture of `rows` rows, or the largest that `available` rows per domain allow.

    Raises `BadInput` where a domain has too few rows for `rows` and repeats are not asked for, or has none at all.
    """
    wanted = {name: share for name, share in proportions.items() if share > 0}
    if empty := [name for name in wanted if not available.get(name)]:
        there = ", ".join(map(repr, available)) or "none"
        raise BadInput(f"mix.proportions: no row of domain {empty[0]!r} is left; domains with rows: {there}")

    def short(total: int) -> tuple[str, ...]:
        return tuple(name for name, count in apportion(total, wanted).items() if count > available[name])

    if rows is None:
        # No domain gets a whole row less than its share. Below that bound, what largest remainders take from a domain is
        # not monotone in the total (the Alabama paradox), so every total is looked at.
        whole = sum(wanted.values())
        most = min((available[name] + 1) * whole / share for name, share in wanted.items())
        most = int(min(most + 1, sum(available[name] for name in wanted)))
        total = next(t for t in range(most, -1, -1) if not short(t))
        return Mixture(apportion(total, wanted), short(total + 1))
    limiting = short(rows)
    if limiting and not upsample:
        needed = apportion(rows, wanted)[limiting[0]]
        raise BadInput(
            f"mix.rows {rows}: domain {limiting[0]!r} has {available[limiting[0]]} of the {needed} rows it takes;"
            " lower mix.rows, set it to null or set mix.upsample=true"
        )
    return Mixture(apportion(rows, wanted), limiting)


def copies(domains: NDArray[np.int64], keys: U64, counts: Mapping[int, int], seed: int) -> NDArray[np.int64]:
    """How often each row is taken `[n]`: of a domain those with the lowest hash of content and seed, first once, then again."""
    taken = np.zeros(len(domains), np.int64)
    ranks = mixed(keys ^ mixed(np.array([seed], np.uint64)))
    for domain, count in counts.items():
        members = np.flatnonzero(domains == domain)
        whole, rest = divmod(count, len(members))
        taken[members] = whole
        taken[members[np.argsort(ranks[members], kind="stable")[:rest]]] += 1
    return taken
