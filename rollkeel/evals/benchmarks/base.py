"""What a benchmark is: where its rows are published, how a row becomes a question with a verifiable answer, and how it is reported."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from pydantic import Field, ValidationError

from rollkeel import rewards
from rollkeel.config import Node
from rollkeel.errors import BadInput, fault
from rollkeel.rewards.judge_model import JudgeModelOptions
from rollkeel.rewards.workers import Workers
from rollkeel.tasks.base import content_hash
from rollkeel.tasks.environment import Environment
from rollkeel.tasks.rows import Row, find_files, read_files, read_hub
from rollkeel.tasks.source import Problem, Problems
from rollkeel.types import GraderSpec


class Options(Node):
    """Settings of a benchmark besides its files. Recorded with the results."""

    limit: int | None = Field(default=None, ge=1)
    """Only the first so many items."""
    shuffle: int | None = Field(default=None, ge=0)
    """Seed by which the choices of every item are put in another order; None keeps them as published."""
    since: str | None = Field(default=None, pattern=r"^\d{4}-\d{2}(-\d{2})?$")
    """Only problems of this date (`2024-08` or `2024-08-01`) and later, where rows have dates."""
    until: str | None = Field(default=None, pattern=r"^\d{4}-\d{2}(-\d{2})?$")
    """Only problems of this date and earlier; a month counts to its end."""
    judge: dict[str, Any] = Field(default_factory=dict)
    """Of a judged benchmark: options of the grader `judge_model`, at least `url` and `model`."""
    classes: str = "bfcl_eval"
    """Of conversations: the installed package, or the folder, that has the benchmark's interfaces."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question."""

    key: str
    """Unique in the benchmark and the same in every file format: its published id, or its place."""
    text: str
    """Prompt before any chat template."""
    answer: str
    """Gold answer as the grader takes it."""
    grader: GraderSpec
    group: str = ""
    """Subject, task or level that is reported on its own."""
    unit: str = ""
    """What is independent of what: items of one unit are averaged before errors are computed. Empty: the item itself."""
    messages: tuple[Mapping[str, str], ...] = ()
    """What a chat template is given, where that is more than `text` as the user's turn."""
    order: tuple[int, ...] = ()
    """Places that the choices had as published, in the order they are shown; empty when nothing is shuffled."""

    @property
    def hash(self) -> str:
        """Equal for the same question with the same gold answer."""
        return content_hash(self.group, self.text, self.answer)


Builder = Callable[[Row, int, Options], Sequence[Item]]
"""Items of one row (0-based number): none when the options leave it out. Raises `KeyError` for a column that is not there and
`ValueError` (a few words) for a value that cannot be used."""


