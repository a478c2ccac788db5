"""Which KL does each estimator really descend? Exact expected gradients on a 4-way softmax, over 100 random policies.

A KL estimator can stand in the loss (differentiated) or in the reward (a number that multiplies ∇log p), and the tokens can
come from p or from another policy q, with u = p/q. The table below is the whole answer; `BIASED` rows pin down in which way.
Sampling noise is not covered: every expectation is a sum over the four tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from rollkeel.objectives import pg_is
from rollkeel.objectives.kl import PLAIN, k1, k2, k3
from rollkeel.types import TokenBatch

Policies = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def policies(seed: int) -> Policies:
    """Logits of p (a leaf), log ref, log q."""
    g = torch.Generator().manual_seed(seed)
    logits, ref, q = torch.randn(3, 4, generator=g, dtype=torch.float64).unbind()
    return logits.clone().requires_grad_(), ref.log_softmax(0), q.log_softmax(0)


def slope(value: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value, logits)[0]


def reverse(logits: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """∇KL(p‖ref)"""
    lp = logits.log_softmax(0)
    return slope((lp.exp() * (lp - ref)).sum(), logits)


def forward(logits: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """∇KL(ref‖p)"""
    return slope((ref.exp() * (ref - logits.log_softmax(0))).sum(), logits)


def in_loss(
    estimator: Callable, logits: torch.Tensor, ref: torch.Tensor, sampled: torch.Tensor, u: str
) -> torch.Tensor:
    """Gradient of Σ sampled · [u ·] estimator, u = p/sampled absent, detached ("sg") or differentiated ("grad")."""
    lp = logits.log_softmax(0)
    ratio = (lp - sampled).exp()
    factor = {"none": torch.ones_like(ratio), "sg": ratio.detach(), "grad": ratio}[u]
    return slope((sampled.exp() * factor * estimator(lp, ref)).sum(), logits)


def in_reward(
    estimator: Callable, logits: torch.Tensor, ref: torch.Tensor, sampled: torch.Tensor, u: bool
) -> torch.Tensor:
    """Gradient that a penalty in the reward adds to the loss: Σ sampled · [u ·] k · ∇log p with k a number."""
    lp = logits.log_softmax(0)
    factor = (lp - sampled).exp().detach() if u else torch.ones_like(lp)
    return slope((sampled.exp() * factor * estimator(lp, ref).detach() * lp).sum(), logits)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def expected(kind: str, logits: torch.Tensor, ref: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The gradients a row of the table can have."""
    lp = logits.log_softmax(0)
    match kind:
        case "zero":
            return torch.zeros_like(logits)
        case "reverse":
            return reverse(logits, ref)
        case "forward":
            return forward(logits, ref)
        case "reverse − forward":
            return reverse(logits, ref) - forward(logits, ref)
        case "∇E_p[k2]":
            return slope((lp.exp() * k2(lp, ref)).sum(), logits)
        case "∇E_p[k2] − reverse":
            return slope((lp.exp() * k2(lp, ref)).sum(), logits) - reverse(logits, ref)
        case "pull from q":  # −∇KL(q‖p): pushes down what q samples, whatever the reference
            return slope((q.exp() * lp).sum(), logits)
    raise AssertionError(kind)


# place, estimator, tokens from, weight u → what the expected gradient is. Only "reverse" descends KL(p‖ref).
TABLE = [
    ("loss", "k1", "p", "none", "zero"),
    ("loss", "k2", "p", "none", "reverse"),
    ("loss", "k3", "p", "none", "forward"),
    ("reward", "k1", "p", "none", "reverse"),
    ("reward", "k2", "p", "none", "∇E_p[k2] − reverse"),
    ("reward", "k3", "p", "none", "reverse − forward"),
    ("loss", "k1", "q", "none", "pull from q"),
    ("loss", "k1", "q", "sg", "zero"),
    ("loss", "k1", "q", "grad", "reverse"),
    ("loss", "k2", "q", "sg", "reverse"),
    ("loss", "k2", "q", "grad", "∇E_p[k2]"),
    ("loss", "k3", "q", "sg", "forward"),
    ("loss", "k3", "q", "grad", "reverse"),
    ("reward", "k1", "q", "sg", "reverse"),
    ("reward", "k2", "q", "sg", "∇E_p[k2] − reverse"),
    ("reward", "k3", "q", "sg", "reverse − forward"),
]
BIASED = [("loss", "k2"), ("loss", "k3"), ("reward", "k1"), ("reward", "k2"), ("reward", "k3")]
"""Off-policy and unweighted: neither KL's gradient."""


