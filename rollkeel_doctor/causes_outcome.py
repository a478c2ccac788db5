"""What a run came to, whatever its log-probs say: no reward to learn from, nothing learnt from it, or lost again."""

from __future__ import annotations

import numpy as np

from rollkeel_doctor import thresholds as limits
from rollkeel_doctor.causes_training import first_tokens, last_tokens
from rollkeel_doctor.diagnosis import Cause
from rollkeel_doctor.evidence import Evidence
from rollkeel_doctor.repeats import contexts
from rollkeel_doctor.series import extremes, known_mean, lost, too_short
from rollkeel_doctor.tokens import Mean, clustered
from rollkeel_doctor.traces.trace import IntArray, Trace


def no_reward_signal(e: Evidence) -> Cause | None:
    """No group, or hardly one, has rewards that differ, and never had."""
    trace, s = e.trace, e.series
    graded = int(np.isfinite(trace.reward).sum())
    groups, differ = _groups(trace)
    if graded < limits.MIN_SEQUENCES or groups < limits.SIGNAL_GROUPS or differ > limits.SIGNAL_SHARE * groups:
        return None
    level = known_mean(s.reward)
    if s.low >= 1 or (s.low < s.high and level >= s.low + limits.SOLVED * (s.high - s.low)):
        return None  # whoever answers all that is asked has nothing left to learn
    return Cause(
        id="no_reward_signal",
        score=1 - differ / groups,
        evidence=f"{differ} of {groups} groups have rewards that differ (mean reward {level:.3g} in [{s.low:g}, {s.high:g}] over "
        f"{graded} responses): without differences there is no policy gradient.",
        advice="Read some responses: warm the policy up (sft.steps), take easier prompts, raise sampling.max_new_tokens, or repair "
        "the grader that scores them all alike.",
        positions=last_tokens(trace, np.flatnonzero(np.isfinite(trace.reward))),
    )


def _groups(trace: Trace) -> tuple[int, int]:
    """Groups of several graded sequences, and those of them whose rewards differ."""
    known = np.isfinite(trace.reward)
    if not known.any():
        return 0, 0
    low, high, count = extremes(trace.reward[known], trace.group[known])
    return int((count > 1).sum()), int((high > low).sum())


def reward_lost(e: Evidence) -> Cause | None:
    fell = lost(e.series)
    if fell is None:
        return None
    best, end, z, step = fell
    return Cause(
        id="reward_lost",
        score=min((best - end) / max(best - e.series.low, 1e-9), 1.0),
        evidence=f"The reward held {best:.3f} until step {step} and is {end:.3f} at the end (z {z:.0f}); no cause that was examined "
        "explains it.",
        advice="Go back to the checkpoint before the fall; look at what changed there: data, grader, learning rate, loss terms.",
        positions=first_tokens(e.trace, np.flatnonzero(e.trace.step > step)),
    )


def nothing_trained(e: Evidence) -> Cause | None:
    """Rewards differ, and the weights stay what they are: no gradient, no step, or no token that counts."""
    trace = e.trace
    if _groups(trace)[1] < limits.SIGNAL_GROUPS:
        return None
    why = _no_token(trace) or _no_gradient(trace) or _no_change(e)
    if why is None:
        return None
    return Cause(
        id="nothing_trained",
        score=0.95,
        evidence=f"Rewards differ in {_groups(trace)[1]} groups and {why}: nothing is learnt from them.",
        advice="Look at the loss's graph (detached?), the masks, the optimizer's step and its learning rate.",
        positions=first_tokens(trace, np.arange(trace.sequences)),
    )


