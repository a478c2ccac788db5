"""Causes that show in rewards, lengths and entropy; most need no log-probs of the trainer."""

from __future__ import annotations

import re

import numpy as np

from rollkeel_doctor import thresholds as limits
from rollkeel_doctor.diagnosis import Cause
from rollkeel_doctor.evidence import Evidence
from rollkeel_doctor.series import Series, cut_responses, difference, known_mean, too_short
from rollkeel_doctor.tokens import Mean, clustered
from rollkeel_doctor.traces.trace import FloatArray, IntArray, Trace

_BROKEN = re.compile(
    r"traceback|exception|error\b|timed? ?out|timeout|deadline|killed|crash|connection|refused|unavailable|exit code [1-9]|"
    r"no such file|out of memory|segfault",
    re.IGNORECASE,
)
_TESTED = re.compile(r"\b(test|case)s? #?\d+", re.IGNORECASE)


def first_tokens(trace: Trace, sequences: IntArray) -> list[dict[str, int]]:
    return [
        {"step": int(trace.step[s]), "id": int(trace.id[s]), "token": 0} for s in sequences[: limits.POSITIONS].tolist()
    ]


def last_tokens(trace: Trace, sequences: IntArray) -> list[dict[str, int]]:
    few = sequences[: limits.POSITIONS].tolist()
    lengths = trace.lengths
    return [{"step": int(trace.step[s]), "id": int(trace.id[s]), "token": int(max(lengths[s] - 1, 0))} for s in few]


def reward_failures(e: Evidence) -> Cause | None:
    """A zero that a broken grader stands behind: it says so, or the same answer, or the gold answer, scored otherwise."""
    trace = e.trace
    graded = np.isfinite(trace.reward)
    if graded.sum() < limits.MIN_SEQUENCES:
        return None
    low = graded & (trace.reward <= min(float(trace.reward[graded].min()), 0.0))
    said = low & _said(trace)
    failed = graded & _status(trace, "grader_failure")
    unlike = low & _scored_otherwise(trace, graded)
    gold = low & _gold(trace)
    silent = low & _silent(trace, graded, low)
    any_ = said | failed | unlike | gold | silent
    if any_.sum() < max(limits.GRADER_COUNT, limits.GRADER_SHARE * graded.sum()):
        return None
    parts = [
        f"{int(found.sum())} {words}"
        for found, words in (
            (failed, "have the status grader_failure and a reward"),
            (said, "have a detail that tells of a failure"),
            (unlike, "are, word for word, answers that scored better on the same prompt"),
            (gold, "equal the gold answer"),
            (silent, "have no detail, where the grader has one for all others"),
        )
        if found.any()
    ]
    share = any_.sum() / max(int(low.sum()), 1)
    # The same answer scored otherwise may also be a judge that gives another mark each time.
    sure = bool((any_ & ~unlike).any())
    whose = "a failed grader's" if sure else "a failed grader's, or a grader's that marks one answer now so, now so"
    return Cause(
        id="reward_failures",
        score=min(0.7 + float(share), 1.0),
        evidence=f"{int(any_.sum())} of {int(low.sum())} lowest rewards ({share:.1%}) are {whose}: {', '.join(parts)}.",
        advice="Leave a rollout whose grader failed out of the batch, count it, and repair the grader; never score it 0.",
        positions=last_tokens(trace, np.flatnonzero(any_)),
    )


def _status(trace: Trace, status: str) -> np.ndarray:
    return (
        np.array([s == status for s in trace.status]) if trace.status is not None else np.zeros(trace.sequences, bool)
    )


def _said(trace: Trace) -> np.ndarray:
    if trace.detail is None:
        return np.zeros(trace.sequences, bool)
    texts = trace.text or [""] * trace.sequences
    return np.array([_tells(detail or "", text) for detail, text in zip(trace.detail, texts, strict=True)])


def _tells(detail: str, text: str) -> bool:
    """Whether the grader tells of a failure that is its own: not in the words of the response, nor of a program's test that failed."""
    words = _BROKEN.search(detail)
    return words is not None and words[0].lower() not in text.lower() and _TESTED.search(detail) is None