def gradient(
    place: str, name: str, sampled: torch.Tensor, u: str, logits: torch.Tensor, ref: torch.Tensor
) -> torch.Tensor:
    if place == "loss":
        return in_loss(PLAIN[name], logits, ref, sampled, u)
    return in_reward(PLAIN[name], logits, ref, sampled, u == "sg")


@pytest.mark.parametrize(("place", "name", "source", "u", "kind"), TABLE)
def test_expected_gradient(place, name, source, u, kind):
    for seed in range(100):
        logits, ref, q = policies(seed)
        sampled = logits.detach().log_softmax(0) if source == "p" else q
        close(gradient(place, name, sampled, u, logits, ref), expected(kind, logits, ref, q))


@pytest.mark.parametrize(("place", "name"), BIASED)
def test_off_policy_without_a_weight_is_neither(place, name):
    for seed in range(20):
        logits, ref, q = policies(seed)
        found = gradient(place, name, q, "none", logits, ref)
        for other in (reverse(logits, ref), forward(logits, ref), torch.zeros(4, dtype=torch.float64)):
            assert (found - other).abs().max() > 1e-3


def test_the_gradients_can_be_told_apart():
    """Otherwise a row of the table would hold for the wrong reason."""
    for seed in range(20):
        logits, ref, q = policies(seed)
        kinds = sorted({row[-1] for row in TABLE})
        found = [expected(kind, logits, ref, q) for kind in kinds]
        for i, a in enumerate(found):
            for b in found[:i]:
                assert (a - b).abs().max() > 1e-3


def test_values_k1_and_k3_are_unbiased_and_k2_is_not():
    for seed in range(100):
        logits, ref, q = policies(seed)
        lp = logits.detach().log_softmax(0)
        value = (lp.exp() * (lp - ref)).sum()
        for estimator in (k1, k3):
            close((lp.exp() * estimator(lp, ref)).sum(), value)
            close((q.exp() * (lp - q).exp() * estimator(lp, ref)).sum(), value)
        assert (k3(lp, ref) >= 0).all()
        assert abs((lp.exp() * k2(lp, ref)).sum() - value) > 1e-6


WEIGHTED = [("rk3", "o"), ("uk3", "q"), ("sk3", "p")]
"""k3 times a differentiated ratio: the reverse KL on tokens from the policy under it."""


@pytest.mark.parametrize(
    ("name", "kind", "sampled"),
    [("k1", "zero", "p"), ("k2", "reverse", "p"), ("k3", "forward", "p"), *((n, "reverse", s) for n, s in WEIGHTED)],
)
def test_an_objective_adds_exactly_this_gradient(name, kind, sampled):
    """The KL term as the trainer runs it: four tokens, coefficient = probability, A = 0, so that only the KL is left."""
    for seed in range(20):
        logits, ref, q = policies(seed)
        lp = logits.log_softmax(0)
        ids = torch.zeros(4, dtype=torch.int64)
        old = policies(seed + 50)[2]
        tokens = TokenBatch(
            logprobs=lp,
            old_logprobs=old,
            rollout_logprobs=q,
            ref_logprobs=ref,
            advantages=torch.zeros(4, dtype=torch.float64),
            coefficients={"p": lp.detach(), "o": old, "q": q}[sampled].exp(),
            sequence_ids=ids,
            group_ids=ids,
        )
        objective = pg_is(kl_coefficient=0.7, kl_estimator=name)
        assert ("old_logprobs" in objective.needs) == (name == "rk3")
        close(slope(objective.loss(tokens), logits), 0.7 * expected(kind, logits, ref, q))
        value = objective(dataclasses.replace(tokens, logprobs=lp.detach())).metrics["loss/kl"]
        if name not in ("k1", "k2"):  # whatever the policy that samples, the value is that of KL(p‖ref)
            assert value == pytest.approx(0.7 * (lp.exp() * (lp - ref)).sum().item(), rel=1e-9)


def test_a_penalty_in_the_reward_is_an_advantage():
    """−γ·k1 in the advantage of a rollout-anchored objective: unbiased for the reverse KL even for tokens of q."""
    for seed in range(20):
        logits, ref, q = policies(seed)
        lp = logits.log_softmax(0)
        ids = torch.zeros(4, dtype=torch.int64)
        tokens = TokenBatch(
            logprobs=lp,
            rollout_logprobs=q,
            advantages=-0.7 * k1(lp, ref).detach(),
            coefficients=q.exp(),
            sequence_ids=ids,
            group_ids=ids,
        )
        close(slope(pg_is().loss(tokens), logits), 0.7 * reverse(logits, ref))
