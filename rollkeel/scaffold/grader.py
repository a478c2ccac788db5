"""A grader: the reward of a response to a row of a file."""

from collections.abc import Mapping
from typing import Any


def example(text: str, answer: str, options: Mapping[str, Any]) -> tuple[float, str]:
    """Reward between 0 and 1, and a line that the rollout keeps: here the share of characters that are in their place.

    `text`: the response; `answer`: the row's answer; `options`: `data.grader_options`. It runs in a process of its own, which is
    killed if it hangs. An exception is a failure of the grader and never a reward of 0.
    """
    read = text.strip()
    same = sum(a == b for a, b in zip(read, answer, strict=False))
    return same / max(len(read), len(answer), 1), f"{same} of {len(answer)} in their place"
