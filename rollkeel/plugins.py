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
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

from pydantic_core import core_schema

import rollkeel_sandbox
from rollkeel.errors import BAD_INPUTS, REFUSALS, BadInput, OwnCodeBroke, nearest
from rollkeel.events import write_atomic

PLACES = (
    ("run", "loop"),
    ("data", "task"),
    ("data", "grader"),
    ("engine", "kind"),
    ("objective", "name"),
    ("advantages", "name"),
    ("report", "trackers"),
)
"""Where a config may name it; the parts of a `mix` of graders may as well."""
RECORD = "own_code.json"
"""In a run folder: the files and their digests, by the module or file that the config names."""
_PREFIX = f"{__name__}."
_NOT_THEIRS = (
    *(f"{Path(ours).parent}/" for ours in (__file__, rollkeel_sandbox.__file__, os.__file__)),
    "<frozen",
    "<string>",
)

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
    return f"{os.path.abspath(os.path.expanduser(place))}:{attribute}" if colon and place.endswith(".py") else name


def load(name: str, key: str, expected: str = "", fits: Callable[[Any], bool] = lambda thing: True) -> Any:
    """What `name` points to. `key`: who asks, as `data.task`; `expected`: what must be there, which `fits` tells.

    Raises `BadInput`, one line with file and line, for code that cannot be loaded, a missing name, or another thing.
    """
    attribute = name.rpartition(":")[2]
    module = module_of(name, key)
    if not hasattr(module, attribute):
        guess = nearest(attribute, list(_lines(module)))
        raise BadInput(f"{key} {name!r}: no {attribute!r} in {module.__file__}{guess}")
    thing = getattr(module, attribute)
    if not fits(thing):
        at = f"{module.__file__}:{_lines(module).get(attribute, 1)}"
        raise BadInput(f"{key} {name!r}: expected {expected}, got {_shown(thing)} ({at})")
    return thing


def maker(name: str, key: str, given: str) -> Callable[..., Any]:
    """A class or function of what `given` lists, with commas between."""
    return load(name, key, f"a class or function of ({given})", lambda thing: takes(thing, given.count(",") + 1))


def made(name: str, key: str, given: str, kind: type, *values: Any) -> Any:
    """What that class or function makes of `values`. Raises `BadInput` if it breaks, or if a part of the protocol `kind` is missing."""
    thing = tried(lambda: maker(name, key, given)(*values), f"{key} {name!r}")
    parts = [part for part in (*vars(kind), *kind.__annotations__) if not part.startswith("_")]
    if missing := [part for part in parts if not hasattr(thing, part)]:
        wanted = f"{kind.__module__}.{kind.__name__}"
        raise BadInput(f"{key} {name!r}: expected a {wanted}, got {thing!r:.80} without {', '.join(missing)}")
    return thing


def module_of(name: str, key: str) -> ModuleType:
    """The module of a name, loaded. Raises `BadInput` as `load` does."""
    return _module(absolute(name).rpartition(":")[0], f"{key} {name!r}")


def _module(place: str, asked: str) -> ModuleType:
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise BadInput(f"{asked}: no such file {place}; put it there, or name the file where it is")
        wanted = _PREFIX + place.replace("%", "%25").replace(".", "%2E")
    elif place and not {"/", ":"} & {*place}:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        wanted = place
    else:
        raise BadInput(f"{asked}: expected path/file.py:name or module:name")
    if wanted not in sys.modules:
        spec = tried(lambda: importlib.util.find_spec(wanted), asked)
        if spec is None:
            looked = [folder for folder in sys.path if not folder.startswith((sys.prefix, sys.base_prefix))]
            raise BadInput(f"{asked}: no module {place} in {', '.join(looked)}; put it there")
        if spec.has_location:
            _refuse_namesakes(Path(spec.origin), _root(wanted, Path(spec.origin)), asked)
    module = tried(lambda: importlib.import_module(wanted), asked)
    if getattr(module, "__file__", None) is None:
        raise BadInput(f"{asked}: expected a module that is a file, got {module!r}")
    return module


def members(file: str, key: str, fits: Callable[[Any], bool]) -> dict[str, Any]:
    """What a file defines that `fits`, by name."""
    if is_own(file):
        raise BadInput(f"{key} {file!r}: expected a file or module without :name")
    module = _module(absolute(f"{file}:")[:-1], f"{key} {file!r}")
    return {name: thing for name in _lines(module) if fits(thing := getattr(module, name, None))}


def takes(function: Any, count: int) -> bool:
    """True if `function` can be called with so many positional arguments, and gives its result at once."""
    if inspect.iscoroutinefunction(function):
        return False
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


