"""AC-MIS-PO's controller on a stream whose spread shrinks and grows: does it hold the acceptance it was asked for?

Synthetic trajectories with known log geometric-mean ratios, thousands per step, so that acceptance is nearly noise-free.
Covers eqs. 4–8 and a resume in the middle; whether the filter helps learning is not covered.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from rollkeel.objectives import RECIPES
from rollkeel.objectives.objective import Objective
from rollkeel.types import TokenBatch

TRAJECTORIES, LENGTH = 4096, 2
LOW, HIGH = math.log(1.0002), math.log(1.01)
SETTLED = 80  # 0.9^80 of the first bound is 0.02 %
RESUMED_AT = 130


def spread(step: int) -> float:
    """Standard deviation of log ρ̄: 0.0041 → 0.0015 → 0.0041 over 400 steps, at most 0.8 % a step: 9 steps' lag costs 0.03."""
    return 0.0025 * math.exp(0.5 * math.cos(2 * math.pi * step / 400))


def batch(step: int, sigma: float) -> TokenBatch:
    g = np.random.default_rng([step, 5])
    z = np.repeat(g.normal(0, sigma, TRAJECTORIES), LENGTH)
    wiggle = g.normal(0, 0.05, (TRAJECTORIES, LENGTH))  # inside a trajectory, of mean 0: only ρ̄ may matter
    z = z + (wiggle - wiggle.mean(1, keepdims=True)).reshape(-1)
    q = np.full_like(z, -1.0)
    ids = torch.arange(TRAJECTORIES).repeat_interleave(LENGTH)
    return TokenBatch(
        logprobs=torch.tensor(q + z),
        rollout_logprobs=torch.tensor(q),
        advantages=torch.tensor(np.repeat(g.choice([-1.0, 1.0], TRAJECTORIES), LENGTH)),
        coefficients=torch.full((len(z),), 1 / len(z), dtype=torch.float64),
        sequence_ids=ids,
        group_ids=ids // 8,
    )


def target(k: int) -> float:
    """Eq. 8 with the paper's 0.4 → 0.2 over 200 steps."""
    return 0.4 - 0.2 * min(k / 200, 1.0)


def accepted(tokens: TokenBatch, bound: float) -> float:
    log_u = (tokens.logprobs - tokens.rollout_logprobs).reshape(TRAJECTORIES, LENGTH)
    return (log_u.mean(1).abs() <= bound).double().mean().item()


def run(objective: Objective, steps: range, sigma=spread) -> list[dict[str, float]]:
    out = []
    for step in steps:
        tokens = batch(step, sigma(step))
        objective.prepare(tokens)
        found = objective(tokens)
        row = {k: found.metrics[f"controller/{k}"] for k in ("bound", "acceptance", "target")}
        # The reported acceptance is that of the batch the bound filters, and what the loss keeps.
        assert row["acceptance"] == pytest.approx(accepted(tokens, row["bound"]), abs=1e-6)
        assert found.keep.double().mean().item() == pytest.approx(row["acceptance"], abs=1e-6)
        out.append(row)
    return out


@pytest.fixture(scope="module")
def stream() -> list[dict[str, float]]:
    return run(RECIPES["ac_mis_po"](), range(400))


def test_acceptance_starts_near_one(stream):
    assert stream[0]["acceptance"] > 0.95
    # b_1 = 0.9·b_max + 0.1·candidate: one step away from b_0 = b_max.
    z = (batch(0, spread(0)).logprobs + 1).reshape(TRAJECTORIES, LENGTH).mean(1).abs().numpy()
    candidate = float(np.quantile(z, stream[0]["target"]))
    assert stream[0]["bound"] == pytest.approx(0.9 * HIGH + 0.1 * candidate, rel=1e-6)


def test_the_schedule_falls_to_its_end_and_stays(stream):
    for k, row in enumerate(stream, start=1):
        assert row["target"] == pytest.approx(target(k), abs=1e-9)


def test_acceptance_tracks_the_target(stream):
    late = stream[SETTLED:]
    errors = [abs(row["acceptance"] - row["target"]) for row in late if LOW < row["bound"] < HIGH]
    assert len(errors) == len(late)  # this stream never reaches a clamp
    assert max(errors) < 0.05
    # The spread shrinks and grows again, and the bound goes with it.
    bounds = [row["bound"] for row in late]
    assert min(bounds) < 0.6 * min(bounds[0], bounds[-1])


def test_the_bound_is_the_smoothed_quantile(stream):
    """Eqs. 6–7 replayed from the stream itself, every step."""
    previous = HIGH
    for step, row in enumerate(stream):
        tokens = batch(step, spread(step))
        z = (tokens.logprobs - tokens.rollout_logprobs).reshape(TRAJECTORIES, LENGTH).mean(1).abs().numpy()
        expected = 0.9 * previous + 0.1 * float(np.quantile(z, row["target"]))
        assert row["bound"] == pytest.approx(min(max(expected, LOW), HIGH), rel=1e-6)
        previous = row["bound"]


def test_the_bound_never_leaves_its_range():
    rows = run(RECIPES["ac_mis_po"](), range(160), sigma=lambda k: 0.2 if k < 40 or k >= 120 else 1e-6)
    bounds = np.array([row["bound"] for row in rows])
    assert (bounds >= LOW * (1 - 1e-9)).all()
    assert (bounds <= HIGH * (1 + 1e-9)).all()
    assert bounds[39] == pytest.approx(HIGH)
    assert bounds[119] == pytest.approx(LOW)
    # At a clamp acceptance is what the range allows, not the target.
    assert rows[39]["acceptance"] < rows[39]["target"] - 0.1
    assert rows[119]["acceptance"] == 1.0


def test_a_resumed_run_continues_with_the_same_bound(stream):
    first = RECIPES["ac_mis_po"]()
    run(first, range(RESUMED_AT))
    state = json.loads(json.dumps(first.state_dict()))
    second = RECIPES["ac_mis_po"]()
    second.load_state_dict(state)
    assert second.state_dict() == state
    rest = run(second, range(RESUMED_AT, RESUMED_AT + 20))
    assert rest == stream[RESUMED_AT : RESUMED_AT + 20]
    fresh = run(RECIPES["ac_mis_po"](), range(RESUMED_AT, RESUMED_AT + 1))
    assert fresh[0]["bound"] != rest[0]["bound"]  # the state is what makes the difference
