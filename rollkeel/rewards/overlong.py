"""Soft overlong punishment: answers that come near the length limit lose reward gradually instead of all at once."""

from __future__ import annotations

import numpy as np

from rollkeel.errors import BadInput


def overlong_penalty(lengths: np.ndarray, limit: int, buffer: int, penalty: float = 1.0) -> np.ndarray:
    """What is added to each reward: `[R]` float64 in [−penalty, 0] (DAPO, Yu et al. 2025, eq. 13).

        0                                      |y| ≤ limit − buffer
        penalty · (limit − buffer − |y|) / buffer     up to |y| = limit
        −penalty                               beyond

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
    return 0.0 - penalty * np.minimum(over / buffer, 1.0)
