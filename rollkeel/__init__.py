"""rollkeel: RL post-training that stays stable when the sampling engine and the training engine disagree.

run = rollkeel.train("default", run={"steps": 20})
rollkeel.doctor(run)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rollkeel import objectives as objectives
    from rollkeel.api import Run as Run
    from rollkeel.api import doctor as doctor
    from rollkeel.api import evaluate as evaluate
    from rollkeel.api import rollout as rollout
    from rollkeel.api import train as train

_PACKAGES = ("objectives", "rollout", "train")
_API = ("Run", "doctor", "evaluate")

__all__ = ["Run", "doctor", "evaluate", "objectives", "rollout", "train"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: `rollkeel --help` must not pay for torch.
    if name in _PACKAGES:
        return importlib.import_module(f"rollkeel.{name}")
    if name in _API:
        return getattr(importlib.import_module("rollkeel.api"), name)
    raise AttributeError(f"module 'rollkeel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
