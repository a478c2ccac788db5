"""Public implementations, taken as published: what each library calls by a recipe's name, judged by `rollkeel conformance
NAME`.

Each file has `claims(checkout)`: the library's own functions, in a few lines each, under the recipe whose name they carry.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollkeel.conformance.runner import Implementation
from rollkeel.errors import BadInput, nearest

LIBRARIES = ("areal", "ms_swift", "nemo_rl", "prime_rl", "skyrl", "slime", "stable_rl", "trl", "verl")
TOKEN: Mapping[str, Any] = {"aggregate": "token_mean"}
"""Options of the claims that are taken as a mean over tokens."""


@dataclass(frozen=True)
class Claim:
    """A library's function, and the recipe whose name it carries."""

    name: str
    """The library's own words for it."""
    recipe: str
    function: Implementation
    options: Mapping[str, Any] = field(default_factory=dict)
    """The recipe's, with the numbers and the denominator that the library says it uses."""


def claims(library: str, checkout: Path | None = None) -> list[Claim]:
    """The claims of a library that is installed, or whose checkout is at `checkout`. Raises `BadInput` where it cannot be
    had."""
    if library not in LIBRARIES:
        raise BadInput(
            f"conformance {library!r}: no adapter for it{nearest(library, LIBRARIES)}; your own is module:function"
        )
    if checkout is not None and not checkout.is_dir():
        raise BadInput(f"conformance --checkout {checkout}: no such folder")
    return importlib.import_module(f"rollkeel.conformance.adapters.{library}").claims(checkout)
