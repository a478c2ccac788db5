"""The third level of a run's record: the trainer's tensors of a few sequences, at the weights that began a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rollkeel.analyzer.capture import Tokens, save_capture
from rollkeel.analyzer.sides import TrainerSide
from rollkeel.errors import BadInput
from rollkeel.types import Rollout


def record_tensors(
    path: Path | None,
    model: Any,
    rollouts: Sequence[Rollout],
    *,
    step: int,
    version: int,
    layers: Sequence[int] = (),
    parity: bool = False,
) -> None:
    """Write what `model` computes for these rollouts (prompt and response) to `path`, atomically.

    `path`: None computes and writes nothing, where ranks compute together and another one writes. `layers`: of these only, all when empty; `parity`: in the arithmetic of `run.parity`. Weights, gradients and random numbers stay as they are. Raises `BadInput` if
    the disk is full.
    """
    sequences = tuple(np.concatenate([r.prompt.token_ids, r.span.token_ids]) for r in rollouts)
    tokens = Tokens(sequences, tuple(len(r.prompt.token_ids) for r in rollouts))
    found = TrainerSide(model, parity=parity).capture(tokens, layers)
    if path is None:
        return
    ids = ",".join(str(r.id) for r in rollouts)
    save_capture(path, replace(found, facts={"step": str(step), "version": str(version), "rollouts": ids}))


def check_layers(layers: Sequence[int], hf_config: Any) -> None:
    """Raises `BadInput` for a layer that the model does not have."""
    count = int(hf_config.get_text_config().num_hidden_layers)
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if wrong:
        raise BadInput(f"trace.layers: expected layers from 0 to {count - 1}, got {wrong[0]}")
