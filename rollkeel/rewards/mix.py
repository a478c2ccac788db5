"""`mix`: several graders of one rollout, weighted. If any of them breaks, there is no reward.

Options `{parts: [{grader, options, weight, required}, …]}`: the reward is Σ weight · reward, weights as they are written; it is 0 where a
`required` part has less than 1. A weight of 0 makes a part that only has to hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollkeel.errors import BadInput
from rollkeel.types import GraderSpec, Rollout

_KEYS = {"grader", "options", "weight", "required"}


def parts_of(spec: GraderSpec) -> list[GraderSpec]:
    """The graders of a mix. Raises `BadInput` for options that are not what they should be."""
    parts = spec.options.get("parts")
    if not isinstance(parts, Sequence) or not parts or set(spec.options) != {"parts"}:
        raise BadInput(f"grader mix: expected the option parts, a list of graders, got {dict(spec.options)!r:.200}")
    for part in parts:
        good = isinstance(part, Mapping) and "grader" in part and set(part) <= _KEYS and part["grader"] != "mix"
        if not good or not math.isfinite(part.get("weight", 1.0)):
            raise BadInput(
                f"grader mix: expected {{grader, options, weight, required}} and no mix within, got {part!r:.200}"
            )
    return [GraderSpec(name=part["grader"], options=part.get("options", {})) for part in parts]


def combined(rollout: Rollout, results: Sequence[tuple[float | None, str]]) -> tuple[float | None, str]:
    """Reward and detail of the whole; None with the reason where a part has none."""
    parts: Sequence[Mapping[str, Any]] = rollout.prompt.grader.options["parts"]
    total = 0.0
    said = []
    missed = False
    for part, (reward, detail) in zip(parts, results, strict=True):
        if reward is None:
            return None, f"mix: {detail}"
        total += part.get("weight", 1.0) * reward
        missed |= bool(part.get("required", False)) and reward < 1
        said.append(f"{part['grader']} {reward:g}" + (f" ({detail})" if detail else ""))
    return (0.0 if missed else total), "; ".join(said)
