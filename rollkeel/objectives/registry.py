"""Names → objectives: the recipes, what users register, and what a config points to in a user's own module."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from rollkeel import plugins
from rollkeel.errors import BadInput
from rollkeel.objectives.objective import Objective
from rollkeel.objectives.options import flag, nearest, number
from rollkeel.objectives.perturbations import perturbations
from rollkeel.types import TokenBatch

RECIPES: dict[str, Callable[..., Objective]] = {}
"""Name → function of keyword options that returns an objective."""
OTHERS: dict[str, Callable[..., Objective]] = {}
"""Names a config may use that are no recipe: `composed`."""
TRAINER_OPTIONS = ("kl_coefficient", "kl_estimator", "entropy_coefficient")
COMMON_OPTIONS = ("perturb", "denominator", "allow_double_correction")
"""Options of every objective, beside its own."""

F = TypeVar("F", bound=Callable[..., Objective])


def register(name: str) -> Callable[[F], F]:
    """Decorator: make a function of keyword options that returns an `Objective` available under `name`.

    The common options are added to what it returns, so it need not know them. Defining the same function anew (a notebook
    cell run twice, a reloaded module) replaces it. Raises `BadInput` for a name that another function has.
    """

    def add(function: F) -> F:
        taken = {**RECIPES, **OTHERS}.get(name, function)
        if any(getattr(taken, k, None) != getattr(function, k, None) for k in ("__module__", "__qualname__")):
            raise BadInput(f"objective {name!r}: the name is taken; register yours under another")
        RECIPES[name] = function
        return function

    return add


def build(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    kl_coefficient: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coefficient: float = 0.0,
) -> Objective:
    """The objective `name` with `options` (its keyword arguments and the common ones), as a config names it.

    `name`: a recipe, a registered function, or somebody's own `file.py:function`.
    Raises `BadInput` for an unknown recipe or option (naming the nearest), a wrong type or a value out of range.
    """
    recipe, options = find(name), dict(options or {})
    own = own_options(recipe)
    for option in options:
        if option in TRAINER_OPTIONS:
            raise BadInput(f"objective.{option}: not an option of {name}; set train.{option}")
        if option not in (*own, *COMMON_OPTIONS):
            raise BadInput(f"objective.{option}: not an option of {name}{nearest(option, [*own, *COMMON_OPTIONS])}")
    common = {o: options.pop(o) for o in COMMON_OPTIONS if o in options and o not in own}
    trainer = {
        "kl_coefficient": kl_coefficient,
        "kl_estimator": kl_estimator,
        "entropy_coefficient": entropy_coefficient,
    }
    # Some take all options: their composition may depend on the common ones, as on allow_double_correction.
    passes_on = takes_any(recipe)
    given = {**options, **common, **trainer} if passes_on else options
    made = (
        plugins.tried(lambda: recipe(**given), f"objective.name {name!r}") if plugins.is_own(name) else recipe(**given)
    )
    if not isinstance(made, Objective):
        raise BadInput(f"objective {name}: expected the function to return an Objective, got {type(made).__name__}")
    if plugins.is_own(name) and not made.topk:
        plugins.tried(lambda: recipe(**given)(_four_tokens()), f"objective.name {name!r}")
    if passes_on:
        return made
    for option in ("kl_coefficient", "entropy_coefficient"):
        if getattr(made, option) not in (0, trainer[option]):
            raise BadInput(
                f"objective {name}: expected {option} from train.{option}={trainer[option]}, got {getattr(made, option)} from"
                " the function; set it in train"
            )
    return dataclasses.replace(made, **common_fields(name, {**common, **trainer}))


def find(name: str) -> Callable[..., Objective]:
    """The function behind a name; see `build`."""
    known = {**RECIPES, **OTHERS}
    if name in known:
        return known[name]
    if not plugins.is_own(name):
        raise BadInput(f"objective.name {name!r}: unknown{nearest(name, [*known, 'file.py:function'])}")
    return plugins.load(name, "objective.name", "a function that returns an Objective", inspect.isfunction)


def own_options(recipe: Callable[..., Objective]) -> list[str]:
    """Names of a recipe's own keyword options."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(recipe).parameters.values() if p.kind in kinds]


def takes_any(recipe: Callable[..., Objective]) -> bool:
    """True if a function passes further keyword arguments on."""
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(recipe).parameters.values())


def common_fields(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """`Objective` fields from common options, checked."""
    known = (*COMMON_OPTIONS, *TRAINER_OPTIONS)
    fields: dict[str, Any] = {}
    for option, value in options.items():
        if option not in known:
            own = own_options(RECIPES[name]) if name in RECIPES else []
            raise BadInput(f"objective {name}: {option} is not one of its options{nearest(option, [*own, *known])}")
        if option in ("kl_coefficient", "entropy_coefficient"):
            fields[option] = number(f"{name}.{option}", value, at_least=0)
        elif option == "perturb":
            fields["factors"] = perturbations(value)
        elif option == "allow_double_correction":
            fields[option] = flag(f"{name}.{option}", value)
        else:
            fields[option] = value
    return fields


def _four_tokens() -> TokenBatch:
    """On which somebody's own objective is tried before anything is trained."""
    o, pairs = torch.tensor([-0.1, -0.7, -1.2, -0.3]), torch.tensor([0, 0, 1, 1])
    return TokenBatch(
        logprobs=(o + 0.01).requires_grad_(),
        old_logprobs=o,
        ref_logprobs=o,
        rollout_logprobs=o - 0.02,
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        coefficients=torch.full((4,), 0.25),
        sequence_ids=pairs,
        group_ids=torch.zeros(4, dtype=torch.long),
        entropy=torch.ones(4),
        kept_mass=torch.ones(4),
        versions=torch.zeros(4, dtype=torch.long),
        kv_versions=torch.zeros(4, dtype=torch.long),
        rollout_ids=pairs,
        token_index=torch.tensor([0, 1, 0, 1]),
    )
