"""From evidence to a ranked list: what explains the evidence first, and nothing that is only its shadow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rollkeel_doctor import causes_logging as logging
from rollkeel_doctor import causes_outcome as outcome
from rollkeel_doctor import causes_training as training
from rollkeel_doctor import causes_weights as weights
from rollkeel_doctor import thresholds as limits
from rollkeel_doctor.diagnosis import CAUSES, Cause, Diagnosis
from rollkeel_doctor.evidence import Evidence, measure
from rollkeel_doctor.series import known_mean, lost
from rollkeel_doctor.traces.trace import Trace

_ORDER = {"bug": 0, "numerics": 1, "dynamics": 2}
RECORD = ("alignment", "mask", "retokenised", "temperature", "truncation")
WEIGHTS = ("wrong_weights", "stale_version", "stale_kv", "quantisation", "routing")
TOLD = (*WEIGHTS, "retokenised")
GAP = (*RECORD, "wrong_weights", "stale_version", "stale_kv", "quantisation", "routing", "policy_lag", "unexplained")
TRAINING = (
    "reward_failures",
    "learning_rate",
    "entropy_collapse",
    "length_truncation",
    "no_reward_signal",
    "reward_lost",
)
BATCH = ("nothing_trained", "wrong_advantages", "duplicates", "cut_off_answers")


def _readable(e: Evidence) -> bool:
    return len(e.clean) >= max(limits.MIN_TOKENS, 0.5 * len(e.tokens))


def _at_rest(e: Evidence) -> bool:
    return _readable(e) and len(e.fresh) >= limits.MIN_TOKENS


def _apart(e: Evidence) -> bool:
    return _at_rest(e) and weights.over(e)


def _alike(e: Evidence) -> bool:
    return _at_rest(e) and not weights.over(e)


def _undriven(e: Evidence) -> bool:
    return not (training.driven(e.series).any() and training.entropy_collapse(e))


class Rule(NamedTuple):
    """One question. They are asked from top to bottom; to change what hides what, change a row."""

    judge: Callable[[Evidence], Cause | None]
    why: str  # Why it is asked here.
    where: Callable[[Evidence], bool] = lambda e: True  # Only of evidence that can tell.
    unless: Sequence[str] = ()  # Not asked once one of these is named.
    ends: bool = False  # Once it names a cause, no rule further down that table is asked.


OF_TOKENS = (
    Rule(logging.positive, "A value above 0 is no log-prob, so that nothing else can be read from it.", ends=True),
    Rule(logging.mask, "Tokens that nobody sampled are evidence of this alone: later rows ask of the others."),
    Rule(logging.alignment, "So are sequences whose log-probs fit other tokens."),
    Rule(logging.wide, "The gap of a forgotten temperature makes some sequences look moved by chance.", ends=True),
    Rule(logging.retokenised, "Ids that were not sampled spoil what follows.", ends=True),
    Rule(logging.temperature, "What another temperature leaves of the gap is its own.", _readable, ends=True),
    Rule(logging.truncation, "What a cut leaves of the gap is its own.", _readable, ends=True),
    Rule(logging.never_drawn, "No gap of weights does what other ids do.", _readable, ends=True),
    Rule(weights.stale_kv, "Tokens behind a change of version tell old KV from old weights.", _apart),
    Rule(weights.never_sampled, "Weights, bits and experts are so for every token; this is for few.", _apart, WEIGHTS),
    Rule(weights.routing, "Flips may carry a gap that the dtype would explain as well.", _at_rest, TOLD),
    Rule(weights.over_time, "What came after a clean start is not how the engine was loaded.", _apart, TOLD),
    Rule(weights.from_the_start, "All that is left for a gap no dtype makes.", _apart, TOLD),
    Rule(weights.harmful, "What the dtype explains harms only where the reward was lost.", _alike, WEIGHTS),
    Rule(weights.policy_lag, "Age adds to what fresh tokens show.", _readable),
    Rule(logging.unexplained, "An E_q[ρ] off 1 is reported where nothing explains it.", _readable, GAP),
)
OF_RUN = (
    Rule(training.reward_failures, "Rewards that are wrong explain whatever came of them, and are wrong all the same."),
    Rule(outcome.rewarded_empty, "So are rewards of answers that say nothing, whatever they led to."),
    Rule(outcome.wrong_advantages, "A wrong batch is wrong whatever its rewards are: these four hide nothing."),
    Rule(outcome.nothing_trained, "Weights that stay where they are need no other cause, and may have one."),
    Rule(outcome.duplicates, "Chance is reckoned with log q, so that these have to be right.", unless=RECORD),
    Rule(outcome.cut_off_answers, "A cut answer may still be right, so that no reward tells."),
    Rule(training.learning_rate, "What took the entropy without any reward took the reward too.", _undriven),
    Rule(
        training.entropy_collapse,
        "A policy that a few large steps destroyed has no entropy either.",
        unless=("learning_rate",),
    ),
    Rule(training.length_truncation, "Nor does it ever stop.", unless=("learning_rate",)),
    Rule(outcome.no_reward_signal, "Any of these leaves nothing to learn from.", unless=(*TRAINING, *BATCH)),
    Rule(outcome.reward_lost, "Said where nothing explains it.", unless=tuple(CAUSES)),
)
"""The order of judgement. Causes of a kind are ranked by score afterwards, whichever was asked first."""


def diagnose(trace: Trace) -> Diagnosis:
    """Causes that are over their thresholds, likeliest first: bugs, then numerics, then dynamics, each by score.

    A trace too small or too bare for a cause is not healthy as to that cause: it stands in `not_examined`.
    """
    e = measure(trace)
    causes: list[Cause] = []
    for table in (OF_TOKENS, OF_RUN):
        for rule in table:
            named = {c.id for c in causes}
            if named & set(rule.unless) or not rule.where(e) or (cause := rule.judge(e)) is None:
                continue
            causes.append(cause)
            if rule.ends:
                break
    ranked = sorted(causes, key=lambda c: (_ORDER[c.kind], -c.score, c.id))
    return Diagnosis(
        source=trace.source,
        path=trace.path,
        tokens=len(trace),
        sequences=trace.sequences,
        steps=len(set(trace.step.tolist())),
        causes=ranked,
        observed=observed(e, ranked),
        not_examined=not_examined(e, ranked),
        notes=tuple(e.trace.notes),
        lost=lost(e.series) is not None,
    )


def observed(e: Evidence, causes: list[Cause]) -> list[str]:
    """What was measured and is in order, in words; of causes that were found nothing."""
    lines: list[str] = []
    ids = {c.id for c in causes}
    limit = e.limit
    g = e.fresh_gap
    at = "at equal versions" if e.tokens.lag is not None else "(versions are not stated)"
    if g.tokens >= limits.MIN_TOKENS and not ids & set(GAP):
        if g.noise > 0.2 * limits.NOISE["bf16"] or g.k3 > limits.K3["fp32"]:
            lines.append(
                f"gap {at} as {limit.words} explain (std of log ρ {g.rms:.3f}, noise in logits {g.noise:.3f}, "
                f"k3 {g.k3:.2g})"
            )
        else:
            lines.append(f"engine and trainer agree {at}: k3 {g.k3:.1g}")
        lines.append(f"E_q[ρ] = {1 + g.excess.value:.4f} ± {g.excess.error:.4f} over {g.tokens} tokens")
    if e.kept_mass is not None and 1 - e.kept_mass > 1e-4:
        lines.append(f"truncated sampling keeps {e.kept_mass:.3f} of the mass on average")
    lag = e.clean.lag
    if lag is not None and (lag > 0).any() and "policy_lag" not in ids:
        from_old = e.gap
        lines.append(
            f"tokens are up to {int(lag.max())} versions old ({lag[lag >= 0].mean():.1f} on average): {from_old.far:.1%} "
            f"have ρ outside [0.5, 2], below the {limits.LAG_FAR:.0%} from which harm was seen"
        )
    s = e.series
    if len(s.steps) > 1 and s.high > s.low:
        lines.append(f"reward {known_mean(s.early(s.reward)):.2f} → {known_mean(s.late(s.reward)):.2f}")
    elif s.high == s.low and not ids & set(TRAINING):
        lines.append(f"every reward is {s.high:g}: no group has anything to learn from")
    if 0 < e.foreign.silent < e.trace.sequences:
        lines.append(f"{e.foreign.silent} of {e.trace.sequences} sequences have no log-probs of the engine at all")
    return lines


def not_examined(e: Evidence, causes: list[Cause]) -> dict[str, str]:
    """Causes that could not be tested, and what they would have needed."""
    ids = {c.id for c in causes}
    out: dict[str, str] = {}

    def lacks(reason: str, *names: str) -> None:
        for name in names:
            if name not in ids:
                out.setdefault(name, reason)

    gap = tuple(name for name in GAP if name != "mask")
    if not np.isfinite(e.trace.rollout_logprobs).any():
        lacks("the trace has no log-probs of the engine, or only zeros", *GAP)
    elif logging.positive(e) is not None:
        lacks("hidden behind values that are no log-probs", *GAP)
    elif e.trace.train_logprobs is None:
        lacks("the trace has no log-probs of the trainer", *gap)
    elif len(e.tokens) < limits.MIN_TOKENS:
        lacks(f"{len(e.tokens)} tokens with both log-probs; {limits.MIN_TOKENS} are needed", *gap)
    elif len(e.clean) < max(limits.MIN_TOKENS, 0.5 * len(e.tokens)):
        lacks(f"hidden behind {causes[0].id if causes else 'other faults'}", *gap)
    elif ids & {"temperature", "truncation", "retokenised"}:
        hides = sorted(ids & {"temperature", "truncation", "retokenised"})[0]
        lacks(f"hidden behind {hides}", *gap)
    if len(e.fresh) < limits.MIN_TOKENS <= len(e.clean):
        lacks(
            "too few tokens of the trainer's own version", "wrong_weights", "stale_version", "quantisation", "routing"
        )
    if e.tokens.lag is None:
        lacks("the trace does not state versions", "policy_lag", "stale_kv")
    if e.fresh.flipped is None or not (e.fresh.flipped >= 0).any():
        lacks("the trace does not compare experts", "routing")
    if e.surprisal is None:
        lacks("entropy was not recorded: only seen where kept mass is", "truncation")
    graded = int((e.trace.reward == e.trace.reward).sum())
    if graded < limits.MIN_SEQUENCES:
        few = f"{graded} rewards; {limits.MIN_SEQUENCES} are needed"
        lacks(few, *TRAINING)
    if (steps := len(e.series.steps)) < 4:
        lacks(f"{steps} step{'' if steps == 1 else 's'}; 4 are needed", "entropy_collapse", "learning_rate")
    if e.trace.status is None and e.trace.facts.max_new_tokens is None:
        lacks("neither status nor length limit is known", "length_truncation")
    return {name: out[name] for name in CAUSES if name in out}
