"""Packages that are called as functions: `rollkeel.train` is the folder of the trainer, and what starts a run."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module("rollkeel.api"), name)(*args, **kwargs)


def callable_as_in_api(name: str) -> None:
    """Make the package `name` callable: a call goes to the function of that name in `rollkeel.api`. A function in the package's place
    would not last: Python sets the package there again whenever one of its modules is imported."""
    sys.modules[name].__class__ = _Callable
