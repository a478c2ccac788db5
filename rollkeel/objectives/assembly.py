"""One helper that every recipe ends in: parts and common options → an `Objective` that remembers its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollkeel.objectives.masks import Mask
from rollkeel.objectives.objective import Objective
from rollkeel.objectives.options import number
from rollkeel.objectives.registry import common_fields
from rollkeel.objectives.surrogates import Surrogate
from rollkeel.objectives.terms import Anchor
from rollkeel.objectives.thresholds import Threshold
from rollkeel.objectives.weights import Weight


def assemble(
    name: str,
    anchor: Anchor,
    surrogate: Surrogate,
    *masks: Mask,
    weight: Weight | None = None,
    aggregate: str,
    advantage: str = "grpo",
    gap_penalty: float = 0.0,
    positive_nll: float = 0.0,
    options: Mapping[str, Any],
    common: Mapping[str, Any],
) -> Objective:
    """The composition under `name`. `options`: what the logs show; `common`: see `registry.COMMON_OPTIONS`."""
    return Objective(
        name=name,
        anchor=anchor,
        surrogate=surrogate,
        masks=masks,
        weight=weight,
        aggregate=aggregate,
        advantage=advantage,
        gap_penalty=number(f"{name}.gap_penalty", gap_penalty, at_least=0),
        positive_nll=number(f"{name}.positive_nll", positive_nll, at_least=0),
        parameters={key: shown(value) for key, value in options.items()},
        **common_fields(name, common),
    )


def shown(value: Any) -> Any:
    """An option as a JSON value."""
    if isinstance(value, Threshold):
        return value.describe()
    if isinstance(value, (Mask, Surrogate, Weight)):
        return value.name
    if isinstance(value, Mapping):
        return {key: shown(inner) for key, inner in value.items()}
    return [shown(inner) for inner in value] if isinstance(value, (list, tuple)) else value
