"""Pickles read as data: a small machine for the pickle opcodes that builds plain values and runs nothing.

Python's own `pickle` calls whatever a file names. This machine has no way to call, import or set an attribute: a name
becomes a `Name`, a call of it an inert `Record` of its arguments, except for the few names in `builders`, which are
functions of this package. Written from the opcode tables of CPython's `pickletools` (protocols 2 to 5, which is all that
`torch.save` and `pickle.dump` have written for years); opcodes that only older protocols or code need are refused.

A small file cannot grow: all sizes are checked against the bytes that are left before anything is allocated, containers
are counted, memo entries must be written before they are read, integers are short, and dictionary keys are such that
they cannot be made to collide.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np

MAX_CONTAINERS: Final = 2_000_000
"""Lists, tuples, dicts, sets and records in one pickle; about half a gigabyte of empty ones."""
MAX_MEMO: Final = 4_000_000
"""Values that a pickle remembers to name them again."""
MAX_INT_BYTES: Final = 16
MAX_NAME: Final = 300


class Refused(ValueError):
    """The pickle is damaged, or holds what this reader does not read; the message is a few words for the middle of a line."""


@dataclass(frozen=True, slots=True)
class Name:
    """What a pickle would have imported, as text."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Record:
    """What a pickle would have built by calling `kind`: its arguments, and what would have been put into it."""

    kind: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    elements: list[Any] = field(default_factory=list)

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Attributes the object would have had; empty unless its state is a dict, as that of a plain class is."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict):
            state = state[0]
        return state if isinstance(state, dict) else {}


Builder = Callable[[tuple[Any, ...]], Any]
"""Takes the arguments of a call as the pickle gives them, returns a value; raises `Refused`."""


