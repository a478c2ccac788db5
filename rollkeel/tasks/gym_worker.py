"""Grading of `gym` in a process that may be killed: a scorer that hangs, crashes or fills the memory costs one grading, not the run.

Importing this imports reasoning-gym, so that the deadline of a grading does not have to pay for the library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rollkeel.tasks.base import TaskItem
from rollkeel.tasks.gym import Gym, generators

generators()  # raises here, naming the extra, where the library is missing


def grade(text: str, answer: str, options: Mapping[str, Any]) -> tuple[float, str]:
    """Options `{task, options, item}` as `Task.grader` writes them; `answer` is in the item. Raises what the scorer raises."""
    return _task(json.dumps(options.get("options", {}), sort_keys=True)).score(
        TaskItem.from_json(options["item"]), text
    )


@lru_cache(maxsize=64)
def _task(options: str) -> Gym:
    return Gym(json.loads(options))
