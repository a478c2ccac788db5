"""A person's own code, loaded by name: `module:name`, or `path/file.py:name`.

A file becomes the module `rollkeel.plugins.<its path>`, the same in every process: what is pickled in one is found in another.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

from pydantic_core import core_schema

from rollkeel.errors import BadInput, nearest
from rollkeel.events import write_atomic

PLACES = (
    ("data", "task"),
    ("data", "grader"),
    ("engine", "kind"),
    ("objective", "name"),
    ("advantages", "name"),
    ("report", "trackers"),
)
"""Where a config may name it; the parts of a `mix` of graders may as well."""
RECORD = "own_code.json"
"""In a run folder: the files and their digests."""
_PREFIX = f"{__name__}."
_NOT_THEIRS = (str(Path(__file__).parent), str(Path(os.__file__).parent), "<frozen")

__path__: list[str] = []  # files are loaded as modules below this one; what unpickles them imports this one first


class _Files:
    """Finds the module of a file by the path that its name holds."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith(_PREFIX):
            return None
        file = unquote(name.removeprefix(_PREFIX))
        if (folder := str(Path(file).parent)) not in sys.path:
            sys.path.append(folder)  # for the files beside it
        return importlib.util.spec_from_file_location(name, file)


sys.meta_path.append(_Files)


def is_own(name: str) -> bool:
    """True of names that point to somebody's own code."""
    return ":" in name


def short(name: str) -> str:
    """The name without folders, for metrics and messages."""
    return name.rsplit("/", 1)[-1] if is_own(name) else name


def absolute(name: str) -> str:
    """The same name, good in every folder: a relative file is one of the working folder."""
    place, colon, attribute = name.rpartition(":")
    return f"{Path(place).expanduser().absolute()}:{attribute}" if colon and place.endswith(".py") else name


def load(name: str, key: str, expected: str = "", fits: Callable[[Any], bool] = lambda thing: True) -> Any:
    """What `name` points to. `key`: who asks, as `data.task`; `expected`: what must be there, which `fits` tells.

    Raises `BadInput`, one line with file and line, for code that cannot be loaded, a missing name, or another thing.
    """
    attribute = name.rpartition(":")[2]
    module = module_of(name, key)
    if not hasattr(module, attribute):
        raise BadInput(
            f"{key} {name!r}: no {attribute!r} in {module.__file__}{nearest(attribute, list(_lines(module)))}"
        )
    thing = getattr(module, attribute)
    if not fits(thing):
        at = f"{module.__file__}:{_lines(module).get(attribute, 1)}"
        raise BadInput(f"{key} {name!r}: expected {expected}, got {_shown(thing)} ({at})")
    return thing


def module_of(name: str, key: str) -> ModuleType:
    """The module of a name, loaded. Raises `BadInput` as `load` does."""
    place = absolute(name).rpartition(":")[0]
    if not place or (not place.endswith(".py") and "/" in place):
        raise BadInput(f"{key} {name!r}: expected path/file.py:name or module:name")
    if not place.endswith(".py"):
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        wanted = place
    elif Path(place).is_file():
        wanted = _PREFIX + place.replace("%", "%25").replace(".", "%2E")
    else:
        raise BadInput(f"{key} {name!r}: no such file {place}")
    return tried(lambda: importlib.import_module(wanted), f"{key} {name!r}")


def members(file: str, key: str, fits: Callable[[Any], bool]) -> dict[str, Any]:
    """What a file defines that `fits`, by name."""
    module = module_of(f"{file}:", key)
    return {name: thing for name in _lines(module) if fits(thing := getattr(module, name, None))}


def takes(function: Any, count: int) -> bool:
    """True if `function` can be called with so many positional arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


def tried(call: Callable[[], Any], what: str) -> Any:
    """`call()`, in which somebody's own code runs. Raises `BadInput` with `what`, the error and its file and line."""
    try:
        return call()
    except (Exception, SystemExit) as error:  # their code can fail in any way
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{what}: {trouble(error)}") from error


def trouble(error: BaseException) -> str:
    """Kind and message of an error, and the last line of somebody's own code that led to it."""
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        frames.append((error.filename or "", error.lineno))
    theirs = [f for f in frames if not f[0].startswith(_NOT_THEIRS) and "site-packages" not in f[0]]
    message = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" + (f" ({theirs[-1][0]}:{theirs[-1][1]})" if theirs else "")


def _shown(thing: Any) -> str:
    if isinstance(thing, type):
        missing = sorted(getattr(thing, "__abstractmethods__", ()))
        return f"class {thing.__name__}" + (f" without {', '.join(missing)}" if missing else "")
    return f"{thing.__name__}{inspect.signature(thing)}" if inspect.isfunction(thing) else f"{thing!r:.80}"


def _lines(module: ModuleType) -> dict[str, int]:
    """Line of every name that a module defines, but for what it imports."""
    found = dict[str, int]()
    for node in ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")).body:
        for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]:
            if name := getattr(target, "name", None) or getattr(target, "id", None):
                found[name] = node.lineno
    return found


def resolve(tree: Mapping[str, Any], change: Callable[[str], str] = absolute) -> None:
    """Put `change(name)` in the place of every name of somebody's own code in a config's tree, which is changed."""

    def changed(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(map(changed, value))
        return change(value) if isinstance(value, str) and is_own(value) else value

    for section, key in PLACES:
        if isinstance(node := tree.get(section), dict) and key in node:
            node[key] = changed(node[key])
    options = node.get("grader_options") if isinstance(node := tree.get("data"), dict) else None
    for part in options.get("parts", ()) if isinstance(options, dict) else ():
        if isinstance(part, dict) and "grader" in part:
            part["grader"] = changed(part["grader"])


def digests(tree: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """SHA-256 and import root of every file that a config's tree names, by its path."""
    names = set[str]()
    resolve(tree, lambda name: names.add(name) or name)
    found = {}
    for name in sorted(names):
        module = module_of(name, "config")
        file = Path(str(module.__file__))
        above = 0 if module.__name__.startswith(_PREFIX) else module.__name__.count(".") + hasattr(module, "__path__")
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        found[str(file)] = {"sha256": digest, "root": str(file.parents[above])}
    return found


def record(tree: Mapping[str, Any], folder: Path) -> list[str]:
    """Write the digests into a run folder; one line for each file that is not what was written there before."""
    before, now = _recorded(folder), digests(tree)
    if now != before:
        write_atomic(folder / RECORD, json.dumps(now, indent=1) + "\n")
    changed = [file for file in now if file in before and now[file]["sha256"] != before[file]["sha256"]]
    return [f"{file} changed since this run last used it" for file in changed]


def recall(folder: Path) -> None:
    """Make importable what was when the run was made, wherever this process was started."""
    sys.path.extend(r for r in dict.fromkeys(each["root"] for each in _recorded(folder).values()) if r not in sys.path)


def _recorded(folder: Path) -> dict[str, dict[str, str]]:
    try:
        return json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


class OrOwn:
    """Type of a string: one of `names`, or somebody's own code as `module:name` or `path/file.py:name`."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"anyOf": [{"enum": list(self.names)}, {"type": "string", "pattern": ".:."}]}

    def _checked(self, name: str) -> str:
        if name not in self.names and ":" not in name:
            raise ValueError(f"expected {', '.join(self.names)} or your own file.py:name")
        return name
