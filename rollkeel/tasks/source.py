"""Prompts by index: a generated task or a file behind one interface, so that a data position is a single integer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar, final

import numpy as np

from rollkeel import plugins
from rollkeel.config import DataConfig
from rollkeel.errors import BadInput
from rollkeel.tasks import get
from rollkeel.tasks.base import Task, TaskItem, check_split, content_hash, excerpt, keyed_rng
from rollkeel.tasks.data import Row, load_rows, side
from rollkeel.tasks.environment import Environment, taken
from rollkeel.tasks.tests_form import CodeRow, load_code_rows
from rollkeel.tasks.turns import Dialogue, as_chat
from rollkeel.types import GraderSpec, IntArray, Prompt

R = TypeVar("R")
Example = tuple[IntArray, ...]
"""Prompt ids and response ids; of an episode also, as bool, which of the response are the model's."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One entry of a data source before tokenisation."""

    text: str
    answer: str
    grader: GraderSpec
    metadata: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, str]] = ()
    """What the chat template is given, where that is more than `text` as the user's turn."""


class Problems(ABC):
    """Index-addressed problems of one split: entry `index` depends on the index (and seed) alone."""

    name: str
    size: int | None
    """Entries before the source repeats; None when it never does."""

    @abstractmethod
    def problem(self, index: int) -> Problem: ...

    @abstractmethod
    def response(self, index: int, label_noise: float) -> str:
        """Demonstration text of the same entry."""


@final
class GeneratedProblems(Problems):
    """Items of a task family. Splits are disjoint by content hash (`rollkeel.tasks.base`)."""

    def __init__(self, task: Task[Any], seed: int, split: str) -> None:
        self.name, self.size = task.name, None
        self.task, self.seed, self.split = task, seed, split
        self._options = task.options.defining()
        self._last: tuple[int, TaskItem] | None = None

    def _item(self, index: int) -> TaskItem:
        if self._last is None or self._last[0] != index:  # a demonstration asks for prompt and response of one item
            self._last = (index, self.task.item(self.seed, self.split, index))
        return self._last[1]

    def problem(self, index: int) -> Problem:
        def made() -> Problem:
            item = self._item(index)
            return Problem(text=item.text, answer=item.answer, grader=self.task.grader(item), metadata=item.metadata)

        return tried(self.task, made)

    def response(self, index: int, label_noise: float) -> str:
        rng = keyed_rng("demonstration", self.name, self._options, self.seed, self.split, index)
        return tried(self.task, lambda: self.task.demonstration(self._item(index), rng, label_noise))


@final
class FileProblems(Problems):
    """Rows of a file: epoch e is a shuffle keyed by (seed, e). `sft` and `train` share the rows that are not held out, unless
    `data.sft_fraction` gives `sft` rows of its own."""

    def __init__(self, config: DataConfig, seed: int, split: str) -> None:
        self.name, self.seed = Path(str(config.path)).stem, seed
        self.grader = GraderSpec(name=config.grader, options=config.grader_options)
        side_of = "train" if split == "sft" and not config.sft_fraction else split

        def mine(row: Row) -> bool:
            return side(row, config.eval_fraction, config.sft_fraction) == side_of

        coded = config.grader == "code"
        self.rows: Sequence[Row] = list(filter(mine, load_code_rows(config))) if coded else load_rows(config, mine)
        if not self.rows:
            total = len(load_code_rows(config) if coded else load_rows(config))
            raise BadInput(
                f"data.path {config.path!r}: none of {total} rows is in the {side_of} split "
                f"at data.{'sft' if side_of == 'sft' else 'eval'}_fraction="
                f"{config.sft_fraction if side_of == 'sft' else config.eval_fraction};"
                f" {'lower' if side_of == 'train' else 'raise'} it or add rows"
            )
        self.size = len(self.rows)
        self._epoch, self._order = -1, list[int]()

    def _at(self, index: int) -> Row:
        epoch, place = divmod(index, len(self.rows))
        if epoch != self._epoch:
            order = list(range(len(self.rows)))
            keyed_rng("epoch", self.seed, epoch).shuffle(order)
            self._epoch, self._order = epoch, order
        return self.rows[self._order[place]]

    def problem(self, index: int) -> Problem:
        row = self._at(index)
        grader = row.grader if isinstance(row, CodeRow) else self.grader
        messages = () if isinstance(row, CodeRow) else row.messages
        return Problem(
            text=row.prompt, answer=row.answer, grader=grader, metadata={"row": row.number}, messages=messages
        )

    def response(self, index: int, label_noise: float) -> str:
        """The solution column, else the answer; label noise needs a task that knows its steps, so here it changes nothing."""
        row = self._at(index)
        if not isinstance(row, CodeRow):
            return row.answer if row.solution is None else row.solution
        if not row.answer:
            raise BadInput(f"{self.name} row {row.number}: no reference solution to show; set sft.steps=0")
        return row.answer


