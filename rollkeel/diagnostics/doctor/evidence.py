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
    clean: Tokens
    """Without foreign tokens and moved sequences."""
    gap: Gap
    """Of `clean`."""
    fresh: Tokens
    """Those of `clean` whose stated version is the trainer's."""
    fresh_gap: Gap
    fresh_steps: list[Gap]
    """By `tokens.steps`."""
    calm: Tokens
    """`fresh` if that is enough of them, else `clean`: the next three are of these."""
    odd: signs.Odd
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
    shift, displaced = _moved(own)
    moved = shift or displaced
    rest = own if moved is None else own.where(~np.isin(own.sequence, moved.sequences))
    fresh = rest.fresh
    calm = fresh if len(fresh) >= limits.MIN_TOKENS else rest
    odd = signs.odd_tokens(calm)
    kept = trace.kept_mass
    return Evidence(
        trace=trace,
        tokens=tokens,
        foreign=strange,
        correlations=signs.correlations(own) if shift is not None else {},
        shift=shift,
        displaced=displaced,
        clean=rest,
        gap=gap(rest),
        fresh=fresh,
        fresh_gap=gap(fresh),
        fresh_steps=by_bin(fresh),
        calm=calm,
        odd=odd,
        tempered=signs.tempered(calm),
        surprisal=signs.surprisal(calm) if len(calm) else None,
        kept_mass=None if kept is None or not len(rest) else float(np.nanmean(kept[rest.index], dtype=np.float64)),
        series=series(trace),
    )


def _moved(tokens: Tokens) -> tuple[signs.Shift | None, signs.Shift | None]:
    """Shifted as a whole or displaced from a token on: the one that puts more sequences right."""
    shift, displaced = signs.shifted(tokens), signs.displaced(tokens)
    shift = shift if shift is not None and enough(shift.sequences, tokens) else None
    displaced = displaced if displaced is not None and enough(displaced.sequences, tokens) else None
    if shift is None or displaced is None:
        return shift, displaced
    # Whole shifts are displacements from the first token on, so that these are always a few more.
    part = len(displaced.sequences) > limits.PARTLY * len(shift.sequences)
    return (None, displaced) if part else (shift, None)


def enough(sequences: IntArray, tokens: Tokens) -> bool:
    """Whether so many sequences with one pattern are more than chance."""
    total = len(np.unique(tokens.sequence))
    return len(sequences) >= limits.SHIFT_COUNT and len(sequences) >= limits.SHIFT_SHARE * total
