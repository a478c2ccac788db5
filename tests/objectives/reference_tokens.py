"""Random tokens for the reference of every recipe: numpy alone, nothing of the package."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Tokens:
    """Flat `[T]` arrays of whole, contiguous sequences; the `[T, K]` ones belong to the K likeliest tokens under q."""

    p: Array
    o: Array
    q: Array
    a: Array
    c: Array
    ids: Array
    top_p: Array
    top_o: Array
    top_q: Array
    top_has_sampled: Array
    """`[T, K]` bool: this column is the sampled token."""
    rest_p: Array
    """`[T]` mass of all tokens that are neither among the K nor sampled."""
    rest_o: Array
    rest_q: Array


VOCABULARY, TOP = 40, 6


def _log_softmax(x: Array) -> Array:
    x = x - x.max(1, keepdims=True)
    return np.minimum(x - np.log(np.exp(x).sum(1, keepdims=True)), 0.0)


def random_tokens(count: int, seed: int, extreme: bool = False, by_token: bool = False) -> Tokens:
    """Whole distributions over 40 tokens, so that every divergence is that of real policies.

    Gaps between the policies differ from sequence to sequence by factors of 10,000, so that every rule drops some and keeps
    some; tokens are drawn from q or, three in ten, evenly. `extreme`: every tenth position has unrelated policies with
    log-probs down to −60. `by_token`: an advantage per token instead of one per sequence.
    """
    g = np.random.default_rng(seed)
    ids = np.repeat(np.arange(count), g.integers(1, 40, count))[:count]
    sequences = int(ids[-1]) + 1

    def gap() -> Array:
        return np.exp(g.uniform(np.log(1e-4), np.log(2), sequences))[ids][:, None] * g.normal(size=(count, VOCABULARY))

    q = 2.5 * g.normal(size=(count, VOCABULARY))
    o = q + gap()
    p = o + gap()
    if extreme:
        far = (g.random((count, 1)) < 0.3) & (g.random(sequences) < 0.3)[ids][:, None]
        q, o, p = (np.where(far, 12 * g.normal(size=x.shape), x) for x in (q, o, p))
    sampled = np.where(g.random(count) < 0.3, g.integers(0, VOCABULARY, count), (q + g.gumbel(size=q.shape)).argmax(1))
    q, o, p = _log_softmax(q), _log_softmax(o), _log_softmax(p)
    top = np.argsort(-q, axis=1)[:, :TOP]

    def at(x: Array, columns: Array) -> Array:
        return np.take_along_axis(x, columns, axis=1)

    listed = np.concatenate([top, sampled[:, None]], axis=1)

    def rest(x: Array) -> Array:
        """Added up, not 1 − the others: a tail of 1e-30 keeps its digits."""
        out = np.exp(x)
        np.put_along_axis(out, listed, 0.0, axis=1)
        return out.sum(1)

    owners = np.arange(count) if by_token else ids
    advantages = np.where(g.random(count) < 0.1, 0.0, g.normal(size=count))[owners]
    chosen = sampled[:, None]
    return Tokens(
        p=at(p, chosen)[:, 0],
        o=at(o, chosen)[:, 0],
        q=at(q, chosen)[:, 0],
        a=advantages,
        c=g.uniform(0.1, 1, count)[ids] / count,
        ids=ids,
        top_p=at(p, top),
        top_o=at(o, top),
        top_q=at(q, top),
        top_has_sampled=top == chosen,
        rest_p=rest(p),
        rest_o=rest(o),
        rest_q=rest(q),
    )
