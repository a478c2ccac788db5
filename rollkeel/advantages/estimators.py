"""How rewards of a group become credit. A group whose rewards are all equal, or with one member, gets exactly 0, but for
estimators of `OVER_BATCH`, which compare with the batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollkeel import plugins
from rollkeel.errors import BadInput, NonFinite, OwnCodeBroke, nearest

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
    weighted: np.ndarray
    """The group's mean, each reward weighted by its rollout's length."""
    lengths: np.ndarray
    """Sampled tokens of each rollout."""
    index: np.ndarray
    """int64, 0-based number of the rollout's group."""
    equal: np.ndarray
    """True in groups that teach nothing: all rewards equal, or one member."""

    @property
    def centred(self) -> np.ndarray:
        return self.rewards - self.mean


Estimator = Callable[[Groups], np.ndarray]
"""Statistics of `[R]` rollouts → their advantages `[R]`; where all rewards of a group are equal, 0 is taken instead."""


def compute(name: str, rewards: Any, group_ids: Any, lengths: Any = None) -> np.ndarray:
    """Advantages of a batch of rollouts.

    Args: `rewards`: `[R]` finite numbers; `group_ids`: `[R]` integers, equal for rollouts of one prompt occurrence, in any
    order; `lengths`: `[R]` sampled tokens of each, ≥ 1 (1 each when None). Array-likes, CPU tensors included. Rollouts without
    a reward must have been left out.
    Returns: `[R]` float64, with the mean and std over a group (`n` members) or over the whole batch:

    * `grpo`: (R − mean) / (std + 1e-6), unbiased std of the group (Shao et al. 2024).
    * `dr_grpo`: R − mean (Liu et al. 2025).
    * `rloo`: R − mean of the *other* members = n/(n−1)·(R − mean) (Ahmadian et al. 2024).
    * `batch_std`: (R − mean) / (std of all rewards of the batch + 1e-6) (Liu et al. 2025, "Lite PPO").
    * `reinforce_plus_plus`: (R − mean) / (std over the batch of R − mean, + 1e-6): the variant with group baseline of
      REINFORCE++ (Hu et al. 2025); without a baseline, groups of equal rewards would not get 0.
      It whitens over rollouts and takes no mean off, where verl whitens over tokens: the next two.
    * `reinforce_plus_plus_tokens`: R − mean, whitened over all tokens of the batch (each rollout counts as often as it has
      tokens; the mean over tokens is taken off, so a group of equal rewards need not get 0): verl's
      `reinforce_plus_plus_baseline`.
    * `reinforce_plus_plus_no_baseline`: R, whitened over all tokens of the batch: REINFORCE++ itself, verl's
      `reinforce_plus_plus` with its γ = 1.
    * `opo`: R − Σ|y|·R / Σ|y| over the group, the optimal baseline when gradients grow with length (Hao et al. 2025).
    * `gpg`: α·(R − mean), α = rollouts / rollouts in groups whose rewards differ (Chu et al. 2025).
    * `grpo_passk`: (largest − second largest reward) / (std + 1e-6) for the group's best rollout, 0 for the others
      (Walder & Karkhanis 2025, as in verl).
    * `pass@2`, `pass@4`, `pass@8`: credit for a group of n rewards 0 or 1, m of them 0, whose answers are drawn k at a time
      and paid as one (Chen et al. 2025, "Pass@k training", eqs. 12–15): with P = 1 − C(m,k)/C(n,k) and σ = √(P(1−P)), (1 − P)/σ
      for a right answer and (1 − P − C(m−1,k−1)/C(n−1,k−1))/σ for a wrong one; 0 where P is 0 or 1, or n < k.
    * `maxrl`: (R − mean) / mean, 0 where the mean is 0; rewards ≥ 0 (Tajwar et al. 2026).

    Raises `BadInput` for an unknown name, different lengths, or negative rewards under `maxrl`, others than 0 and 1 under
    `pass@k`; `NonFinite` for a reward
    that is NaN or infinite.
    """
    groups = _group(rewards, group_ids, lengths)
    # Exactly 0 and not a rounding residue: R − mean of equal rewards need not vanish in floating point.
    still = groups.rewards.min() == groups.rewards.max() if name in OVER_BATCH and len(groups.rewards) else groups.equal
    return np.where(still, 0.0, _credit(name, find(name), groups))


def find(name: str) -> Estimator:
    """Estimator `name`, or somebody's own `file.py:name`, tried on two groups. Raises `BadInput` for an unknown or broken one."""
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    if not plugins.is_own(name):
        raise BadInput(f"advantages.name {name!r}: unknown{nearest(name, list(ESTIMATORS))}; your own is file.py:name")
    own = plugins.load(name, "advantages.name", "a function of (groups)", lambda f: plugins.takes(f, 1))
    _credit(name, own, _group([0.0, 1.0, 1.0, 1.0], [0, 0, 1, 1]))
    return own


def _credit(name: str, estimator: Estimator, groups: Groups) -> np.ndarray:
    own = plugins.is_own(name)
    came = plugins.tried(lambda: estimator(groups), f"advantages.name {name!r}") if own else estimator(groups)
    try:
        credit = np.asarray(came, dtype=np.float64)
    except (TypeError, ValueError):
        credit = np.empty(0)
    if credit.shape != groups.rewards.shape or not np.isfinite(credit).all():
        shape = f" of shape {list(credit.shape)}" if isinstance(came, np.ndarray) else ""
        raise (OwnCodeBroke if own else BadInput)(
            f"advantages.name {name!r}: expected {len(groups.rewards)} finite numbers, one for each rollout, got"
            f" {' '.join(repr(came).split()):.80}{shape}"
        )
    return credit


