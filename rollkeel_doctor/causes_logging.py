"""Causes that spoil the record of a token: its log-prob is of another token, another distribution, or of none."""

from __future__ import annotations

import numpy as np

from rollkeel_doctor import thresholds as limits
from rollkeel_doctor.diagnosis import Cause
from rollkeel_doctor.evidence import Evidence
from rollkeel_doctor.outliers import around
from rollkeel_doctor.signs import Shift
from rollkeel_doctor.tokens import Gap, Tokens, clustered, gap
from rollkeel_doctor.traces.trace import IntArray, Trace

OWN_IDS = "Train on the engine's own token ids; never decode a response and encode it again."
"""What to do about text that was encoded anew."""
RENORMALISE = (
    "Renormalise the sampler's log-probs over the kept tokens and record the kept mass, or sample without cuts."
)


def places(trace: Trace, index: IntArray) -> list[dict[str, int]]:
    """The first few tokens of `index`, as evidence names them."""
    return [trace.where(int(i)) for i in index[: limits.POSITIONS]]


def widest(tokens: Tokens) -> IntArray:
    """Places of the tokens with the largest |log ρ|, largest first."""
    apart = np.abs(tokens.q - tokens.o)
    most = min(limits.POSITIONS, len(apart))
    if most == 0:
        return tokens.index
    few = np.argpartition(-apart, most - 1)[:most]
    return tokens.index[few[np.argsort(-apart[few], kind="stable")]]


def left(gap: Gap) -> bool:
    """E_q[ρ] left 1 by more than its gate."""
    return abs(gap.excess.value) > limits.EXCESS and abs(gap.excess.z) > limits.EXCESS_Z


def positive(e: Evidence) -> Cause | None:
    """Values above 0 are no log-probs, whatever else is wrong. Rounding may leave a hair above 0."""
    trace = e.trace
    sides = [("engine", trace.rollout_logprobs), ("trainer", trace.train_logprobs)]
    parts, found = [], np.zeros(len(trace), bool)
    for side, values in sides:
        above = np.zeros(len(trace), bool) if values is None else values > limits.ABOVE_ZERO
        if above.any():
            parts.append(f"{int(above.sum())} of the {side}'s")
            found |= above
    if not parts:
        return None
    return Cause(
        id="unexplained",
        score=0.9,
        evidence=f"Of {len(trace)} tokens, {' and '.join(parts)} values are above 0 by more than {limits.ABOVE_ZERO:g}: these "
        "are not log-probabilities.",
        advice="Look at what is logged there: log-probs are natural logarithms and at most 0; probabilities, −log p and logits "
        "are not.",
        positions=places(trace, np.flatnonzero(found)),
    )


def mask(e: Evidence) -> Cause | None:
    found, total = e.foreign, len(e.tokens) + len(e.foreign.without)
    if found.total < limits.FOREIGN_COUNT or found.total < limits.FOREIGN_SHARE * total:
        return None
    index = np.sort(np.concatenate([found.without, e.tokens.index[found.chosen]]))
    how = f"all with log q = {found.fill:g}" if np.isfinite(found.fill) else "all but impossible to engine and trainer"
    if len(found.without) > found.chosen.sum():
        how = "without any log q"
    where = (
        "at the start of responses, as prompt tokens" if found.at_start > 0.8 else "inside responses, as tool output"
    )
    return Cause(
        id="mask",
        score=min(0.7 + 3 * found.total / total, 1.0),
        evidence=f"{found.total} of {total} tokens in the loss mask ({found.total / total:.1%}) were never sampled: "
        f"{how}, {where} would stand.",
        advice="Set the loss mask to 0 on every token the engine did not sample, before advantages are spread over it.",
        positions=places(e.trace, index),
    )


def alignment(e: Evidence) -> Cause | None:
    shift = e.shift
    if shift is None:
        return None
    share = shift.share
    late = "earlier" if shift.lag < 0 else "later"
    places_ = f"{abs(shift.lag)} place{'s' if abs(shift.lag) > 1 else ''}"
    return Cause(
        id="alignment",
        # Of many sequences it comes first: those where it does not show leave a gap that other causes would explain.
        score=min((0.6 if share < limits.SHIFT_ALL else 0.96) + 0.4 * share, 1.0),
        evidence=f"In {len(shift.sequences)} sequences ({share:.0%}) log q is that of the token {places_} {late}: moved, "
        f"they agree to {shift.fits:.3f} nats, as recorded to {shift.apart:.2f}; correlation "
        f"{e.correlations.get(shift.lag, float('nan')):.2f} at lag {shift.lag:+d}, {e.correlations.get(0, float('nan')):.2f} at 0.",
        advice=f"Move the recorded log-probs by {places_}: a slice of the prompt's last logit, or of the stop token, is off.",
        positions=places(e.trace, shift.first),
    )


