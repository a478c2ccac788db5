"""Everything measured once, from a `Trace` to numbers; causes only compare these with thresholds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rollkeel.diagnostics.doctor import signs
from rollkeel.diagnostics.doctor import thresholds as limits
from rollkeel.diagnostics.doctor.series import Series, series
from rollkeel.diagnostics.doctor.tokens import Gap, Tokens, by_bin, gap, ordered, select
from rollkeel.diagnostics.traces.trace import Trace
from rollkeel.types import IntArray


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Measured in this order, each on what the ones before left over: a token with a known fault is evidence of that
    fault alone."""

    trace: Trace
    """Sequences by step and id."""
    tokens: Tokens
    """All with both log-probs."""
    foreign: signs.Foreign
    correlations: dict[int, float]
    shift: signs.Shift | None
    displaced: signs.Shift | None
    odd: signs.Odd
    clean: Tokens
    """Without foreign, shifted, displaced and odd tokens."""
    gap: Gap
    """Of `clean`."""
    fresh: Tokens
    """Those of `clean` whose stated version is the trainer's."""
    fresh_gap: Gap
    fresh_steps: list[Gap]
    """By `tokens.steps`."""
    tempered: signs.Tempered
    surprisal: signs.Surprisal | None
    kept_mass: float | None
    """Mean over `clean` as recorded; None if the trace has none."""
    series: Series
    spoilt: dict[str, str] = field(default_factory=dict)


def measure(trace: Trace) -> Evidence:
    """Needs a few hundred bytes per token beside the trace; `tokens` may be empty."""
    trace = ordered(trace)
    tokens = select(trace)
    strange = signs.foreign(trace, tokens)
    own = tokens.where(~strange.chosen) if strange.chosen.any() else tokens
    shift = signs.shifted(own)
    if shift is not None and not enough(shift.sequences, own):
        shift = None
    rest = own if shift is None else own.where(~np.isin(own.sequence, shift.sequences))
    displaced = signs.displaced(rest) if shift is None else None
    if displaced is not None and not enough(displaced.sequences, rest):
        displaced = None
    if displaced is not None:
        rest = rest.where(~np.isin(rest.sequence, displaced.sequences))
    odd = signs.odd_tokens(rest)
    fresh = rest.fresh
    calm = fresh if len(fresh) >= limits.MIN_TOKENS else rest
    kept = trace.kept_mass
    return Evidence(
        trace=trace,
        tokens=tokens,
        foreign=strange,
        correlations=signs.correlations(own) if shift is not None else {},
        shift=shift,
        displaced=displaced,
        odd=odd,
        clean=rest,
        gap=gap(rest),
        fresh=fresh,
        fresh_gap=gap(fresh),
        fresh_steps=by_bin(fresh),
        tempered=signs.tempered(calm),
        surprisal=signs.surprisal(calm) if len(calm) else None,
        kept_mass=None if kept is None or not len(rest) else float(np.nanmean(kept[rest.index], dtype=np.float64)),
        series=series(trace),
    )


def enough(sequences: IntArray, tokens: Tokens) -> bool:
    """Whether so many sequences with one pattern are more than chance."""
    total = len(np.unique(tokens.sequence))
    return len(sequences) >= limits.SHIFT_COUNT and len(sequences) >= limits.SHIFT_SHARE * total
