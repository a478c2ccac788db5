"""Graders and the budget of their failures."""

from rollkeel.rewards.budget import FailureBudget
from rollkeel.rewards.graders import GraderFn, Graders, get, names, register

__all__ = ["FailureBudget", "GraderFn", "Graders", "get", "names", "register"]
