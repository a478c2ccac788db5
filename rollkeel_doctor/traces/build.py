"""What all readers of other frameworks' dumps share: sequences collected one by one into a `Trace`, and notes that stay few."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from rollkeel_doctor.errors import BadInput, Corrupt
from rollkeel_doctor.traces.trace import TOKENS, Facts, Trace

_ALWAYS: Final = ("token_ids", "rollout_logprobs")
_SCALARS: Final = {int, float, bool, type(None)}


@final
class Notes:
    """Lines on what could not be read or is not certain; the same problem again only counts."""

    def __init__(self) -> None:
        self._found: dict[str, list[Any]] = {}

    def add(self, problem: str, where: str = "") -> None:
        known = self._found.setdefault(problem, [where, 0])
        known[1] += 1

    def lines(self) -> list[str]:
        out = []
        for problem, (where, n) in self._found.items():
            more = f" (and {n - 1} more like it)" if n > 1 else ""
            line = f"{where}: {problem}{more}" if where else f"{problem}{more}"
            out.append(_encodable(line.replace("\n", " ")))
        return out


@dataclass(slots=True, kw_only=True)
class Response:
    """One response as a reader found it; see `Trace` for the fields. `tokens` holds per-token values, None where absent."""

    where: str
    step: int
    length: int
    group: Hashable = None  # Sequences with equal keys in one step share a group; None: a group of its own.
    id: int | None = None
    reward: float = float("nan")
    prompt_length: int = -1
    status: str = ""
    prompt_text: str = ""
    text: str = ""
    answer: str = ""
    tokens: Mapping[str, Any] = field(default_factory=dict)


@final
class Sequences:
    """Collects sequences of one dump.

    `source`: how the trace names its format. `room`: tokens that the files can hold at most, where a file can name the same
    list again and again; an honest one takes two bytes or more for a token.
    """

    def __init__(self, source: str, path: Path, notes: Notes, *, room: float = float("inf")) -> None:
        self.source = source
        self.path = path
        self.notes = notes
        self._room = room
        self._found: list[Response] = []
        self._tokens: dict[str, list[np.ndarray | None]] = {name: [] for name in TOKENS}

    def add(self, found: Response) -> None:
        """Token fields whose length or kind does not fit are left out of this sequence, with a note.

        Raises `Corrupt` for more tokens than there is room for.
        """
        self._room -= found.length
        if self._room < 0:
            raise Corrupt(f"{self.path}: more tokens than its bytes can hold; not a dump that {self.source} wrote")
        self._found.append(found)
        for name, column in self._tokens.items():
            column.append(self._field(name, found))

    def _field(self, name: str, found: Response) -> np.ndarray | None:
        value = found.tokens.get(name)
        if value is None:
            return None
        array = numbers(value, TOKENS[name][1])
        if array is None:
            self.notes.add(f"{name}: expected one number per token; left out", found.where)
        elif len(array) != found.length:
            self.notes.add(f"{name}: as many as the response has tokens were expected; left out", found.where)
        else:
            return array
        return None

    def trace(self, facts: Facts | None = None, metrics: Sequence[Mapping[str, Any]] = ()) -> Trace:
        """All of them, by step. Raises `BadInput` if there are none."""
        if not self._found:
            lines = self.notes.lines()
            raise BadInput(f"{self.path}: no {self.source} sequence can be read" + (f" ({lines[0]})" if lines else ""))
        order = sorted(range(len(self._found)), key=lambda i: self._found[i].step)
        found = [self._found[i] for i in order]
        tokens = {name: self._join(name, order) for name in TOKENS}
        return Trace(
            source=self.source,
            path=str(self.path),
            facts=facts or Facts(),
            starts=np.concatenate([[0], np.cumsum([s.length for s in found])]).astype(np.int64),
            step=np.array([s.step for s in found], np.int64),
            id=_ids([s.id for s in found]),
            group=_groups(found),
            reward=np.array([s.reward for s in found], np.float64),
            prompt_length=np.array([s.prompt_length for s in found], np.int64),
            status=_texts([s.status for s in found]),
            prompt_text=_texts([s.prompt_text for s in found]),
            text=_texts([s.text for s in found]),
            answer=_texts([s.answer for s in found]),
            metrics=metrics,
            notes=self.notes.lines(),
            **tokens,
        )

    def _join(self, name: str, order: Iterable[int]) -> Any:
        _, dtype, missing = TOKENS[name]
        column = self._tokens[name]
        absent = sum(value is None for value in column)
        if absent == len(column) and name not in _ALWAYS:
            return None
        if 0 < absent < len(column):
            self.notes.add(f"{name}: not in {absent} of {len(column)} sequences")
        parts = (
            np.full(self._found[i].length, missing, dtype) if (value := column[i]) is None else value for i in order
        )
        return np.concatenate([np.empty(0, dtype), *parts])


def numbers(value: Any, dtype: type[np.generic]) -> np.ndarray | None:
    """`[n]` of a list or array of numbers, None where it is anything else. None inside becomes NaN; a mask is what is not 0."""
    if isinstance(value, list | tuple):
        if not set(map(type, value)) <= _SCALARS:
            return None
        try:
            value = np.asarray(value, np.float64 if None in value or not value else None)
        except OverflowError:
            return None
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "biuf":
        return None
    kind = np.dtype(dtype).kind
    if kind == "b":
        return np.isfinite(value) & (value != 0)
    if kind == "i":
        whole = value.dtype.kind in "bi" or bool(np.all((np.abs(value) < 1 << 62) & (value == np.floor(value))))
        return value.astype(dtype) if whole else None
    with np.errstate(over="ignore"):
        return value.astype(dtype)


def number(value: Any) -> float:
    """A float of a number, NaN of anything else."""
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return float("nan")
    return float("nan")


def integer(value: Any) -> int | None:
    """An int that fits an array, else None."""
    return value if type(value) is int and abs(value) < 1 << 62 else None


def text(value: Any, depth: int = 2) -> str:
    """Text of a string, or of a conversation: the contents of its messages, or their parts, one after the other."""
    if isinstance(value, Mapping):
        value = value.get("content", value.get("text"))
    if isinstance(value, str):
        return _encodable(value)
    if isinstance(value, list | tuple) and depth:
        return "\n".join(filter(None, (text(v, depth - 1) for v in value[:1000])))
    return ""


def _encodable(value: str) -> str:
    """Without the lone surrogates that JSON and pickles can hold and no terminal or file takes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode(errors="replace").decode()
    return value


