"""A penalty of the wrong sign or place teaches length instead of answers. By hand, from DAPO's eq. 13.

Not covered: how the loop adds it (tests/test_loop.py).
"""

from __future__ import annotations

import numpy as np
import pytest

from rollkeel.errors import BadInput
from rollkeel.rewards.shaping import overlong_penalty


def test_the_three_branches_by_hand() -> None:
    """L_max 20, L_cache 4: nothing up to 16, a quarter more per token, all of it at 20 and beyond."""
    lengths = np.array([0, 15, 16, 17, 18, 19, 20, 25])
    assert overlong_penalty(lengths, 20, 4).tolist() == [0, 0, 0, -0.25, -0.5, -0.75, -1, -1]


def test_the_paper_setting() -> None:
    """L_max 20,480 with a cache of 4,096 (DAPO §4.1)."""
    assert overlong_penalty(np.array([16384, 18432, 20480]), 20480, 4096).tolist() == [0, -0.5, -1]


def test_no_buffer_is_no_penalty_and_a_buffer_beyond_the_limit_is_refused() -> None:
    assert overlong_penalty(np.array([5, 20]), 20, 0).tolist() == [0, 0]
    assert overlong_penalty(np.array([0, 10, 20]), 20, 20).tolist() == [0, -0.5, -1]
    for buffer in (-1, 21):
        with pytest.raises(BadInput, match=r"reward\.overlong\.buffer: expected 0 to sampling\.max_new_tokens=20"):
            overlong_penalty(np.array([1]), 20, buffer)
