"""The table of what no healthy step does: a check is a rule over the metrics of a step's row, with what to do about it.

Keys without a slash are what `checks.Checks` adds to a row: what was asked for, and what rows before it had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

Row = Mapping[str, Any]
MASKED, TRUNCATED, CHANGED, CHANGEABLE = 0.99, 0.95, 0.02, 0.5
"""Shares: of the tokens that masks were to leave, dropped; of answers, cut; both above which, and of weights that an update changed
and could change, below which something is wrong. Healthy float32 runs change 0.3 to 1 of the weights (experts without tokens keep
theirs)."""


REMEMBERED = 50
"""Steps whose rollouts are known again."""
UNLIKELY, RECENT = 12.0, 20
"""Nats by which chance must be ruled out for equal rewards to be no chance, and the steps that say what is usual."""
GAP, JUMPED = 0.2, 8.0
"""Mean |log ρ| that policies 16 steps old have, and a growth from one step to the next that no update makes."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A rule over one row: the evidence in one line, or empty."""

    name: str
    rule: Callable[[Row], str]
    advice: str
    after: int = 1
    """Steps in a row after which it is said."""
    stop: int = 0
    """Steps in a row after which the run stops; 0 never."""
    early: bool = False
    """Asked before the update; it stops the run there."""


def _signal(row: Row) -> float:
    """Groups whose rewards differ."""
    return row.get("groups/count", 0.0) - row.get("groups/zero_variance", 0.0)


def _when(key: str, text: str) -> Callable[[Row], str]:
    """True for a count that should be 0."""
    return lambda row: text.format(row[key]) if row.get(key, 0) > 0 else ""


def _credit(row: Row) -> float:
    """Share of the trained rollouts that have an advantage: some estimators give none where rewards differ, or some where none do."""
    return row.get("advantages/nonzero", 0.0)


def _no_signal(row: Row) -> str:
    if not row.get("groups/count") or _signal(row) or _credit(row):
        return ""
    spread = "" if row.get("reward/std") else f", all rewards are {row.get('reward/mean', 0.0):.3g}"
    return f"no group of {row['groups/count']:.0f} has rewards that differ{spread}"


def _gradient(row: Row) -> str:
    credit = row.get("advantages/kept", _credit(row))  # a mask may keep a few tokens, none of them with credit
    learns = row.get("optimizer/updates") and credit and row.get("objective/kept", 1.0) > 1 - MASKED
    return "the gradient is 0 where advantages are not" if learns and row.get("optimizer/grad_norm") == 0 else ""


def _no_credit(row: Row) -> str:
    return "rewards differ and every advantage is 0" if _signal(row) and row.get("advantages/nonzero") == 0 else ""


def _changed(row: Row) -> float | None:
    """Share of weights that a real update changed. None where nothing could be expected: no gradient, or hardly a learning rate."""
    lr = row.get("optimizer/lr", 0.0)
    return (
        row.get("optimizer/changed_share")
        if row.get("optimizer/grad_norm", 0.0) > 0 and lr >= 0.1 * row["peak_lr"] and lr > 0
        else None
    )


def _truncated(row: Row) -> str:
    share = row.get("rollout/truncated", 0.0)
    return f"{share:.0%} of the answers end at the length limit" if share >= TRUNCATED and not _signal(row) else ""


def _masked(row: Row) -> str:
    share = row.get("mask/dropped_share", 0.0)
    return f"masks drop {share:.2%} of the tokens" if 1 - share <= (1 - MASKED) * row["left"] else ""


def _parted(row: Row) -> str:
    gap = row.get("mismatch/equal_version/logprob_abs_diff", 0.0)
    return f"log-probs of fresh tokens differ by {gap:.3g} nats on average" if row["parity"] and gap != 0 else ""