def problems_of(config: DataConfig, seed: int, split: str) -> Problems:
    """Those that `config` names. Raises `BadInput` for unusable data or options."""
    if config.task is not None:
        return GeneratedProblems(get(config.task, config.options), seed, split)
    return FileProblems(config, seed, split)


def tried(task: Task[Any], call: Callable[[], R]) -> R:
    """`call()`; what somebody's own family throws there is bad input with its place."""
    return plugins.tried(call, f"task {task.name}") if task.address else call()


class PromptSource:
    """Tokenised prompts and demonstrations of one split, addressed by index alone, so that resuming needs one integer.

    `max_prompt` and `context` are token counts: a prompt longer than the former, or a demonstration longer than the latter
    (prompt + response + EOS), is refused. `vocab_size` is the number of rows of the model's embedding table.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        *,
        seed: int,
        split: str,
        vocab_size: int,
        max_prompt: int,
        context: int | None = None,
        eos_token_id: int | None = None,
        problems: Problems | None = None,
    ) -> None:
        """`eos_token_id` ends demonstrations; None takes the tokenizer's. `problems`: taken in place of those `config` names.
        Raises `BadInput` for unusable data or options."""
        check_split(split)
        self.config, self.tokenizer, self.seed, self.split = config, tokenizer, seed, split
        self.vocab_size, self.max_prompt, self.context = vocab_size, max_prompt, context
        self.eos_token_id = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
        if config.chat_template and not getattr(tokenizer, "chat_template", None):
            raise BadInput(
                "data.chat_template: expected a tokenizer with a chat template, this one has none; set it to false"
            )
        self.problems: Problems = problems_of(config, seed, split) if problems is None else problems

    @property
    def size(self) -> int | None:
        """Prompts before the source repeats; None for generated tasks."""
        return self.problems.size

    def prompt(self, index: int) -> Prompt:
        """Prompt `index`. Raises `BadInput` for one longer than `max_prompt`, empty, or with an id outside the vocabulary."""
        return self.prompts([index])[0]

    def prompts(self, indices: Sequence[int]) -> list[Prompt]:
        """Several prompts with one tokenizer call."""
        problems = [self._problem(i) for i in indices]
        texts = [self._render(p) for p in problems]
        name = self.problems.name
        return [
            Prompt(
                id=content_hash(name, text, problem.answer),
                index=index,
                text=text,
                token_ids=self._checked_prompt(index, ids),
                answer=problem.answer,
                grader=problem.grader,
                task=name,
                metadata={"split": self.split, **problem.metadata},
            )
            for index, problem, text, ids in zip(indices, problems, texts, self._encode(texts), strict=True)
        ]

    @property
    def environment(self) -> Environment[Any] | None:
        """The family whose episodes these prompts begin, if they do."""
        task = getattr(self.problems, "task", None)
        return task if isinstance(task, Environment) else None

    @cached_property
    def dialogue(self) -> Dialogue:
        """How an environment's text becomes tokens."""
        return Dialogue(self.tokenizer, chat=self.config.chat_template)

    def demonstration(self, index: int, label_noise: float = 0.0) -> Example:
        """`(prompt_ids [P], response_ids [R])`, int64; the response ends with EOS. Raises `BadInput` like `prompt`.

        An episode is played, and its response is all of it, with a third array `[R]` bool: True for what the model says.
        """
        return self.demonstrations([index], label_noise)[0]

    def demonstrations(self, indices: Sequence[int], label_noise: float = 0.0) -> list[Example]:
        """Several demonstrations with one tokenizer call; much faster than one by one."""
        if self.eos_token_id is None:
            raise BadInput("demonstrations: expected a tokenizer with an EOS token, this one has none")
        if (played := self.environment) is not None:
            return [tried(played, partial(self._episode, played.fresh(), i, label_noise)) for i in indices]
        texts = [(self._render(self._problem(i)), self.problems.response(i, label_noise)) for i in indices]
        encoded = self._encode([text for pair in texts for text in pair])
        pairs = zip(indices, encoded[::2], encoded[1::2], strict=True)
        return [(self._checked_prompt(i, p), self._checked_response(i, len(p), r)) for i, p, r in pairs]

    def _episode(self, environment: Environment[Any], index: int, label_noise: float) -> Example:
        item, parts, own = TaskItem.from_json(self._problem(index).grader.options["item"]), [], []
        try:
            environment.reset(item)
            for action in self.problems.response(index, label_noise).split("\n"):
                parts.append([*self._encode([action])[0], self.eos_token_id])
                own.append(True)
                if (step := taken(environment, action)).done:
                    break
                parts.append(self.dialogue.between(step.text, self.eos_token_id))
                own.append(False)
        finally:
            environment.close()
        count = len(parts) if own[-1] else len(parts) - 1  # behind the last turn nobody reads
        ids, sampled = np.concatenate(parts[:count]), np.repeat(own[:count], [len(p) for p in parts[:count]])
        prompt = self.prompt(index).token_ids
        self._check_room(index, len(prompt) + len(ids))
        return prompt, self._in_vocabulary(index, ids), sampled

    def _problem(self, index: int) -> Problem:
        if index < 0:
            raise BadInput(f"prompt index: expected ≥ 0, got {index}")
        return self.problems.problem(index)

    def _render(self, problem: Problem) -> str:
        return as_chat(self.tokenizer, problem.messages or problem.text) if self.config.chat_template else problem.text

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        return self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]

    def _checked_prompt(self, index: int, ids: Sequence[int]) -> IntArray:
        if not ids:
            raise BadInput(f"{self._where(index)}: the tokenizer makes no tokens of it")
        if len(ids) > self.max_prompt:
            raise BadInput(
                f"{self._where(index)}: {len(ids)} tokens, expected at most {self.max_prompt}; "
                "shorten it or raise the context (engine.max_length, or a model with a longer one)"
            )
        return self._in_vocabulary(index, ids)

    def _checked_response(self, index: int, prompt_length: int, ids: Sequence[int]) -> IntArray:
        if self.eos_token_id in ids:
            raise BadInput(f"{self._where(index)}: the answer holds the EOS token {self.eos_token_id} before its end")
        self._check_room(index, prompt_length + len(ids) + 1)
        return self._in_vocabulary(index, [*ids, self.eos_token_id])

    def _check_room(self, index: int, total: int) -> None:
        if self.context is not None and total > self.context:
            raise BadInput(
                f"{self._where(index)}: prompt and answer take {total} tokens, expected at most {self.context}"
            )

    def _in_vocabulary(self, index: int, ids: Sequence[int] | IntArray) -> IntArray:
        array = np.asarray(ids, np.int64)
        bad = np.flatnonzero((array < 0) | (array >= self.vocab_size))
        if bad.size:
            raise BadInput(
                f"{self._where(index)}: token id {array[bad[0]]} at position {bad[0]} is outside the model's vocabulary "
                f"of {self.vocab_size}; the tokenizer does not belong to this model"
            )
        return array

    def _where(self, index: int) -> str:
        problem = self.problems.problem(index)
        row = f" (row {problem.metadata['row']})" if "row" in problem.metadata else ""
        return f"{self.problems.name} {self.split} prompt {index}{row} {excerpt(problem.text, 40)!r}"
