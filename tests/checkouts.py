"""Sources of other libraries for tests that run them: folders of their names below the one that `ROLLKEEL_CHECKOUTS` names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def checkout(library: str) -> Path:
    """Its folder; skips the test where there is none."""
    name, given = library.replace("_", "-"), os.environ.get("ROLLKEEL_CHECKOUTS")
    if not given or not (Path(given) / name).is_dir():
        pytest.skip(f"no sources of {name}: ROLLKEEL_CHECKOUTS names a folder that has {name}")
    return Path(given) / name
