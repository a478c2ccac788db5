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
    """The package `name` may be called as the function of `rollkeel.api` of its name. Python sets a package as an attribute of its
    parent whenever one of its modules is imported, so that a function of that name would be gone."""
    sys.modules[name].__class__ = _Callable
