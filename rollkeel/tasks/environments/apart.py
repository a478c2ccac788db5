"""Tests on one side, the code that they test on the other: two processes, between which only plain values pass.

This file needs nothing of rollkeel: its source is sent into the sandbox. It forks before it reads anything. The child imports the
repository, which is of a policy's making, and answers requests; the parent reads tests from standard input and runs them, with stand-ins
in the place of the repository's modules. So the repository never sees a test, only calls; what it patches, prints or ends is its own.
An object that is no plain value stays on its side and is never equal to a plain one, whatever it claims.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import importlib
import importlib.machinery
import inspect
import io
import json
import operator
import os
import socket
import sys
import types
import unittest
from collections.abc import Callable, Iterable, Mapping
from typing import Any

PR_SET_DUMPABLE = 4
CALL_S = 2.0
FOLDER = "repo"
PLAIN = (bool, int, str, type(None))
MANY = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
COMPARED = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
OTHERS = ("__add__", "__sub__", "__mul__", "__truediv__", "__neg__", "__getitem__", "__setitem__", "__contains__")
BUILT_IN: dict[str, Callable[..., Any]] = {
    "__len__": len,
    "__str__": str,
    "__repr__": repr,
    "__iter__": list,
    "__bool__": bool,
    "__instancecheck__": lambda kind, x: isinstance(x, kind),
}


def pack(value: Any, refer: Callable[[Any], list[Any]]) -> Any:
    """JSON for a value of exactly a plain type; `refer` makes that of any other."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is float:
        return ["float", repr(value)]
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind is dict:
        return ["dict", [[pack(k, refer), pack(v, refer)] for k, v in value.items()]]
    if kind in MANY.values():
        return [kind.__name__, [pack(v, refer) for v in value]]
    return refer(value)


def unpack(data: Any, known: Callable[[str, Any], Any]) -> Any:
    """Inverse of `pack`; `known` takes what its `refer` made."""
    if not isinstance(data, list):
        return data
    kind, inner = data
    if kind == "float":
        return float(inner)
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "dict":
        return {unpack(k, known): unpack(v, known) for k, v in inner}
    if kind in MANY:
        return MANY[kind](unpack(v, known) for v in inner)
    return known(kind, inner)


# -- the repository's side ---------------------------------------------------------------------------------------------


def serve(lines: Iterable[bytes], send: Callable[[bytes], object]) -> None:
    """Answer requests until there are no more."""
    things: list[Any] = []

    def refer(value: Any) -> list[Any]:
        if inspect.isclass(value) and issubclass(value, Exception):
            return ["exception", [kind.__name__ for kind in value.__mro__]]
        things.append(value)
        return ["thing", len(things) - 1]

    for line in lines:
        what, *rest = unpack(json.loads(line), lambda _, index: things[index])
        try:
            if what == "import":
                value = importlib.import_module(rest[0])
            elif what == "get":
                value = getattr(*rest)
            elif what == "call":
                value = rest[0](*rest[1], **rest[2])
            else:
                value = (BUILT_IN.get(what) or getattr(operator, what))(*rest)
            reply = [True, pack(value, refer)]
        except BaseException as error:  # of the policy's code, which may raise anything
            reply = [False, [kind.__name__ for kind in type(error).__mro__], str(error)[:200]]
        send(json.dumps(reply).encode() + b"\n")


# -- the tests' side ---------------------------------------------------------------------------------------------------


