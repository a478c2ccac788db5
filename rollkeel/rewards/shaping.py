"""What is added to graded rewards before they become credit: the overlong penalty, and KL to the start model."""

from __future__ import annotations

import numpy as np

from rollkeel.errors import BadInput


def overlong_penalty(lengths: np.ndarray, limit: int, buffer: int) -> np.ndarray:
    """What is added to each reward: `[R]` float64 in [−1, 0] (DAPO, Yu et al. 2025, eq. 13).

        0                                |y| ≤ limit − buffer
        (limit − buffer − |y|) / buffer     up to |y| = limit
        −1                               beyond

    `lengths [R]`: response tokens, the stop token included; `limit`: L_max, `sampling.max_new_tokens`; `buffer`: L_cache,
    0 for no penalty at all. Raises `BadInput` for a buffer outside [0, limit].
    """
    if not 0 <= buffer <= limit:
        raise BadInput(
            f"reward.overlong.buffer: expected 0 to sampling.max_new_tokens={limit}, got {buffer}; it is part of the limit"
        )
    over = np.maximum(np.asarray(lengths, dtype=np.float64) - (limit - buffer), 0.0)
    if not buffer:
        return np.zeros_like(over)
    return 0.0 - np.minimum(over / buffer, 1.0)


def shaped(
    rewards: np.ndarray, lengths: np.ndarray, buffer: int, limit: int, kl: np.ndarray | None = None
) -> tuple[np.ndarray, dict[str, float]]:
    """Rewards with all that is added to them, `[R]` float64, and metrics of what was added.

    `rewards [R]`: as graded; `lengths [R]`: response tokens; `buffer` and `limit`: see `overlong_penalty`; `kl [R]`: what each rollout
    loses for leaving the start model, γ·Σ_t KL_t; None for nothing.
    """
    out, metrics = np.asarray(rewards, dtype=np.float64), dict[str, float]()
    added = np.zeros(len(out))
    if buffer:
        penalty = overlong_penalty(lengths, limit, buffer)
        metrics["reward/overlong_penalty"] = abs(float(penalty.mean()))
        metrics["reward/overlong_share"] = float((penalty < 0).mean())
        added += penalty
    if kl is not None:
        metrics["reward/kl_penalty"] = float(kl.mean())
        added -= kl
    if added.any():
        metrics["reward/shaped_mean"] = float((out + added).mean())
    return out + added, metrics
