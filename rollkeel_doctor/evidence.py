"""Everything measured once, from a `Trace` to numbers; causes only compare these with thresholds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rollkeel_doctor import outliers, signs
from rollkeel_doctor import thresholds as limits
from rollkeel_doctor.series import Series, extremes, series
from rollkeel_doctor.tokens import Gap, Mean, Tokens, by_bin, gap, ordered, select
from rollkeel_doctor.traces.trace import Facts, FloatArray, IntArray, Trace


class Allowed(NamedTuple):
    """What the stated dtypes explain."""

    noise: float
    k3: float
    words: str

    def noisy(self, found: Gap, times: float = 1.0) -> bool:
        """Whether tokens of middling probability are noisier than that, and not they alone."""
        return found.spread > times * self.noise and not found.noise <= times * self.noise

    def explains(self, found: Gap) -> bool:
        return not self.noisy(found) and not found.k3_least > self.k3


def allowed(facts: Facts) -> Allowed:
    """Engine and trainer add up; a dtype that is not stated counts as bf16."""
    sides = [facts.engine_dtype, facts.train_dtype]
    known = [s if s in limits.NOISE else limits.UNSTATED for s in sides]
    words = " and ".join(
        f"{side} {stated}" if stated in limits.NOISE else f"{side} of unstated dtype"
        for side, stated in zip(("engine", "trainer"), sides, strict=True)
    )
    cool = 1 / min(facts.temperature or 1.0, 1.0)  # divided by the temperature, logits are so much further apart
    noise, k3 = sum(limits.NOISE[k] for k in known), sum(limits.K3[k] for k in known)
    return Allowed(
        noise * cool, k3 * cool**2, words if cool == 1 else f"{words} at a temperature of {facts.temperature:g}"
    )


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Measured in this order, each on what the ones before left over: a token with a known fault is evidence of that
    fault alone."""

    trace: Trace  # Sequences by step and id.
    tokens: Tokens  # All with both log-probs.
    foreign: signs.Foreign
    correlations: dict[int, float]
    shift: signs.Shift | None
    displaced: signs.Shift | None  # Displaced or broken from a token on.
    clean: Tokens  # Without foreign tokens and moved sequences, nor those that could be moved as well as not.
    gap: Gap  # Of `clean`.
    fresh: Tokens  # Those of `clean` whose stated version is the trainer's.
    fresh_gap: Gap
    fresh_steps: list[Gap]  # By `tokens.steps`.
    calm: Tokens  # `fresh` if that is enough of them, else `clean`: the next two are of these.
    odd: outliers.Odd
    tempered: signs.Tempered
    drawn: Tokens
    """The tokens of `clean` up to the staleness at which they are still near the trainer's policy, at least `calm`: what honest
    log-probs must fulfil at any staleness is asked of these, and the next two are of them."""
    drawn_gap: Gap
    surprisal: signs.Surprisal | None
    kept_mass: float | None  # Mean over `clean` as recorded; None if the trace has none.
    series: Series
    limit: Allowed


def measure(trace: Trace) -> Evidence:
    """Needs a few hundred bytes per token beside the trace; `tokens` may be empty."""
    trace = _without_negative(_without_zeros(ordered(trace)))
    tokens = select(trace)
    strange = signs.foreign(trace, tokens)
    own = tokens.where(~strange.chosen) if strange.chosen.any() else tokens
    shift, displaced = _moved(own)
    moved = shift or displaced
    rest = own if moved is None else own.where(~np.isin(own.sequence, moved.sequences))
    if shift is not None:
        rest = rest.where(signs.straight(rest, shift.lag))
        strange = signs.carried(trace, tokens, strange, shift.lag)
    fresh = rest.fresh
    calm = fresh if len(fresh) >= limits.MIN_TOKENS else rest
    odd = outliers.odd_tokens(calm)
    whole = gap(rest)
    drawn = rest if whole.k3 < limits.NEAR_K3 else _near(rest) or calm
    kept = trace.kept_mass
    return Evidence(
        trace=trace,
        tokens=tokens,
        foreign=strange,
        correlations=signs.correlations(own) if shift is not None else {},
        shift=shift,
        displaced=displaced,
        clean=rest,
        gap=whole,
        fresh=fresh,
        fresh_gap=whole if fresh is rest else gap(fresh),
        fresh_steps=by_bin(fresh),
        calm=calm,
        odd=odd,
        tempered=signs.tempered(calm),
        drawn=drawn,
        drawn_gap=whole if drawn is rest else gap(drawn),
        surprisal=signs.surprisal(drawn) if len(drawn) and not chosen_by_reward(trace) else None,
        kept_mass=None if kept is None else _mean_kept(kept[rest.index]),
        series=series(trace),
        limit=allowed(trace.facts),
    )


