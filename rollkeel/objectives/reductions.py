"""Many scalars off a device in one synchronisation."""

from __future__ import annotations

import math

import torch


class Reductions:
    """Collects named 0-d tensors, as values or as quotients, and reads them all at once.

    A quotient whose denominator is 0 has no value (a mean over no tokens) and its name is left out; so is a value that
    is not finite, because metrics are JSON.
    """

    def __init__(self) -> None:
        self._names: list[tuple[str, bool]] = []
        self._tensors: list[torch.Tensor] = []

    def add(self, name: str, value: torch.Tensor, over: torch.Tensor | None = None) -> None:
        """`value`, or `value / over`, under `name`. Both 0-d, on the same device as all others."""
        self._names.append((name, over is not None))
        self._tensors.append(value.detach().double())
        if over is not None:
            self._tensors.append(over.detach().double())

    def read(self) -> dict[str, float]:
        """Names in the order they were added → Python floats."""
        numbers = iter(torch.stack(self._tensors).tolist() if self._tensors else [])
        metrics: dict[str, float] = {}
        for name, quotient in self._names:
            value = next(numbers)
            if quotient:
                over = next(numbers)
                value = value / over if over != 0 else math.nan
            if math.isfinite(value):
                metrics[name] = value
        return metrics