def _broke(moved: Shift) -> str:
    if moved.lag == 0:
        return (
            f"log q and log o agree to {moved.fits:.3f} nats up to a token and lie {moved.apart:.1f} apart from it on, the "
            "trainer finding most tokens absurd"
        )
    return (
        f"log q fit the tokens up to a point and from there on tokens one to three places "
        f"{'earlier' if moved.lag < 0 else 'later'} (|log ρ| {moved.apart:.2f} nats as recorded, {moved.fits:.2f} moved, "
        f"{moved.control:.2f} moved the other way)"
    )


def retokenised(e: Evidence) -> Cause | None:
    moved, odd = e.displaced, e.odd
    if moved is not None:
        share = moved.share
        return Cause(
            id="retokenised",
            score=min(0.6 + 0.4 * share, 1.0),
            evidence=f"In {len(moved.sequences)} sequences ({share:.0%}) {_broke(moved)}: the ids are not those sampled.",
            advice=OWN_IDS,
            positions=places(e.trace, moved.first),
        )
    share = float(odd.chosen.mean()) if len(odd.chosen) else 0.0
    whole = gap(e.calm)
    fits = left(whole) and whole.excess.value < 0 and 0 < share < limits.OUTLIER_SHARE
    if not fits or odd.rest > limits.OUTLIER_REST or abs(odd.excess.value) > 0.5 * abs(whole.excess.value):
        return None
    if gap(around(e.calm, odd.chosen)[0]).spread > limits.BREAK_NOISE:
        return None  # the policies differ before the token too
    return Cause(
        id="retokenised",
        score=0.6,
        evidence=f"E_q[ρ] = {1 + whole.excess.value:.3f} (z {whole.excess.z:.0f}) and {share:.2%} of tokens, standing alone, "
        f"carry it: without them it is {1 + odd.excess.value:.3f}; the trainer was shown other ids than were sampled.",
        advice=OWN_IDS,
        positions=places(e.trace, widest(e.calm)),
    )


def never_drawn(e: Evidence) -> Cause | None:
    """E_q[min(ρ, c)] is at most 1 whatever weights, bits and experts do: over it, log q is of other ids than the trainer was shown."""
    calm = e.calm
    above = clustered(np.minimum(np.exp(calm.o - calm.q), limits.RATIO_MOST) - 1, calm.sequence)
    if not (above.value > limits.EXCESS and above.z > limits.EXCESS_Z):
        return None
    # Other log-probs than the sampler's, as of another temperature, are so for every token.
    agree = np.fmin(gap(calm).spread, gap(around(calm, e.odd.chosen)[0]).spread)
    if not agree < limits.BREAK_NOISE:
        return None
    return Cause(
        id="retokenised",
        score=0.8,
        evidence=f"E_q[min(ρ, {limits.RATIO_MOST:g})] = {1 + above.value:.3f} (z {above.z:.0f}), which no weights, bits or experts bring over 1; "
        f"most tokens, or those before the first odd one, agree (spread of logits {agree:.3f}): the ids are not those sampled.",
        advice=OWN_IDS,
        positions=places(e.trace, widest(calm)),
    )


def line(e: Evidence) -> Cause | None:
    """Log-probs of a temperature that one side does not know of, and E_q[ρ] over 1."""
    found, excess = e.tempered, e.drawn_gap.excess
    if not (_sloped(e) and left(e.drawn_gap) and excess.value > 0 and found.explained > limits.LINE_FITS):
        return None
    return Cause(
        id="temperature",
        score=min(0.6 + 0.4 * found.explained, 1.0),
        evidence=f"log q against log o is a line (it explains {found.explained:.0%} of the gap) as if one side had no "
        f"temperature of {found.temperature:.2f}{_says(e)}; E_q[ρ] = {1 + excess.value:.3f} (z {excess.z:.0f}), where honest "
        "log-probs give 1.",
        advice="Log the sampler's log-probs after temperature (processed, not raw logits), or divide by it in the trainer.",
        positions=places(e.trace, widest(e.fresh)),
    )


def wide(e: Evidence) -> Cause | None:
    """A temperature that explains the whole gap, where few sequences look displaced."""
    few = e.displaced is not None and e.displaced.share < limits.SHIFT_ALL
    return line(e) if few and e.tempered.explained > limits.LINE_ALL else None


