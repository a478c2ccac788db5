"""Straight-through rounding: the trainer computes with the weights that a quantised engine computes with.

The live weights hold the rounded values for the time of a pass, and their full precision again before the optimizer's step. So
the gradient at the rounded weights moves the exact ones, and what is published, saved and resumed are the exact ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch
from transformers.modeling_utils import PreTrainedModel

from rollkeel.errors import BadInput
from rollkeel.models.names import checkpoint_views
from rollkeel.models.numerics import is_quantised, weight_rounder


@final
class Rounding:
    """Rounds `model`'s projections as an engine of numeric mode `mode` does; `none` rounds nothing.

    A checkpoint tensor at a time, because that is the piece an engine gets, and its scales depend on it. In use it keeps a
    second copy of the weights that it rounds. Raises `BadInput` for a model without such weights.
    """

    def __init__(self, model: PreTrainedModel, mode: str) -> None:
        self._rounder = weight_rounder(mode)
        self._views: list[torch.Tensor] = []
        if self._rounder is not None:
            self._views = [view for name, view in checkpoint_views(model).items() if is_quantised(name, view)]
            if not self._views:
                raise BadInput(
                    f"experiment.rounding={mode}: model {type(model).__name__} has no projection weights to round; set none"
                )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the weights are rounded; afterwards they are as before, to the bit. Nothing may update them inside."""
        if self._rounder is None:
            yield
            return
        exact = [view.clone() for view in self._views]
        try:
            for view, kept in zip(self._views, exact, strict=True):
                view.copy_(self._rounder(kept))
            yield
        finally:
            for view, kept in zip(self._views, exact, strict=True):
                view.copy_(kept)
