"""Batches as they travel from the controller to ranks: numbers only, each said once.

Most facts about tokens are the same, or one more, for all tokens of a sequence. Integers travel as runs of equal differences where
that is shorter, and so do the bits of floats.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch

from rollkeel.batch.build import TrainingBatch
from rollkeel.train.scores import Scores, UpdateOutput


class Runs(NamedTuple):
    """A flat array of whole numbers, as runs of equal differences between neighbours."""

    dtype: str
    """Of the array."""
    shape: tuple[int, ...]
    values: np.ndarray
    counts: np.ndarray


class Narrow(NamedTuple):
    """An array of whole numbers that fit into fewer bytes."""

    dtype: str
    values: np.ndarray


_WIDTHS = (np.int8, np.int16, np.int32)


def packed(array: np.ndarray) -> np.ndarray | Runs | Narrow:
    """The same bits in fewer bytes, where that is easy."""
    if not array.size or array.dtype not in (np.int64, np.int32, np.float32):
        return array
    whole = array.view(np.int32) if array.dtype == np.float32 else array
    steps = np.diff(whole.reshape(-1), prepend=whole.dtype.type(0))
    starts = np.flatnonzero(np.concatenate([[True], steps[1:] != steps[:-1]]))
    counts = np.diff(np.append(starts, steps.size))
    values, counts = _narrow(steps[starts]), _narrow(counts)
    if values.nbytes + counts.nbytes < _narrow(whole).nbytes:
        return Runs(array.dtype.str, array.shape, values, counts)
    narrow = array if array.dtype == np.float32 else _narrow(array)
    return array if narrow.dtype == array.dtype else Narrow(array.dtype.str, narrow)


def unpacked(told: np.ndarray | Runs | Narrow) -> np.ndarray:
    """The array that was packed, in memory of its own."""
    if isinstance(told, Narrow):
        return told.values.astype(told.dtype)
    if not isinstance(told, Runs):
        return np.array(told)
    dtype = np.dtype(told.dtype)
    whole = np.dtype(np.int32) if dtype == np.float32 else dtype
    steps = np.repeat(told.values.astype(whole), told.counts)
    return np.cumsum(steps, dtype=whole).view(dtype).reshape(told.shape)


def _narrow(whole: np.ndarray) -> np.ndarray:
    low, high = int(whole.min()), int(whole.max())
    for width in _WIDTHS:
        if np.iinfo(width).min <= low and high <= np.iinfo(width).max:
            return whole.astype(width)
    return whole


def batch_out(batch: TrainingBatch) -> dict[str, Any]:
    """A batch as `batch_in` takes it. Sequences lie behind each other; sampled tokens are read from them."""
    lengths = [len(ids) for ids in batch.sequences]
    out: dict[str, Any] = {"lengths": packed(np.array(lengths)), "prompts": packed(np.array(batch.prompt_lengths))}
    out["sequences"] = packed(np.concatenate(batch.sequences))
    out["positions"] = packed(np.concatenate(batch.positions))
    out["sampled"] = packed(np.array([len(at) for at in batch.positions]))
    if batch.read_experts is not None:
        out["read_experts"] = np.concatenate(batch.read_experts)
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor) and field.name != "token_ids":
            out[field.name] = packed(value.cpu().contiguous().numpy())
    return out


def batch_in(told: dict[str, Any]) -> TrainingBatch:
    """The batch that was told, on the CPU."""
    ends = np.cumsum(unpacked(told["lengths"]))
    sequences = np.split(unpacked(told["sequences"]), ends[:-1])
    positions = np.split(unpacked(told["positions"]), np.cumsum(unpacked(told["sampled"]))[:-1])
    ids = np.concatenate([one[at] for one, at in zip(sequences, positions, strict=True)])
    about: dict[str, Any] = {"token_ids": torch.from_numpy(ids)}
    if "read_experts" in told:
        about["read_experts"] = tuple(np.split(np.array(told["read_experts"]), ends[:-1]))
    known = {field.name for field in fields(TrainingBatch)} - {"sequences", "positions", "read_experts"}
    about |= {name: torch.from_numpy(unpacked(value)) for name, value in told.items() if name in known}
    return TrainingBatch(
        sequences=tuple(sequences),
        prompt_lengths=tuple(unpacked(told["prompts"]).tolist()),
        positions=tuple(positions),
        **about,
    )


def tensors_out(values: dict[str, torch.Tensor | None]) -> dict[str, Any]:
    """Those that are there."""
    return {n: packed(v.detach().cpu().contiguous().numpy()) for n, v in values.items() if v is not None}


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


def size_of(told: Any) -> int:
    """Bytes of the numbers in it."""
    if isinstance(told, np.ndarray):
        return told.nbytes
    if isinstance(told, dict):
        return sum(map(size_of, told.values()))
    return sum(map(size_of, told)) if isinstance(told, tuple) else 0
