"""Do the alarms come before the fall, stay silent where nothing falls, and does the gap move first?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rollkeel.lab.claims import COMMON
from rollkeel.lab.preset import NOT_REPRODUCED, REPRODUCED, UNDECIDED, Arm, Finding, Preset, Readings, Rows
from rollkeel.lab.presets import bases
from rollkeel.lab.presets.bases import arm
from rollkeel.record.alarms import REWARD_SEEN, WINDOW, alarms_of

COLLAPSING = "grpo, fp8, 16 steps old"
_FALLEN, _MOVED = 0.2, 2.0
_ALARM, _FALL = "first alarm (step)", "reward 20 % below its best ten steps (step)"
_GAP, _ENTROPY, _GRADIENT = "gap doubled (step)", "entropy doubled or halved (step)", "gradient norm doubled (step)"
_BEFORE, _SILENT = 0.9, 29 / 30


def first_alarm(rows: Rows) -> float:
    """Step of a run's first alarm; infinity without one, NaN for a run without rows."""
    if not rows:
        return float("nan")
    return float(min((alarm.step for alarm in alarms_of(rows)), default=np.inf))


def first_fall(rows: Rows) -> float:
    """First step whose ten-step mean reward is 20 % below the best such mean so far; infinity where none is."""
    steps, means = _over_ten(rows, "reward/mean", np.mean)
    best = np.maximum.accumulate(means) if len(means) else means
    return _first(steps, (best > REWARD_SEEN) & (means < (1 - _FALLEN) * best))


def first_move(key: str, *, down: bool = False) -> Callable[[Rows], float]:
    """First step whose ten-step median of a metric is twice the run's first such median, or with `down` half of it."""

    def read(rows: Rows) -> float:
        steps, levels = _over_ten(rows, key, np.median)
        start = levels[0] if len(levels) else np.nan
        return _first(steps, (levels > _MOVED * start) | (down & (levels * _MOVED < start)))

    return read


