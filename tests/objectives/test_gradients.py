"""Two implementations of an objective agree iff the gradient coefficient of every token agrees.

An independent float64 numpy reference, written from the formulas and importing nothing of the package's objectives, against
autograd on 10,000 random tokens; and the invariances every loss must have. Learning itself is not covered here.
"""

import dataclasses

import numpy as np
import pytest
import torch

from rollkeel.objectives import grpo, icepop, kpop
from rollkeel.types import TokenBatch

T = 10_000


def random_tokens(seed: int, extreme: bool, dtype: torch.dtype = torch.float64) -> TokenBatch:
    """o near q and p near o; with `extreme`, every tenth token has log-ratios up to ±40."""
    g = np.random.default_rng(seed)
    q = -g.exponential(1.5, T)
    o = np.minimum(q + g.normal(0, 0.3, T), -1e-9)
    p = np.minimum(o + g.normal(0, 0.2, T), -1e-9)
    if extreme:
        far = g.random(T) < 0.1
        q = np.where(far, -g.uniform(0, 40, T), q)
        o = np.where(far, -g.uniform(0, 40, T), o)
        p = np.where(far, -g.uniform(0, 40, T), p)
    lengths = g.integers(1, 40, T)
    sequence_ids = np.repeat(np.arange(T), lengths)[:T]
    advantages = np.where(g.random(T) < 0.1, 0.0, g.normal(0, 1, T))
    ref = np.minimum(p + g.normal(0, 0.5, T), -1e-9)

    def f(x: np.ndarray) -> torch.Tensor:
        return torch.tensor(x, dtype=dtype)

    return TokenBatch(
        logprobs=f(p).requires_grad_(),
        old_logprobs=f(o),
        rollout_logprobs=f(q),
        ref_logprobs=f(ref),
        advantages=f(advantages),
        coefficients=f(g.uniform(0, 1, T) / T),
        sequence_ids=torch.tensor(sequence_ids),
        group_ids=torch.tensor(sequence_ids // 8),
        entropy=f(g.uniform(0, 3, T)).requires_grad_(),
    )


# ---- the reference -------------------------------------------------------------------------------------------------


def np_ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.exp(np.clip(a - b, -20, 20))


def np_clip_coefficient(p, o, a, low=0.2, high=0.2):
    r = np_ratio(p, o)
    dead = ((a > 0) & (r > 1 + high)) | ((a < 0) & (r < 1 - low))
    return np.where(dead, 0.0, r * a)


def np_binary(lp, lq):
    p = np.exp(lp)
    return p * (lp - lq) + (1 - p) * (np.log1p(-p) - np.log1p(-np.exp(lq)))


def np_kpop_keep(a, b, phi):
    return np.maximum(np_binary(a, b), np_binary(b, a)) <= phi


def reference(name: str, p, o, q, a):
    rho, u = np_ratio(o, q), np_ratio(p, q)
    match name:
        case "grpo":
            return np_clip_coefficient(p, o, a)
        case "grpo_wide":
            return np_clip_coefficient(p, o, a, 0.1, 0.28)
        case "icepop":
            return np.where((rho >= 0.5) & (rho <= 5), rho * np_clip_coefficient(p, o, a), 0.0)
        case "kpop":
            return np.where(np_kpop_keep(o, q, 0.1), rho * np_clip_coefficient(p, o, a), 0.0)
        case "kpop_capped":
            return np.where(np_kpop_keep(o, q, 2.0), np.minimum(rho, 1.5) * np_clip_coefficient(p, o, a), 0.0)
        case "kpop_mask_only":
            return np.where(np_kpop_keep(o, q, 0.1), np_clip_coefficient(p, o, a), 0.0)
        case "kpop_rollout":
            return np.where(np_kpop_keep(p, q, 0.1), u * a, 0.0)
        case "kpop_rollout_capped":
            return np.where(np_kpop_keep(p, q, 2.0), np.minimum(u, 1.5) * a, 0.0)
    raise AssertionError(name)


OBJECTIVES = {
    "grpo": grpo(),
    "grpo_wide": grpo(clip_low=0.1, clip_high=0.28),
    "icepop": icepop(),
    "kpop": kpop(),
    "kpop_capped": kpop(phi=2.0, weight_cap=1.5),
    "kpop_mask_only": kpop(mode="mask_only"),
    "kpop_rollout": kpop(mode="rollout"),
    "kpop_rollout_capped": kpop(mode="rollout", phi=2.0, cap=1.5),
}


def arrays(tokens: TokenBatch) -> list[np.ndarray]:
    assert tokens.old_logprobs is not None
    fields = (tokens.logprobs, tokens.old_logprobs, tokens.rollout_logprobs, tokens.advantages, tokens.coefficients)
    return [x.detach().double().numpy() for x in fields]


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradient_coefficients_match_the_reference(name, extreme):
    tokens = random_tokens(11, extreme)
    p, o, q, a, c = arrays(tokens)
    expected = -c * reference(name, p, o, q, a)
    (found,) = torch.autograd.grad(OBJECTIVES[name].loss(tokens), tokens.logprobs)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-12)
    live = np.count_nonzero(expected)
    assert 0.2 * T < live < T  # the batch exercises both branches


