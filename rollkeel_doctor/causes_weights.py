"""Causes behind a gap between honest log-probs: other weights, older ones, fewer bits, other experts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rollkeel_doctor import outliers
from rollkeel_doctor import thresholds as limits
from rollkeel_doctor.causes_logging import OWN_IDS, places, widest
from rollkeel_doctor.diagnosis import Cause
from rollkeel_doctor.evidence import Evidence
from rollkeel_doctor.repeats import repeats
from rollkeel_doctor.series import lost
from rollkeel_doctor.tokens import Gap, Mean, Tokens, gap
from rollkeel_doctor.traces.trace import FloatArray, IntArray, Trace

PROBES = "Compare log-probs of fixed probes after every publication, and refuse to stamp a version that fails."
"""What to do about versions whose weights did not arrive."""
TENSORS = "Compare checksums of every tensor {}; look for fused, tied or renamed ones that a {} skips."


def over(e: Evidence) -> bool:
    """Whether fresh tokens are further apart than their dtypes explain. A gap of a few steps drowns in the mean of many: at least three
    steps stand far out."""
    return not e.limit.explains(e.fresh_gap) or sum(e.limit.noisy(g, limits.STEP_OVER) for g in e.fresh_steps) >= 3


def _numbers(found: Gap) -> str:
    return f"noise in logits {found.noise:.3f}, std of log ρ {found.rms:.3f}, k3 {found.k3:.2g}"


def stale_kv(e: Evidence) -> Cause | None:
    """Tokens of the newest version behind a change of version, against the same in sequences without one."""
    trace, fresh = e.trace, e.fresh
    if trace.versions is None or trace.facts.kv == "keep":
        return None
    if trace.kv_versions is not None and (trace.kv_versions[fresh.index] < trace.versions[fresh.index]).any():
        return None
    first = trace.versions[np.minimum(trace.starts[:-1], max(len(trace) - 1, 0))]
    behind = first[fresh.sequence] < trace.versions[fresh.index]
    if behind.sum() < limits.MIN_INFORMED or (~behind).sum() < limits.MIN_INFORMED:
        return None
    after, others = gap(fresh.where(behind)), gap(fresh.where(~behind))
    # Squares of the spread, as k3 goes: k3 itself hangs on the few flipped experts of either part.
    if after.spread**2 < limits.BEHIND * others.spread**2 or e.limit.explains(after) or not e.limit.explains(others):
        return None
    return Cause(
        id="stale_kv",
        score=0.9,
        evidence=f"Tokens sampled by the newest weights behind a change of version have a spread of logits of "
        f"{after.spread:.2g} ({after.tokens} tokens), the others of the same version {others.spread:.2g}; recomputed KV would make no difference.",
        advice="Flush the KV and prefix cache when weights change, or state the old KV so that the trainer can correct for it.",
        positions=places(trace, widest(fresh.where(behind))),
    )


def never_sampled(e: Evidence) -> Cause | None:
    """A gap of few tokens while all others agree: ones that no sampler would have drawn, or that spoil all behind them.

    Other weights, bits or experts are so for every token; other ids than were sampled are few, and a context from there on.
    """
    odd, found = e.odd, e.fresh_gap
    if not odd.chosen.any() or found.noise > e.limit.noise or odd.rest > limits.OUTLIER_REST:
        return None
    share, absurd = float(odd.chosen.mean()), gap(e.calm.where(odd.chosen))
    if not limits.ABSURD_SHARE < share < limits.OUTLIER_SHARE:
        return None
    before, behind = (gap(part) for part in outliers.around(e.calm, odd.chosen))
    if before.spread > max(e.limit.noise, limits.BREAK_NOISE):
        return None
    spoilt = before.noise <= e.limit.noise and behind.noise > max(limits.SPOILT * before.noise, limits.HARMFUL_NOISE)
    if absurd.k3 < limits.ABSURD_K3 and not spoilt:
        return None
    what = f"{share:.2%} of tokens have k3 {absurd.k3:.2g}, {'which no engine samples, ' if absurd.k3 >= limits.ABSURD_K3 else ''}"
    return Cause(
        id="retokenised",
        score=0.6,
        evidence=f"{what}while the others agree (noise in logits {found.noise:.3f}; {before.noise:.3f} before such a token in its "
        f"sequence, {behind.noise:.3f} behind it): the trainer was shown other ids than were sampled.",
        advice=OWN_IDS,
        positions=places(e.trace, widest(e.calm)),
    )


def routing(e: Evidence) -> Cause | None:
    if e.fresh.flipped is None:
        return None
    known = e.fresh.where(e.fresh.flipped >= 0)
    if len(known) < limits.MIN_TOKENS or known.flipped is None:
        return None
    flipped = known.flipped > 0
    if flipped.mean() < limits.FLIPPED or flipped.all() or not _from_first(flipped, known.bin):
        return None
    if not _in_every_step(e, flipped, known.bin):
        return None
    with_ = gap(known.where(flipped))
    without = gap(known.where(~flipped))
    both = gap(known)
    share = with_.k3 * with_.tokens / max(both.k3 * both.tokens, 1e-30)
    # One that differs where the engine is asked the same again, as no rounding does; or two of three: flips that no noise
    # elsewhere explains, that carry the gap, and a gap that is rare, large and of no token.
    own = flipped.mean() > limits.FLIPS_PER_NOISE * without.noise
    # Of all fresh tokens: experts are compared in a step's first update alone, too few to tell what goes with a token.
    found = e.fresh_gap
    rare = found.by_token < limits.FLIPPED_NO_TOKEN or (
        found.tails > limits.FLIPPED_TAILS and not found.by_token > limits.FLIPPED_BY_TOKEN
    )
    again = repeats(e.fresh, e.trace)
    random = not e.limit.explains(found) and again.repeated >= limits.MIN_TOKENS and again.differ > limits.RANDOM
    if not random and sum(map(bool, (own, share > limits.FLIPPED_SHARE, rare))) < 2:
        return None
    # Where the dtype would explain the whole gap, it would explain flips that carry it.
    if not (own or random or (e.limit.explains(without) and not e.limit.explains(found))):
        return None
    return Cause(
        id="routing",
        score=min(0.4 + 0.6 * share, 1.0),
        evidence=f"{flipped.mean():.1%} of tokens use other experts in engine and trainer and carry {share:.0%} of k3; "
        f"k3 is {both.k3:.2g} with them and {without.k3:.2g} without, the noise in logits there {without.noise:.3f}"
        f"{'; asked the same again, the engine answers otherwise' if random else ''}.",
        advice="Replay the engine's experts in the trainer (rollout.routing=replay), or compute routers in fp32.",
        positions=places(e.trace, widest(known.where(flipped))),
    )


def _from_first(flipped: np.ndarray, bins: IntArray) -> bool:
    """Routers at fault choose otherwise from the first step on; older weights only once there are newer ones."""
    early = bins <= np.quantile(bins, 0.25)
    return early.all() or flipped[early].mean() > limits.FLIPPED_EARLY * flipped[~early].mean()


def _in_every_step(e: Evidence, flipped: np.ndarray, bins: IntArray) -> bool:
    """Routers at fault choose otherwise in steps without a gap too; where updates arrive now and then, flips go with it."""
    over = np.array([e.limit.noisy(g) for g in e.fresh_steps])
    apart = over[bins]
    if min(over.sum(), (~over).sum()) < 2 or apart.all() or not apart.any():
        return True
    return bool(flipped[~apart].mean() > limits.FLIPPED_EARLY * flipped[apart].mean())


class Onset(NamedTuple):
    """When a gap began."""

    step: int
    before: float
    level: float  # Median spread from there on.
    at_once: float  # Spread of the first step over that of the later half.
    returns: int  # Times the gap closed again after it had opened.
    closed: float  # Median spread of the steps after the first in which it had.


def onset(e: Evidence) -> Onset | None:
    """First step with a gap beyond the limit after steps without one; None if the gap was there from the first."""
    known = [(int(s), g) for s, g in zip(e.fresh.steps, e.fresh_steps, strict=True) if np.isfinite(g.spread)]
    if len(known) < 3:
        return None
    noise = np.array([g.spread for _, g in known])
    over = np.array([e.limit.noisy(g) for _, g in known])
    if over[0] or not over.any():
        return None
    first = int(over.argmax())
    level = float(np.median(noise[first:][over[first:]]))
    closes = int((over[first:-1] & ~over[first + 1 :]).sum())
    later = noise[first:][over[first:]]
    at_once = float(noise[first] / np.median(later[len(later) // 2 :])) if first + 3 <= len(noise) else 1.0
    shut = noise[first:][~over[first:]]
    closed = float(np.median(shut)) if len(shut) else 0.0
    return Onset(known[first][0], float(np.median(noise[:first])), level, at_once, closes, closed)


def over_time(e: Evidence) -> Cause | None:
    """A gap that came after a clean start: older weights grow apart step by step, a failed load at once."""
    began = onset(e)
    if began is None:
        return None
    told = f"At a stated staleness of 0 the spread of logits is {began.before:.3f} before step {began.step}"
    again, at_once = began.returns >= 2, began.at_once > limits.JUMP
    if again and began.level < limits.APART * began.closed:
        return None  # one kind of steps, with noise about as large as the limit
    partly = not again and (at_once or _partly(e, began.step))
    if again:
        told += (
            f", {began.level:.2f} after it, and back within {e.limit.noise:.3f} {began.returns} times: some updates of the weights "
            "arrive and some do not."
        )
    elif partly:
        grew = "at once" if at_once else "growing, as where a part of the weights stands still while the rest arrives"
        told += (
            f" and {began.level:.2f} from it on, {grew}: part of the weights the engine serves are not the trainer's."
        )
    else:
        told += (
            f" and grows to {e.fresh_steps[-1].spread:.2f} by the end, first {began.at_once:.0%} of its level: the engine serves older "
            "weights than it states."
        )
    return Cause(
        id="wrong_weights" if partly else "stale_version",
        score=0.9 if again else 0.8,
        evidence=told,
        advice=TENSORS.format("after a publication", "reload") if partly else PROBES,
        positions=places(e.trace, widest(e.fresh.where(e.fresh.steps[e.fresh.bin] >= began.step))),
    )


def _partly(e: Evidence, step: int) -> bool:
    """Whether the sampler goes on changing behind a gap that grows: then some of its weights do arrive.

    One tensor that scales all logits, such as a head, shows as a bias of the gap as well.
    """
    after = e.fresh.where(e.fresh.steps[e.fresh.bin] >= step)
    if len(np.unique(after.bin)) < 6:
        return False
    each = [
        abs(g.bias) / g.noise for s, g in zip(e.fresh.steps, e.fresh_steps, strict=True) if s >= step and g.noise > 0
    ]
    biased = bool(each) and float(np.median(each)) > limits.STUCK_BIAS
    return biased or learning(after, e.trace) > limits.DRIFT_Z


def learning(tokens: Tokens, trace: Trace) -> float:
    """z-score of what the sampler has learnt over the steps: its own surprisal goes where the trainer's entropy goes, and its
    rewards rise. Groups are the unit, for the answers to one prompt are alike; a sampler that stands still has a standard normal value.

    Some prompts are harder: what the trainer's entropy says of that, its trend taken out, is taken out of both.
    """
    which, inverse = np.unique(tokens.sequence, return_inverse=True)
    counts = np.bincount(inverse)
    step = np.bincount(inverse, tokens.bin) / counts
    q, o = (-np.bincount(inverse, values) / counts for values in (tokens.q, tokens.o))
    trainer = o if tokens.entropy is None else np.bincount(inverse, tokens.entropy) / counts
    group = np.unique(trace.group[which], return_inverse=True)[1]
    toward = slope(step, trainer, group)
    hardness = trainer - toward.value * step
    rewards = trace.reward[which]
    graded = np.isfinite(rewards)
    rewards = np.where(graded, rewards, rewards[graded].mean() if graded.any() else 0.0)
    score = _standard(_without(rewards, hardness))
    if abs(toward.z) > limits.TREND_Z:
        score = score + np.sign(toward.value) * _standard(_without(q, hardness))
    return slope(step, score, group).z


def _without(values: FloatArray, known: FloatArray) -> FloatArray:
    """`values` less what a line on `known` says of them."""
    return values - slope(known, values, np.arange(len(known))).value * known


def _standard(values: FloatArray) -> FloatArray:
    spread = float(values.std())
    return (values - values.mean()) / spread if spread > 0 else np.zeros(len(values))


def slope(x: FloatArray, y: FloatArray, cluster: IntArray) -> Mean:
    """Least-squares slope of y on x, with an error that takes what is in one cluster for dependent."""
    x, y = x - x.mean(), y - y.mean()
    squares = float((x * x).sum())
    if squares == 0:
        return Mean(0.0, 0.0)
    value = float((x * y).sum()) / squares
    return Mean(value, float(np.sqrt(np.square(np.bincount(cluster, x * (y - value * x))).sum())) / squares)


def from_the_start(e: Evidence) -> Cause:
    gap, why = e.fresh_gap, _not_rounding(e)
    return Cause(
        id="wrong_weights" if why else "quantisation",
        score=0.8 if why else 0.7,
        evidence=f"{_numbers(gap)} at equal versions, where {e.limit.words} explain {e.limit.noise:.3f} and {e.limit.k3:.2g}, from the "
        f"first step on{',' if why else ''} and {why or 'of both signs alike'}; E_q[ρ] = {1 + gap.excess.value:.3f}, so log q is honest, "
        f"of {'other weights' if why else 'fewer bits'}.",
        advice=TENSORS.format("in engine and trainer", "load")
        if why
        else "Check the dtype of the engine's weights, activations and KV cache; state it, or raise it.",
        positions=places(e.trace, widest(e.fresh)),
    )


def _not_rounding(e: Evidence) -> str | None:
    """What about a gap no number format makes: rounding is small, of both signs, about all tokens alike and in all layers."""
    found = e.fresh_gap
    if found.noise > limits.WRONG_NOISE or found.k3 > limits.WRONG_K3:
        return "larger than any number format in use makes it"
    if abs(found.bias) > limits.WRONG_BIAS * found.noise:
        return f"one side is the surer of the two (by {abs(found.bias):.2f} in logits at the median)"
    if e.tempered.explained > limits.LINE_FITS_HONEST and found.noise > limits.HARMFUL_NOISE:
        return f"a scale of {e.tempered.temperature:.2f} on all logits, as of a norm or a head ({e.tempered.explained:.0%} of the gap)"
    if found.by_token > limits.WRONG_BY_TOKEN:
        return f"{found.by_token:.0%} of its variance goes with the token's id, where rounding has up to 10 %"
    if e.fresh.flipped is not None and found.noise > limits.HARMFUL_NOISE:
        known = e.fresh.flipped >= 0
        flips = float((e.fresh.flipped[known] > 0).mean()) if known.any() else float("nan")
        if flips < limits.FLIPS_OF_NOISE * found.noise:
            return f"experts hardly differ ({flips:.1%} of tokens), so it arises behind the routers"
    return None


def harmful(e: Evidence) -> Cause | None:
    """A stated dtype is what was asked for: it is a cause only of a reward that was lost."""
    found, facts = e.fresh_gap, e.trace.facts
    if lost(e.series) is None or not (found.noise > limits.HARMFUL_NOISE or found.k3 > limits.HARMFUL_K3):
        return None
    return Cause(
        id="quantisation",
        score=0.5,
        evidence=f"{_numbers(found)} at equal versions: {facts.engine_dtype or 'the unstated dtype'} explains it, it is large "
        f"enough to harm (noise {limits.HARMFUL_NOISE}, k3 {limits.HARMFUL_K3}), and the reward was lost.",
        advice="Sample in more bits (fp8 or bf16), or train on the quantised weights; masks rarely cure this.",
        positions=places(e.trace, widest(e.fresh)),
    )


def policy_lag(e: Evidence) -> Cause | None:
    lag = e.clean.lag
    if lag is None or not (lag > 0).any():
        return None
    old = e.clean.where(lag > 0)
    if len(old) < limits.MIN_TOKENS or old.lag is None:
        return None
    found = gap(old)
    near = e.fresh_gap if e.fresh_gap.tokens >= limits.MIN_TOKENS else gap(old.where(old.lag <= np.median(old.lag)))
    if not (found.far > limits.LAG_FAR or found.k3 > limits.LAG_K3) or found.k3 < 2 * near.k3:
        return None
    return Cause(
        id="policy_lag",
        score=min(0.4 + 4 * found.far, 1.0),
        evidence=f"Tokens {old.lag.mean():.1f} versions old on average (at most {int(old.lag.max())}) have ρ outside [0.5, 2] "
        f"in {found.far:.1%} and k3 {found.k3:.2g}; the youngest {near.far:.1%} and {near.k3:.2g}.",
        advice="Lower the staleness or the learning rate, or use an objective anchored on the sampler (dppo_binary_tv, icepop).",
        positions=places(e.trace, widest(old)),
    )
