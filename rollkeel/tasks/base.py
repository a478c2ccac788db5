"""What a verifiable task is: items by index, gold answers, near misses and exact scoring.

Item `index` is a pure function of (task, options, seed, split, index). Splits are disjoint by content: every problem belongs
to exactly one split by the hash of what it asks, whatever the seed, so an evaluation item can never be trained on.
"""

from __future__ import annotations

import hashlib
import json
import math
import numbers
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from rollkeel import plugins
from rollkeel.errors import BadInput, fault, nearest
from rollkeel.types import GraderSpec

SPLITS = ("sft", "train", "eval")
SPLIT_EDGES = {"eval": (0.0, 0.125), "sft": (0.125, 0.5), "train": (0.5, 1.0)}
"""Which part of the hash range `[0, 1)` each split owns."""
MAX_ATTEMPTS = 1000
MAX_RESPONSE_CHARS = 4096
"""Longer responses score 0 unread: no task has an answer this long, and a scorer must not be made to work for minutes."""
LIMITS = {"wall_s": 5.0, "cpu_s": 5.0, "memory_mb": 256}
"""In the sandbox, of what belongs to one response."""
ASCII_SPACE = " \t\r\n"
JUNK = ("0", " 0", "x", " x", "=", ".", "\n1", "\x00", "٣", "²")
"""What `check` glues to a gold answer, which must then score 0."""