def tried(call: Callable[[], Any], what: str, *, between: bool = False) -> Any:
    """`call()`, in which somebody's own code runs. Raises `BadInput` with `what`, the error and its file and line.

    `between`: their code runs between ours, and an error that no line of theirs led to goes up as it is.
    """
    try:
        return call()
    except (Exception, SystemExit) as error:  # their code can fail in any way
        if isinstance(error, REFUSALS) or (between and not _theirs(error)):
            raise
        raise OwnCodeBroke(f"{what}: {trouble(error)}") from error


def trouble(error: BaseException, called: Any = None) -> str:
    """Kind and message of an error, the last line of somebody's own code that led to it, and their function that we called.

    `called`: whose place it is where the error is ours, about what that function returned."""
    theirs = _theirs(error)
    message = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    line = message if isinstance(error, BAD_INPUTS) else f"{type(error).__name__}: {message:.160}"
    if not theirs:
        return line + ("" if called is None else place(called))
    name = f" in {theirs[0][2]}" if theirs[0][2] != "<module>" else ""
    return f"{line} ({theirs[-1][0]}:{theirs[-1][1]}{name})"


def _theirs(error: BaseException) -> list[tuple[str, int | None, str]]:
    """File, line and function of every frame of somebody's own code that led to an error."""
    frames = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        frames.append((error.filename or "", error.lineno, "<module>"))
    return [f for f in frames if not f[0].startswith(_NOT_THEIRS) and "site-packages" not in f[0]]


def place(function: Any) -> str:
    """` (file:line in name)` of a function of somebody's own, or of what is loaded from its name; empty of ours."""
    try:
        function = load(function, "own code") if isinstance(function, str) else function
    except BadInput:
        return ""
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None or code.co_filename.startswith(_NOT_THEIRS):
        return ""
    return f" ({code.co_filename}:{code.co_firstlineno} in {code.co_name})"


def _shown(thing: Any) -> str:
    if isinstance(thing, type):
        missing = sorted(getattr(thing, "__abstractmethods__", ()))
        return f"class {thing.__name__}" + (f" without {', '.join(missing)}" if missing else "")
    waits = "async " if inspect.iscoroutinefunction(thing) else ""
    return f"{waits}{thing.__name__}{inspect.signature(thing)}" if inspect.isfunction(thing) else f"{thing!r:.80}"


def _lines(module: ModuleType) -> dict[str, int]:
    """Line of every name that a module defines, but for what it imports."""
    found = dict[str, int]()
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):  # compiled code has none
        return found
    for node in ast.parse(source).body:
        for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]:
            if name := getattr(target, "name", None) or getattr(target, "id", None):
                found[name] = node.lineno
    return found


def resolve(tree: Mapping[str, Any], change: Callable[[str, str], str] = lambda name, key: absolute(name)) -> None:
    """Put `change(name, key)` in the place of every name of somebody's own code in a config's tree, which is changed."""

    def changed(value: Any, key: str) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(changed(each, key) for each in value)
        return change(value, key) if isinstance(value, str) and is_own(value) else value

    data = tree.get("data")
    sources = data.get("sources") if isinstance(data, dict) else ()
    several = [data, *(sources if isinstance(sources, (list, tuple)) else ())]
    for section, key in PLACES:
        for node in several if section == "data" else [tree.get(section)]:
            if isinstance(node, dict) and key in node:
                node[key] = changed(node[key], f"{section}.{key}")
    for node in several:
        options = node.get("grader_options") if isinstance(node, dict) else None
        for part in options.get("parts", ()) if isinstance(options, dict) else ():
            if isinstance(part, dict) and "grader" in part:
                part["grader"] = changed(part["grader"], "data.grader_options.parts")


# -- the files, for a run that goes on and for what is kept under the name of what made it ------------------------------


def code(module: ModuleType) -> dict[str, Any]:
    """Where a module is imported from, and SHA-256 of its file and of those below there that it imports, and they in turn."""
    file = Path(str(module.__file__))
    root = _root(module.__name__, file)
    files = {str(f.relative_to(root)): hashlib.sha256(f.read_bytes()).hexdigest() for f in _reached(file, root)}
    return {"root": str(root), "files": files}


