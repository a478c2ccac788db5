"""The Ring-1T report's Theorem 1 (2 in its appendix B): the gap between two engines can feed on itself, exactly as far as it says.

Policies over a few answers, listed: π_train = softmax(θ), π_infer = softmax(θ + e) with an engine's error e, and every gradient
and expectation is a sum. The constants are the tightest that satisfy (A1)–(A4) along the run. Not covered: whether a real
run satisfies them; the report fits the growth of a run's gap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

ANSWERS, STEPS = 5, 40


@dataclass(frozen=True)
class Path:
    """A run of the theorem's update. `[STEPS]` each but `delta [STEPS + 1]`."""

    delta: np.ndarray
    aligned: np.ndarray
    """⟨∇δ, b⟩."""
    drift: np.ndarray
    """⟨∇δ, g*⟩."""
    norm: np.ndarray
    """‖g‖."""
    size: float

    @property
    def eta(self) -> float:
        """c of (A2)."""
        return float((self.aligned / self.delta[:-1]).min())

    @property
    def kappa(self) -> float:
        """M + L·μ·G²/2, of (A1), (A3) and (A4)."""
        rest = self.delta[1:] - self.delta[:-1] - self.size * (self.aligned + self.drift)
        smooth = (2 * np.abs(rest) / (self.size * self.norm) ** 2).max()
        return float(np.abs(self.drift).max() + smooth / 2 * self.size * self.norm.max() ** 2)


def run(seed: int, mean: float, spread: float, size: float, corrected: bool = False) -> Path:
    """θ ← θ + μ·g with g = E_infer[A ∇log π_train], A = `mean` + `spread`·z; `corrected` weighs it by ρ = π_train/π_infer."""
    g = torch.Generator().manual_seed(seed)
    theta, error, z = torch.randn(3, ANSWERS, generator=g, dtype=torch.float64)
    theta, error, a = theta.clone().requires_grad_(), 0.5 * error, mean + spread * z
    rows = []
    for _ in range(STEPS + 1):
        train, infer = theta.log_softmax(0), (theta + error).log_softmax(0)
        delta = (infer.exp() * (infer - train)).sum()
        (slope,) = torch.autograd.grad(delta, theta, retain_graph=True)
        weight = (train - infer).exp().detach() if corrected else 1.0
        (step,) = torch.autograd.grad((infer.exp().detach() * weight * a * train).sum(), theta, retain_graph=True)
        (exact,) = torch.autograd.grad((train.exp() * a).sum(), theta)
        rows.append([delta.item(), (slope @ (step - exact)).item(), (slope @ exact).item(), step.norm().item()])
        theta = (theta.detach() + size * step).requires_grad_()
    delta, aligned, drift, norm = np.array(rows).T
    return Path(delta, aligned[:-1], drift[:-1], norm[:-1], size)


def test_the_gap_grows_at_least_as_the_theorem_says() -> None:
    """δ' ≥ (1 + ημ)δ − κμ wherever the bias is aligned; above δ_c = 2κ/η, δ' ≥ (1 + ημ/2)δ."""
    held, above, tightest = 0, 0, np.inf
    for seed in range(300):
        path = run(seed, mean=(-1.0) ** seed, spread=0.01, size=0.01)
        if path.eta <= 0:
            continue
        held += 1
        before, after, mu = path.delta[:-1], path.delta[1:], path.size
        slack = after - ((1 + path.eta * mu) * before - path.kappa * mu)
        assert (slack >= -1e-15).all()
        tightest = min(tightest, float((slack / (mu * path.kappa)).min()))
        big = before >= 2 * path.kappa / path.eta
        assert (after >= (1 + path.eta / 2 * mu) * before - 1e-15)[big].all()
        above += int(big.sum())
    assert held > 30
    assert above > 500  # not an empty statement
    assert tightest < 1.0  # κ is needed


def test_without_alignment_the_gap_may_close() -> None:
    """(A2) is what makes it grow: where ⟨∇δ, b⟩ is negative all along and drift is small, δ shrinks."""
    shrunk = [
        p.delta[-1] / p.delta[0] for p in (run(s, (-1.0) ** s, 0.0, 0.01) for s in range(100)) if p.aligned.max() < 0
    ]
    assert len(shrunk) > 10
    assert max(shrunk) < 1


def test_weighing_by_the_ratio_leaves_no_bias() -> None:
    """IcePop's weight inside its range (eqs. 1–3): g = g*, so b = 0 and nothing compounds."""
    for seed in range(20):
        path = run(seed, mean=-1.0, spread=1.0, size=0.05, corrected=True)
        assert path.aligned == pytest.approx(0.0, abs=1e-14)
