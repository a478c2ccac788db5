"""From evidence to a ranked list: what explains the evidence first, and nothing that is only its shadow."""

from __future__ import annotations

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
GAP = ("alignment", "mask", "retokenised", "temperature", "truncation", "wrong_weights", "stale_version", "stale_kv")
GAP = (*GAP, "quantisation", "routing", "policy_lag", "unexplained")
TRAINING = (
    "reward_failures",
    "learning_rate",
    "entropy_collapse",
    "length_truncation",
    "no_reward_signal",
    "reward_lost",
)
BATCH = ("nothing_trained", "wrong_advantages", "duplicates", "cut_off_answers")


def diagnose(trace: Trace) -> Diagnosis:
    """Causes that are over their thresholds, likeliest first: bugs, then numerics, then dynamics, each by score.

    A trace too small or too bare for a cause is not healthy as to that cause: it stands in `not_examined`.
    """
    e = measure(trace)
    found = [*_gap_causes(e), *_training_causes(e)]
    if not {c.id for c in found} & {*TRAINING, *BATCH} and (cause := outcome.no_reward_signal(e)) is not None:
        found.append(cause)
    if not found and (cause := outcome.reward_lost(e)) is not None:
        found.append(cause)
    ranked = sorted(found, key=lambda c: (_ORDER[c.kind], -c.score, c.id))
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


def _gap_causes(e: Evidence) -> list[Cause]:
    """Causes of what lies between q and o. Tokens of a cause found earlier are out of the later ones' evidence."""
    if (impossible := logging.positive(e)) is not None:
        return [impossible]  # what stands there is no log-prob, so nothing else can be read from it
    found = [c for judge in (logging.mask, logging.alignment) if (c := judge(e)) is not None]
    if (again := logging.retokenised(e)) is not None:
        few = e.displaced is not None and e.displaced.share < limits.SHIFT_ALL
        if few and e.tempered.explained > limits.LINE_ALL and (cause := logging.line(e)) is not None:
            return [*found, cause]  # the gap is so wide that some sequences look moved by chance
        found.append(again)
    if (
        len(e.clean) < limits.MIN_TOKENS
        or len(e.clean) < 0.5 * len(e.tokens)
        or any(c.id == "retokenised" for c in found)
    ):
        return found  # what is left over shows the same fault less clearly
    for judge in (logging.temperature, logging.truncation):
        if (cause := judge(e)) is not None:
            return [*found, cause]  # what is left of the gap is this cause's own
    for judge in (weights.weights, weights.policy_lag):
        if (cause := judge(e)) is not None:
            found.append(cause)
    if not found and (cause := _unexplained(e)) is not None:
        found.append(cause)
    return _without_shadows(e, found)


def _without_shadows(e: Evidence, found: list[Cause]) -> list[Cause]:
    """A token too many or too few shifts what is behind it: in few sequences alignment is re-tokenisation's shadow."""
    few = e.shift is not None and e.shift.share < limits.SHIFT_ALL
    if few and any(c.id == "retokenised" for c in found):
        return [c for c in found if c.id != "alignment"]
    return found


def _unexplained(e: Evidence) -> Cause | None:
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
        positions=logging.places(e.trace, logging.widest(e.fresh)),
    )


JUDGES = (
    training.reward_failures,
    outcome.rewarded_empty,
    outcome.wrong_advantages,
    outcome.nothing_trained,
    outcome.duplicates,
    outcome.cut_off_answers,
    training.learning_rate,
    training.entropy_collapse,
    training.length_truncation,
)


def _training_causes(e: Evidence) -> list[Cause]:
    found = [c for judge in JUDGES if (c := judge(e)) is not None]
    ids = {c.id for c in found}
    if {"learning_rate", "entropy_collapse"} <= ids and training.driven(e.series).any():
        return [c for c in found if c.id != "learning_rate"]  # what took the entropy took the reward
    # A policy that a few large steps destroyed has no entropy either, and never stops: that is the same event.
    return [c for c in found if "learning_rate" not in ids or c.id == "learning_rate" or c.kind == "bug"]


def observed(e: Evidence, causes: list[Cause]) -> list[str]:
    """What was measured and is in order, in words; of causes that were found nothing."""
    lines: list[str] = []
    ids = {c.id for c in causes}
    limit = weights.allowed(e.trace.facts)
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