def without_placeholders(logprobs: Any, mask: Any) -> Any:
    """Log-probs in which an exact 0 outside the mask, written where nothing was sampled, is NaN.

    An exact 0 inside the mask stays: a loss was taken over it.
    """
    q = numbers(logprobs, np.float32) if logprobs is not None else None
    m = numbers(mask, np.bool_) if mask is not None else None
    if q is None or m is None or len(q) != len(m):
        return logprobs
    return np.where((q == 0) & ~m, np.float32(np.nan), q)


def numbered(folder: Path, pattern: str, last: int | None = None) -> list[tuple[int, Path]]:
    """Entries of a folder whose name matches, with the number in it, in order; only those of the `last` numbers."""
    wanted = re.compile(pattern)
    found = [(int(m[1]), p) for p in folder.iterdir() if (m := wanted.fullmatch(p.name))]
    found.sort(key=lambda entry: (entry[0], entry[1].name))
    if last is not None:
        kept = set(sorted({n for n, _ in found})[-last:]) if last > 0 else set()
        found = [entry for entry in found if entry[0] in kept]
    return found


def dumped(path: Path, folder: str, pattern: str, last: int | None = None) -> list[tuple[int, Path]]:
    """`numbered` files: this one, those of this folder, or of the one in it that is called `folder`."""
    if path.is_file():
        return [(number_in(path, pattern), path)]
    return numbered(path / folder if (path / folder).is_dir() else path, pattern, last)


def number_in(path: Path, pattern: str) -> int:
    """The number in one file's name, 0 without one."""
    m = re.fullmatch(pattern, path.name)
    return int(m[1]) if m else 0


def _ids(ids: Sequence[int | None]) -> np.ndarray:
    if None in ids or len(set(ids)) != len(ids):
        return np.arange(len(ids), dtype=np.int64)
    return np.array(ids, np.int64)


def _groups(found: Sequence[Response]) -> np.ndarray:
    known: dict[Hashable, int] = {}
    return np.array(
        [
            known.setdefault((s.step, i) if s.group is None else (s.step, "group", s.group), len(known))
            for i, s in enumerate(found)
        ],
        np.int64,
    )


def _texts(values: list[str]) -> list[str] | None:
    return values if any(values) else None
