"""Prompts by index: a generated task or a file behind one interface, so that a data position is a single integer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

import numpy as np

from rollkeel import plugins
from rollkeel.config_data import DataConfig, Rows, SourceConfig
from rollkeel.errors import BadInput
from rollkeel.tasks import get
from rollkeel.tasks.base import Task, TaskItem, check_split, content_hash, excerpt, keyed_rng
from rollkeel.tasks.data import Row, load_rows, side
from rollkeel.tasks.environment import Environment, taken
from rollkeel.tasks.turns import Dialogue, as_chat
from rollkeel.types import GraderSpec, IntArray, Prompt, Rollout

if TYPE_CHECKING:
    from rollkeel.tasks.mixed import MixedProblems

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

    def source(self, index: int) -> str:
        """Where the entry comes from, for metrics of each source."""
        return self.name

    @abstractmethod
    def response(self, index: int, label_noise: float) -> str:
        """Demonstration text of the same entry."""

    def observe(self, rollouts: Sequence[Rollout]) -> None:  # noqa: B027 - nothing to learn where the order is the index
        """A step was sampled and graded."""

    def state_dict(self) -> dict[str, Any] | None:
        """What the order of prompts depends on beside the config, for `train.state.save_state`."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Continue from `state_dict()`."""


@final
class GeneratedProblems(Problems):
    """Items of a task family. Splits are disjoint by content hash (`rollkeel.tasks.base`)."""

    def __init__(
        self, task: Task[Any], seed: int, split: str, name: str = "", grader: GraderSpec | None = None
    ) -> None:
        """`name` and `grader` take the place of the family's own."""
        self.name = name or task.name
        self.size = None
        self._grader = grader
        self.task = task
        self.seed = seed
        self.split = split
        self._options = task.options.defining()
        self._last: tuple[int, TaskItem] | None = None

    def _item(self, index: int) -> TaskItem:
        if self._last is None or self._last[0] != index:  # a demonstration asks for prompt and response of one item
            self._last = (index, self.task.item(self.seed, self.split, index))
        return self._last[1]

    def problem(self, index: int) -> Problem:
        def made() -> Problem:
            item = self._item(index)
            return Problem(
                text=item.text,
                answer=item.answer,
                grader=self._grader or self.task.grader(item),
                metadata=item.metadata,
            )

        return tried(self.task, made)

    def response(self, index: int, label_noise: float) -> str:
        rng = keyed_rng("demonstration", self.task.name, self._options, self.seed, self.split, index)
        return tried(self.task, lambda: self.task.demonstration(self._item(index), rng, label_noise))


@final
class FileProblems(Problems):
    """Rows of a file: epoch e is a shuffle keyed by (seed, e). `sft` and `train` share the rows that are not held out, unless
    `data.sft_fraction` gives `sft` rows of its own."""

    def __init__(self, config: Rows, seed: int, split: str) -> None:
        self.name, self.seed = getattr(config, "name", "") or Path(str(config.path)).stem, seed
        self._key = getattr(config, "draw_by", "row")
        self.grader = GraderSpec(name=config.grader, options=config.grader_options)
        side_of = "train" if split == "sft" and not config.sft_fraction else split

        def mine(row: Row) -> bool:
            return side(row, config.eval_fraction, config.sft_fraction) == side_of

        load: Callable[..., Sequence[Row]] = load_rows
        if config.grader in ("code", "row"):
            from rollkeel.tasks.graded import load_graded as load
        self.rows: Sequence[Row] = load(config, mine)
        if not self.rows:
            total = len(load(config))
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
        return Problem(
            text=row.prompt,
            answer=row.answer,
            grader=row.grader or self.grader,
            metadata={self._key: row.key, "row": row.number},
            messages=row.messages,
        )

    def response(self, index: int, label_noise: float) -> str:
        """The solution column, else the answer; label noise needs a task that knows its steps, so here it changes nothing."""
        row = self._at(index)
        if not (shown := row.solution or row.answer):
            raise BadInput(f"{self.name} row {row.number}: no reference solution to show; set sft.steps=0")
        return shown


def problems_of(config: Rows, seed: int, split: str) -> Problems:
    """Those that `config` names. Raises `BadInput` for unusable data or options."""
    if isinstance(config, DataConfig) and config.sources:
        from rollkeel.tasks.mixed import MixedProblems

        return MixedProblems(config.parts, [problems_of(part, seed, split) for part in config.parts], seed)
    if config.task is not None:
        task = get(config.task, config.options)
        if not isinstance(config, SourceConfig):
            return GeneratedProblems(task, seed, split)
        grader = GraderSpec(name=config.grader, options=config.grader_options) if config.grader else None
        return GeneratedProblems(task, seed, split, config.name, grader)
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
        self.config = config
        self.tokenizer = tokenizer
        self.seed = seed
        self.split = split
        self.vocab_size = vocab_size
        self.max_prompt = max_prompt
        self.context = context
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
        names = [self.problems.source(i) for i in indices]
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
            for index, name, problem, text, ids in zip(
                indices, names, problems, texts, self._encode(texts), strict=True
            )
        ]

    @property
    def mixed(self) -> MixedProblems | None:
        """The sources, where there are several."""
        return self.problems if isinstance(self.config, DataConfig) and self.config.sources else None  # type: ignore[return-value]

    @property
    def environment(self) -> Environment[Any] | None:
        """The family whose episodes these prompts begin, if they do."""
        task = getattr(self.problems, "task", None)
        return task if isinstance(task, Environment) else None

    @cached_property
    def dialogue(self) -> Dialogue:
        """How an environment's text becomes tokens."""
        role = self.environment.role if self.environment else "user"
        return Dialogue(self.tokenizer, chat=self.config.chat_template, role=role)

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
        item = TaskItem.from_json(self._problem(index).grader.options["item"])
        parts = []
        own = []
        try:
            environment.reset(item)
            actions = self.problems.response(index, label_noise).split("\n")
            for number, action in enumerate(actions, 1):
                parts.append([*self._encode([action])[0], self.eos_token_id])
                own.append(True)
                if number == len(actions) or (step := taken(environment, action)).done:
                    break  # what would come of the last one is not shown
                parts.append(self.dialogue.between([step.text, *step.more], self.eos_token_id))
                own.append(False)
        finally:
            environment.close()
        ids, sampled = np.concatenate(parts), np.repeat(own, [len(p) for p in parts])
        prompt = self.prompt(index).token_ids
        self._check_room(index, len(prompt) + len(ids))
        return prompt, self._in_vocabulary(index, ids), sampled

    def _problem(self, index: int) -> Problem:
        if index < 0:
            raise BadInput(f"prompt index: expected ≥ 0, got {index}")
        return self.problems.problem(index)

    def _render(self, problem: Problem) -> str:
        if not self.config.chat_template:
            return problem.text
        tools = self.environment.schemas() if self.environment else ()
        return as_chat(self.tokenizer, problem.messages or problem.text, tools)

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
        return f"{self.problems.source(index)} {self.split} prompt {index}{row} {excerpt(problem.text, 40)!r}"
