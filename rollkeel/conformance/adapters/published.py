"""A module of a library, installed or from a checkout, without what its loss does not need.

From a checkout the wanted file and the files that it imports run as they stand there. Packages' `__init__` files do not run,
and a module that is not installed (an engine, a cluster) becomes a stand-in that does nothing: no loss here calls one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from rollkeel.errors import BadInput


class _Anything(type):
    """Class of every name in a module that is not there: can be called, subclassed, indexed and used as a decorator."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else cls

    def __delattr__(cls, name: str) -> None:
        """Nothing was there."""

    def __iter__(cls) -> Any:
        return iter(())

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __instancecheck__(cls, instance: Any) -> bool:
        """True for what an adapter says is one: `stands_for = "ActorConfig"`."""
        return getattr(instance, "stands_for", None) == cls.__name__

    def __enter__(cls) -> Any:
        return cls

    def __exit__(cls, *args: object) -> None:
        return None

    def __mro_entries__(cls, bases: tuple[Any, ...]) -> tuple[()]:
        return ()


def _nothing(name: str) -> Any:
    return _Anything(name, (), {"__init__": lambda self, *args, **kwargs: None})


class _StandIn(ModuleType):
    __version__ = "999"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the checkout's files first, then what is installed, then stand-ins."""

    def __init__(self, root: Path, package: str, whole: Sequence[str], absent: Sequence[str]) -> None:
        self.root = root
        self.package = package
        self.whole = whole
        self.absent = absent

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if _below(name, self.absent):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if not _below(name, (self.package,)):
            return None
        place = self.root.joinpath(*name.split("."))
        if name in self.whole:
            return importlib.util.spec_from_file_location(name, place / "__init__.py")
        if place.is_dir():
            spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
            spec.submodule_search_locations = [str(place)]
            return spec
        file = place.with_suffix(".py")
        return importlib.util.spec_from_file_location(name, file) if file.is_file() else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs."""


class _Last(_Finder):
    """Stands in for what nobody found, where a file of the checkout asks for it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        asked = sys._getframe(1)
        while asked and "importlib" in asked.f_code.co_filename:
            asked = asked.f_back  # type: ignore[assignment]
        theirs = asked is not None and str(self.root) in asked.f_code.co_filename
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if theirs else None


@contextlib.contextmanager
def _found(root: Path, package: str, whole: Sequence[str], absent: Sequence[str]) -> Iterator[None]:
    hidden = {name: module for name, module in sys.modules.items() if _below(name, (package, *absent))}
    for name in hidden:
        del sys.modules[name]
    first, last = _Finder(root, package, whole, absent), _Last(root, package, whole, absent)
    sys.meta_path.insert(0, first)
    sys.meta_path.append(last)
    try:
        yield
    finally:
        sys.meta_path.remove(first)
        sys.meta_path.remove(last)
        for name, module in list(sys.modules.items()):
            if _below(name, (package,)) or isinstance(module, _StandIn):
                del sys.modules[name]
        sys.modules.update(hidden)


def _below(name: str, places: Sequence[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def modules(
    names: Sequence[str],
    checkout: Path | None,
    *,
    below: str = "",
    whole: Sequence[str] = (),
    absent: Sequence[str] = (),
) -> list[ModuleType]:
    """Modules by name: installed ones, or those of a checkout.

    `below`: the folder of the checkout in which the package lies. `whole`: packages whose `__init__` runs too. `absent`:
    modules and packages that are not run though they may be there.
    Raises `BadInput` where one is missing or does not import.
    """
    package = names[0].split(".")[0]
    if checkout is None:
        try:
            return [importlib.import_module(name) for name in names]
        except ImportError as error:
            raise BadInput(
                f"conformance: {package} does not import ({' '.join(str(error).split()):.120});"
                " install it, or name its sources with --checkout"
            ) from None
    root = (checkout / below).resolve()
    for name in names:
        if not (root / (name.replace(".", "/") + ".py")).is_file():
            raise BadInput(
                f"conformance --checkout {checkout}: no {name.replace('.', '/')}.py in it; is it {package}'s repository?"
            )
    with _found(root, package, whole, absent):
        return [importlib.import_module(name) for name in names]


class Trainer(SimpleNamespace):
    """Stands in for a trainer: it has the attributes that it is given, and the methods of the library's class `of`."""

    of: type

    def __getattr__(self, name: str) -> Any:
        made = inspect.getattr_static(self.of, name)
        return made.__func__ if isinstance(made, staticmethod) else functools.partial(made, self)