def temperature(e: Evidence) -> Cause | None:
    """Three ways to be wrong: log-probs without it, another one in the trainer, another one in the sampler."""
    if (cause := line(e)) is not None:
        return cause
    slope = e.tempered
    stated = e.trace.facts.temperature
    if (
        _sloped(e)
        and _scaled(e, stated)
        and slope.explained > limits.LINE_FITS_HONEST
        and _is_stated(slope.temperature, stated)
    ):
        # q = o^T without it in log q, q = o^(1/T) without it in the trainer; which one E_q[ρ] would say, of enough tokens.
        sampler = stated is not None and (slope.temperature < 1) == (stated < 1)
        return Cause(
            id="temperature",
            score=min(0.5 + 0.4 * slope.explained, 1.0),
            evidence=f"log q against log o is a line (it explains {slope.explained:.0%} of the gap) as if {'log q' if sampler else 'log o'}"
            f" had no temperature of {slope.temperature if sampler else 1 / slope.temperature:.2f}{_says(e)}; "
            f"E_q[ρ] = {1 + e.drawn_gap.excess.value:.3f} (z {e.drawn_gap.excess.z:.0f}).",
            advice="Log the sampler's log-probs after temperature (processed, not raw logits)."
            if sampler
            else "Give the trainer the temperature of the sampler.",
            positions=places(e.trace, widest(e.fresh)),
        )
    return _drawn_elsewhere(e, "temperature")


def _says(e: Evidence) -> str:
    stated = e.trace.facts.temperature
    return "" if stated is None else f"; stated is {stated:g}"


def _sloped(e: Evidence) -> bool:
    return abs(np.log(max(e.tempered.temperature, 1e-3))) > limits.SLOPE and len(e.fresh) >= limits.MIN_TOKENS


def _scaled(e: Evidence, stated: float | None) -> bool:
    """A gap from the first step on that E_q[ρ] does not rule out; of any size where its slope is that of a stated temperature.

    Few tokens leave E_q[ρ] undecided: without a temperature of 0.9 it is 1.005.
    """
    first = e.fresh_steps[0] if e.fresh_steps else e.fresh_gap
    large = first.noise > limits.HARMFUL_NOISE or stated is not None
    return large and not (left(e.drawn_gap) and e.drawn_gap.excess.value < 0)


def _is_stated(slope: float, stated: float | None) -> bool:
    """Whether a temperature that one side forgot has this slope; where none is stated, it may be any.

    Where both sides state 1 there is none to forget, and a scale on all logits is a norm or a head of other weights.
    """
    if stated is None:
        return True
    forgotten = abs(np.log(max(stated, 1e-3)))
    return forgotten > limits.SLOPE and limits.SLOPE_LEAST < abs(np.log(slope)) / forgotten < limits.SLOPE_MOST


def truncation(e: Evidence) -> Cause | None:
    """Un-renormalised log q: E_q[ρ] = 1 where the kept mass says less, or tokens less surprising than their entropy."""
    excess, kept = e.drawn_gap.excess, e.kept_mass
    if kept is not None and 1 - kept > limits.EXCESS and len(e.drawn) >= limits.MIN_TOKENS:
        # With the mass put back, renormalised log-probs give 1 and others 1 / kept.
        if excess.value > 0.5 * (1 / kept - 1) and excess.z > limits.EXCESS_Z:
            return Cause(
                id="truncation",
                score=0.9,
                evidence=f"The recorded kept mass is {kept:.3f} on average and ρ is {1 + excess.value:.3f} of what it should be: log "
                "q was not divided by the mass of the tokens that top-p, top-k or min-p left.",
                advice="Renormalise the sampler's log-probs over the kept tokens, or sample without truncation.",
                positions=places(e.trace, widest(e.fresh)),
            )
        return None
    return _unrecorded_cut(e) or _hidden_truncation(e) or _drawn_elsewhere(e, "truncation")


def _unrecorded_cut(e: Evidence) -> Cause | None:
    """A stated cut leaves less than the whole wherever several tokens are likely; a record that says 1 there knows of none."""
    trace, tokens = e.trace, e.clean
    if not trace.facts.truncated or trace.kept_mass is None or tokens.entropy is None:
        return None
    unsure = tokens.where(tokens.entropy > limits.CUT_ENTROPY)
    if len(unsure) < limits.MIN_INFORMED or (trace.kept_mass[unsure.index] < 1).mean() > limits.CUT_SEEN:
        return None
    facts = trace.facts
    cuts = [("top-p", facts.top_p, (facts.top_p or 1) < 1), ("top-k", facts.top_k, (facts.top_k or 0) > 0)]
    cuts.append(("min-p", facts.min_p, (facts.min_p or 0) > 0))
    s = e.surprisal
    return Cause(
        id="truncation",
        score=0.9,
        evidence=f"The run states a cut ({', '.join(f'{name} {value:g}' for name, value, cuts_ in cuts if cuts_)}), and the recorded kept mass is 1 on "
        f"{len(unsure)} tokens whose entropy is over {limits.CUT_ENTROPY:g} nats: log q knows of no cut"
        f"{'' if s is None else f'; mean(−log o) is {s.difference.value:+.3f} nats off the entropy of {s.entropy:.3f}'}.",
        advice=RENORMALISE,
        positions=places(trace, unsure.index),
    )


