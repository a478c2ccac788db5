"""NeMo-RL's `train_data_step*.jsonl`: one line per trained sequence, whole sequences with everything per token.

Schema read from NVIDIA-NeMo/RL: `nemo_rl/algorithms/grpo.py` (commit 002cdc27b8019eafc470f0aab22d4a7206d0de81) for the
fields, `nemo_rl/utils/logger.py` for the writing (each value of a line is a batch of one, a list around it),
`nemo_rl/data/llm_message_utils.py` (commit 032482d677c0b0c6b78a0114e9f714867ff9cc7a) for padding, always on the right.
All token fields are over the whole sequence and unshifted: position i is about token i, and position 0 of `prev_logprobs`
is 0. `generation_logprobs` are the engine's, 0 on every token that it did not sample; `prev_logprobs` are the trainer's
before the step's update, at the sampling temperature, which some versions left out on both sides (where vLLM reported raw
log-probs). `input_lengths` counts prompt and response. Older versions wrote no token ids, masks and advantages;
the response then starts at the first token with a non-zero `generation_logprobs`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rollkeel_doctor.errors import BadInput
from rollkeel_doctor.traces.build import (
    Notes,
    Response,
    Sequences,
    integer,
    number,
    number_in,
    numbered,
    numbers,
    text,
    without_placeholders,
)
from rollkeel_doctor.traces.jsonl import first_record, records
from rollkeel_doctor.traces.trace import Trace

FILES = r"train_data_step(\d{1,15})\.jsonl"
SOURCE = "NeMo-RL train_data"


def matches(path: Path) -> bool:
    """Whether this is such a file, a folder of them, or a log folder with `exp_…` folders of them."""
    if path.is_dir():
        return bool(_folders(path))
    return path.suffix == ".jsonl" and "generation_logprobs" in first_record(path)


def read(path: Path, *, last: int | None = None) -> Trace:
    """`last`: only the last so many steps. Raises `BadInput` if nothing can be read, or several runs could be meant."""
    notes = Notes()
    sequences = Sequences(SOURCE, path, notes)
    for step, file in _files(path, last):
        for where, row in records(file, notes):
            _add(sequences, where, step, row)
    return sequences.trace()


def _folders(path: Path) -> list[Path]:
    if numbered(path, FILES):
        return [path]
    return [p for p in sorted(path.glob("exp_*")) if p.is_dir() and numbered(p, FILES)]


def _files(path: Path, last: int | None) -> list[tuple[int, Path]]:
    if path.is_file():
        return [(number_in(path, FILES), path)]
    folders = _folders(path)
    if len(folders) > 1:
        names = ", ".join(p.name for p in folders[:10])
        raise BadInput(f"{path}: several runs ({names}); expected one, give its folder")
    return numbered(folders[0], FILES, last) if folders else []


def _one(value: Any) -> Any:
    """The value inside the batch of one that the logger writes; bare values of other writers as they are."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _per_token(row: dict[str, Any], name: str) -> Any:
    value = row.get(name)
    return value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) else value


def _add(sequences: Sequences, where: str, step: int, row: dict[str, Any]) -> None:
    q = numbers(_per_token(row, "generation_logprobs"), np.float32)
    ids = numbers(_per_token(row, "token_ids"), np.int64)
    mask = numbers(_per_token(row, "token_loss_mask"), np.bool_)
    whole = next((a for a in (ids, q, mask) if a is not None), None)
    if whole is None:
        sequences.notes.add("neither token_ids nor generation_logprobs; left out", where)
        return
    length = integer(_one(row.get("input_lengths")))
    if length is None or not 0 <= length <= len(whole):
        sequences.notes.add("no input_lengths: padding cannot be told from tokens; all are kept", where)
        length = len(whole)
    if mask is None:
        sequences.notes.add(
            "no token_loss_mask: a 0 in generation_logprobs is taken for a token that was not sampled", where
        )
    begun = np.zeros(len(whole), bool)
    for known in (mask, q):
        if known is not None and len(known) == len(whole):
            begun |= np.nan_to_num(known) != 0
    start = int(np.argmax(begun)) if begun[:length].any() else length
    tokens = {
        "token_ids": ids,
        "rollout_logprobs": without_placeholders(q, begun if mask is None else mask) if q is not None else None,
        "train_logprobs": _per_token(row, "prev_logprobs"),
        "mask": mask,
        "advantages": _per_token(row, "advantages"),
    }
    cut = {name: _cut(value, start, length, len(whole)) for name, value in tokens.items()}
    if _one(row.get("sample_loss_mask")) == 0:
        cut["mask"] = np.zeros(length - start, bool)
    trained, advantages = cut["mask"], cut["advantages"]
    if isinstance(advantages, np.ndarray) and isinstance(trained, np.ndarray) and len(advantages) == len(trained):
        cut["advantages"] = np.where(trained, advantages, np.float32(np.nan))
    content = _content(row)
    sequences.add(
        Response(
            where=where,
            step=step,
            length=length - start,
            group=ids[:start].tobytes() if ids is not None and start else (content[0] or None),
            reward=_reward(row),
            prompt_length=start,
            prompt_text=content[0],
            text=content[1],
            tokens=cut,
        )
    )


def _cut(value: Any, start: int, end: int, whole: int) -> Any:
    """The response's part of a field of the whole sequence; any other value as it is, for the builder to refuse."""
    array = numbers(value, np.float32) if isinstance(value, list) else value
    return array[start:end] if isinstance(array, np.ndarray) and len(array) == whole else value


def _reward(row: dict[str, Any]) -> float:
    """With dynamic sampling `rewards` are those of all that was sampled, in another order than the lines."""
    return number(_one(row["filtered_rewards"] if "filtered_rewards" in row else row.get("rewards")))


def _content(row: dict[str, Any]) -> tuple[str, str]:
    """(prompt, response) of the message texts: the first message, and those after it."""
    content = row.get("content")
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], list):
        content = content[0]
    if isinstance(content, str):
        return "", content
    if not isinstance(content, list) or not content:
        return "", ""
    return (text(content[0]), text(content[1:])) if len(content) > 1 else ("", text(content[0]))