def group_metrics(rewards: Any, group_ids: Any) -> dict[str, float]:
    """`reward/mean`, `reward/std` (unbiased, over rollouts), `groups/count`, `groups/zero_variance` (number of groups whose
    rewards are all equal, those with one member included). Arguments and errors as in `compute`; no rollouts give only counts.
    """
    groups = _group(rewards, group_ids)
    first = np.unique(np.asarray(group_ids), return_index=True)[1]
    metrics = {"groups/count": float(len(first)), "groups/zero_variance": float(groups.equal[first].sum())}
    if len(groups.rewards):
        metrics["reward/mean"] = float(groups.rewards.mean())
        metrics["reward/std"] = _std(groups.rewards)
    return metrics


def shuffle(advantages: Any, seed: int, step: int) -> np.ndarray:
    """The same `[R]` advantages dealt to other rollouts of the batch: the control in which nothing can be learnt.

    The permutation is a function of (`seed`, `step`, R) alone.
    """
    values = np.asarray(advantages, dtype=np.float64)
    return values[np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, step]))).permutation(len(values))]


def one_sided(advantages: Any, only: str) -> np.ndarray:
    """`[R]` advantages with those of the other sign than `only` (`negative`, `positive`; anything else keeps both) set to 0."""
    values = np.asarray(advantages, dtype=np.float64)
    if only == "negative":
        return np.minimum(values, 0.0)
    return np.maximum(values, 0.0) if only == "positive" else values


def _group(rewards: Any, group_ids: Any, lengths: Any = None) -> Groups:
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
    tokens = np.ones(len(values)) if lengths is None else np.asarray(lengths, dtype=np.float64)
    if tokens.shape != values.shape or (tokens < 1).any():
        raise BadInput(
            f"advantages: expected a length ≥ 1 per reward, got shape {list(tokens.shape)}; leave empty ones out"
        )
    weighted = np.bincount(index, values * tokens, count) / np.bincount(index, tokens, count)
    return Groups(
        rewards=values,
        mean=mean[index],
        size=size[index],
        std=std[index],
        weighted=weighted[index],
        lengths=tokens,
        index=index,
        equal=(low == high)[index],
    )


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


def _whitened(values: np.ndarray, groups: Groups) -> np.ndarray:
    """`[R]`, less their mean and over their std as if each stood there once per token; verl adds 1e-8 to the variance."""
    tokens = groups.lengths
    mean = np.average(values, weights=tokens)
    variance = (tokens * (values - mean) ** 2).sum() / max(tokens.sum() - 1, 1)
    return (values - mean) / np.sqrt(variance + 1e-8)


def _reinforce_plus_plus_tokens(groups: Groups) -> np.ndarray:
    return _whitened(groups.centred, groups)


def _reinforce_plus_plus_no_baseline(groups: Groups) -> np.ndarray:
    return _whitened(groups.rewards, groups)


def _opo(groups: Groups) -> np.ndarray:
    return groups.rewards - groups.weighted


def _gpg(groups: Groups) -> np.ndarray:
    return groups.centred * len(groups.rewards) / max((~groups.equal).sum(), 1)


def _grpo_passk(groups: Groups) -> np.ndarray:
    out = np.zeros(len(groups.rewards))
    for group in np.unique(groups.index):
        members = np.flatnonzero(groups.index == group)
        if len(members) > 1:
            *_, second, best = members[np.argsort(groups.rewards[members], kind="stable")]
            gap = groups.rewards[best] - groups.rewards[second]
            out[best] = gap / (groups.std[best] + EPSILON)
    return out


def _pass_at(k: int, groups: Groups) -> np.ndarray:
    if not np.isin(groups.rewards, (0.0, 1.0)).all():
        odd = groups.rewards[~np.isin(groups.rewards, (0.0, 1.0))][0]
        raise BadInput(f"advantages pass@{k}: expected rewards of 0 or 1, got {odd}; choose another estimator")
    table: dict[tuple[int, int], tuple[float, float]] = {}
    wrong = np.rint(groups.size * (1 - groups.mean)).astype(int)
    out = np.zeros(len(groups.rewards))
    for i, (n, m, reward) in enumerate(zip(groups.size.astype(int), wrong, groups.rewards, strict=True)):
        if (n, m) not in table:
            passed = 1 - math.comb(m, k) / math.comb(n, k) if n >= k else 0.0
            spread = math.sqrt(passed * (1 - passed))
            with_this = math.comb(m - 1, k - 1) / math.comb(n - 1, k - 1) if m and spread else 0.0
            table[n, m] = ((1 - passed - with_this) / spread, (1 - passed) / spread) if spread else (0.0, 0.0)
        out[i] = table[n, m][int(reward)]
    return out


ESTIMATORS: Mapping[str, Estimator] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
    "batch_std": _batch_std,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "maxrl": _maxrl,
    "opo": _opo,
    "gpg": _gpg,
    "grpo_passk": _grpo_passk,
    "reinforce_plus_plus_tokens": _reinforce_plus_plus_tokens,
    "reinforce_plus_plus_no_baseline": _reinforce_plus_plus_no_baseline,
    **{f"pass@{k}": functools.partial(_pass_at, k) for k in (2, 4, 8)},
}
"""Name → estimator over `Groups`."""
OVER_BATCH = frozenset({"reinforce_plus_plus_tokens", "reinforce_plus_plus_no_baseline"})
"""Those under which a group of equal rewards need not get 0: only a batch of equal rewards does."""
