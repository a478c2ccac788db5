"""Untrusted programs, run away from the host: see docs/sandbox.md for what that means and what it does not.

with Sandbox(workers=2) as sandbox:
    result = sandbox.run(Job(source=b"print(input())", stdin=b"hello"))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rollkeel_sandbox.client import CageFailure
    from rollkeel_sandbox.job import Job, Level, Limits, Refused, Result, Status, display
    from rollkeel_sandbox.kinds import MissingTool
    from rollkeel_sandbox.probing import probe
    from rollkeel_sandbox.sandbox import Sandbox
    from rollkeel_sandbox.terminal import SessionEnded, Terminal, TerminalLimits

__all__ = [
    "CageFailure", "Job", "Level", "Limits", "MissingTool", "Refused", "Result", "Sandbox", "SessionEnded", "Status", "Terminal",
    "TerminalLimits", "display", "probe",
]  # fmt: skip

_HOME = {"CageFailure": "client", "MissingTool": "kinds", "probe": "probing", "Sandbox": "sandbox"}
_HOME |= dict.fromkeys(("SessionEnded", "Terminal", "TerminalLimits"), "terminal")


def __getattr__(name: str) -> Any:
    # The fork server imports its modules through this file too, and must not bring in what only its callers need:
    # `threading` and `random` alone cost a hundred page faults in every process of every cage.
    if name not in __all__:
        raise AttributeError(f"module 'rollkeel_sandbox' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rollkeel_sandbox.{_HOME.get(name, 'job')}"), name)
