"""Early warning: what a run's metrics say together before the reward falls.

The signals follow the papers' order of events: the gap between engines grows first, then entropy and gradients move, then
the reward falls (stability study, Appendix D). No signal decides alone, and a falling mask rate is no comfort while the gap
grows (IcePop, Fig. 1). Levels are medians over `WINDOW` steps; growth is against the run's own first `WINDOW` steps.

A pure function of the rows seen: a resumed run that is shown its old rows warns where the whole one would have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WINDOW = 10
"""Steps behind a level: 128 rollouts each have a standard error of 0.04, ten such steps of 0.013."""
TV, TV_GROWTH = 0.02, 1.5
"""Mean abs(o−q) below which no growth matters, and the growth that does: healthy runs shrink it, collapsing ones double it."""
K3, ESS, CORRELATION, BAD_UPDATES = 0.1, 0.8, 0.9, 0.01
"""Levels that each confirm a growing gap: stale or fp8 runs that go on learning stay on the good side of most of them."""
ENTROPY_LEFT, ENTROPY_GROWN, REWARD_SOLVED = 0.1, 1.5, 0.8
"""Shares of the first level; a task that is all but solved may lose its entropy, and dip by a tenth on the way."""
GRADIENT_GROWN, REWARD_LOST, REWARD_SEEN = 4.0, 0.2, 0.05
ERRORS = 5.0
"""Standard errors of the difference of two ten-step means that a fall of the reward must exceed: the deepest of 300 steps
of noise stays below 4.7 in 99 of 100."""

LARGEST = 1e300
"""A number beyond this, infinite or not a number, is left out: it says nothing about levels and would overflow them."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """One warning."""

    kind: str
    """`gap`, `entropy`, `gradient` or `reward`."""
    step: int
    evidence: tuple[str, ...]
    """One line per signal, with its number and its limit."""
    advice: str

    @property
    def line(self) -> str:
        return f"alarm at step {self.step}: {'; '.join(self.evidence)}. {self.advice}"


_ADVICE = {
    "gap": "Engine and trainer drift apart: lower the learning rate or the staleness, or take an objective that bounds the"
    " divergence (dppo_binary_tv); rollkeel doctor RUN names the source.",
    "entropy": "The policy is losing or flooding its entropy without learning: lower the learning rate, or weigh entropy.",
    "gradient": "Gradients have grown several times: lower the learning rate or train.clip_norm.",
    "reward": "The reward falls: go back to an earlier checkpoint; rollkeel doctor RUN ranks the causes.",
}


class Alarms:
    """Sees a run's rows in order and says when something is about to go wrong, once per kind until it has passed."""

    def __init__(self) -> None:
        self._rows: dict[str, list[float]] = {}
        self._raised: dict[str, int] = {}
        self._best = 0.0

    def observe(self, row: Mapping[str, Any]) -> list[Alarm]:
        """The alarms that this step's row raises. Rows without training metrics (step 0) say nothing."""
        step = int(row["step"])
        if step < 1:
            return []
        for key in _KEYS:
            value = row.get(key)
            if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST:
                self._rows.setdefault(key, []).append(float(value))
        raised = []
        for kind, evidence in self._signs():
            if kind not in self._raised:
                raised.append(Alarm(kind=kind, step=step, evidence=tuple(evidence), advice=_ADVICE[kind]))
            self._raised[kind] = step
        for kind, last in list(self._raised.items()):
            if step - last > WINDOW:  # it has passed; the next one is news
                del self._raised[kind]
        return raised

    def _signs(self) -> Iterator[tuple[str, list[str]]]:
        for kind, sign in (
            ("gap", self._gap()),
            ("entropy", self._entropy()),
            ("gradient", self._gradient()),
            ("reward", self._reward()),
        ):
            if sign:
                yield kind, sign

    def _level(self, key: str) -> float | None:
        """Median of the last steps, or None while there are too few."""
        values = self._rows.get(key, [])
        return float(np.median(values[-WINDOW:])) if len(values) >= WINDOW else None

    def _first(self, key: str) -> float | None:
        values = self._rows.get(key, [])
        return float(np.median(values[:WINDOW])) if len(values) >= 2 * WINDOW else None

    def _gap(self) -> list[str]:
        now, first = self._level("mismatch/prob_abs_diff"), self._first("mismatch/prob_abs_diff")
        if now is None or first is None or now < TV or now < TV_GROWTH * first:
            return []
        confirmed = []
        for key, limit, above in (
            ("mismatch/kl_k3", K3, True),
            ("mismatch/ess", ESS, False),
            ("mismatch/pearson", CORRELATION, False),
            ("mask/bad_updates", BAD_UPDATES, True),
        ):
            level = self._level(key)
            if level is not None and (level > limit if above else level < limit):
                confirmed.append(f"{key} {level:.3g} ({'over' if above else 'under'} {limit:g})")
        if not confirmed:
            return []
        blind = self._masks_fall()
        return [f"mean abs(o−q) {now:.3f}, {_times(now, first)}", *confirmed, *blind]

    def _masks_fall(self) -> list[str]:
        """A mask that drops less while the gap grows does not see it."""
        kept, first = self._level("objective/kept"), self._first("objective/kept")
        if kept is None or first is None or first > 1 - 1e-4 or (1 - kept) > 0.5 * (1 - first):
            return []
        return [f"masks drop {1 - kept:.2%}, less than at first ({1 - first:.2%}), while the gap grows"]

    def _entropy(self) -> list[str]:
        now, first = self._level("policy/entropy"), self._first("policy/entropy")
        reward = self._level("reward/mean")
        if now is None or first is None or first <= 0 or reward is None or reward >= REWARD_SOLVED:
            return []
        falling = self._falls(REWARD_LOST / 2)
        if now < ENTROPY_LEFT * first and falling:
            return [f"entropy {now:.3g}, {now / first:.0%} of its first level, at reward {reward:.2f}"]
        if now > ENTROPY_GROWN * first and falling:
            return [f"entropy {now:.3g}, {_times(now, first)}, at reward {reward:.2f}"]
        return []

    def _gradient(self) -> list[str]:
        now, first = self._level("optimizer/grad_norm"), self._first("optimizer/grad_norm")
        if now is None or first is None or now <= GRADIENT_GROWN * first or not self._falls(REWARD_LOST / 2):
            return []
        return [f"gradient norm {now:.3g}, {_times(now, first)}"]

    def _reward(self) -> list[str]:
        if not self._falls(REWARD_LOST):
            return []
        return [f"reward {self._mean_reward():.3f}, {self._fallen():.0%} below its best ten steps ({self._best:.3f})"]

    def _falls(self, share: float) -> bool:
        """Whether the reward is this share below its best, and further than chance puts it there."""
        fallen = self._fallen()
        return fallen > share and fallen * self._best > ERRORS * self._error()

    def _mean_reward(self) -> float:
        values = self._rows.get("reward/mean", [])
        return float(np.mean(values[-WINDOW:])) if len(values) >= WINDOW else 0.0

    def _error(self) -> float:
        """Standard error of the difference of two ten-step means of the reward."""
        spread, count = self._level("reward/std"), self._level("rollout/count")
        return (
            float("inf")
            if spread is None or count is None or count <= 0
            else spread * float(np.sqrt(2 / (WINDOW * count)))
        )

    def _fallen(self) -> float:
        """Share by which the mean reward of the last ten steps is below the best such mean."""
        now = self._mean_reward()
        self._best = max(self._best, now)
        return 1 - now / self._best if self._best > REWARD_SEEN else 0.0


def _times(now: float, first: float) -> str:
    return f"{now / first:.1f} times its first level" if first > 0 else f"first level {first:.3g}"


_KEYS = (
    "reward/mean",
    "reward/std",
    "rollout/count",
    "mismatch/prob_abs_diff",
    "mismatch/kl_k3",
    "mismatch/ess",
    "mismatch/pearson",
    "mask/bad_updates",
    "objective/kept",
    "policy/entropy",
    "optimizer/grad_norm",
)


def alarms_of(rows: Sequence[Mapping[str, Any]]) -> list[Alarm]:
    """Every alarm of a run, from its metrics rows in order."""
    alarms = Alarms()
    return [alarm for row in rows for alarm in alarms.observe(row)]