@final
@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One public benchmark. Its contents are never part of this package."""

    name: str
    title: str
    hub: str
    """Data set id on the Hugging Face hub; empty for one that is read from files alone."""
    config: str | None = None
    split: str
    files: tuple[str, ...]
    """Patterns of its files below a folder; the first that matches anything is used."""
    where: str
    """Where its files are published, for people."""
    columns: tuple[str, ...]
    """Columns that are read."""
    items: int
    """Documented number of items, with the default options."""
    license: str
    grader: str
    build: Builder
    reported: str
    """How the Ring-1T report, DPPO and AC-MIS-PO report it."""
    k: int
    """Samples per item where the caller does not say."""
    read: Callable[[str], str | None] | None = None
    """The answer that a response votes for in majority@k; None where answers cannot be compared as text."""
    aggregate: Literal["items", "groups", "harmonic", "effective"] = "items"
    """What is reported beside the mean over items: the mean, or harmonic mean, of the groups' means; or the mean over units of the
    probability that all their items are right."""
    context: int = 32_768
    """Prompt and response together in the Ring-1T report (§3.2), tokens."""
    join: Callable[[Iterator[Row]], Iterator[Row]] | None = None
    """Rows from those of the files, where a question and its gold answer stand apart."""
    played: Callable[[Workers], Environment[Any]] | None = None
    """What plays its items turn by turn; None where a response is all there is."""

    @property
    def judged(self) -> bool:
        """Whether a language model grades."""
        return self.grader == "judge_model"

    def graded_by(self, options: Options, given: Mapping[str, Any]) -> Options:
        """`options` with those of `data.grader_options` that this benchmark takes. Raises `BadInput` for others of one that is played."""
        if self.judged:
            return options.model_copy(update={"judge": dict(given)})
        if self.played is None:
            return options
        if set(given) - {"classes"} or not isinstance(given.get("classes", ""), str):
            raise BadInput(
                f"{self.name}: data.grader_options: expected classes=PACKAGE or FOLDER, got {dict(given)!r:.80}"
            )
        return options.model_copy(update=dict(given))

    def load(self, path: str | Path | None, options: Options | None = None) -> Loaded:
        """All items. Raises `BadInput` (one line) when files, columns or the grader are not there, or nothing is left."""
        options = options or Options()
        rewards.get(self.grader)
        if path is None and not self.hub:
            raise BadInput(f"{self.name}: is read from files alone; give --path: {self.where}")
        if path is None:
            rows = read_hub(self.hub, self.config, self.split, self.where)
        else:
            root = Path(path).expanduser()
            rows = read_files(find_files(root, self.files, self.where), root)
        if self.judged:
            self._check_judge(options)
        items: dict[str, Item] = {}
        silent = 0
        for item in self._items(rows, options):
            if not item.answer.strip():
                silent += 1
                continue
            if item.key in items:
                raise BadInput(f"{self.name}: item {item.key} appears twice; give one file of the split {self.split!r}")
            items[item.key] = item
            if options.limit is not None and len(items) >= options.limit:
                break
        if not items:
            raise BadInput(
                f"{self.name}: no items in {path or self.hub} with {options.model_dump(exclude_none=True)}; "
                f"{silent} without a gold answer were left out"
            )
        for name in {item.grader.name for item in items.values()}:
            rewards.get(name)
        usual = options.model_copy(update={"shuffle": None, "judge": {}, "classes": Options().classes}) == Options()
        warning = ""
        if silent or (usual and len(items) != self.items):
            warning = (
                f"{self.name}: expected the {self.items} items that are documented, got {len(items)}, and {silent} "
                "without a gold answer, left out; the result cannot be compared with published ones"
            )
        return Loaded(benchmark=self, options=options, items=tuple(items.values()), warning=warning)

    def _check_judge(self, options: Options) -> None:
        try:
            JudgeModelOptions(**options.judge)
        except ValidationError as error:
            where, why = fault(error)
            raise BadInput(
                f"{self.name}: a model judges it, set data.grader_options={{url: …, model: …}}; {'.'.join(where)}: {why}"
            ) from None

    def _items(self, rows: Iterator[Row], options: Options) -> Iterator[Item]:
        for number, row in enumerate(self.join(rows) if self.join else rows):
            where = f"{self.name} row {number + 1}"
            try:
                built = self.build(row, number, options)
            except KeyError as error:
                there = ", ".join(repr(c) for c in row if not c.startswith("_")) or "none"
                raise BadInput(
                    f"{where}: no column {error.args[0]!r} (expected {', '.join(self.columns)}); present: {there}"
                ) from None
            except ValueError as error:
                raise BadInput(f"{where}: {' '.join(str(error).split())[:200]}") from None
            for item in built:
                if not item.text.strip():
                    raise BadInput(f"{where}: expected a question, got an empty one")
                yield item


@final
@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A benchmark with its items."""

    benchmark: Benchmark
    options: Options
    items: tuple[Item, ...]
    warning: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 over all questions, gold answers and graders, in order."""
        parts = [[i.key, i.hash, i.grader.name, json.dumps(dict(i.grader.options), sort_keys=True)] for i in self.items]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def problems(self) -> Problems:
        """The items as a source of prompts."""
        return _Problems(self)


@final
class _Problems(Problems):
    def __init__(self, loaded: Loaded) -> None:
        self.name, self.size = loaded.benchmark.name, len(loaded.items)
        self.items = loaded.items

    def problem(self, index: int) -> Problem:
        item = self.items[index]
        return Problem(
            text=item.text, answer=item.answer, grader=item.grader, metadata={"key": item.key}, messages=item.messages
        )

    def response(self, index: int, label_noise: float) -> str:
        raise BadInput(f"{self.name}: a benchmark has no demonstrations; nothing is trained on it")


def text_of(row: Mapping[str, Any], column: str) -> str:
    """A column that must hold text or a number, as text. Raises `KeyError` and `ValueError` as a `Builder` does."""
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"column {column!r}: expected text or a number, got {type(value).__name__}")
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # integers that passed through a table with gaps
    return str(value)


__all__ = ["Benchmark", "Builder", "Item", "Loaded", "Options", "text_of"]
