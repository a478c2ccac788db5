"""Thresholds: what a mask compares its statistic with. A number, or one that a rule finds anew for every batch.

`update(values)` sees the statistic of the whole optimizer batch before that batch is filtered; between updates a threshold
is constant. State is JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rollkeel.errors import BadInput


class Threshold:
    """A bound on a statistic. `side` upper keeps statistic ≤ value, lower keeps statistic ≥ value."""

    adaptive = True
    """True if `update` must see every batch."""
    left = 1.0
    """Share of the values that the configuration wants kept, the least there will be; 1 where it names none."""

    def __init__(self, value: float | None, side: str = "upper") -> None:
        self.value = value
        """The current bound; None if no batch has been seen and there is none before."""
        self.side = side

    def keeps(self, statistic: torch.Tensor, value: float, strict: bool = False) -> torch.Tensor:
        """bool, shape of `statistic`; `strict` drops at equality too."""
        if self.side == "lower":
            return statistic > value if strict else statistic >= value
        return statistic < value if strict else statistic <= value

    def solve(self, values: torch.Tensor) -> float:
        """The bound for a batch with these `[n]` values, without remembering it."""
        raise NotImplementedError

    def update(self, values: torch.Tensor) -> None:
        """See the batch's `[n]` values, of all ranks, in any order."""
        self.value = self.solve(values)

    def describe(self) -> Any:
        """JSON value for logs."""
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart; empty if the next `update` finds it all."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""


class Fixed(Threshold):
    """A number."""

    adaptive = False

    def solve(self, values: torch.Tensor) -> float:
        assert self.value is not None  # a number from the start
        return self.value

    def update(self, values: torch.Tensor) -> None:
        """A number stays."""


class Controller(Threshold):
    """A bound that follows a target acceptance (AC-MIS-PO eqs. 4–8, for any statistic and either side).

    At the k-th `update`, k = 1, 2, …: target A* falls linearly from `rate_start` to `rate_end` over `steps` updates (eq. 8);
    candidate = the A*-quantile of the values (eq. 6; the 1 − A* one for side lower);
    bound = clip(momentum·bound + (1−momentum)·candidate, low, high) (eq. 7). The first bound is `initial`.
    Infinite values count as the largest or smallest finite one; a batch without a finite value leaves the bound alone.
    """

    def __init__(
        self,
        rate_start: float,
        rate_end: float,
        steps: int,
        momentum: float = 0.9,
        low: float = -math.inf,
        high: float = math.inf,
        initial: float = math.inf,
        side: str = "upper",
    ) -> None:
        if not (0 < rate_start <= 1 and 0 < rate_end <= 1 and 0 <= momentum < 1 and low <= high and steps >= 0):
            raise BadInput(
                "controller: expected acceptance rates in (0, 1], momentum in [0, 1), low ≤ high and steps ≥ 0, got"
                f" {rate_start}, {rate_end}, {momentum}, {low}, {high}, {steps}"
            )
        super().__init__(min(max(initial, low), high), side)
        self.rate_start = rate_start
        self.rate_end = rate_end
        self.steps = steps
        self.momentum = momentum
        self.low = low
        self.high = high
        self.left = min(rate_start, rate_end)
        self.updates = 0
        self.acceptance: float | None = None
        """Fraction of the last batch's values that the bound found for it keeps."""

    @property
    def target(self) -> float:
        """A* of the last update (of the first one before any)."""
        share = min(max(self.updates, 1) / self.steps, 1.0) if self.steps else 1.0
        return self.rate_start - (self.rate_start - self.rate_end) * share

    def solve(self, values: torch.Tensor) -> float:
        assert self.value is not None  # `initial` at first
        finite = values[torch.isfinite(values)]
        if finite.numel() == 0:
            return self.value
        ordered = values.clamp(finite.min(), finite.max()).sort().values
        rate = self.target if self.side == "upper" else 1.0 - self.target
        place = rate * (len(ordered) - 1)
        below = min(int(place), len(ordered) - 1)
        first, second = ordered[[below, min(below + 1, len(ordered) - 1)]].tolist()
        candidate = first + (place - below) * (second - first)
        return min(max(self.momentum * self.value + (1 - self.momentum) * candidate, self.low), self.high)

    def update(self, values: torch.Tensor) -> None:
        self.updates += 1
        if values.numel() == 0:
            return
        values = values.detach().double()
        self.value = self.solve(values)
        self.acceptance = self.keeps(values, self.value).double().mean().item()

    def describe(self) -> dict[str, Any]:
        bounds = {"low": self.low, "high": self.high}
        return {
            "drop_rate": [1 - self.rate_start, 1 - self.rate_end],
            "steps": self.steps,
            "momentum": self.momentum,
            **{k: v for k, v in bounds.items() if math.isfinite(v)},
        }

    def state_dict(self) -> dict[str, Any]:
        return {"bound": self.value, "updates": self.updates, "acceptance": self.acceptance}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self.updates = float(state["bound"]), int(state["updates"])
        self.acceptance = None if state["acceptance"] is None else float(state["acceptance"])


class Budget(Threshold):
    """The largest bound under which the mean of the kept values is ≤ `mean` (M2PO's rule). Negative values do not count.

    It lies midway between the last kept and the first dropped value, so that float noise between two passes over the same
    tokens cannot flip one.
    """

    def __init__(self, mean: float) -> None:
        super().__init__(None)
        self.mean = mean

    def solve(self, values: torch.Tensor) -> float:
        ordered = values[values >= 0].double().sort().values
        means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
        kept = int((means <= self.mean).sum())
        if kept < len(ordered):  # equal values stay or go together
            kept = int((ordered < ordered[kept]).sum())
        return _between(ordered, kept, below=0.0, above=math.inf)

    def describe(self) -> float:
        return self.mean


class Share(Threshold):
    """The bound that keeps round(`acceptance`·n) of n values, the largest ones, and all that equal the least of these."""

    def __init__(self, acceptance: float | None) -> None:
        super().__init__(None, side="lower")
        self.acceptance = acceptance
        self.left = 1.0 if acceptance is None else acceptance

    def solve(self, values: torch.Tensor) -> float:
        assert self.acceptance is not None  # given, or set by the rule that owns this
        if values.numel() == 0:
            return -math.inf
        rejected = len(values) - round(self.acceptance * len(values))
        return _between(values.double().sort().values, rejected, below=-math.inf, above=math.inf)

    def describe(self) -> float | None:
        return self.acceptance


class Top(Threshold):
    """The bound that drops the `share` of n values that are largest, at least one of them and all that equal the least of these;
    −∞ is never dropped."""

    def __init__(self, share: float) -> None:
        super().__init__(None)
        self.share, self.left = share, 1.0 - share

    def solve(self, values: torch.Tensor) -> float:
        dropped = min(max(int(self.share * len(values)), 1), int((values > -math.inf).sum()))
        ordered = values.double().sort().values
        kept = len(values) - dropped
        if dropped:  # a bound between equal values would drop none of them
            kept = int(torch.searchsorted(ordered, ordered[kept]))
        return _between(ordered, kept, below=-math.inf, above=math.inf)

    def describe(self) -> float:
        return self.share


def _between(ordered: torch.Tensor, count: int, below: float, above: float) -> float:
    """A number between the first `count` of the ascending values and the rest; half the first where `below` is 0."""
    if count == len(ordered):
        return above
    if count == 0:
        return below if math.isinf(below) else (below + float(ordered[0])) / 2
    first, second = ordered[count - 1 : count + 1].tolist()
    return (first + second) / 2
