"""Right, half right, wrong, and what a model may write besides."""

import pytest

from rollkeel.scaffold.grader import example


@pytest.mark.parametrize(
    ("text", "reward"), [("1234", 1.0), (" 1234\n", 1.0), ("1299", 0.5), ("9999", 0.0), ("", 0.0), ("12345678", 0.5)]
)
def test_rewards_by_hand(text: str, reward: float) -> None:
    assert example(text, "1234", {})[0] == reward