def _hidden_truncation(e: Evidence) -> Cause | None:
    """log q renormalised over a cut that nobody stated: log ρ = log of the kept mass, never above 0."""
    if e.trace.facts.truncated or not left(e.drawn_gap) or e.drawn_gap.excess.value > 0:
        return None
    log_ratio = e.fresh.o - e.fresh.q
    above, below = (log_ratio > 0.01).mean(), (log_ratio < -0.01).mean()
    if above > 0.05 * below or np.quantile(log_ratio, 0.001) < -1.5:
        return None
    return Cause(
        id="truncation",
        score=0.7,
        evidence=f"E_q[ρ] = {1 + e.drawn_gap.excess.value:.3f} (z {e.drawn_gap.excess.z:.0f}) and log q exceeds log o on "
        f"{below:.0%} of tokens, the reverse on {above:.1%}: tokens were drawn from a part of the vocabulary, "
        f"{'which the run denies' if e.trace.facts.truncated is False else 'which the run does not state'}.",
        advice="State the truncation (top-p, top-k, min-p), or turn it off while training.",
        positions=places(e.trace, widest(e.fresh)),
    )


def _drawn_elsewhere(e: Evidence, wanted: str) -> Cause | None:
    """q and o agree, but tokens were drawn from neither: their surprisal is not the entropy."""
    s = e.surprisal
    if s is None or len(e.drawn) < limits.MIN_TOKENS or left(e.drawn_gap) or never_drawn(e):
        return None
    # A stated cut leaves out the most surprising tokens: their mass times the most that one can surprise.
    cut_off = (1 - e.kept_mass) * limits.CLAMP if e.trace.facts.truncated and e.kept_mass is not None else 0.0
    rest = abs(s.difference.value) - (cut_off if s.difference.value < 0 else 0.0)
    off = rest > limits.SURPRISAL * s.entropy and abs(s.difference.z) > limits.SURPRISAL_Z
    if not off or (e.trace.facts.truncated and (e.kept_mass is not None and 1 - e.kept_mass > limits.EXCESS)):
        return None
    cold = s.difference.value < 0
    cut = cold and (s.cut > 0 or bool(e.trace.facts.truncated))
    if ("truncation" if cut else "temperature") != wanted:
        return None
    temperature = e.trace.facts.temperature
    stated = temperature or 1.0
    says = "none is stated" if temperature is None else f"{stated:g} is stated"
    means = (
        "improbable tokens are missing altogether, so sampling was cut (top-p, top-k or min-p) and log q is of the whole vocabulary"
        if cut
        else f"tokens look drawn at temperature {stated / max(s.inverse_temperature, 0.05):.2f}, where {says} and both sides compute at "
        f"{stated:g}{'; a cut such as top-p can look alike' if cold else ''}"
    )
    return Cause(
        id=wanted,
        score=min(0.6 + abs(s.difference.value) / max(s.entropy, 1e-9), 0.95),
        evidence=f"mean(−log o) is {s.difference.value:+.3f} nats off the entropy of {s.entropy:.3f} (z {s.difference.z:.0f}), "
        f"while E_q[ρ] = {1 + e.drawn_gap.excess.value:.3f}: {means}.",
        advice=RENORMALISE if cut else "Make the sampler draw at the temperature it states and logs.",
        positions=places(e.trace, e.drawn.index[np.argsort(e.drawn.o, kind="stable")[: limits.POSITIONS]]),
    )


def unexplained(e: Evidence) -> Cause | None:
    excess = e.fresh_gap.excess
    stated = e.trace.facts.truncated or (e.kept_mass is not None and 1 - e.kept_mass > limits.EXCESS)
    if stated or not (abs(excess.value) >= limits.UNEXPLAINED and abs(excess.z) >= 2 * limits.EXCESS_Z):
        return None
    return Cause(
        id="unexplained",
        score=0.3,
        evidence=f"E_q[ρ] = {1 + excess.value:.3f} (z {excess.z:.0f}) at equal versions, where honest log-probs give 1, and no "
        "pattern of a known cause fits.",
        advice="Look at the tokens named here: ids, log-probs, mask and sampling settings do not belong together.",
        positions=places(e.trace, widest(e.fresh)),
    )