def loads(
    data: bytes, builders: Mapping[str, Builder] | None = None, storage: Callable[[Any], Any] | None = None
) -> Any:
    """The value a pickle holds. Names in `builders` are built by them, all others become `Record`s.

    `storage`: makes values of persistent ids, which `torch.save` writes; without it they are refused.
    Raises `Refused` for anything damaged or not read here, and nothing else.
    """
    try:
        return _Machine(data, builders or {}, storage).run()
    except (IndexError, struct.error) as error:
        raise Refused("cut short or damaged") from error
    except (UnicodeDecodeError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise Refused(f"damaged ({type(error).__name__})") from error


_MARK: Final = object()
_SHORT_INTS = re.compile(rb"(?:K.|M..|J....)++", re.DOTALL)
_U16, _I32, _U32, _U64, _F64 = (struct.Struct(code).unpack_from for code in ("<H", "<i", "<I", "<Q", ">d"))
_PROTO, _FRAME, _STOP = 0x80, 0x95, ord(".")


@final
class _Machine:
    def __init__(self, data: bytes, builders: Mapping[str, Builder], storage: Callable[[Any], Any] | None) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.containers = 0
        self.builders, self.storage = builders, storage

    def run(self) -> Any:
        data, steps = self.data, _STEPS
        if data[:1] != b"\x80" or data[1] > 5:
            raise Refused("not a pickle of protocol 2 to 5")
        while (code := data[self.at]) != _STOP:
            self.at += 1
            step = steps.get(code)
            if step is None:
                raise Refused(f"opcode 0x{code:02x} is not read here")
            step(self)
        if len(self.stack) != 1 or self.stack[0] is _MARK:
            raise Refused("damaged (stack)")
        return self.stack[0]

    # reading

    def take(self, n: int) -> bytes:
        start = self.at
        if n > len(self.data) - start:
            raise Refused("cut short")
        self.at = start + n
        return self.data[start : self.at]

    def number(self, unpack: Callable[[bytes, int], tuple[Any, ...]], size: int) -> Any:
        (value,) = unpack(self.data, self.at)
        self.at += size
        return value

    def count(self) -> None:
        self.containers += 1
        if self.containers > MAX_CONTAINERS:
            raise Refused(f"more than {MAX_CONTAINERS} containers")

    # stack

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise Refused("damaged (mark)")
        return value

    def top(self) -> Any:
        value = self.stack[-1]
        if value is _MARK:
            raise Refused("damaged (mark)")
        return value

    def marked(self) -> list[Any]:
        """Everything above the last mark."""
        stack = self.stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise Refused("damaged (no mark)")
        found = stack[at + 1 :]
        del stack[at:]
        return found

    def put(self, value: Any) -> None:
        self.count()
        self.stack.append(value)

    def remember(self, index: int) -> None:
        if len(self.memo) >= MAX_MEMO:
            raise Refused(f"more than {MAX_MEMO} remembered values")
        self.memo[index] = self.top()

    # runs of numbers, which are most of a dump

    def short_ints(self) -> None:
        """One or more ints; the opcode at `at - 1` is the first."""
        data, at, push = self.data, self.at - 1, self.stack.append
        run = _SHORT_INTS.match(data, at)
        end = run.end() if run else at + 1
        while at < end:
            code = data[at]
            if code == 0x4D:
                push(data[at + 1] | data[at + 2] << 8)
                at += 3
            elif code == 0x4B:
                push(data[at + 1])
                at += 2
            else:
                push(_I32(data, at + 1)[0])
                at += 5
        self.at = at

    def floats(self) -> None:
        """One or more floats; the opcode at `at - 1` is the first."""
        start, left = self.at - 1, (len(self.data) - self.at + 1) // 9
        if left < 8 or self.data[start + 9] != 0x47 or self.data[start + 18] != 0x47:
            self.stack.append(self.number(_F64, 8))
            return
        n = 8
        while True:
            codes = np.frombuffer(self.data, np.uint8, min(n, left) * 9, start)[::9]
            other = np.flatnonzero(codes != 0x47)
            if other.size or n >= left:
                break
            n *= 8
        n = int(other[0]) if other.size else left
        run = np.frombuffer(self.data, np.dtype([("code", "u1"), ("value", ">f8")]), n, start)
        self.stack.extend(run["value"].tolist())
        self.at = start + n * 9

    # what names and calls become

    def named(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str) or len(module) + len(name) > MAX_NAME:
            raise Refused("damaged (name)")
        self.put(Name(module, name))

    def line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + MAX_NAME)
        if end < 0:
            raise Refused("damaged (name)")
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text

    def call(self, name: Any, args: Any) -> None:
        if not isinstance(args, tuple):
            raise Refused("damaged (arguments)")
        if not isinstance(name, Name):
            raise Refused("calls what is not a name")
        build = self.builders.get(str(name))
        self.put(build(args) if build else Record(str(name), args))

    def persistent(self) -> None:
        if self.storage is None:
            raise Refused("persistent id outside a torch file")
        self.put(self.storage(self.pop()))

    def build(self) -> None:
        state, value = self.pop(), self.top()
        if isinstance(value, Record):
            value.state = state
        elif not isinstance(value, dict):
            # A built value stays as it was built. A dict is what an OrderedDict became.
            raise Refused("sets the state of what is not an object")

    def append(self, values: list[Any]) -> None:
        target = self.top()
        if isinstance(target, Record):
            target.elements.extend(values)
        elif isinstance(target, list):
            target.extend(values)
        else:
            raise Refused("damaged (append)")

    def set_items(self, values: list[Any]) -> None:
        target = self.top()
        into = target.items if isinstance(target, Record) else target
        if not isinstance(into, dict) or len(values) % 2:
            raise Refused("damaged (items)")
        for key, value in zip(values[::2], values[1::2], strict=True):
            into[honest_key(key)] = value


def honest_key(value: Any) -> Any:
    """Keys with honest hashes only: a file must not be able to make a dict slow, or a hash recurse."""
    if value is None or isinstance(value, str | bytes | float | Name | Record):
        return value
    if isinstance(value, int) and abs(value) < 1 << 60:  # beyond it hashes wrap around
        return value
    if isinstance(value, tuple) and len(value) < 10 and all(isinstance(v, str | float) or v is None for v in value):
        return value
    raise Refused(f"a {type(value).__name__} as a key")


def _integer(m: _Machine, size: int) -> None:
    if size > MAX_INT_BYTES:
        raise Refused("an integer that is too long")
    m.stack.append(int.from_bytes(m.take(size), "little", signed=True))


def _text(m: _Machine, size: int) -> None:
    m.stack.append(m.take(size).decode("utf-8", "surrogatepass"))


def _pair(m: _Machine, act: Callable[[Any, Any], None]) -> None:
    second, first = m.pop(), m.pop()
    act(first, second)


