"""What the plug-ins share where they write rollkeel's trace while a trainer trains: for `rollkeel doctor`, `replay` and `report`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rollkeel.errors import BadInput
from rollkeel.record.runfolder import rollout_files
from rollkeel_doctor.traces.own import save_batch


def folder_of(folder: str | Path) -> Path:
    """The folder, or `rank_N` in it for each of several processes of a torch process group."""
    group = torch.distributed
    alone = not (group.is_available() and group.is_initialized() and group.get_world_size() > 1)
    return Path(folder) if alone else Path(folder) / f"rank_{group.get_rank()}"


def before(thing: Any, method: str, save: Callable[..., Any]) -> None:
    """Have `thing.method` call `save` with its arguments, and then do what it did."""
    old = getattr(thing, method)

    @functools.wraps(old)
    def both(*args: Any, **kwargs: Any) -> Any:
        save(*args, **kwargs)
        return old(*args, **kwargs)

    setattr(thing, method, both)


def next_step(folder: str | Path) -> int:
    """The step behind the last one of a trace, 1 for a new one."""
    return 1 + max((step for step, _ in rollout_files(folder_of(folder))), default=0)


def save_sequences(folder: str | Path, step: int, ids: torch.Tensor, mask: torch.Tensor, **columns: Any) -> Path:
    """`save_batch` of whole sequences `[S, L]`, prompt and response in a row: a response begins with the first token in `mask`.

    `columns` of two dimensions are cut like `ids`; the others are as `save_batch` takes them.
    """
    mask = mask.bool()
    first = mask.int().argmax(1)
    at = first[:, None] + torch.arange(ids.shape[1], device=ids.device)
    inside, at = at < ids.shape[1], at.clamp(max=ids.shape[1] - 1)

    def cut(value: Any) -> Any:
        two = isinstance(value, torch.Tensor) and value.dim() == 2
        return value.gather(1, at.to(value.device)) if two else value

    cuts = {name: cut(value) for name, value in columns.items() if value is not None}
    prompts = [row[:n] for row, n in zip(ids, first.tolist(), strict=True)]
    return save_batch(
        folder_of(folder), step, token_ids=cut(ids), mask=cut(mask) & inside, **{"prompt_ids": prompts, **cuts}
    )


def needed(batch: Any, name: str, who: str, todo: str) -> Any:
    """An entry of a trainer's batch. Raises `BadInput` where it is missing, which says what to set."""
    try:
        value = batch[name]
    except KeyError:
        value = None
    if value is None:
        raise BadInput(f"{who}: expected {name} in the batch, got none; {todo}")
    return value