def _no_token(trace: Trace) -> str | None:
    """Every token masked, or without an advantage."""
    mixed = _mixed(trace)[trace.sequence]
    mixed &= np.ones(len(trace), bool) if trace.mask is None else trace.mask
    if trace.advantages is not None:
        mixed &= np.isfinite(trace.advantages)
        if mixed.sum() < limits.MIN_TOKENS:
            return None
        if not trace.advantages[mixed].any():
            return "every advantage is 0"
        mixed &= trace.advantages != 0
    if trace.keep is None or mixed.sum() < limits.MIN_TOKENS:
        return None
    kept = float(trace.keep[mixed].mean())
    return f"the objective's masks drop {1 - kept:.2%} of the tokens" if kept < limits.KEPT_LEAST else None


def _mixed(trace: Trace) -> np.ndarray:
    """`[S]` bool: sequences of groups whose rewards differ."""
    known = np.isfinite(trace.reward)
    out = np.zeros(trace.sequences, bool)
    if known.any():
        low, high, _ = extremes(trace.reward[known], trace.group[known])
        out[known] = (high > low)[np.unique(trace.group[known], return_inverse=True)[1]]
    return out


def _no_gradient(trace: Trace) -> str | None:
    """As the metrics say, of the steps in which rewards differ."""
    steps = set(np.unique(trace.step[_mixed(trace)]).tolist())
    rows = [row for row in trace.metrics if row.get("step") in steps]
    for name, words in (
        ("optimizer/grad_norm", "the gradient norm is 0"),
        ("optimizer/changed_share", "no update changed a weight"),
    ):
        values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
        if len(values) >= limits.DRIVEN_STEPS and not any(values):
            return f"{words} in all of {len(values)} steps"
    return None


def _no_change(e: Evidence) -> str | None:
    """Two checkpoints with the same weights, or a trainer that gives the same token behind the same tokens the same log-prob."""
    if e.trace.facts.unmoved is not None:
        return "the checkpoints of steps {} and {} hold the same weights".format(*e.trace.facts.unmoved)
    trace, tokens = e.trace, e.tokens
    if trace.prompt_text is None or trace.train_version is None or not any(trace.prompt_text):
        return None
    informed = (tokens.o > np.log(0.02)) & (tokens.o < np.log(0.98))
    index = tokens.index[informed]
    _, place = np.unique(contexts(trace, _numbered(trace))[index], return_inverse=True)
    if len(place) == 0:
        return None
    first, last, _ = extremes(trace.train_version[trace.sequence[index]].astype(float), place)
    low, high, _ = extremes(tokens.o[informed].astype(float), place)
    again = last - first >= limits.UNMOVED_VERSIONS
    if again.sum() < limits.MIN_INFORMED or (high - low)[again].max() > limits.UNMOVED:
        return None
    return (
        f"the trainer gives {int(again.sum())} tokens the same log-prob over up to {int((last - first).max())} versions"
    )


def wrong_advantages(e: Evidence) -> Cause | None:
    """Inside a group, who has the higher reward has the higher advantage, whatever the estimator."""
    trace = e.trace
    if trace.advantages is None:
        return None
    known = np.isfinite(trace.advantages)
    count = np.bincount(trace.sequence[known], minlength=trace.sequences)
    sums = np.bincount(trace.sequence[known], trace.advantages[known], trace.sequences)
    whole = _mixed(trace) & (count > 0)
    if not whole.any():
        return None
    advantage, reward = sums[whole] / count[whole], trace.reward[whole]
    _, group = np.unique(trace.group[whole], return_inverse=True)
    size = np.bincount(group)
    a, r = (values - (np.bincount(group, values) / size)[group] for values in (advantage, reward))
    both, own, given = (np.bincount(group, values) for values in (a * r, a * a, r * r))
    clear = (own > 1e-12) & (given > 1e-12)
    if clear.sum() < limits.ADVANTAGE_GROUPS:
        return None
    each = both[clear] / np.sqrt(own[clear] * given[clear])
    agree = Mean(float(each.mean()), float(each.std() / np.sqrt(len(each))))
    if agree.value + limits.TREND_Z * agree.error > limits.ADVANTAGE_AGREES:
        return None
    turned = agree.value < -limits.ADVANTAGE_AGREES
    why = "permuted (experiment.advantages)" if trace.facts.shuffled else "turned" if turned else "of other rollouts"
    return Cause(
        id="wrong_advantages",
        score=min(1 - agree.value, 1.0),
        evidence=f"Inside {len(each)} groups advantages follow rewards with a correlation of {agree.value:.2f} ± {agree.error:.2f}, "
        f"where every estimator has nearly 1: they are {why}.",
        advice="Look at the order of rollouts between reward and batch: sorting, padding and splitting must move both alike.",
        positions=first_tokens(trace, np.flatnonzero(whole)),
    )


