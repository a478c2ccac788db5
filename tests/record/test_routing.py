"""The flip rate says how often two engines disagree about experts; order inside a choice is no disagreement.

By hand on small arrays, and against Python sets. Not covered: where the choices come from (tests/models/test_routers.py)
and whole runs (tests/test_loop.py).
"""

from __future__ import annotations

import pytest
import torch

from rollkeel.errors import BadInput
from rollkeel.record.routing import routing_metrics


def chosen(*tokens: list[list[int]]) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int16)


def test_by_hand() -> None:
    """Two tokens, two layers: the first token's order differs, the second one's experts differ in one layer."""
    engine = chosen([[0, 1], [2, 3]], [[4, 5], [6, 7]])
    trainer = chosen([[1, 0], [2, 3]], [[4, 5], [6, 1]])
    assert routing_metrics(engine, trainer) == {"routing/flip_rate": 0.25, "routing/flipped_tokens": 0.5}
    assert routing_metrics(engine, engine)["routing/flip_rate"] == 0


def test_against_sets() -> None:
    g = torch.Generator().manual_seed(0)
    engine, trainer = (torch.rand(200, 3, 5, generator=g).topk(2).indices.to(torch.int16) for _ in range(2))
    flips = [
        [set(a) != set(b) for a, b in zip(x, y, strict=True)]
        for x, y in zip(engine.tolist(), trainer.tolist(), strict=True)
    ]
    found = routing_metrics(engine, trainer)
    assert found["routing/flip_rate"] == pytest.approx(sum(map(sum, flips)) / 600)
    assert found["routing/flipped_tokens"] == pytest.approx(sum(map(any, flips)) / 200)
    assert 0 < found["routing/flip_rate"] < 1


def test_without_experts_there_is_no_metric_and_other_layers_are_refused() -> None:
    some = chosen([[0, 1]])
    assert routing_metrics(None, some) == routing_metrics(some, None) == routing_metrics(some[:0], some[:0]) == {}
    with pytest.raises(BadInput, match=r"\[1, 1, 2\] and \[1, 2, 2\]"):
        routing_metrics(some, chosen([[0, 1], [0, 1]]))