class TaskOptions(BaseModel):
    """Base of every task's difficulty knobs: frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    beside: ClassVar[frozenset[str]] = frozenset()
    """Options that change how an item is graded, and not which items there are."""

    def defining(self) -> dict[str, Any]:
        """The others, which key every draw: of items and of what a demonstration gets wrong."""
        return self.model_dump(mode="json", exclude=set(self.beside))


O = TypeVar("O", bound=TaskOptions)  # noqa: E741 - reads as Task[O]


@dataclass(frozen=True, kw_only=True)
class TaskItem:
    """One problem. JSON values only, so that it can travel inside a `GraderSpec`."""

    text: str
    """Prompt text before any chat template."""
    answer: str
    """Gold answer in canonical form."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What scoring needs beside the answer."""

    def __post_init__(self) -> None:
        if not (isinstance(self.text, str) and isinstance(self.answer, str)):
            raise TypeError(f"TaskItem: expected text and answer as str, got {self.text!r:.40} and {self.answer!r:.40}")

    def to_json(self) -> dict[str, Any]:
        return {"text": self.text, "answer": self.answer, "metadata": dict(self.metadata)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> TaskItem:
        """Inverse of `to_json`. Raises `BadInput` when `text` or `answer` is missing."""
        if not {"text", "answer"} <= set(value):
            raise BadInput(f"task item: expected keys text and answer, got {sorted(value)}")
        return TaskItem(text=value["text"], answer=value["answer"], metadata=dict(value.get("metadata", {})))


class Task(ABC, Generic[O]):
    """A family of problems with a verifier. A subclass defines `draw`; what else it leaves out is as this class has it."""

    name: ClassVar[str]
    """The class's own name in small letters, unless it says another."""
    summary: ClassVar[str]
    """One line for `rollkeel tasks list`; the first line of the class's docstring, unless it says another."""
    address: str = ""
    """Where graders find a family that is not built in: `path/file.py:Name`."""
    options_type: ClassVar[type[TaskOptions]] = TaskOptions
    """The knobs: `RevOptions` of `class Rev(Task[RevOptions])`, unless it says another."""
    worker: ClassVar[str] = ""
    """`module:function` of `(text, answer, options)` that grades in a killable process, for a verifier that may hang or crash;
    empty: `verify` is bounded and runs in place."""
    junk: ClassVar[tuple[str, ...]] = JUNK
    """Endings that spoil a gold answer; a family that reads the answer out of prose or a program names its own."""
    options: O

    def __init_subclass__(cls) -> None:
        if "name" not in vars(cls):
            cls.name = cls.__name__.lower()
        if kinds := [k for base in vars(cls).get("__orig_bases__", ()) for k in get_args(base) if isinstance(k, type)]:
            cls.options_type = vars(cls).get("options_type", kinds[0])
        if "summary" not in vars(cls):
            cls.summary = (cls.__doc__ or "").strip().partition("\n")[0]

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        """Raises `BadInput` for an unknown knob (naming the nearest), a wrong type or a value out of range."""
        self.options = validate_options(self.name, self.options_type, options or {})  # type: ignore[assignment]

    @abstractmethod
    def draw(self, rng: random.Random) -> TaskItem:
        """One problem from the whole family, all of its randomness from `rng`."""

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        """Reward in [0, 1] and what was read from `response`, which is at most `MAX_RESPONSE_CHARS` long: by default 1 for the
        answer and nothing else but space around it."""
        read = response.strip(ASCII_SPACE)
        return float(read == item.answer), excerpt(read)

    def near_misses(self, item: TaskItem) -> Sequence[str]:
        """Responses close to the gold one that must each score 0.0; at least one."""
        gold = self.gold(item)
        return gold[:-1], gold + gold[-1:]

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """A gold response in which each step went wrong with probability `label_noise`: by default, each character is another
        one of the answer's."""
        gold = self.gold(item)
        return "".join(rng.choice(gold) if rng.random() < label_noise else c for c in gold)

    def identity(self, item: TaskItem) -> str:
        """What makes two items the same problem for the split; equal for rewordings such as swapped operands."""
        return item.text

    def gold(self, item: TaskItem) -> str:
        """A response that scores 1.0."""
        return item.answer

    def finish(self, item: TaskItem, rng: random.Random) -> TaskItem | None:
        """The problem made of a drawn item whose split is known, of the same identity; None draws another.

        For work too dear to do on items that then belong to another split.
        """
        return item

    def grader(self, item: TaskItem) -> GraderSpec:
        """Who grades responses to `item`: by default this task's own verifier."""
        options = {
            "task": self.address or self.name,
            "options": self.options.model_dump(mode="json"),
            "item": item.to_json(),
        }
        return GraderSpec(name="task", options=options)

    def effort(self, item: TaskItem) -> float:
        """Work of a plain reference solver, in its own unit; by default the characters of the gold answer."""
        return float(len(item.answer))

    def near_miss(self, item: TaskItem) -> str:
        """A response close to the gold one that must score 0.0."""
        return self.near_misses(item)[0]

    @cached_property
    def _key(self) -> str:
        return json.dumps([self.name, self.options.defining()], sort_keys=True)

    def item(self, seed: int, split: str, index: int) -> TaskItem:
        """Item `index` of `split`: redrawn until its content hash falls into the split.

        Raises `BadInput` for an unknown split, a negative index, or a family of too few different problems.
        """
        check_split(split)
        if index < 0:
            raise BadInput(f"task {self.name}: expected an index ≥ 0, got {index}")
        low, high = SPLIT_EDGES[split]
        rng = keyed_rng(self._key, seed, split, index)
        seen, mine = set[str](), 0
        for _ in range(MAX_ATTEMPTS):
            item = self.draw(rng)
            if not isinstance(item, TaskItem):
                raise BadInput(
                    f"task {self.name}: draw returned {item!r:.80}, expected a TaskItem{plugins.place(self.draw)}"
                )
            seen.add(identity := self.identity(item))
            if low <= hash_fraction(self.name, identity) < high:
                mine += 1
                if done := self.finish(item, rng):
                    if self.address and not self.gold(done).strip():
                        where = plugins.place(self.draw)
                        raise BadInput(
                            f"task {self.name}: the answer to {done.text!r} is empty, and so is silence{where}"
                        )
                    return done
        drawn = f"{MAX_ATTEMPTS} draws gave {len(seen)} different problem{'s' * (len(seen) > 1)}"
        if mine:
            raise BadInput(f"task {self.name}: {drawn}, and finish refused all {mine} of split {split!r}")
        knobs = self.describe()
        advice = f"raise the difficulty by data.options ({knobs})" if knobs else "let draw make fifty or more"
        raise BadInput(
            f"task {self.name}: {drawn}, none in split {split!r}, which has {high - low:.0%} of all; {advice}"
        )

    def demonstration(self, item: TaskItem, rng: random.Random, label_noise: float = 0.0) -> str:
        """Response text for SFT: the gold answer, with `label_noise` in [0, 1] the share of steps made wrong."""
        return self.noisy(item, rng, label_noise) if label_noise > 0 else self.gold(item)

    def score(self, item: TaskItem, response: str) -> tuple[float, str]:
        """Exact verification of a whole response: reward in [0, 1] and one line of detail. Never raises on any text."""
        if len(response) > MAX_RESPONSE_CHARS:
            return 0.0, f"longer than {MAX_RESPONSE_CHARS} characters"
        verdict = self.verify(item, response)
        reward, detail = verdict if isinstance(verdict, tuple) and len(verdict) == 2 else (verdict, "")
        undecided = reward is None and detail
        if not undecided and not (isinstance(reward, numbers.Real) and math.isfinite(reward)):
            raise BadInput(
                f"task {self.name}: verify returned {verdict!r:.80}, expected a reward from 0 to 1, or one and a line of detail"
                f"{plugins.place(self.verify)}"
            )
        return reward, detail  # type: ignore[return-value]

    def split_of(self, item: TaskItem) -> str:
        """The one split an item may appear in."""
        u = hash_fraction(self.name, self.identity(item))
        return next(s for s in SPLITS if SPLIT_EDGES[s][0] <= u < SPLIT_EDGES[s][1])

    def describe(self) -> str:
        """Options as `a=1 b=2`."""
        return " ".join(f"{k}={v}" for k, v in self.options.model_dump(mode="json").items())

    @classmethod
    def knobs(cls) -> dict[str, dict[str, Any]]:
        """JSON schema of every knob: type, default, range, description."""
        return cls.options_type.model_json_schema().get("properties", {})


def validate_options(task: str, kind: type[TaskOptions], options: Mapping[str, Any]) -> TaskOptions:
    """Options as a typed record. Raises `BadInput` (one line) on the first fault."""
    for key in options:
        if key not in kind.model_fields:
            raise BadInput(f"task {task}: unknown option {key!r}{nearest(str(key), list(kind.model_fields))}")
    try:
        return kind.model_validate(dict(options))
    except ValidationError as error:
        where, reason = fault(error)
        raise BadInput(f"task {task}: {' '.join(['option', *where]) if where else 'options'}: {reason}") from None


def check_split(split: str) -> None:
    """Raises `BadInput` for a split that does not exist."""
    if split not in SPLITS:
        raise BadInput(f"split {split!r}: unknown{nearest(split, SPLITS)}")


def digest(*parts: object) -> bytes:
    """SHA-256 of a JSON list: unlike `hash()` the same in every process, unlike joined text without collisions."""
    return hashlib.sha256(json.dumps(parts).encode()).digest()


def keyed_rng(*key: object) -> random.Random:
    """A generator that is a function of `key` (JSON values) alone."""
    return random.Random(int.from_bytes(digest(*key)[:16], "big"))


def hash_fraction(*parts: object) -> float:
    """Hash of `parts` as a number in [0, 1)."""
    return (int.from_bytes(digest(*parts)[:8], "big") >> 11) / 2.0**53


def content_hash(task: str, text: str, answer: str) -> str:
    """`Prompt.id`: 32 hex digits."""
    return digest(task, text, answer).hex()[:32]


def excerpt(text: str, limit: int = 80) -> str:
    """A response on one printable line, cut at `limit` characters."""
    line = text if text.isprintable() else text.encode("unicode_escape", "backslashreplace").decode("ascii")
    return line if len(line) <= limit else line[: limit - 1] + "…"