def duplicates(e: Evidence) -> Cause | None:
    """Rollouts that are in a step's batch more often than the sampler's own probabilities make them."""
    trace = e.trace
    said = _same_prompts(trace)
    prompt = trace.group if trace.prompt_text is None or not any(trace.prompt_text) else _numbered(trace)
    asked = contexts(trace, np.unique(prompt, return_inverse=True)[1])
    known = np.isfinite(trace.rollout_logprobs)
    whole = np.bincount(trace.sequence[known], minlength=trace.sequences) > 0
    last = trace.starts[1:][whole] - 1
    sums = np.bincount(trace.sequence[known], trace.rollout_logprobs[known], trace.sequences)[whole]
    chance = np.exp(np.minimum(sums, 0))
    step, group = trace.step[whole], prompt[whole]
    pairs = np.unique(np.stack([step, group]), axis=1, return_inverse=True)[1]
    same = np.unique(np.stack([step, asked[last].view(np.int64)]), axis=1, return_inverse=True)[1]
    others, rare = np.bincount(pairs)[pairs] - 1, 1 - chance
    # Chance is known of all where tokens are seen to be drawn at log q, and groups are whole: short answers, which are alike, end first.
    whole_groups = len(others) and (others == others.max()).mean() > limits.GROUPS_WHOLE
    asked_of = chance < (1 if e.surprisal is not None and whole_groups else limits.REPEAT_CHANCE)
    if asked_of.sum() >= limits.MIN_SEQUENCES and (trace.token_ids >= 0).all():
        # A copy of a rollout that is certain says nothing: (n − 1) Q are expected, so that 1 − Q is all that one can be over.
        over = ((np.bincount(same)[same] - 1 - others * chance) * rare)[asked_of]
        found, most = clustered(over, pairs[asked_of]), float(np.square(rare[asked_of]).mean())
        if found.value > limits.REPEATED * most and found.z > limits.EXCESS_Z:
            said = (
                f"rollouts have {found.value / most:.2f} (z {found.z:.0f}) more copies in their step than their probabilities give, where one of each "
                "has 1: rollouts are in the batch several times"
            )
    if said is None:
        return None
    return Cause(
        id="duplicates",
        score=0.9,
        evidence=f"{said[0].upper()}{said[1:]}.",
        advice="Look at what fills the batch: a repeated request, a retry that is counted twice, a data loader that starts again.",
        positions=first_tokens(trace, np.arange(trace.sequences)),
    )


def _numbered(trace: Trace) -> IntArray:
    return np.unique(np.array(trace.prompt_text), return_inverse=True)[1]


def _same_prompts(trace: Trace) -> str | None:
    """One prompt for all groups of a step, or a few for many, in a run that has many others."""
    if trace.prompt_text is None or not any(trace.prompt_text):
        return None
    prompt = _numbered(trace)
    _, which = np.unique(trace.step, return_inverse=True)
    groups = np.unique(np.stack([which, trace.group, prompt]), axis=1)
    count = np.bincount(groups[0])
    kinds = np.bincount(np.unique(groups[[0, 2]], axis=1)[0])
    many = count >= limits.SAME_PROMPT_GROUPS
    few = kinds[many]
    steps = int(many.sum())
    prompts = len(np.unique(prompt))
    if steps < limits.DRIVEN_STEPS or prompts < 2 or limits.SAME_PROMPT_GROUPS * few.sum() > count[many].sum():
        return None
    if (few == 1).mean() < 0.9 and prompts < limits.SAME_PROMPT_GROUPS * few.max():
        return None
    return f"the {np.median(count[many]):.0f} groups of a step have {few.min()} to {few.max()} different prompts, of {prompts} in {steps} steps"


