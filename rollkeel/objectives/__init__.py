"""Objectives: pure functions on flat `[T]` tensors, composed into one form, and named recipes of it.

`objective = rollkeel.objectives.kpop(phi=0.1)`; `objective.loss(tokens)` in the trainer, `objective(tokens)` for the metrics.
"""

from rollkeel.objectives.objective import Objective, ObjectiveOutput
from rollkeel.objectives.recipes import RECIPES, build, grpo, icepop, kpop

__all__ = ["RECIPES", "Objective", "ObjectiveOutput", "build", "grpo", "icepop", "kpop"]
