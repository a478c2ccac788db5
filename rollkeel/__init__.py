"""rollkeel: RL post-training that stays stable when the sampling engine and the training engine disagree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rollkeel import objectives as objectives


def __getattr__(name: str) -> Any:
    # Loaded on first use: `rollkeel --help` must not pay for torch.
    if name == "objectives":
        import importlib

        return importlib.import_module("rollkeel.objectives")
    raise AttributeError(f"module 'rollkeel' has no attribute {name!r}")