def _tuple(m: _Machine, n: int) -> None:
    m.put(tuple(m.pop() for _ in range(n))[::-1])


def _dict(m: _Machine) -> None:
    values = m.marked()
    m.put({})
    m.set_items(values)


def _set_marked(m: _Machine) -> None:
    values = m.marked()
    target = m.top()
    if not isinstance(target, set):
        raise Refused("damaged (set)")
    target.update(honest_key(v) for v in values)


def _new_with_keywords(m: _Machine) -> None:
    keywords, args, name = m.pop(), m.pop(), m.pop()
    if not isinstance(keywords, dict):
        raise Refused("damaged (keywords)")
    if keywords and isinstance(name, Name):
        m.put(Record(str(name), (args, keywords)))  # joining them would copy what a file can name again and again
    else:
        m.call(name, args)


def _global(m: _Machine) -> None:
    module = m.line()
    m.named(module, m.line())


_STEPS: Final[dict[int, Callable[[_Machine], object]]] = {
    _PROTO: lambda m: m.take(1),
    _FRAME: lambda m: m.take(8),
    ord("("): lambda m: m.stack.append(_MARK),
    ord("0"): lambda m: m.stack.pop(),
    ord("1"): lambda m: m.marked(),
    ord("2"): lambda m: m.stack.append(m.top()),
    ord("N"): lambda m: m.stack.append(None),
    0x88: lambda m: m.stack.append(True),
    0x89: lambda m: m.stack.append(False),
    ord("K"): _Machine.short_ints,
    ord("M"): _Machine.short_ints,
    ord("J"): _Machine.short_ints,
    0x8A: lambda m: _integer(m, m.take(1)[0]),
    0x8B: lambda m: _integer(m, m.number(_U32, 4)),
    ord("G"): _Machine.floats,
    ord("C"): lambda m: m.stack.append(m.take(m.take(1)[0])),
    ord("B"): lambda m: m.stack.append(m.take(m.number(_U32, 4))),
    0x8E: lambda m: m.stack.append(m.take(m.number(_U64, 8))),
    0x96: lambda m: m.stack.append(m.take(m.number(_U64, 8))),
    ord("U"): lambda m: m.stack.append(m.take(m.take(1)[0]).decode("latin-1")),
    ord("T"): lambda m: m.stack.append(m.take(m.number(_U32, 4)).decode("latin-1")),
    0x8C: lambda m: _text(m, m.take(1)[0]),
    ord("X"): lambda m: _text(m, m.number(_U32, 4)),
    0x8D: lambda m: _text(m, m.number(_U64, 8)),
    ord("]"): lambda m: m.put([]),
    ord("a"): lambda m: m.append([m.pop()]),
    ord("e"): lambda m: m.append(m.marked()),
    ord("l"): lambda m: m.put(m.marked()),
    ord(")"): lambda m: m.stack.append(()),
    0x85: lambda m: _tuple(m, 1),
    0x86: lambda m: _tuple(m, 2),
    0x87: lambda m: _tuple(m, 3),
    ord("t"): lambda m: m.put(tuple(m.marked())),
    ord("}"): lambda m: m.put({}),
    ord("d"): _dict,
    ord("s"): lambda m: m.set_items([m.pop(), m.pop()][::-1]),
    ord("u"): lambda m: m.set_items(m.marked()),
    0x8F: lambda m: m.put(set()),
    0x90: _set_marked,
    0x91: lambda m: m.put(frozenset(honest_key(v) for v in m.marked())),
    ord("q"): lambda m: m.remember(m.take(1)[0]),
    ord("r"): lambda m: m.remember(m.number(_U32, 4)),
    0x94: lambda m: m.remember(len(m.memo)),
    ord("h"): lambda m: m.stack.append(m.memo[m.take(1)[0]]),
    ord("j"): lambda m: m.stack.append(m.memo[m.number(_U32, 4)]),
    ord("c"): _global,
    0x93: lambda m: _pair(m, m.named),
    ord("R"): lambda m: _pair(m, m.call),
    0x81: lambda m: _pair(m, m.call),
    0x92: _new_with_keywords,
    ord("b"): _Machine.build,
    ord("Q"): _Machine.persistent,
}
"""Opcode → what it does. What is not here (INST, OBJ, EXT, protocol 0 and 1) is refused."""
