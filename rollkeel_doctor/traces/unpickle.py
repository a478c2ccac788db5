"""Pickles read as data: Python's own unpickler with every step that could call, import or set something replaced.

A name becomes a `Name`, a call of it an inert `Record` of its arguments, except for the few names in `builders`, which are
functions of this package. Opcodes are those that pickle writes in protocols 2 to 5; others (INST, OBJ, EXT, those of
protocols 0 and 1) are refused. The unpickler is the one in Python: that in C makes room for any memo index and byte count
that a file claims, and hashes keys before anyone can look at them.

A small file cannot grow: what one byte can make is counted, integers are short, and dictionary keys are such that they
cannot be made to collide.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Final, final

MAX_OBJECTS: Final = 2_500_000
"""Containers, marks, names, calls and values remembered by one byte in one pickle; half a gigabyte of empty ones."""
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
    """What a pickle would have built by calling `kind`: its arguments and its state. Items that it would hold are dropped."""

    kind: str
    args: tuple[Any, ...] = ()
    state: Any = None

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Attributes the object would have had; empty unless its state is a dict, as that of a plain class is."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict):
            state = state[0]
        return state if isinstance(state, dict) else {}

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, values: Any) -> None: ...

    extend = append


Builder = Callable[[tuple[Any, ...]], Any]
"""Takes the arguments of a call as the pickle gives them, returns a value; raises `Refused`."""


def loads(
    data: bytes, builders: Mapping[str, Builder] | None = None, storage: Callable[[Any], Any] | None = None
) -> Any:
    """The value a pickle holds. Names in `builders` are built by them, all others become `Record`s.

    `storage`: makes values of persistent ids, which `torch.save` writes; without it they are refused.
    Raises `Refused` for anything damaged or not read here, and nothing else.
    """
    if data[:1] != b"\x80":
        raise Refused("not a pickle of protocol 2 to 5")
    try:
        return _Machine(data, builders or {}, storage).load()
    except Refused:
        raise
    except Exception as error:  # whatever damage leads to
        raise Refused(f"cut short, damaged or not of a kind that is read ({type(error).__name__})") from error


def honest_key(value: Any) -> None:
    """Keys with honest hashes only: a file must not be able to make a dict slow, or a hash recurse."""
    if value is None or isinstance(value, str | bytes | float | Name | Record):
        return
    if isinstance(value, int) and abs(value) < 1 << 60:  # beyond it hashes wrap around
        return
    if isinstance(value, tuple) and len(value) < 10 and all(isinstance(v, str | float) or v is None for v in value):
        return
    raise Refused(f"a {type(value).__name__} as a key")


_Step = Callable[[Any], None]
_PYTHONS: Final[Mapping[int, _Step]] = pickle._Unpickler.dispatch
_RUN = re.compile(rb"(?:K.)++|(?:M..)++|(?:J.{4})++|(?:G.{8})++", re.DOTALL)
_NUMBERS: Final = {ord(c): struct.Struct(form) for c, form in (("K", "xB"), ("M", "<xH"), ("J", "<xi"), ("G", ">xd"))}


def _counted(step: _Step) -> _Step:
    def counted(machine: _Machine) -> None:
        machine.objects += 1
        if machine.objects > MAX_OBJECTS:
            raise Refused(f"more than {MAX_OBJECTS} containers and names")
        step(machine)

    return counted


def _keyed(step: _Step, first: int, every: int) -> _Step:
    """`step` with honest keys: every so many values of the stack, which holds those above the last mark."""

    def keyed(machine: _Machine) -> None:
        for key in machine.stack[first::every]:
            honest_key(key)
        step(machine)

    return keyed


@final
class _Machine(pickle._Unpickler):
    stack: list[Any]

    def __init__(self, data: bytes, builders: Mapping[str, Builder], storage: Callable[[Any], Any] | None) -> None:
        self.data, self.file = data, io.BytesIO(data)
        super().__init__(self.file, encoding="latin-1")
        self.builders = builders
        self.storage = storage
        self.objects = 0

    def find_class(self, module: str, name: str) -> Name:
        if len(module) + len(name) > MAX_NAME:
            raise Refused("damaged (name)")
        return Name(module, name)

    def persistent_load(self, pid: Any) -> Any:
        if self.storage is None:
            raise Refused("persistent id outside a torch file")
        return self.storage(pid)

    def call(self) -> None:
        args, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, Name) or not isinstance(args, tuple):
            raise Refused("calls what is not a name")
        build = self.builders.get(str(name))
        self.stack.append(build(args) if build else Record(str(name), args))

    def call_with_keywords(self) -> None:
        self.stack.pop()  # no reader asks for them
        self.call()

    def build(self) -> None:
        state, value = self.stack.pop(), self.stack[-1]
        if isinstance(value, Record):
            value.state = state
        elif not isinstance(value, dict):
            # A built value stays as it was built. A dict is what an OrderedDict became.
            raise Refused("sets the state of what is not an object")

    def numbers(self) -> None:
        """Numbers are most of a dump, and come in runs; the opcode just read is the first."""
        run = _RUN.match(self.data, at := self.file.tell() - 1)
        if run is None:
            raise Refused("cut short")
        while run:
            found = run.group()
            self.stack.extend(chain.from_iterable(_NUMBERS[found[0]].iter_unpack(found)))
            run = _RUN.match(self.data, at := run.end())
        self.file.seek(at)

    def integer(self) -> None:
        size = self.file.read(1)[0]
        if size > MAX_INT_BYTES:
            raise Refused("an integer that is too long")
        self.stack.append(int.from_bytes(self.file.read(size), "little", signed=True))

    dispatch: ClassVar[dict[int, _Step]] = {  # pyright: ignore[reportIncompatibleVariableOverride]
        # Constants, bytes, text, what is remembered, persistent ids, lists: as Python has them.
        **{code: _PYTHONS[code] for code in b"\x80.012N\x88\x89)CB\x8eUT\x8cX\x8dqrhjQtae"},
        **{code: _counted(_PYTHONS[code]) for code in b"(]}\x8f\x85\x86\x87\x94c\x93"},
        ord("s"): _keyed(_PYTHONS[ord("s")], -2, 2),
        ord("u"): _keyed(_PYTHONS[ord("u")], 0, 2),
        **{code: _keyed(_PYTHONS[code], 0, 1) for code in b"\x90\x91"},
        **dict.fromkeys(b"R\x81", _counted(call)),
        **dict.fromkeys(b"KMJG", numbers),
        0x92: _counted(call_with_keywords),
        ord("b"): build,
        0x8A: integer,
        0x95: lambda machine: machine.file.read(8),  # frames: only how a pickle was written
        0x96: _PYTHONS[0x8E],  # a bytearray as bytes; Python's makes room before it reads
    }
    """Opcode → what it does; all that is not here is refused."""
