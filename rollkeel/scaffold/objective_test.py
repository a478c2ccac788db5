"""Which token is kept, and what its gradient is, by hand: the coefficient of ∇ log p is ratio × weight × advantage."""

import math

import pytest
import torch

from rollkeel.scaffold.objective import example
from rollkeel.types import TokenBatch


def coefficient(policy: float, old: float, rollout: float, advantage: float) -> float:
    """Of one token with these probabilities."""
    log = [torch.tensor([math.log(p)], dtype=torch.float64) for p in (policy, old, rollout)]
    tokens = TokenBatch(
        logprobs=log[0].requires_grad_(),
        old_logprobs=log[1],
        rollout_logprobs=log[2],
        advantages=torch.tensor([advantage], dtype=torch.float64),
        coefficients=torch.ones(1, dtype=torch.float64),
        sequence_ids=torch.zeros(1, dtype=torch.int64),
        group_ids=torch.zeros(1, dtype=torch.int64),
    )
    (gradient,) = torch.autograd.grad(example().loss(tokens), tokens.logprobs)
    return -gradient.item()


@pytest.mark.parametrize(
    ("policy", "old", "rollout", "advantage", "expected"),
    [
        (0.5, 0.5, 0.5, 2.0, 2.0),
        (0.55, 0.5, 0.5, 2.0, 1.1 * 2),
        (0.5, 0.5, 0.45, 2.0, (0.5 / 0.45) ** 0.5 * 2),
        (0.5, 0.5, 0.39, 2.0, 0.0),  # the mask: 0.11 apart
        (0.7, 0.5, 0.5, 2.0, 0.0),  # the clip: pushed up enough
        (0.7, 0.5, 0.5, -2.0, 1.4 * -2),
    ],
)
def test_one_token(policy: float, old: float, rollout: float, advantage: float, expected: float) -> None:
    assert coefficient(policy, old, rollout, advantage) == pytest.approx(expected, rel=1e-12)
