"""Batches as they travel from the controller to ranks, and what comes back: numbers only, each said once.

A batch goes out whole; the parts that updates take of it are told by their rows, and prompts once for all answers to them. What ranks have
told themselves, log-probs of a pass, is named and not sent back.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from rollkeel.arrays import Packed, packed, unpacked
from rollkeel.batch.build import TrainingBatch
from rollkeel.train.scores import Scores, UpdateOutput

OF_PART = ("advantages", "coefficients", "group_ids")
"""What a part does not have from its batch."""
_READ = ("token_ids", "sequence_ids")
"""What is read from the sequences and positions."""


def batch_out(batch: TrainingBatch, *, replays: bool = True) -> dict[str, Any]:
    """A batch as `batch_in` takes it. `replays`: passes take the engine's experts; else only how many of them a token has is sent."""
    prompts, at = dict[bytes, int](), list[int]()
    for ids, length in zip(batch.sequences, batch.prompt_lengths, strict=True):
        at.append(prompts.setdefault(ids[:length].tobytes(), len(prompts)))
    answers = [ids[length:] for ids, length in zip(batch.sequences, batch.prompt_lengths, strict=True)]
    out: dict[str, Any] = {"prompts": packed(np.frombuffer(b"".join(prompts), np.int64)), "at": packed(np.array(at))}
    out["long"] = packed(np.array([len(ids) // 8 for ids in prompts]))
    out["answers"] = packed(np.concatenate(answers))
    out["lengths"] = packed(np.array([len(ids) for ids in answers]))
    out["positions"] = packed(np.concatenate(batch.positions))
    out["sampled"] = packed(np.array(batch.response_lengths))
    if batch.read_experts is not None and replays:
        out["read_experts"] = packed(np.concatenate(batch.read_experts))
    for name, value in _tensors(batch).items():
        value = torch.zeros_like(value) if name == "experts" and not replays else value
        if name not in _READ:
            out[name] = packed(value.cpu().numpy())
    return out


def batch_in(told: dict[str, Any]) -> TrainingBatch:
    """The batch that was told, on the CPU."""
    prompts, answers = _split(told["prompts"], told["long"]), _split(told["answers"], told["lengths"])
    own = [prompts[i] for i in unpacked(told["at"])]
    sequences = [np.concatenate(pair) for pair in zip(own, answers, strict=True)]
    positions = _split(told["positions"], told["sampled"])
    ids = np.concatenate([one[at] for one, at in zip(sequences, positions, strict=True)])
    numbers = np.repeat(np.arange(len(positions)), unpacked(told["sampled"]))
    about: dict[str, Any] = {"token_ids": torch.from_numpy(ids), "sequence_ids": torch.from_numpy(numbers)}
    if "read_experts" in told:
        ends = np.cumsum([len(ids) for ids in sequences])
        about["read_experts"] = tuple(np.split(unpacked(told["read_experts"]), ends[:-1]))
    known = {field.name for field in fields(TrainingBatch)} - {"positions", "read_experts"}
    about |= {name: torch.from_numpy(unpacked(value)) for name, value in told.items() if name in known}
    lengths = tuple(map(len, own))
    return TrainingBatch(sequences=tuple(sequences), prompt_lengths=lengths, positions=tuple(positions), **about)


def rows_of(part: TrainingBatch, whole: TrainingBatch) -> slice | None:
    """Which rows of `whole` the batch `part` is, made by `TrainingBatch.parts`; None if it is no part of it."""
    first = next((i for i, ids in enumerate(whole.sequences) if ids is part.sequences[0]), None)
    if first is None:
        return None
    rows = slice(first, first + len(part.sequences))
    there = _tensors(whole.cut(rows))
    own = _tensors(part)
    names = {*OF_PART, "sequence_ids"}
    same = there.keys() == own.keys() and all(map(_same, whole.sequences[rows], part.sequences))
    same = same and all(own[n].data_ptr() == there[n].data_ptr() for n in own.keys() - names)
    return rows if same and len(there["token_ids"]) == len(part) else None


def part_out(part: TrainingBatch, rows: slice) -> Packed:
    return rows.start, rows.stop, tensors_out({name: getattr(part, name) for name in OF_PART})


def part_in(whole: TrainingBatch, told: Packed | None) -> TrainingBatch:
    """The part that was told; None is all of it."""
    return whole if told is None else replace(whole.cut(slice(*told[:2])), **tensors_in(told[2]))


def view_out(value: torch.Tensor, of: torch.Tensor | None) -> Packed | None:
    """First row and end of a `value` that is rows of the tensor `of`; None if it is not."""
    if of is None or value.untyped_storage().data_ptr() != of.untyped_storage().data_ptr():
        return None
    if (value.dtype, value.stride(), value.shape[1:]) != (of.dtype, of.stride(), of.shape[1:]):
        return None
    first = (int(value.storage_offset()) - int(of.storage_offset())) // int(of.stride(0))
    return first, first + len(value)


def tensors_out(values: dict[str, torch.Tensor | None]) -> dict[str, Any]:
    """Those that are there."""
    return {n: packed(v.detach().cpu().numpy()) for n, v in values.items() if v is not None}


def tensors_in(told: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(unpacked(value)) for name, value in told.items()}


def scores_out(scores: Scores) -> dict[str, Any]:
    return tensors_out(scores._asdict())


def scores_in(told: dict[str, Any]) -> Scores:
    return Scores(**tensors_in(told))


_SEEN = [field.name for field in fields(UpdateOutput) if field.name != "metrics"]


def output_out(output: UpdateOutput) -> dict[str, Any]:
    return {"metrics": output.metrics, "tokens": tensors_out({name: getattr(output, name) for name in _SEEN})}


def output_in(told: dict[str, Any]) -> UpdateOutput:
    return UpdateOutput(metrics=told["metrics"], **tensors_in(told["tokens"]))


def _tensors(batch: TrainingBatch) -> dict[str, torch.Tensor]:
    held = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def _same(a: Any, b: Any) -> bool:
    return a is b


def _split(values: Packed, lengths: Packed) -> list[np.ndarray]:
    return np.split(unpacked(values), np.cumsum(unpacked(lengths))[:-1])


class _Bytes(NamedTuple):
    data: np.ndarray
    dtype: torch.dtype
    shape: tuple[int, ...]


def state_out(value: Any) -> Any:
    """A trainer's state with its tensors as bytes, which Ray copies once."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return _Bytes(flat.view(torch.uint8).numpy(), value.dtype, tuple(value.shape))
    return {key: state_out(one) for key, one in value.items()} if isinstance(value, dict) else value


def state_in(told: Any) -> Any:
    """The state that was told, in memory of its own."""
    if isinstance(told, _Bytes):
        return torch.from_numpy(told.data.copy()).view(told.dtype).reshape(told.shape)
    return {key: state_in(one) for key, one in told.items()} if isinstance(told, dict) else told