_impossible = partial(Check, stop=1, early=True)
"""No sound step has it."""
ADVICE = {
    "non_finite": "Look at the rollout that it names, at the learning rate and at the numbers of model.dtype.",
    "positive_logprob": "It is no log-prob: look at who computes it.",
    "stray_gradient": "Gradients of another batch are left over, or the loss has a part that no advantage pays for.",
}
"""What to do about errors that name a check and stand in no row."""
CHECKS = (
    _impossible(
        name="repeated_ids",
        rule=_when("rollout/repeated_ids", "{:.0f} rollouts have an id that another one of the step has"),
        advice="Data reach the trainer twice: look at what collects rollouts.",
    ),
    _impossible(
        name="unstopped",
        rule=_when("rollout/unstopped", "{:.0f} rollouts are called finished and do not end with a stop token"),
        advice="The engine cuts answers or drops their last token: return status `length` for a cut, and the stop token with a whole one.",
    ),
    _impossible(
        name="trained_before",
        rule=_when("rollout/trained_before", "{:.0f} rollouts were trained in an earlier step"),
        advice="A batch reaches the trainer twice: look at what hands batches over, and at what a resumed run begins with.",
    ),
    _impossible(
        name="no_tokens",
        rule=_when("rollout/no_tokens", "{:.0f} answers have no token at all"),
        advice="The engine ends before it begins: look at its limits and stop tokens, and return status `engine_failure` for what failed.",
    ),
    _impossible(
        name="from_later",
        rule=_when("rollout/from_later", "{:.0f} rollouts have tokens of weights that the trainer has not made yet"),
        advice="Versions are stamped wrongly, or the trainer went back without its engines: look at what resumes the run.",
    ),
    _impossible(
        name="too_old",
        rule=_when("rollout/too_old", "{:.0f} rollouts have tokens of older weights than run.loop, rollout.overlap and experiment.lag allow"),
        advice="The bound on staleness does not hold: look at what hands rollouts over, and at what a resumed run begins with.",
    ),
    _impossible(
        name="old_kv",
        rule=_when("rollout/old_kv", "{:.0f} rollouts have tokens that attended to KV of older weights, under engine.kv=recompute"),
        advice="The engine keeps KV over new weights: look at what resumes sequences, or say engine.kv=keep.",
    ),
    Check(
        name="fresh_ratio",
        rule=lambda row: (
            f"log-probs of fresh tokens are {times:.3g} times as far apart as the dtypes explain"
            if (times := row.get("mismatch/beyond_dtypes_max", 0.0)) > 1
            else ""
        ),
        advice="Engine and trainer do not compute one distribution: rollkeel doctor RUN names why.",
    ),
    Check(
        name="gap_jumped",
        rule=lambda row: (
            f"log-probs of engine and trainer are {row['mismatch/logprob_abs_diff']:.3g} nats apart, for their staleness"
            f" {row['gap_times']:.3g} times as far as in any recent step"
            if row.get("gap_times", 0.0) > JUMPED and row["mismatch/logprob_abs_diff"] > GAP
            else ""
        ),
        advice="Something changed between two steps, and staleness does not explain it: rollkeel doctor RUN names it.",
    ),
    Check(
        name="empty",
        rule=_when("rollout/empty", "{:.0f} answers, most of the step's, have no text"),
        advice="The policy or the engine ends at once: look at the stop tokens and the prompts, or go back to an earlier checkpoint.",
    ),
    Check(
        name="nothing_sampled",
        rule=lambda row: "the step has no graded rollout" if row.get("groups/count") == 0 and not row["pooled"] else "",
        advice="The data source or the engine gives nothing: look at what ends early.",
    ),
    Check(
        name="not_trained",
        rule=lambda row: (
            f"weights have version {row['version']:.0f} behind {row['optimizer/updates']:.0f} updates of version {row['before']:.0f}"
            if row.get("before", -1) >= 0 and row["version"] != row["before"] + row.get("optimizer/updates", 0)
            else ""
        ),
        advice="Updates are lost or counted that were not made: look at the trainer.",
        stop=1,
    ),
    Check(
        name="rewards_gone",
        rule=lambda row: (
            f"every reward is {row['reward/mean']:.3g}; recent steps had {row['usual']:.3g} on average, and chance does this once in"
            f" {math.exp(min(row['unlikely'], 40)):.1g}"
            if row.get("unlikely", 0.0) > UNLIKELY
            else ""
        ),
        advice="Look at the grader: it may fail in silence.",
    ),
    _impossible(
        name="credit",
        rule=_when("rollout/miscredited", "{:.0f} rollouts have less advantage than one of their group with a lower reward"),
        advice="Advantages do not belong to their rollouts: look at the order of rollouts and advantages.",
    ),
    _impossible(
        name="uncaused",
        rule=_when("rollout/uncaused", "{:.0f} rollouts have an advantage in groups whose rewards are all equal"),
        advice="Rounding was divided by itself, or advantages are another batch's: look at the advantage estimator.",
    ),
    Check(
        name="duplicates",
        rule=_when("rollout/duplicates", "{:.0f} rollouts repeat another of their prompt, which the policy's probabilities rule out"),
        advice="Look for requests with the same random numbers, or data that are collected twice.",
    ),
    Check(
        name="same_prompt",
        rule=_when("rollout/same_prompt", "all {:.0f} groups have the same prompt"),
        advice="Look at the data source: every step should have other prompts.",
        after=3,
    ),
    Check(
        name="empty_rewarded",
        rule=_when("rollout/empty_rewarded", "{:.0f} answers without text have the highest reward of the step"),
        advice="Look at the grader: rollkeel tasks check TASK.",
    ),
    Check(
        name="right_unrewarded",
        rule=_when("rollout/right_unrewarded", "{:.0f} answers that are the gold answer to the letter got no reward"),
        advice="Look at the grader: rollkeel tasks check TASK.",
        after=2,
    ),
    Check(
        name="no_signal",
        rule=_no_signal,
        advice="Nothing is learnt from it: make the task easier or harder, warm-start longer, or look at the grader.",
        after=10,
    ),
    Check(
        name="gradient",
        rule=_gradient,
        advice="The loss does not depend on the model, or clips and weights cancel all of it: look at the objective.",
        stop=5,
    ),
    Check(
        name="no_credit",
        rule=_no_credit,
        advice="Nothing is learnt from these steps: look at the advantage estimator, or take one that pays every difference (grpo, rloo).",
        after=3,
    ),
    Check(
        name="unchanged",
        rule=lambda row: "the update left every weight as it was" if _changed(row) == 0 else "",
        advice="The optimizer does not step, or train.lr is below float32's precision: raise train.lr.",
        stop=2,
    ),
    Check(
        name="update_too_small",
        rule=lambda row: f"an update changed {share:.2%} of the weights" if 0 < (share := _changed(row) or 0) < CHANGED else "",
        advice="Float32 cannot follow: raise train.lr.",
        after=2,
    ),
    Check(
        name="masked",
        rule=_masked,
        advice="Hardly anything is trained: widen the objective's thresholds, or lower the staleness or the engine's rounding.",
        after=3,
    ),
    Check(
        name="all_masked",
        rule=lambda row: "masks drop every token" if row.get("mask/dropped_share", 0.0) >= 1 else "",
        advice="Nothing is trained: widen the objective's thresholds, or lower the staleness or the engine's rounding.",
        after=3,
        stop=20,
    ),
    Check(
        name="parity",
        rule=_parted,
        advice="Under run.parity both sides have the same bits, so this is a fault: rollkeel analyze RUN names where they part.",
        stop=1,
    ),
    Check(
        name="truncated",
        rule=_truncated,
        advice="No answer may fit: raise sampling.max_new_tokens, or warm-start until answers end.",
        after=5,
    ),
)  # fmt: skip


def advice(name: str) -> str:
    """What to do about a check."""
    return next((check.advice for check in CHECKS if check.name == name), ADVICE.get(name, ""))
