"""Why a run went bad: causes with evidence, from recorded tokens alone, or healthy. `docs/doctor.md` explains each.

found = diagnose(read_trace("DUMP"))
found.healthy, found.causes
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rollkeel_doctor.diagnosis import CAUSES, Cause, Diagnosis
    from rollkeel_doctor.traces.own import save_batch
    from rollkeel_doctor.traces.read import read_trace
    from rollkeel_doctor.verdict import diagnose

__all__ = ["CAUSES", "Cause", "Diagnosis", "diagnose", "read_trace", "save_batch"]

_HOME = {"diagnose": "verdict", "read_trace": "traces.read", "save_batch": "traces.own"}


def __getattr__(name: str) -> Any:
    # A command's --help answers without numpy.
    if name not in __all__:
        raise AttributeError(f"module 'rollkeel_doctor' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rollkeel_doctor.{_HOME.get(name, 'diagnosis')}"), name)