@pytest.mark.parametrize("name", OBJECTIVES)
def test_float32_agrees_but_for_tokens_on_an_edge(name):
    tokens = random_tokens(12, extreme=False, dtype=torch.float32)
    p, o, q, a, c = arrays(tokens)
    expected = -c * reference(name, p, o, q, a)
    (found,) = torch.autograd.grad(OBJECTIVES[name].loss(tokens), tokens.logprobs)
    wrong = ~np.isclose(found.numpy(), expected, rtol=1e-5, atol=1e-10)
    assert wrong.sum() <= 2


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_and_entropy_terms_are_added_and_not_masked(estimator):
    tokens = random_tokens(13, extreme=True)
    p, o, q, a, c = arrays(tokens)
    assert tokens.ref_logprobs is not None
    assert tokens.entropy is not None
    gap = p - tokens.ref_logprobs.numpy()
    slope = {"k1": np.ones(T), "k2": gap, "k3": 1 - np.exp(-gap)}[estimator]
    objective = kpop(kl_coefficient=0.3, kl_estimator=estimator, entropy_coefficient=0.05)
    assert objective.needs == {"old_logprobs", "ref_logprobs", "entropy"}
    d_p, d_h = torch.autograd.grad(objective.loss(tokens), [tokens.logprobs, tokens.entropy])
    np.testing.assert_allclose(d_p.numpy(), c * (0.3 * slope - reference("kpop", p, o, q, a)), rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(d_h.numpy(), -0.05 * c, rtol=1e-12)
    metrics = objective(tokens).metrics
    value = {"k1": gap, "k2": gap**2 / 2, "k3": np.expm1(-gap) + gap}[estimator]
    assert metrics["loss/kl"] == pytest.approx(0.3 * (c * value).sum())
    assert metrics["loss/entropy"] == pytest.approx(-0.05 * (c * tokens.entropy.detach().numpy()).sum())
    assert metrics["loss/total"] == pytest.approx(sum(metrics[f"loss/{k}"] for k in ("policy", "kl", "entropy")))


def pick(tokens: TokenBatch, index: torch.Tensor) -> TokenBatch:
    """The batch's tokens at `index`, with the graph to the original tensors kept."""
    chosen = {f.name: getattr(tokens, f.name) for f in dataclasses.fields(tokens)}
    return TokenBatch(**{n: None if v is None else v[index] for n, v in chosen.items()})


@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_and_packing_order_change_nothing(name):
    objective = OBJECTIVES[name]
    tokens = random_tokens(14, extreme=False)
    whole = objective.loss(tokens)
    (gradient,) = torch.autograd.grad(whole, tokens.logprobs)
    order = torch.randperm(T, generator=torch.Generator().manual_seed(0))
    parts = [objective.loss(pick(tokens, part)) for part in order.split(997)]
    (split,) = torch.autograd.grad(torch.stack(parts).sum(), tokens.logprobs)
    assert torch.equal(split, gradient)
    assert torch.stack(parts).sum().item() == pytest.approx(whole.item(), rel=1e-12)
    permuted = objective(pick(tokens, order)).metrics
    assert permuted == pytest.approx(objective(tokens).metrics, rel=1e-9)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_fast_path_and_the_full_one_are_the_same_loss(name):
    tokens = random_tokens(15, extreme=True)
    out = OBJECTIVES[name](tokens)
    assert out.loss.item() == OBJECTIVES[name].loss(tokens).item()
    assert torch.equal(*(torch.autograd.grad(x, tokens.logprobs)[0] for x in (out.loss, OBJECTIVES[name].loss(tokens))))
    assert not out.weight.requires_grad


def test_estimators_on_a_four_way_softmax():
    """Exact expectations over the four tokens: what each estimator's gradient is, on-policy and from another policy."""
    from rollkeel.objectives.kl import k1, k2, k3

    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-0.2, 0.5, 0.4, -1.1], dtype=torch.float64).log_softmax(0)
    q = torch.tensor([0.1, 0.2, -0.4, 0.9], dtype=torch.float64).log_softmax(0)

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, logits)[0]

    def lp() -> torch.Tensor:
        return logits.log_softmax(0)

    reverse = gradient((lp().exp() * (lp() - ref)).sum())
    forward = gradient((ref.exp() * (ref - lp())).sum())
    assert (reverse - forward).abs().max() > 0.05  # the cases below can be told apart
    on_policy = lp().detach().exp()
    torch.testing.assert_close(
        gradient((on_policy * k1(lp(), ref)).sum()), torch.zeros_like(logits), atol=1e-12, rtol=0
    )
    torch.testing.assert_close(gradient((on_policy * k2(lp(), ref)).sum()), reverse)
    torch.testing.assert_close(gradient((on_policy * k3(lp(), ref)).sum()), forward)
    u = (lp() - q).exp()
    torch.testing.assert_close(gradient((q.exp() * u * k3(lp(), ref)).sum()), reverse)
    torch.testing.assert_close(gradient((q.exp() * u.detach() * k2(lp(), ref)).sum()), reverse)
    value = (lp().exp() * (lp() - ref)).sum().item()
    assert (on_policy * k1(lp(), ref)).sum().item() == pytest.approx(value)
    assert (on_policy * k3(lp(), ref)).sum().item() == pytest.approx(value)
