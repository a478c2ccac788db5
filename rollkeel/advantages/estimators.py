"""How rewards of a group become credit. A group whose rewards are all equal, or with one member, gets exactly 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollkeel import plugins
from rollkeel.errors import BadInput, NonFinite, nearest

EPSILON = 1e-6
"""Added to every standard deviation."""


@dataclass(frozen=True)
class Groups:
    """What an estimator sees: statistics of each rollout's own group, all `[R]` float64 but `equal` (bool)."""

    rewards: np.ndarray
    mean: np.ndarray
    size: np.ndarray
    std: np.ndarray
    """Unbiased; 0 for one member."""
    equal: np.ndarray
    """True in groups that teach nothing: all rewards equal, or one member."""

    @property
    def centred(self) -> np.ndarray:
        return self.rewards - self.mean


Estimator = Callable[[Groups], np.ndarray]
"""Statistics of `[R]` rollouts → their advantages `[R]`; where all rewards of a group are equal, 0 is taken instead."""


def compute(name: str, rewards: Any, group_ids: Any) -> np.ndarray:
    """Advantages of a batch of rollouts.

    Args: `rewards`: `[R]` finite numbers; `group_ids`: `[R]` integers, equal for rollouts of one prompt occurrence, in any
    order. Array-likes, CPU tensors included. Rollouts without a reward must have been left out.
    Returns: `[R]` float64, with the mean and std over a group (`n` members) or over the whole batch:

    * `grpo`: (R − mean) / (std + 1e-6), unbiased std of the group (Shao et al. 2024).
    * `dr_grpo`: R − mean (Liu et al. 2025).
    * `rloo`: R − mean of the *other* members = n/(n−1)·(R − mean) (Ahmadian et al. 2024).
    * `batch_std`: (R − mean) / (std of all rewards of the batch + 1e-6) (Liu et al. 2025, "Lite PPO").
    * `reinforce_plus_plus`: (R − mean) / (std over the batch of R − mean, + 1e-6): the variant with group baseline of
      REINFORCE++ (Hu et al. 2025); without a baseline, groups of equal rewards would not get 0.
    * `maxrl`: (R − mean) / mean, 0 where the mean is 0; rewards ≥ 0 (Tajwar et al. 2026).

    Raises `BadInput` for an unknown name, different lengths, or negative rewards under `maxrl`; `NonFinite` for a reward
    that is NaN or infinite.
    """
    groups = _group(rewards, group_ids)
    # Exactly 0 and not a rounding residue: R − mean of equal rewards need not vanish in floating point.
    return np.where(groups.equal, 0.0, _credit(name, find(name), groups))


def find(name: str) -> Estimator:
    """Estimator `name`, or somebody's own `file.py:name`, tried on two groups. Raises `BadInput` for an unknown or broken one."""
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    if not plugins.is_own(name):
        raise BadInput(f"advantages.name {name!r}: unknown{nearest(name, list(ESTIMATORS))}; your own is file.py:name")
    own = plugins.load(name, "advantages.name", "a function of (groups)", lambda f: plugins.takes(f, 1))
    plugins.tried(lambda: _credit(name, own, _group([0.0, 1.0, 1.0, 1.0], [0, 0, 1, 1])), f"advantages.name {name!r}")
    return own


def _credit(name: str, estimator: Estimator, groups: Groups) -> np.ndarray:
    credit = np.asarray(estimator(groups), dtype=np.float64)
    if credit.shape != groups.rewards.shape or not np.isfinite(credit).all():
        raise BadInput(
            f"advantages.name {name!r}: expected {len(groups.rewards)} finite numbers, one for each rollout, got {credit!r:.80}"
        )
    return credit


def group_metrics(rewards: Any, group_ids: Any) -> dict[str, float]:
    """`reward/mean`, `reward/std` (unbiased, over rollouts), `groups/count`, `groups/zero_variance` (number of groups whose
    rewards are all equal, those with one member included). Arguments and errors as in `compute`; no rollouts give only counts.
    """
    groups = _group(rewards, group_ids)
    first = np.unique(np.asarray(group_ids), return_index=True)[1]
    found = {"groups/count": float(len(first)), "groups/zero_variance": float(groups.equal[first].sum())}
    if len(groups.rewards):
        found["reward/mean"] = float(groups.rewards.mean())
        found["reward/std"] = _std(groups.rewards)
    return found


def shuffle(advantages: Any, seed: int, step: int) -> np.ndarray:
    """The same `[R]` advantages dealt to other rollouts of the batch: the control in which nothing can be learnt.

    The permutation is a function of (`seed`, `step`, R) alone.
    """
    values = np.asarray(advantages, dtype=np.float64)
    return values[np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, step]))).permutation(len(values))]


def one_sided(advantages: Any, only: str) -> np.ndarray:
    """`[R]` advantages with those of the other sign than `only` (`negative`, `positive`; `all` keeps both) set to 0."""
    values = np.asarray(advantages, dtype=np.float64)
    if only == "negative":
        return np.minimum(values, 0.0)
    return np.maximum(values, 0.0) if only == "positive" else values


def _group(rewards: Any, group_ids: Any) -> Groups:
    values, ids = np.asarray(rewards, dtype=np.float64), np.asarray(group_ids)
    if values.ndim != 1 or values.shape != ids.shape:
        raise BadInput(
            f"advantages: expected one group id per reward, got shapes {list(values.shape)} and {list(ids.shape)};"
            " pass flat arrays over rollouts"
        )
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise NonFinite(
            f"advantages: expected finite rewards, got {values[bad[0]]} for rollout {bad[0]} of the batch (group"
            f" {ids[bad[0]]}); a grader that cannot score must report a failure, not a number"
        )
    index = np.unique(ids, return_inverse=True)[1]
    count = int(index.max()) + 1 if len(index) else 0
    size = np.bincount(index, minlength=count).astype(np.float64)
    mean = np.bincount(index, values, count) / size
    squares = np.bincount(index, (values - mean[index]) ** 2, count)
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, index, values)
    np.maximum.at(high, index, values)
    std = np.sqrt(squares / np.maximum(size - 1, 1))
    return Groups(values, mean[index], size[index], std[index], (low == high)[index])


def _std(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def _grpo(groups: Groups) -> np.ndarray:
    return groups.centred / (groups.std + EPSILON)


def _dr_grpo(groups: Groups) -> np.ndarray:
    return groups.centred


def _rloo(groups: Groups) -> np.ndarray:
    return groups.centred * groups.size / np.maximum(groups.size - 1, 1)


def _batch_std(groups: Groups) -> np.ndarray:
    return groups.centred / (_std(groups.rewards) + EPSILON)


def _reinforce_plus_plus(groups: Groups) -> np.ndarray:
    return groups.centred / (_std(groups.centred) + EPSILON)


def _maxrl(groups: Groups) -> np.ndarray:
    if len(groups.rewards) and groups.rewards.min() < 0:
        raise BadInput(f"advantages maxrl: expected rewards ≥ 0, got {groups.rewards.min()}; choose another estimator")
    return groups.centred / np.where(groups.mean > 0, groups.mean, 1.0)


ESTIMATORS: Mapping[str, Estimator] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
    "batch_std": _batch_std,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "maxrl": _maxrl,
}
"""Name → estimator over `Groups`."""
