"""The experiments, by name."""

from __future__ import annotations

from typing import Any

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
            raise BadInput(f"lab {name}: expected a rollkeel.lab.preset.Preset, got {known}")
        return next(iter(own.values()))
    if plugins.is_own(name):
        return plugins.load(name, "lab", "a rollkeel.lab.preset.Preset", _is_preset)
    raise BadInput(f"lab {name!r}: no such preset{nearest(name, list(PRESETS))}; your own is a file.py")


def _is_preset(thing: Any) -> bool:
    return isinstance(thing, Preset)