def chosen_by_reward(trace: Trace) -> bool:
    """Whether groups of equal rewards are missing among those with log-probs of the trainer, as dynamic sampling leaves them out.

    What is left was drawn from q and then picked: rare answers among likely ones, so that it is more surprising than q is.
    """
    known = np.isfinite(trace.reward)
    if not known.any() or trace.train_logprobs is None:
        return False
    heard = np.bincount(trace.sequence[np.isfinite(trace.train_logprobs)], minlength=trace.sequences) > 0
    reward, step = trace.reward[known], np.unique(trace.step[known], return_inverse=True)[1]
    _, first, group, size = np.unique(trace.group[known], return_index=True, return_inverse=True, return_counts=True)
    least, most, _ = extremes(reward, trace.group[known])
    same = least == most
    trained = np.bincount(group, heard[known]) == size
    # Answers of one prompt are more alike than those of a step, so that chance makes more such groups and not fewer.
    cells, count = np.unique(np.stack([step, reward]), axis=1, return_counts=True)
    share = count / np.bincount(step)[cells[0].astype(int)]
    alike = {n: np.bincount(cells[0].astype(int), share**n) for n in np.unique(size).tolist()}
    by_chance = sum(alike[n][step[first[trained & (size == n)]]].sum() for n in alike)
    expected = max(float(by_chance), trained.sum() * same.mean())
    return bool(expected >= limits.CHOSEN_EXPECTED and same[trained].sum() < limits.CHOSEN_LEFT * expected)


def _without_zeros(trace: Trace) -> Trace:
    """Without its log q if all of them are 0: that is how programs fill what the engine was not asked for.

    Greedy sampling has 0 as well, with a kept mass below 1.
    """
    q = trace.rollout_logprobs
    known = np.isfinite(q)
    if q[known].any() or (trace.kept_mass is not None and (trace.kept_mass < 1).any()):
        return trace
    return trace.with_(rollout_logprobs=np.full_like(q, np.nan))


def _without_negative(trace: Trace) -> Trace:
    """Without entropies below 0, which are none; without all of them if these are more than a few. A note says so."""
    if trace.entropy is None or not (below := trace.entropy < limits.ENTROPY_BELOW).any():
        return trace
    known = np.isfinite(trace.entropy)
    whole = below.sum() > limits.ENTROPY_SPOILT * known.sum()
    left = np.where(below | whole, np.nan, trace.entropy).astype(np.float32)
    note = (
        f"{int(below.sum())} of {int(known.sum())} recorded entropies are below 0 (least {trace.entropy[below].min():.3g}), which "
        f"no entropy is: {'none of them was used' if whole else 'these were not used'}"
    )
    return trace.with_(entropy=left, notes=[*trace.notes, note])


def _near(tokens: Tokens) -> Tokens | None:
    """Tokens up to the largest staleness at which their mean k3 is below `NEAR_K3`; None if that is none but the fresh."""
    if tokens.lag is None or not (tokens.lag > 0).any():
        return None
    known = tokens.where(tokens.lag >= 0)
    assert known.lag is not None
    log_ratio = (known.o - known.q).astype(np.float64)
    lag = np.minimum(known.lag, limits.MAX_BINS)
    sums = np.cumsum(np.bincount(lag, np.expm1(log_ratio) - log_ratio))
    counts = np.cumsum(np.bincount(lag))
    near = np.flatnonzero((sums < limits.NEAR_K3 * counts) & (counts >= limits.MIN_TOKENS))
    return known.where(known.lag <= near[-1]) if len(near) and near[-1] > 0 else None


def _mean_kept(kept: FloatArray) -> float | None:
    """As `select` puts it back: 0 is no mass that anything can be drawn from."""
    known = kept[np.isfinite(kept)]
    return float(known.clip(1e-6, 1).mean(dtype=np.float64)) if len(known) else None


