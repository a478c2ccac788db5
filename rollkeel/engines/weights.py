"""Applying a weight update to an engine in place, and computing the evidence that it arrived."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rollkeel.errors import EngineFailure
from rollkeel.models.checksum import MASK, tensor_checksum
from rollkeel.models.numerics import is_quantised, weight_rounder
from rollkeel.types import WeightUpdate


def apply_update(update: WeightUpdate, destinations: Mapping[str, torch.Tensor], mode: str) -> int:
    """Write every slice to the view of its name and return the checksum of what the engine now holds.

    Where storage is exact (same dtype, no rounding) the checksum is recomputed from the engine's own memory after the
    write; where the mode rounds, from the received values. Raises `EngineFailure` for an unknown or missing name, a wrong
    shape, or a slice whose bytes do not match its checksum.
    """
    if update.kind != "full":
        raise EngineFailure(f"weight update {update.version}: this engine takes full updates, got {update.kind!r}")
    rounder = weight_rounder(mode)
    missing = {name: view.numel() for name, view in destinations.items()}
    total = 0
    for piece in update.slices:
        view = destinations.get(piece.name)
        if view is None:
            raise EngineFailure(f"weight update {update.version}: the engine has no weight named {piece.name}")
        if piece.tensor.shape != view.shape or piece.offset:
            raise EngineFailure(
                f"weight update {update.version}: {piece.name} has shape {tuple(piece.tensor.shape)} at offset "
                f"{piece.offset}, the engine expects {tuple(view.shape)}"
            )
        received = tensor_checksum(piece.name, piece.tensor)
        if received != piece.checksum:
            raise EngineFailure(f"weight update {update.version}: {piece.name} arrived with a wrong checksum")
        rounded = rounder is not None and is_quantised(piece.name, piece.tensor)
        view.copy_(rounder(piece.tensor.to(view.device)) if rounder and rounded else piece.tensor)
        exact = not rounded and view.dtype == piece.tensor.dtype
        total += tensor_checksum(piece.name, view) if exact else received
        if missing.pop(piece.name, None) is None:
            raise EngineFailure(f"weight update {update.version}: {piece.name} arrived twice")
    if missing:
        raise EngineFailure(
            f"weight update {update.version}: {len(missing)} weights did not arrive, first {next(iter(missing))}"
        )
    return total & MASK