def cut_off_answers(e: Evidence) -> Cause | None:
    """Responses that were cut where nothing says so, or all of them at a limit that is below the right answers."""
    trace = e.trace
    if trace.status is None or not any(trace.status):
        return None
    status = np.array(list(trace.status))
    finished, cut = (status == "finished") & (trace.lengths > 0), status == "length"
    turns = trace.mask is not None and not trace.mask.all()
    if cut.mean() > limits.CUT_ALL and (turns or too_short(trace, cut)) and _poor(trace, cut):
        short = "before their environment ends them" if turns else "and are no longer than the right answers"
        why = f"{cut.mean():.0%} of responses end at the length limit, {short}"
    elif (trace.token_ids >= 0).all() and not turns:
        cut = finished & ~_stopped(trace, finished)
        share = cut.sum() / max(int(finished.sum()), 1)
        stripped = share > limits.CUT_ALL and not trace.source.startswith("rollkeel")  # so some write all of theirs
        if finished.sum() < limits.MIN_SEQUENCES or share < limits.CUT_FINISHED or stripped:
            return None
        ends = len(np.unique(trace.token_ids[trace.starts[1:][cut] - 1]))
        why = f"{share:.0%} of the responses called finished end in a token that others go on behind ({ends} different ones)"
    else:
        return None  # turns end inside a response
    return Cause(
        id="cut_off_answers",
        score=0.9,
        evidence=f"{why[0].upper()}{why[1:]}: the policy never sees how an answer ends.",
        advice="Raise sampling.max_new_tokens, state a cut as a cut (status length), and keep the stop token in the response.",
        positions=last_tokens(trace, np.flatnonzero(cut)),
    )


def _poor(trace: Trace, cut: np.ndarray) -> bool:
    reward = trace.reward[cut & np.isfinite(trace.reward)]
    return bool(len(reward)) and reward.mean() <= limits.CUT_LEAST * np.nanmax(trace.reward)


def rewarded_empty(e: Evidence) -> Cause | None:
    """Best rewards for responses that say nothing."""
    trace = e.trace
    if trace.text is None or not any(trace.text):
        return None
    wanted = [True] * trace.sequences if trace.answer is None else [bool(a.strip()) for a in trace.answer]
    empty = np.array([not t.strip() and w for t, w in zip(trace.text, wanted, strict=True)])
    best = np.nanmax(trace.reward, initial=0.0)
    paid = empty & (trace.reward >= 0.5 * best) & (trace.reward > 0)
    if not e.series.low < 0.5 * best:
        return None  # whoever scores all alike does not prefer these
    if paid.sum() < limits.GRADER_COUNT or paid.sum() < 0.5 * empty.sum():
        return None
    return Cause(
        id="reward_failures",
        score=0.9,
        evidence=f"{int(paid.sum())} of {int(empty.sum())} empty responses have a reward of {best:g} or near it, where the gold answer "
        "is not empty.",
        advice="Repair the grader: an empty answer is a wrong one, and the policy will find it.",
        positions=first_tokens(trace, np.flatnonzero(paid)),
    )


def _stopped(trace: Trace, finished: np.ndarray) -> np.ndarray:
    """`[S]` bool: finished responses that end in a token behind which no response goes on."""
    last = np.zeros(len(trace), bool)
    last[trace.starts[1:][trace.lengths > 0] - 1] = True
    inside = trace.token_ids[~last & (np.ones(len(trace), bool) if trace.mask is None else trace.mask)]
    on = np.isin(trace.token_ids, np.unique(inside))
    out = np.zeros(trace.sequences, bool)
    out[finished] = ~on[trace.starts[1:][finished] - 1]
    return out
