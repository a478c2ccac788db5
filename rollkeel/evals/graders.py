"""Graders of benchmarks whose answers have a form of their own: grids, houses of a logic puzzle, BBEH's final phrase, numbers within a
tolerance, names with aliases, expressions, function calls.

A response that answers nothing in the form asked for scores 0; a gold answer that is not of the form is an error.
"""

from __future__ import annotations

from rollkeel.evals import reading
from rollkeel.evals.calls import grade_calls
from rollkeel.rewards import GraderFn, register
from rollkeel.tasks.base import excerpt
from rollkeel.types import Rollout


def grade_grid(rollout: Rollout) -> tuple[float, str]:
    """1 when the last grid of digits in the response equals the gold one in every cell."""
    gold = reading.grid(rollout.prompt.answer)
    if gold is None:
        raise ValueError(f"the gold answer {excerpt(rollout.prompt.answer)!r} is not a grid")
    read = reading.grid(rollout.text)
    return (0.0, "no grid") if read is None else (float(read == gold), excerpt(read))


def grade_houses(rollout: Rollout) -> tuple[float, str]:
    """1 when every cell of a logic grid puzzle is right (puzzle accuracy); the detail says how many are."""
    gold = reading.houses(rollout.prompt.answer)
    if gold is None:
        raise ValueError(f"the gold answer {excerpt(rollout.prompt.answer)!r} is not a table of houses")
    read = reading.houses(rollout.text)
    if read is None:
        return 0.0, "no table of houses"
    cells = [(house, attribute, value) for house, row in gold.items() for attribute, value in row.items()]
    right = sum(read.get(house, {}).get(attribute) == value for house, attribute, value in cells)
    return float(right == len(cells)), f"{right} of {len(cells)} cells"


def grade_said(rollout: Rollout) -> tuple[float, str]:
    """1 when what follows the last `the answer is:` is the gold answer as plain text or as a number."""
    gold = reading.plain(rollout.prompt.answer)
    if not gold:
        raise ValueError("the gold answer is empty")
    read = reading.said(rollout.text)
    return (0.0, "no answer") if read is None else (float(reading.same(read, gold)), excerpt(read))


def grade_near(rollout: Rollout) -> tuple[float, str]:
    """1 when the last box holds a number within the option `relative` of the gold one. Signs of money and percent mean nothing."""
    gold, relative = float(rollout.prompt.answer), float(rollout.prompt.grader.options["relative"])
    read = reading.number(rollout.text)
    return (0.0, "no number") if read is None else (float(abs(read - gold) <= relative * abs(gold)), f"{read:g}")


def grade_alias(rollout: Rollout) -> tuple[float, str]:
    """1 when what follows the last `the answer is:` is one of the option `aliases`, but for case, articles and punctuation."""
    names = {reading.bare(name) for name in rollout.prompt.grader.options["aliases"]} - {""}
    if not names:
        raise ValueError("no alias is left without punctuation")
    read = reading.said(rollout.text)
    return (0.0, "no answer") if read is None else (float(reading.bare(read) in names), excerpt(read))


GRADERS: dict[str, GraderFn | str] = {
    "grid": grade_grid,
    "houses": grade_houses,
    "said": grade_said,
    "near": grade_near,
    "alias": grade_alias,
    "calls": grade_calls,
    "expression_distance": "rollkeel.evals.expressions:grade",
}


def register_all() -> None:
    """Make these known to `rollkeel.rewards`."""
    for name, fn in GRADERS.items():
        register(name, fn)
