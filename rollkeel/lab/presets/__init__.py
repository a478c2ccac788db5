"""The experiments, by name."""

from __future__ import annotations

from rollkeel.errors import BadInput, nearest
from rollkeel.lab.preset import Preset
from rollkeel.lab.presets import collapse, controls, growth, irreversible, mismatch, stale, warning

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for file in (mismatch, collapse, stale, growth, controls, irreversible, warning)
    for preset in file.PRESETS
}


def find(name: str) -> Preset:
    """The preset called `name`. Raises `BadInput` naming the nearest."""
    if name not in PRESETS:
        raise BadInput(f"lab {name!r}: no such preset{nearest(name, list(PRESETS))}")
    return PRESETS[name]