def _silent(trace: Trace, graded: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Empty details where a grader has something to say of every answer that scores, and of most that do not."""
    nothing = np.zeros(trace.sequences, bool)
    if trace.detail is None or not low.any():
        return nothing
    empty = np.array([not d for d in trace.detail])
    if trace.text is not None:
        empty &= np.array([bool(t and t.strip()) for t in trace.text])  # of an empty answer there is nothing to say
    if (cut := cut_responses(trace)) is not None:
        empty &= ~cut
    others = graded & ~low
    if not others.any() or empty[others].any() or empty[low].mean() > limits.SILENT_SHARE:
        return nothing
    return empty


def _scored_otherwise(trace: Trace, graded: np.ndarray) -> np.ndarray:
    """Same prompt and response as one that got the trace's best reward; ids where there is no text."""
    out = np.zeros(trace.sequences, bool)
    if trace.prompt_text is None or trace.text is None:
        return out
    best: dict[tuple[str, ...], float] = {}
    # One prompt may ask for another answer each time: a number to be guessed, a document that an environment holds.
    keys = list(zip(trace.prompt_text, trace.text, trace.answer or trace.prompt_text, strict=True))
    reward = trace.reward
    for i in np.flatnonzero(graded).tolist():
        if keys[i][0] and keys[i][1]:
            best[keys[i]] = max(best.get(keys[i], -np.inf), float(reward[i]))
    lengths = trace.lengths
    cut = cut_responses(trace)
    spread = float(np.nanmax(reward) - np.nanmin(reward))
    for i in np.flatnonzero(graded).tolist():
        known = best.get(keys[i])
        out[i] = known is not None and known - reward[i] > 0.5 * spread > 0 and lengths[i] > 0
    return out if cut is None else out & ~cut


def _gold(trace: Trace) -> np.ndarray:
    """Responses that are the gold answer and nothing else, where such responses are what the grader rewards."""
    if trace.answer is None or trace.text is None:
        return np.zeros(trace.sequences, bool)
    equal = np.array([bool(a) and t.strip() == a.strip() for t, a in zip(trace.text, trace.answer, strict=True)])
    cut = cut_responses(trace)
    if cut is not None:
        equal &= ~cut
    known = equal & np.isfinite(trace.reward)
    # A task may well want more than the bare answer: then none of them scores. Rewards that got lost do so from some step on.
    wins = known & (trace.reward >= 0.5 * np.nanmax(trace.reward, initial=0.0)) & (trace.reward > 0)
    then = known & np.isin(trace.step, trace.step[wins])
    return equal if wins.sum() > 0.3 * then.sum() else np.zeros(trace.sequences, bool)


def length_truncation(e: Evidence) -> Cause | None:
    trace = e.trace
    at_limit = cut_responses(trace)
    graded = np.isfinite(trace.reward)
    if at_limit is None or graded.sum() < limits.MIN_SEQUENCES:
        return None
    cut, rest = at_limit & graded, ~at_limit & graded
    share, spread = cut.sum() / graded.sum(), e.series.high - e.series.low
    if share < limits.CUT_SHARE or rest.sum() < limits.MIN_SEQUENCES or spread <= 0:
        return None
    a, b = (clustered(trace.reward[x], trace.group[x]) for x in (cut, rest))
    apart = Mean(b.value - a.value, float(np.hypot(a.error, b.error)))
    much = apart.value >= limits.CUT_GAP * spread or a.value - e.series.low <= limits.CUT_SCORE * (
        b.value - e.series.low
    )
    # Where hardly anything is right, prompts differ more than a cut can: there the share at the limit speaks as well.
    seldom = a.value - e.series.low < limits.CUT_SELDOM * spread and apart.value >= limits.CUT_LOSS * (
        b.value - e.series.low
    )
    below = apart.value > 0 and too_short(trace, cut)  # what stands there may still earn a part of the reward
    if not (((much or below) and apart.z >= limits.TREND_Z) or (seldom and apart.z >= limits.CUT_Z)):
        return None
    lost = float(share) * apart.value / spread
    return Cause(
        id="length_truncation",
        score=min(0.4 + lost, 1.0),
        evidence=f"{share:.0%} of responses end at the length limit and score {a.value:.2f} on average, the others "
        f"{b.value:.2f} (z {apart.z:.0f}).",
        advice="Raise sampling.max_new_tokens, or leave cut responses out of the loss; a soft length penalty keeps them short.",
        positions=last_tokens(trace, np.flatnonzero(cut)),
    )


def entropy_collapse(e: Evidence) -> Cause | None:
    s = e.series
    if len(s.steps) < 4 or not np.isfinite(s.entropy).any() or not np.isfinite(s.reward).any():
        return None
    late, high = known_mean(s.late(s.entropy)), float(np.nanmax(s.entropy))
    if late < limits.ENTROPY_HALF * high and (steps := driven(s)).any():
        return Cause(
            id="entropy_collapse",
            score=0.5 + 0.5 * (1 - late / high),
            evidence=f"Entropy ({s.entropy_of}) fell from {high:.3f} to {late:.3f} nats per token. In {steps.sum()} steps no group had "
            f"differing rewards, so that no policy gradient was left, and yet the gradient norm was {np.median(s.grad_norm[steps]):.3g}: "
            "something else than rewards makes the policy sure.",
            advice="Look at the signs and sizes of the loss's other terms: entropy, KL, auxiliary losses.",
            positions=first_tokens(e.trace, np.flatnonzero(e.trace.step >= s.late(s.steps)[0])),
        )
    if late < limits.ENTROPY_HALF * high and (ratio := bonus(e)) > 1:
        return Cause(
            id="entropy_collapse",
            score=0.5 + 0.5 * (1 - late / high),
            evidence=f"Entropy ({s.entropy_of}) fell from {high:.3f} to {late:.3f} nats per token, though the run states a bonus for it "
            f"that weighs {ratio:.1f} times what its advantages do: the bonus punishes entropy.",
            advice="Look at the sign of the entropy term: the loss subtracts a bonus.",
            positions=first_tokens(e.trace, np.flatnonzero(e.trace.step >= s.late(s.steps)[0])),
        )
    same = known_mean(s.late(s.same))
    reward = known_mean(s.late(s.reward))
    spread = s.high - s.low
    if spread <= 0 or (reward - s.low) / spread > limits.REWARD_BEST or trend(s).z > limits.TREND_Z:
        return None
    quarter = max(len(s.steps) // 4, 1)
    lost = difference(s, slice(0, quarter), slice(-quarter, None))
    fell = -lost.value > limits.ENTROPY_LOSS * (known_mean(s.early(s.reward)) - s.low) and lost.z < -limits.TREND_Z
    begin = known_mean(s.reward[: max(len(s.steps) // 10, 1)])
    stuck = reward - begin < limits.ENTROPY_GAIN * (s.high - begin)  # what was gained explains how sure it became
    alike = same > max(
        limits.ZERO_VARIANCE, known_mean(s.early(s.same))
    )  # where rewards are rare, most groups always were
    nothing = stuck and (late < limits.ENTROPY_LOW or alike)
    if not ((late < limits.ENTROPY_FALL * high and nothing) or (late < limits.ENTROPY_HALF * high and fell)):
        return None
    return Cause(
        id="entropy_collapse",
        score=min(0.5 + 0.5 * (1 - late / max(high, 1e-9)) * (1 - (reward - s.low) / spread), 1.0),
        evidence=f"Entropy ({s.entropy_of}) fell from {high:.3f} to {late:.3f} nats per token while the reward is "
        f"{reward:.2f} in [{s.low:g}, {s.high:g}] and {'falls' if fell else 'no longer rises'}"
        f"{'' if np.isnan(same) else f'; {same:.0%} of groups have no differing rewards'}.",
        advice="Lower the learning rate or raise the upper clip bound, drop negative KL or entropy terms, use harder prompts.",
        positions=first_tokens(e.trace, np.flatnonzero(e.trace.step >= s.late(s.steps)[0])),
    )


def driven(s: Series) -> np.ndarray:
    """Steps with gradients though no group's rewards differed, in a run whose rewards are not what they could be.

    Empty of True below `DRIVEN_STEPS` of them. Where rewards alone drive a policy, such a step has a gradient of exactly 0.
    """
    with np.errstate(invalid="ignore"):
        found = (s.same >= 1) & (s.grad_norm > 0)
    best = s.low if s.high <= 0 else s.low + limits.REWARD_BEST * (s.high - s.low)
    poor = known_mean(s.late(s.reward)) <= best if s.high > s.low or s.high <= 0 else False
    return found if poor and found.sum() >= limits.DRIVEN_STEPS else np.zeros_like(found)


def bonus(e: Evidence) -> float:
    """Weight of the stated entropy bonus over that of the advantages, as they stand at a token's log-prob: root mean squares over the
    tokens. Above 1 entropy goes where the bonus drives it, whatever rewards say. 0 where either is not known."""
    tokens, advantages = e.clean, e.trace.advantages
    if not e.trace.facts.entropy_coefficient or tokens.entropy is None or advantages is None:
        return 0.0
    driving, pulling = -tokens.o - tokens.entropy, advantages[tokens.index]
    known = np.isfinite(driving) & np.isfinite(pulling)
    if known.sum() < limits.MIN_TOKENS or not pulling[known].any():
        return 0.0
    up, down = (float(np.square(x[known]).mean(dtype=np.float64)) for x in (driving, pulling))
    return e.trace.facts.entropy_coefficient * float(np.sqrt(up / down))


def trend(s: Series) -> Mean:
    """Reward of the last quarter of the steps minus that of the quarter before it."""
    quarter = max(len(s.steps) // 4, 1)
    return difference(s, slice(-2 * quarter, -quarter), slice(-quarter, None))


def learning_rate(e: Evidence) -> Cause | None:
    """The reward is lost, and the policy moved too far in single steps before it was."""
    s = e.series
    if len(s.steps) < 3 or not np.isfinite(s.reward).any() or s.high <= s.low:
        return None
    known = np.flatnonzero(np.isfinite(s.reward))
    peak = int(known[np.argmax(s.reward[known])])
    fall = difference(s, slice(peak, peak + 1), slice(-max((len(s.steps) - peak) // 2, 1), None))
    best = float(s.reward[peak]) - s.low
    # The best of n steps stands out by chance, by about √(2 ln n) standard errors.
    chance = float(np.sqrt(limits.TREND_Z**2 + 2 * np.log(len(known))))
    if -fall.value < limits.REWARD_FALL * best or (fall.z > -chance and not _dead(e, known)):
        return None
    signs = _moves(s)
    if not signs:
        return None
    rate = e.trace.facts.lr
    after = float(s.reward[known[-1]])
    return Cause(
        id="learning_rate",
        score=min(0.5 + 0.15 * len(signs) + 0.2 * min(-fall.value / best, 1), 1.0),
        evidence=f"The reward fell from {s.reward[peak]:.2f} at step {int(s.steps[peak])} to {after:.2f}, and {', '.join(signs)}"
        f"{'' if rate is None else f'; the learning rate is {rate:g}'}.",
        advice="Lower the learning rate by three to ten times and warm it up; go back to the checkpoint before the fall.",
        positions=first_tokens(e.trace, np.flatnonzero(e.trace.step >= s.steps[min(peak + 1, len(s.steps) - 1)])),
    )


def _dead(e: Evidence, known: IntArray) -> bool:
    """Whether the later half of the steps brings nothing, and the steps before more than chance would put there."""
    s, wins = e.series, int((e.trace.reward > e.series.low).sum())
    last = np.flatnonzero(s.reward[known] > s.low).max(initial=-1) + 1
    later_half = len(known) >= limits.DEAD_STEPS and 2 * last <= len(known)
    return bool(later_half and (last / len(known)) ** wins < limits.DEAD_CHANCE)


def _moves(s: Series) -> list[str]:
    found = []
    clipped = np.nanmax(s.clipped) if np.isfinite(s.clipped).any() else 0.0
    if clipped > limits.CLIPPED:
        found.append(f"{clipped:.0%} of tokens left the clip band in one step (step {_at(s, s.clipped)})")
    norms = s.grad_norm[np.isfinite(s.grad_norm) & (s.grad_norm > 0)]
    if len(norms) and norms.max() > limits.GRAD_SPIKE * np.median(norms):
        found.append(
            f"the gradient norm reached {norms.max():.3g}, {norms.max() / np.median(norms):.0f} times its median"
        )
    entropy = s.entropy
    step = np.abs(np.diff(entropy)) / np.maximum(np.maximum(entropy[1:], entropy[:-1]), 1e-9)
    big = np.where(np.abs(np.diff(entropy)) > limits.ENTROPY_JUMP, step, 0)
    if len(big) and np.nanmax(big, initial=0) > limits.ENTROPY_STEP:
        at = int(np.nanargmax(big))
        found.append(f"entropy went from {entropy[at]:.2f} to {entropy[at + 1]:.2f} nats in step {int(s.steps[at])}")
    return found


def _at(s: Series, values: FloatArray) -> int:
    return int(s.steps[int(np.nanargmax(values))])