def digests(tree: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`code` of every module or file that a config's tree names."""
    names = dict[str, str]()
    resolve(tree, lambda name, key: names.setdefault(name, key) and name)
    for name in [name for name, key in names.items() if key == "data.task"]:
        worker = getattr(load(name, "data.task"), "worker", "")
        if worker and not worker.startswith("rollkeel."):
            names.setdefault(worker, "the task's worker")
    return {name.rpartition(":")[0]: code(module_of(name, key)) for name, key in sorted(names.items())}


def record(tree: Mapping[str, Any], folder: Path) -> list[str]:
    """Write the digests into a run folder; one line for each file that is not what was written there before."""
    before, now = _recorded(folder), digests(tree)
    if now != before:
        write_atomic(folder / RECORD, json.dumps(now, indent=1) + "\n")
    pairs = [(new["root"], before[place]["files"], new["files"]) for place, new in now.items() if place in before]
    changed = [f"{root}/{f}" for root, old, new in pairs for f in {**old, **new} if old.get(f) != new.get(f)]
    return [f"{file} changed since this run last used it" for file in dict.fromkeys(changed)]


def as_recorded(tree: Mapping[str, Any], folder: Path) -> None:
    """Put the name that a run knows in the place of every name of the same files elsewhere, in a config's tree."""
    before, now = _recorded(folder), digests(tree)

    def known(name: str, key: str) -> str:
        place, _, attribute = name.rpartition(":")
        same = [old for old, each in before.items() if each["files"] == now[place]["files"]]
        return f"{same[0]}:{attribute}" if same and place not in before else name

    resolve(tree, known)


def recall(folder: Path) -> None:
    """Make importable what was when the run was made, wherever this process was started."""
    roots = [each["root"] for place, each in _recorded(folder).items() if not place.endswith(".py")]
    sys.path[:0] = [root for root in dict.fromkeys([*roots, os.getcwd()]) if roots and root not in sys.path]


def _recorded(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return {place: each for place, each in found.items() if "files" in each}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _root(name: str, file: Path) -> Path:
    """The folder that a module is imported from, which its own imports see as well."""
    return file.parents[0 if name.startswith(_PREFIX) else name.count(".") + (file.name == "__init__.py")]


def _reached(file: Path, root: Path) -> list[Path]:
    """The file, and all below `root` that it imports and they import, without what is installed there."""
    inside = root / file.relative_to(root).parts[0] if "site-packages" in root.parts else root

    def counts(taken: Path) -> bool:
        own = taken.is_relative_to(inside) and not str(taken).startswith(_NOT_THEIRS)
        return own and "site-packages" not in taken.relative_to(inside).parts

    found = [
        file,
        *(f for parent in file.parents if root in parent.parents and (f := parent / "__init__.py").is_file()),
    ]
    for each in found:  # which grows
        found += {taken: 0 for _, taken, _ in _imports(each, root) if taken not in found and counts(taken)}
    return found


def _imports(file: Path, root: Path) -> Iterator[tuple[int, Path, Path]]:
    """Line, file that is taken, and file of that name below `root`, for all that a file imports, in its functions too."""
    try:
        nodes = [*ast.walk(ast.parse(file.read_bytes()))]
    except (OSError, SyntaxError, ValueError):  # said by who imports it
        return
    for node in nodes:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        level, stem = getattr(node, "level", 0), getattr(node, "module", None)
        for name in [f"{stem}.{alias.name}" if stem else alias.name for alias in node.names]:
            parts = name.split(".")
            folders = [file.parents[min(level, len(file.parents)) - 1]] if level else _folders(parts[0])
            for end in range(1, len(parts) + 1):
                if taken := _source(folders, Path(*parts[:end])):
                    beside = None if level else _source([root], Path(*parts[:end]))
                    same = beside is None or taken.samefile(beside)
                    yield node.lineno, beside if beside and same else taken, beside or taken


def _folders(top: str) -> list[Path]:
    """Where a name is imported from now: from one folder, but for packages without `__init__.py`."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return []
    if spec is None or top == "rollkeel":
        return []
    if spec.submodule_search_locations is not None:
        return [Path(place).parent for place in spec.submodule_search_locations]
    return [Path(str(spec.origin)).parent] if spec.has_location else []


def _source(folders: Sequence[Path], path: Path) -> Path | None:
    places = (file for folder in folders for file in (folder / path / "__init__.py", folder / f"{path}.py"))
    return next(filter(Path.is_file, places), None)


def _refuse_namesakes(file: Path, root: Path, asked: str) -> None:
    """Python keeps one module of a name: raises `BadInput` where that is not the one beside the file that asks for it."""
    for each in _reached(file, root):
        for line, taken, beside in _imports(each, root):
            if taken != beside:
                raise BadInput(f"{asked}: {each}:{line} would import {taken} and not {beside}; rename one of them")


class OrOwn:
    """Type of a string: one of `names`, or somebody's own code as `module:name` or `path/file.py:name`."""

    def __init__(self, *names: str, **parked: str) -> None:
        self.names, self.parked = names, parked

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"anyOf": [{"enum": list(self.names)}, {"type": "string", "pattern": ".:."}]}

    def _checked(self, name: str) -> str:
        if name in self.parked:
            raise ValueError(f"expected {' or '.join(self.names)}; {self.parked[name]}")
        if name not in self.names and ":" not in name:
            raise ValueError(f"expected {', '.join(self.names)} or your own file.py:name")
        return name
