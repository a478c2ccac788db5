"""What `rollkeel data clean` can be told, and how it is read from a file and from `a.b=c` words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from rollkeel.config import Node, parse_yaml
from rollkeel.errors import BadInput, fault, nearest
from rollkeel.recipe import merge


class ColumnOptions(Node):
    """Columns of the input, by what they mean; the output calls them `prompt`, `answer`, `solution`, `domain`."""

    prompt: str = "prompt"
    answer: str | None = "answer"
    """None: the data has none, and no rule looks at answers."""
    solution: str | None = None
    """A worked answer, what SFT learns from."""
    domain: str | None = None
    keep: tuple[str, ...] = ()
    """Further columns to carry along, under their own names; what is no text is written as JSON."""


class MalformedOptions(Node):
    share: float = Field(default=0.1, ge=0, le=1)
    """Largest share of malformed rows; above it nothing is written."""
    min_characters: int = Field(default=1, ge=1)
    """Shortest prompt."""
    max_characters: int = Field(default=1_000_000, ge=1)
    """Longest prompt, answer or solution."""


class ExactOptions(Node):
    enabled: bool = True
    conflicts: Literal["first", "drop"] = "first"
    """Rows with one prompt and different answers: keep the `first`, or `drop` all of them."""


class NearOptions(Node):
    """Near duplicates by MinHash, LSH and the true Jaccard similarity of the candidates."""

    enabled: bool = True
    threshold: float = Field(default=0.65, gt=0, le=1)
    """Jaccard similarity of the sets of shingles from which two prompts are one."""
    shingle: int = Field(default=2, ge=1, le=32)
    """Tokens per shingle."""
    bands: int = Field(default=32, ge=1, le=256)
    rows: int = Field(default=4, ge=1, le=32)
    """Hashes per band: two prompts of similarity s meet with probability 1 − (1 − s^rows)^bands."""
    numbers: bool = True
    """Prompts whose numbers or drawings differ are different problems; formulas (few words) must agree but for spaces and case."""
    answers: bool = True
    """Rows whose answers differ are different problems; answers above `answer_characters`, most of them letters, are prose and
    not compared."""
    answer_characters: int = Field(default=100, ge=0)


class DecontaminateOptions(Node):
    benchmarks: tuple[str, ...] = ()
    """Files (`.jsonl`, `.parquet`, gzipped too, or `.txt` with empty lines between items), `file:column` names the column."""
    ngram: int = Field(default=13, ge=1)
    """Tokens of an n-gram. An item with fewer is looked for as a whole."""
    min_tokens: int = Field(default=5, ge=1)
    """Items with fewer tokens are compared as a whole prompt alone."""
    numbers: bool = True
    """A prompt that lacks a number or a piece of a drawing of an item is another problem of the same words, and is kept."""
    common: int = Field(default=10, ge=1)
    """n-grams of more items than this are how a benchmark phrases things, and tell nothing."""


class HarmfulOptions(Node):
    hook: str | None = None
    """`module:function` of one argument, a row's texts by column; what it returns is the reason to remove the row, or falsy."""
    keywords: str | None = None
    """File with a word or phrase per line, matched as whole words in any case."""
    failures: float = Field(default=0.01, ge=0, le=1)
    """Share of rows on which the hook may fail (they are kept and counted) before nothing is written."""


class PassRateOptions(Node):
    rollouts: tuple[str, ...] = ()
    """Run folders, folders of parquet files or files, as `rollkeel train`, `score` and `eval` write them."""
    low: float = Field(default=0.0, ge=0, le=1)
    high: float = Field(default=1.0, ge=0, le=1)
    """Rows with a pass rate outside [low, high] are removed."""
    passed: float = 1.0
    """Smallest reward that counts as passed."""
    attempts: int = Field(default=1, ge=1)
    """With fewer graded rollouts a prompt's pass rate is unknown."""
    unknown: Literal["keep", "drop"] = "keep"
    prefix: str = ""
    suffix: str = ""
    """What the chat template put around the prompts of those rollouts."""


class MixOptions(Node):
    proportions: dict[str, float] = Field(default_factory=dict)
    """Share of each domain; they are divided by their sum. Empty mixes nothing."""
    rows: int | None = Field(default=None, ge=1)
    """Rows of the mixture; None takes the most that the proportions allow."""
    upsample: bool = False
    """Repeat rows of domains that have too few."""
    seed: int = Field(default=0, ge=0)


class CleanOptions(Node):
    """The whole of it. Defaults remove malformed rows, junk characters and duplicates."""

    columns: ColumnOptions = ColumnOptions()
    malformed: MalformedOptions = MalformedOptions()
    exact: ExactOptions = ExactOptions()
    near: NearOptions = NearOptions()
    decontaminate: DecontaminateOptions = DecontaminateOptions()
    harmful: HarmfulOptions = HarmfulOptions()
    pass_rate: PassRateOptions = PassRateOptions()
    mix: MixOptions = MixOptions()
    examples: int = Field(default=3, ge=0)
    """Removed rows shown per reason."""
    chunk_rows: int = Field(default=10_000, ge=1)
    """Rows that are worked on, kept and picked up again together."""
    part_rows: int = Field(default=100_000, ge=1)
    """Rows per file of the output."""


def read_options(file: Path | None, words: Sequence[str] = ()) -> CleanOptions:
    """Options of a YAML file (None: the defaults) with `a.b=c` words. Raises `BadInput` on the first fault, naming the key."""
    tree: Any = {}
    if file is not None:
        try:
            tree = parse_yaml(file.read_text(encoding="utf-8")) or {}
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise BadInput(f"--options {file}: expected a YAML file: {' '.join(str(error).split())}") from None
        if not isinstance(tree, dict):
            raise BadInput(f"--options {file}: expected a mapping of sections, got {type(tree).__name__}")
    try:
        options = CleanOptions.model_validate_json(json.dumps(merge(tree, words)))
    except ValidationError as error:
        where, reason = fault(error)
        if error.errors()[0]["type"] == "extra_forbidden":
            section: Any = CleanOptions()
            for part in where[:-1]:
                section = getattr(section, part)
            reason = f"unknown key{nearest(where[-1], list(type(section).model_fields), '.'.join(where[:-1]))}"
        raise BadInput(f"data option {'.'.join(where)}: {reason}") from None
    except TypeError as error:  # YAML has dates and sets, JSON has not
        raise BadInput(f"data options: expected text, numbers, lists and mappings: {error}") from None
    return _checked(options)


def _checked(options: CleanOptions) -> CleanOptions:
    rate = options.pass_rate
    mix = options.mix
    columns = options.columns
    if rate.low > rate.high:
        raise BadInput(f"data option pass_rate: expected low ≤ high, got {rate.low} and {rate.high}")
    if mix.proportions and (
        columns.domain is None or min(mix.proportions.values()) < 0 or not any(mix.proportions.values())
    ):
        raise BadInput(
            "data option mix.proportions: expected shares ≥ 0, one of them above, and columns.domain to be set"
        )
    if mix.upsample and not mix.rows:
        raise BadInput("data option mix.upsample: expected mix.rows too, the size that rows are repeated for")
    taken = [*OUTPUT_COLUMNS, *RATE_COLUMNS]
    if clash := [c for c in columns.keep if c in taken]:
        raise BadInput(f"data option columns.keep: {clash[0]!r} is a name of the output's own; rename that column")
    return options


OUTPUT_COLUMNS = ("prompt", "answer", "solution", "domain", "source", "row")
RATE_COLUMNS = ("pass_rate", "attempts", "difficulty")