def _over_ten(rows: Rows, key: str, of: Callable[..., np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    found = [(row["step"], row[key]) for row in rows if row["step"] > 0 and key in row]
    if len(found) < WINDOW:
        return np.zeros(0), np.zeros(0)
    steps, values = np.array(found).T
    return steps[WINDOW - 1 :], of(np.lib.stride_tricks.sliding_window_view(values, WINDOW), axis=1)


def _first(steps: np.ndarray, there: np.ndarray) -> float:
    if not len(steps):
        return float("nan")
    return float(steps[there][0]) if there.any() else float("inf")


def _lead(later: np.ndarray, earlier: np.ndarray) -> str:
    """Median of `later` − `earlier` over runs that have both, with how many never had the later."""
    both = np.isfinite(later) & np.isfinite(earlier)
    never = int((np.isinf(later) & np.isfinite(earlier)).sum())
    middle = f"{np.median((later - earlier)[both]):+.0f} steps" if both.any() else "no run has both"
    return f"{middle}, {never} never" if never else middle


def _enough(those: np.ndarray, of: np.ndarray, share: float) -> bool:
    """Whether this share of the runs in `of` is among `those`; none of no runs is not enough."""
    return bool(of.any()) and bool(those.sum() >= share * of.sum() - 1e-9)


def _verdict(those: np.ndarray, of: np.ndarray, share: float) -> str:
    """A count of runs is its own verdict, from ten runs on."""
    return UNDECIDED if of.sum() < 10 else REPRODUCED if _enough(those, of, share) else NOT_REPRODUCED


def _judge(readings: Readings) -> Sequence[Finding]:
    alarm, fall = readings[_ALARM], readings[_FALL][COLLAPSING]
    fell = np.isfinite(fall)
    before = (alarm[COLLAPSING] < fall) & fell
    healthy, lost = (
        np.concatenate([steps for name, steps in readings[key].items() if name != COLLAPSING])
        for key in (_ALARM, _FALL)
    )
    known = ~np.isnan(healthy)
    # A run of a healthy configuration may fall and recover: an alarm there is no false one.
    right = known & (np.isposinf(healthy) | np.isfinite(lost))
    moves = {name: readings[name][COLLAPSING] for name in (_GAP, _ENTROPY, _GRADIENT)}
    others = np.minimum(moves[_ENTROPY], moves[_GRADIENT])
    gap_first, alarm_first = (moves[_GAP] < others) & fell, (alarm[COLLAPSING] < others) & fell
    tripped = {
        name: sum(int(np.isfinite(steps).sum()) for key, steps in readings[name].items() if key != COLLAPSING)
        for name in moves
    }
    return [
        Finding(
            claim="in nine of ten runs that collapse the alarm comes before the reward is 20 % below its peak",
            source="rollkeel, after the stability study, Appendix D",
            numbers=f"{before.sum()} of {fell.sum()} runs; reward falls {_lead(fall, alarm[COLLAPSING])} after the alarm",
            verdict=_verdict(before, fell, _BEFORE),
            met=_enough(before, fell, _BEFORE),
        ),
        Finding(
            claim="in 29 of 30 runs of healthy configurations there is no alarm without a fall of the reward by 20 %",
            source="rollkeel",
            numbers=f"{right.sum()} of {known.sum()} runs; {np.isposinf(healthy).sum()} silent, {np.isfinite(lost).sum()} fell",
            verdict=_verdict(right, known, _SILENT),
            met=_enough(right, known, _SILENT),
        ),
        Finding(
            claim="the gap moves before entropy and gradient norm do",
            source="stability study, Appendix D",
            numbers=f"doubled first in {gap_first.sum()} of {fell.sum()} runs; entropy {_lead(moves[_ENTROPY], moves[_GAP])}, "
            f"gradient norm {_lead(moves[_GRADIENT], moves[_GAP])} after it",
            verdict=_verdict(gap_first, fell, _BEFORE),
        ),
        Finding(
            claim="the alarm leads the first anomaly of entropy and of gradient norm",
            source="rollkeel, after the stability study, Appendix D",
            numbers=f"entropy {_lead(moves[_ENTROPY], alarm[COLLAPSING])}, gradient norm "
            f"{_lead(moves[_GRADIENT], alarm[COLLAPSING])} after the alarm; of {known.sum()} healthy runs the gap alone would have "
            f"warned in {tripped[_GAP]}, entropy in {tripped[_ENTROPY]}, gradient norm in {tripped[_GRADIENT]}",
            verdict=_verdict(alarm_first, fell, _BEFORE),
        ),
    ]


EARLY_WARNING = Preset(
    name="early-warning",
    question="Does the alarm come before a collapse, and never without one?",
    paper="stability study, Appendix D",
    expected="The alarm comes before the reward falls, healthy runs are silent, and the gap moves before entropy and gradients.",
    arms=(
        arm(COLLAPSING, "grpo", *bases.ASYNC_FP8),
        arm("dppo_binary_tv, fp8, 16 steps old", "dppo_binary_tv", *bases.ASYNC_FP8),
        Arm(name="kpop, fp32", words=("run.steps=200",)),
        arm("grpo, fp8", "grpo", *bases.SYNC_FP8),
    ),
    readings={
        _ALARM: first_alarm,
        _FALL: first_fall,
        _GAP: first_move("mismatch/prob_abs_diff"),
        _ENTROPY: first_move("policy/entropy", down=True),
        _GRADIENT: first_move("optimizer/grad_norm"),
        **COMMON,
    },
    judge=_judge,
    seeds=10,
    first_seed=20,
    charts=("reward/mean", "mismatch/prob_abs_diff", "policy/entropy", "optimizer/grad_norm"),
    notes=(
        "Seeds 20 and up: the alarms' rules were set with runs of seeds 0 to 19 in view.",
        "Ten-step means and medians throughout: 128 rollouts have a standard error of 0.04.",
        "An anomaly of one metric is twice, or for entropy also half, its own first ten-step level: a rule as blunt for each.",
        "Rewards of collapsing runs are those of weights 16 steps old, so that every signal of the trainer has a head start.",
    ),
)
PRESETS = (EARLY_WARNING,)
