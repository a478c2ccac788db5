"""The experiments, by name."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollkeel import plugins
from rollkeel.errors import BadInput, nearest
from rollkeel.lab.preset import Preset
from rollkeel.lab.presets import collapse, controls, growth, irreversible, mismatch, stale, warning

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for file in (mismatch, collapse, stale, growth, controls, irreversible, warning)
    for preset in file.PRESETS
}


def find(name: str) -> Preset:
    """The preset called `name`, or somebody's own: `file.py:name`, or `file.py` for the only one in it. Raises `BadInput`."""
    if name in PRESETS:
        return PRESETS[name]
    if name.endswith(".py"):
        own = plugins.members(name, "lab", _is_preset)
        if len(own) != 1:
            known = f"{len(own)} ({', '.join(own)}); name one: {name}:{next(iter(own))}" if own else "none"
            raise BadInput(f"lab {name!r}: expected a rollkeel.lab.preset.Preset, got {known}")
        return _judging(next(iter(own.values())), name)
    if plugins.is_own(name):
        return _judging(plugins.load(name, "lab", "a rollkeel.lab.preset.Preset", _is_preset), name)
    raise BadInput(f"lab {name!r}: no such preset{nearest(name, list(PRESETS))}; your own is a file.py")


def _judging(preset: Preset, name: str) -> Preset:
    """The preset, whose judge takes runs that gave nothing. Raises `BadInput` before any of them is made."""
    arms = [arm.name for arm in preset.arms]
    nothing = {reading: {arm: np.full(2, np.nan) for arm in arms} for reading in preset.readings}
    try:
        plugins.tried(lambda: preset.judge(nothing), f"lab {name!r}: its judge")
    except BadInput as error:
        if not isinstance(error.__cause__, KeyError):
            raise
        asked = error.__cause__.args[0]
        raise BadInput(
            f"lab {name!r}: its judge asks for {asked!r}, neither an arm ({', '.join(arms)}) nor a reading ({', '.join(preset.readings)})"
        ) from None
    return preset


def _is_preset(thing: Any) -> bool:
    return isinstance(thing, Preset)
