"""Requests and segments as they travel between a caller and the parts of an engine: a prompt once for all that share it, numbers of all
sequences of a message one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rollkeel.arrays import Packed, packed, unpacked
from rollkeel.types import SPAN_FACTS, Request, Segment, Status, TokenSpan

FACTS = ("token_ids", *SPAN_FACTS, "prompt_experts")


def requests_out(requests: Sequence[Request]) -> Packed:
    """As `requests_in` takes them."""
    prompts, at = _distinct(requests, [r.prompt_ids.tobytes() for r in requests])
    samplings, by = _distinct(requests, [r.sampling for r in requests])
    told = (
        packed(np.concatenate([r.prompt_ids for r in prompts])),
        packed(np.array([len(r.prompt_ids) for r in prompts])),
    )
    kept = {i: r.kv for i, r in enumerate(requests) if r.kv is not None}
    ids = packed(np.array([r.id for r in requests]))
    return ids, *told, at, [r.sampling for r in samplings], by, _spans_out([r.prefix for r in requests]), kept


def requests_in(told: Packed) -> list[Request]:
    """Those that were sent; requests with the same prompt share it."""
    ids, tokens, lengths, at, samplings, by, prefixes, kept = told
    prompts = _split(unpacked(tokens), unpacked(lengths))
    facts = zip(unpacked(ids).tolist(), unpacked(at).tolist(), unpacked(by).tolist(), _spans_in(prefixes), strict=True)
    return [
        Request(id=id, prompt_ids=prompts[prompt], sampling=samplings[sampling], prefix=prefix, kv=kept.get(i))
        for i, (id, prompt, sampling, prefix) in enumerate(facts)
    ]


class Segments(NamedTuple):
    """As `segments_in` takes them."""

    told: Packed


def segments_out(segments: Sequence[Segment]) -> Segments:
    if not segments:
        return Segments(())
    ends, at = _distinct(segments, [(s.status, s.detail) for s in segments])
    kept = {i: s.kv for i, s in enumerate(segments) if s.kv is not None}
    ids = packed(np.array([s.request_id for s in segments]))
    return Segments((ids, [(s.status.value, s.detail) for s in ends], at, _spans_out([s.span for s in segments]), kept))


def segments_in(sent: Segments) -> list[Segment]:
    """Those that were sent."""
    if not sent.told:
        return []
    ids, ends, at, spans, kept = sent.told
    facts = zip(unpacked(ids).tolist(), (ends[i] for i in unpacked(at)), _spans_in(spans), strict=True)
    return [
        Segment(request_id=id, span=span, status=Status(status), detail=detail, kv=kept.get(i))
        for i, (id, (status, detail), span) in enumerate(facts)
    ]


def _distinct(things: Sequence[Any], keys: Sequence[Any]) -> tuple[list[Any], Packed]:
    """The first thing of each key, and which of them each thing is like."""
    numbers = dict[Any, int]()
    at = [numbers.setdefault(key, len(numbers)) for key in keys]
    first = dict(zip(reversed(at), reversed(things), strict=True))
    return [first[i] for i in range(len(numbers))], packed(np.array(at))


def _spans_out(spans: Sequence[TokenSpan]) -> Packed:
    """Lengths; then of each fact, and of each kind of array that it is, which spans have it, how long it is there, and all of them."""
    lengths, out = np.array([len(span) for span in spans]), []
    for number, name in enumerate(FACTS):
        kinds: dict[Any, list[int]] = {}
        for i, span in enumerate(spans):
            value = getattr(span, name)
            if value is not None:
                kinds.setdefault((value.dtype, value.shape[1:]), []).append(i)
        for some in kinds.values():
            values = [getattr(spans[i], name) for i in some]
            counts = np.array([len(value) for value in values])
            who = None if len(some) == len(spans) else packed(np.array(some))
            long = None if np.array_equal(counts, lengths[some]) else packed(counts)
            out.append((number, who, long, packed(np.concatenate(values))))
    return packed(lengths), out


def _spans_in(told: Packed) -> list[TokenSpan]:
    lengths = unpacked(told[0])
    found: list[dict[str, Any]] = [{} for _ in lengths]
    for number, who, long, values in told[1]:
        some = np.arange(len(lengths)) if who is None else unpacked(who)
        for i, value in zip(
            some, _split(unpacked(values), lengths[some] if long is None else unpacked(long)), strict=True
        ):
            found[i][FACTS[number]] = value
    return [TokenSpan(**facts) for facts in found]


def _split(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.cumsum(lengths)[:-1])
