"""Settings of where prompts come from: one task family or file, or several of them in given shares."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer


class Node(BaseModel):
    """Base of every config section: unknown keys and lossy conversions are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Rows(Node):
    """One place that prompts come from: a generated task, or files with prompt and answer columns."""

    task: str | None = None
    """Task family (`rollkeel tasks list`); exclusive with `path` and `sources`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Difficulty knobs of the task."""
    path: str | None = None
    """`.jsonl`, `.parquet`, `.csv`, a folder of `rollkeel data clean`, or a Hugging Face data set folder or id."""
    prompt_column: str = Field(default="prompt", description="Column of a file's prompts.")
    answer_column: str = "answer"
    """Column of a file's gold answers; a dot goes into a column of objects: `reward_model.ground_truth`."""
    solution_column: str | None = None
    """Worked answers, which SFT learns; None: it learns the answers."""
    split: str = Field(default="train", description="Split of a Hugging Face data set.")
    grader: str = "exact"
    """Grader of file data; generated tasks bring their own. With `code`, rows are problems with tests in one of the forms of
    `rollkeel.tasks.tests_form`; with `row`, of any form of `rollkeel.tasks.published`, and bring their grader."""
    grader_options: dict[str, Any] = Field(default_factory=dict)
    """Options of that grader."""
    eval_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of a file's rows (by content hash) held out for evaluation."""
    sft_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of a file's other rows (by content hash) that only SFT learns from, so that RL sees prompts of its own; 0 shares all."""
    chat_template: bool = False
    """Wrap prompts with the tokenizer's chat template; a prompt that is a list of messages goes through it whole."""


class SourceConfig(Rows):
    """An entry of `data.sources`. A file's keys that it leaves out are as `data` has them; a task whose `grader` it leaves out
    grades itself."""

    name: str = Field(default="", pattern=r"^([A-Za-z0-9][\w.-]*)?$")
    """In metrics and rollouts files; empty takes the task's or the file's."""
    share: float = Field(default=1.0, gt=0, description="Of the groups, in proportion to the other sources' shares.")
    grader_column: str | None = None
    """Column with the name of each row's own grader, or `{name, options}`."""
    draw: Literal["uniform", "pass_rate"] = "uniform"
    """`pass_rate`: a prompt is passed over three times in four while the mean reward of its like is outside `band`."""
    draw_by: str = "row"
    """What makes prompts alike: the same `row` of the file, or the same value of this column, or of this key of the task's metadata."""
    band: tuple[float, float] = (0.0, 1.0)
    """Mean rewards between these two, exclusive, are drawn as often as unknown ones."""

    @model_serializer(mode="wrap")
    def _as_given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what was left out, which a config that is written and read again must not spell out."""
        return {key: value for key, value in handler(self).items() if key in self.model_fields_set}

    @property
    def called(self) -> str:
        """`name`, or what follows from the task or the file."""
        if self.name:
            return self.name
        short = self.task or Path(self.path or "").stem
        return re.sub(r"[^\w.-]", "_", short.rpartition(":")[2])


class DataConfig(Rows):
    """Where prompts come from: a generated task, files with prompt and answer columns, or several of them."""

    task: str | None = "runsum"
    """Task family (`rollkeel tasks list`); exclusive with `path` and `sources`."""
    sources: tuple[SourceConfig, ...] = ()
    """Several places, `{task or path, share, name, …}` each, in the place of `task` and `path`: see docs/data.md."""

    @property
    def parts(self) -> tuple[SourceConfig, ...]:
        """The sources, each whole: with a name, and with what `data` says where it says nothing."""
        return tuple(map(self.whole, self.sources))

    def whole(self, source: SourceConfig) -> SourceConfig:
        """A source with a name, and with what `data` says where it says nothing."""
        shared = self.model_dump(exclude={"task", "options", "path", "sources"})
        given = {key: value for key, value in source.model_dump().items() if key in SourceConfig.model_fields}
        own = ({"grader": ""} if source.task else {}) | given
        return SourceConfig.model_validate({**shared, **own, "name": source.called})


class EvalSampling(Node):
    """How one of `eval.sets` is sampled; what is left out is as `sampling` has it."""

    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, lt=1)
    max_new_tokens: int | None = Field(default=None, ge=1)


class EvalSet(SourceConfig):
    """An entry of `eval.sets`: of `benchmark` (with `path`, where its files are), `source` (the held-out part of one of
    `data.sources`), `task` and `path` (all rows of the file) one."""

    benchmark: str | None = None
    source: str | None = None
    every: int | None = Field(default=None, ge=0)
    """Steps between evaluations, 0 for start and end alone; None takes `eval.every`."""
    items: int | None = Field(default=None, ge=1)
    """None takes all of a benchmark or a file, else `eval.items`."""
    samples: int | None = Field(default=None, ge=1)
    """None takes `eval.samples`."""
    sampling: EvalSampling = EvalSampling()

    @property
    def called(self) -> str:
        """`name`, or what follows from what it is."""
        return self.name or self.benchmark or self.source or super().called