class Link:
    """Asks the other side."""

    def __init__(self, channel: socket.socket) -> None:
        channel.settimeout(CALL_S)
        self._channel, self._lines = channel, channel.makefile("rb")
        self._exceptions: dict[str, type[Exception]] = {}

    def ask(self, *request: Any) -> Any:
        self._channel.sendall(json.dumps(pack(list(request), _sent)).encode() + b"\n")
        good, value, *message = json.loads(self._lines.readline())
        if good is not True:
            raise self._exception(value)(*message)
        return unpack(value, self._known)

    def _known(self, kind: str, value: Any) -> Any:
        return self._exception(value) if kind == "exception" else Thing(self, value)

    def _exception(self, names: list[str]) -> type[Exception]:
        """The built-in one of that name, or one made here from the nearest built-in one."""
        known = (getattr(builtins, name, None) for name in [*names, "Exception"])
        base = next(kind for kind in known if isinstance(kind, type) and issubclass(kind, Exception))
        own = self._exceptions.setdefault(names[0], type(names[0], (base,), {}))
        return base if base.__name__ == names[0] else own


def _sent(value: Any) -> list[Any]:
    if isinstance(value, Thing):
        return ["thing", value._index]
    raise TypeError(f"a test can hand over plain values and the repository's own, not {type(value).__name__}")


class Thing:
    """Stands for an object of the other side."""

    def __init__(self, link: Link, index: int) -> None:
        self._link, self._index = link, index

    def __getattr__(self, name: str) -> Any:
        return self._link.ask("get", self, name)

    def __call__(self, *values: Any, **named: Any) -> Any:
        return self._link.ask("call", self, list(values), named)


def _operation(name: str) -> Callable[..., Any]:
    def operation(self: Thing, *values: Any) -> Any:
        if name in COMPARED and not isinstance(values[0], Thing):
            return {"__eq__": False, "__ne__": True}.get(name, NotImplemented)
        value = self._link.ask(name, self, *values)
        return iter(value) if name == "__iter__" else value

    return operation


for _name in (*COMPARED, *OTHERS, *BUILT_IN):
    setattr(Thing, _name, _operation(_name))


class Module(types.ModuleType):
    """Stands for a module of the other side."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_thing"], name)


class Finder:
    """Imports modules of the repository as stand-ins."""

    def __init__(self, link: Link, tops: Iterable[str]) -> None:
        self._link, self._tops = link, frozenset(tops)

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self._tops:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module._thing = self._link.ask("import", module.__name__)  # type: ignore[attr-defined]


def run(names: Mapping[str, Any], test: str) -> str:
    """Empty if the test passes, else why not: `function`, or `Class::method` of a `unittest.TestCase` or a plain class."""
    first, _, method = test.partition("::")
    thing = names[first]
    if not method:
        thing()
        return ""
    if not issubclass(thing, unittest.TestCase):
        getattr(thing(), method)()
        return ""
    result = unittest.TestResult()
    thing(method).run(result)
    for kind in (result.errors, result.failures, result.skipped, result.expectedFailures):
        for _, text in kind:
            return text.strip().rpartition("\n")[2] or "failed"
    return "" if result.wasSuccessful() else "passed where it is expected to fail"


def verdicts(tests: Mapping[str, str], ids: Iterable[str]) -> dict[str, str]:
    """Of every `path::test`, empty or why it does not pass."""
    modules: dict[str, dict[str, Any]] = {}
    out = {}
    for test in ids:
        path, _, name = test.partition("::")
        try:
            if path not in modules:
                modules[path] = {"__name__": "tests", "__file__": path}
                exec(compile(tests[path], path, "exec"), modules[path])
            out[test] = run(modules[path], name)
        except BaseException as error:  # a test that skips or ends the program has not passed either
            out[test] = f"{type(error).__name__}: {error}"[:200]
    return out


def main() -> None:
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        ours.close()
        os.chdir(FOLDER)
        sys.path[0:1] = [os.getcwd(), os.path.abspath("src")]
        serve(theirs.makefile("rb"), theirs.sendall)
        os._exit(0)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)  # the child must not look into this process
    theirs.close()
    del sys.path[0]
    asked = json.loads(sys.stdin.buffer.read())
    sys.meta_path.insert(0, Finder(Link(ours), asked["modules"]))  # type: ignore[arg-type]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = verdicts(asked["tests"], asked["ids"])
    os.write(1, json.dumps({"seal": asked["seal"], "verdicts": found}).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