def _moved(tokens: Tokens) -> tuple[signs.Shift | None, signs.Shift | None]:
    """Shifted as a whole, or from a token on displaced or broken: what puts most sequences right.

    Asked of the fresh tokens first, for a gap of old ones hides it, and makes some look moved by chance.
    """
    fresh = tokens.fresh
    if fresh is not tokens and len(fresh) >= limits.MIN_TOKENS:
        found = _moved_among(fresh)
        if found != (None, None):
            return found
    return _moved_among(tokens)


def _moved_among(tokens: Tokens) -> tuple[signs.Shift | None, signs.Shift | None]:
    def sure(found: signs.Shift | None, share: float) -> signs.Shift | None:
        if found is None or not enough(found.sequences, tokens, share) or _of_the_old(found.sequences, tokens):
            return None
        # Where all sequences differ, as those of an old policy do, some look moved by chance; where the others agree, none.
        rest = tokens.where(~np.isin(tokens.sequence, found.sequences))
        many = enough(found.sequences, tokens, limits.SHIFT_ALL)
        likely = _too_likely(found, tokens)
        if found.whole and not (_exactly(found, rest) and (many or likely)):
            return None
        if not found.whole and not likely and (found.lag or _as_far(found, rest)):
            return None
        if many or not gap(rest).noise > limits.BREAK_NOISE:
            return found
        return found if found.lag and _above(gap(tokens).excess) else None  # E_q[ρ] stays at 1 at any staleness

    shift = sure(signs.shifted(tokens), limits.SHIFT_SHARE)
    later = [sure(signs.displaced(tokens), limits.DISPLACED_SHARE), sure(signs.broken(tokens), limits.BREAK_SHARE)]
    part = max((p for p in later if p is not None), key=lambda p: len(p.sequences), default=None)
    if shift is None or part is None:
        return shift, part
    # Whole shifts are displacements from the first token on, so that these are always a few more, and fit a little better.
    longer = len(part.sequences) > limits.PARTLY * len(shift.sequences)
    return (None, part) if longer or signs.left_later(tokens, shift) < limits.LATER else (shift, None)


def _exactly(shift: signs.Shift, rest: Tokens) -> bool:
    """Whether log-probs moved as a whole agree as those of the other sequences do; from a later token on, the first ones do not."""
    if len(rest) == 0:
        return True
    which = rest.sequence - rest.sequence.min()
    counts = np.bincount(which)
    others = np.bincount(which, np.abs(rest.q - rest.o))[counts > 0] / counts[counts > 0]
    return shift.fits < limits.SHIFT_LEFT * shift.apart + 2 * float(np.median(others))


def _as_far(shift: signs.Shift, rest: Tokens) -> bool:
    """Whether the other sequences, which have their own ids, are as far off."""
    return len(rest) >= limits.MIN_TOKENS and bool(np.abs(rest.q - rest.o).mean() > limits.SHIFT_FITS * shift.apart)


def _too_likely(shift: signs.Shift, tokens: Tokens) -> bool:
    """E_q[ρ] over 1 in these sequences: log q of another token is often far too low. Honest sequences that look moved by chance
    are ones that the trainer finds less likely than the sampler did."""
    return gap(tokens.where(np.isin(tokens.sequence, shift.sequences))).excess.value > 0


def _above(excess: Mean) -> bool:
    """E_q[ρ] over 1 by its gate: a wrong record, for honest log-probs have 1 at any staleness, and less where tails are missed."""
    return excess.value > limits.EXCESS and excess.z > limits.EXCESS_Z


def _of_the_old(sequences: IntArray, tokens: Tokens) -> bool:
    """Whether hardly any of these sequences are of the trainer's own version: a wrong record is wrong for all of them alike."""
    if tokens.lag is None:
        return False
    which, first = np.unique(tokens.sequence, return_index=True)
    fresh = np.maximum.reduceat(tokens.lag, first) == 0
    chosen = np.isin(which, sequences)
    expected = chosen.mean() * fresh.sum()
    return bool(expected >= limits.FRESH_EXPECTED and chosen[fresh].sum() < limits.FRESH_LEAST * expected)


def enough(sequences: IntArray, tokens: Tokens, share: float) -> bool:
    """Whether so many sequences with one pattern are more than chance."""
    total = len(np.unique(tokens.sequence))
    return len(sequences) >= limits.SHIFT_COUNT and len(sequences) >= share * total
