"""What must hold for every batch, not only for the examples somebody thought of.

Hypothesis draws policies, advantages and sequences. Covers symmetries, the reduction to plain policy gradient on policy, sums of
fractions, and independence of packing; several processes are in test_parallel_invariance.py.
"""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollkeel.objectives import RECIPES, icepop, kpop
from rollkeel.objectives.segments import lengths, per_sequence, sequence_max, sequence_mean, sequence_sum
from rollkeel.types import TokenBatch

TOPK = 3
NAMES = sorted(RECIPES)
probabilities = st.floats(1e-6, 1 - 1e-6)


@st.composite
def batches(draw, on_policy: bool = False) -> TokenBatch:
    """Up to twelve sequences of up to five tokens; gaps from nothing to large; A constant over a sequence."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=12))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([1e-4, 1e-2, 0.3, 3.0]))
    count, vocabulary = sum(sizes), 6

    def step(x: torch.Tensor) -> torch.Tensor:
        return x if on_policy else x + spread * torch.randn(count, vocabulary, generator=g, dtype=torch.float64)

    q = 2.0 * torch.randn(count, vocabulary, generator=g, dtype=torch.float64)
    o = step(q)
    p = step(o)
    p, o, q = p.log_softmax(1), o.log_softmax(1), q.log_softmax(1)
    sampled = torch.multinomial(q.exp(), 1, generator=g)
    top = q.topk(TOPK, 1).indices
    sequence_ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    advantages = torch.randint(-2, 3, (len(sizes),), generator=g).double()[sequence_ids]

    def at(x: torch.Tensor) -> torch.Tensor:
        return x.gather(1, sampled)[:, 0]

    return TokenBatch(
        logprobs=at(p).requires_grad_(),
        old_logprobs=at(o),
        rollout_logprobs=at(q),
        advantages=advantages,
        coefficients=torch.rand(len(sizes), generator=g, dtype=torch.float64)[sequence_ids],
        sequence_ids=sequence_ids,
        group_ids=sequence_ids // 4,
        rollout_ids=sequence_ids + 17,
        token_ids=sampled[:, 0],
        topk_ids=top,
        topk_logprobs=p.gather(1, top),
        old_topk_logprobs=o.gather(1, top),
        rollout_topk_logprobs=q.gather(1, top),
    )


def gradient(objective, tokens: TokenBatch) -> torch.Tensor:
    return torch.autograd.grad(objective.loss(tokens), tokens.logprobs)[0]


def pick(tokens: TokenBatch, index: torch.Tensor) -> TokenBatch:
    return TokenBatch(**{k: None if v is None else v[index] for k, v in vars(tokens).items()})


def pair(a: float, b: float) -> TokenBatch:
    """One token with o = a, q = b."""
    ids = torch.zeros(1, dtype=torch.int64)

    def f(x: float) -> torch.Tensor:
        return torch.tensor([x], dtype=torch.float64)

    return TokenBatch(
        logprobs=f(a).log(),
        old_logprobs=f(a).log(),
        rollout_logprobs=f(b).log(),
        advantages=f(1.0),
        coefficients=f(1.0),
        sequence_ids=ids,
        group_ids=ids,
    )


@settings(deadline=None, max_examples=200)
@given(probabilities, probabilities, st.floats(1e-4, 3.0))
def test_kpop_treats_both_engines_and_both_events_alike(a, b, phi):
    """Swapping the engines, or the token for everything else, changes no verdict; off the edge, where rounding decides."""
    from rollkeel.objectives.divergences import symmetric_binary_kl

    value = symmetric_binary_kl(pair(a, b).old_logprobs, pair(a, b).rollout_logprobs).item()
    if abs(value - phi) < 1e-6 * phi:
        return
    keep = kpop(phi=phi)(pair(a, b)).keep.item()
    assert keep == (value <= phi)
    assert kpop(phi=phi)(pair(b, a)).keep.item() == keep
    assert kpop(phi=phi)(pair(1 - a, 1 - b)).keep.item() == keep


PLAIN = [name for name in NAMES if name not in ("random_rejection",)]


@pytest.mark.parametrize("name", PLAIN)
@settings(deadline=None, max_examples=20)
@given(tokens=batches(on_policy=True))
def test_on_policy_every_recipe_is_plain_policy_gradient(name, tokens):
    """With p = o = q nothing is masked, clipped or weighted: the gradient of −Σ c·A·log p."""
    objective = RECIPES[name]()
    objective.prepare(tokens)
    torch.testing.assert_close(
        gradient(objective, tokens), -tokens.coefficients * tokens.advantages, rtol=1e-9, atol=1e-12
    )
    assert objective(tokens).keep.all()


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=15)
@given(tokens=batches(), seed=st.integers(0, 1000))
def test_packing_changes_nothing(name, tokens, seed):
    """Whole batch, or its sequences in another order and in micro-batches of three: the same loss and gradient."""
    objective = RECIPES[name]()
    objective.prepare(tokens)
    whole = objective.loss(tokens)
    expected = torch.autograd.grad(whole, tokens.logprobs)[0]
    order = torch.randperm(len(lengths(tokens.sequence_ids)), generator=torch.Generator().manual_seed(seed))
    parts = [
        torch.cat([(tokens.sequence_ids == s).nonzero()[:, 0] for s in chunk.tolist()]) for chunk in order.split(3)
    ]
    losses = torch.stack([objective.loss(pick(tokens, part)) for part in parts])
    torch.testing.assert_close(torch.autograd.grad(losses.sum(), tokens.logprobs)[0], expected, rtol=1e-9, atol=1e-13)
    assert losses.sum().item() == pytest.approx(whole.item(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=15)
@given(tokens=batches())
def test_fractions_add_up(name, tokens):
    objective = RECIPES[name]()
    objective.prepare(tokens)
    out = objective(tokens)
    m, keeps = out.metrics, []
    assert m["objective/kept"] == pytest.approx(out.keep.double().mean().item())
    for mask in objective.masks:
        prefix = f"mask/{mask.name}"
        assert m[f"{prefix}/kept"] + m[f"{prefix}/dropped"] == pytest.approx(1.0)
        sides = [m[f"{prefix}/dropped_{rule.parameter}"] for rule in mask.rules if len(mask.rules) > 1]
        if sides:  # each test drops a part of what the mask drops, and together they drop it all
            assert max(sides) <= m[f"{prefix}/dropped"] + 1e-12
            assert m[f"{prefix}/dropped"] <= sum(sides) + 1e-12
        assert 0 <= m.get(f"{prefix}/dropped_gradient_mass", 0.0) <= 1 + 1e-9
        keeps.append(m[f"{prefix}/kept"])
    assert m["objective/kept"] <= min(keeps, default=1.0) + 1e-12
    assert m["objective/kept"] >= 1 - sum(1 - k for k in keeps) - 1e-12
    # A dropped token teaches nothing (but for the pull of a penalty), a kept one with A ≠ 0 may.
    dead = gradient(objective, tokens)[~out.keep]
    assert (dead == 0).all() or objective.gap_penalty > 0


@settings(deadline=None, max_examples=50)
@given(tokens=batches(), low=st.floats(0.1, 1.0), high=st.floats(1.0, 10.0))
def test_a_wider_band_keeps_more(tokens, low, high):
    inner, outer = icepop(low=low, high=high)(tokens).keep, icepop(low=low / 2, high=high * 2)(tokens).keep
    assert (outer | ~inner).all()
    tight, loose = kpop(phi=0.05)(tokens).keep, kpop(phi=0.2)(tokens).keep
    assert (loose | ~tight).all()


@settings(deadline=None, max_examples=30)
@given(tokens=batches())
def test_directional_masks_never_drop_zero_advantage(tokens):
    still = dataclasses.replace(tokens, advantages=torch.zeros_like(tokens.advantages))
    for name in (
        "grpo_clip_higher",
        "minirl",
        "dppo_binary_tv",
        "dppo_binary_kl",
        "dppo_topk_kl",
        "mask_negative",
        "m2po",
    ):
        assert RECIPES[name]()(still).keep.all()


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(st.floats(-50, 50), min_size=1, max_size=6), min_size=1, max_size=8))
def test_segments(sequences):
    values = torch.tensor([x for s in sequences for x in s], dtype=torch.float64).requires_grad_()
    ids = torch.tensor([3 * i for i, s in enumerate(sequences) for _ in s])
    assert lengths(ids).tolist() == [len(s) for s in sequences]
    total, mean, most = sequence_sum(values, ids), sequence_mean(values, ids), sequence_max(values, ids)
    assert per_sequence(total, ids).tolist() == pytest.approx([sum(s) for s in sequences], abs=1e-9)
    assert per_sequence(mean, ids).tolist() == pytest.approx([sum(s) / len(s) for s in sequences], abs=1e-9)
    assert per_sequence(most, ids).tolist() == [max(s) for s in sequences]
    factor = torch.linspace(-1, 1, len(values), dtype=torch.float64)
    (found,) = torch.autograd.grad((mean * factor).sum(), values)
    torch.testing.assert_close(found, sequence_mean(factor, ids), rtol=1e-12, atol=1e-12)


def test_segments_of_nothing():
    none, ids = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    for function in (sequence_sum, sequence_mean, sequence_max):
        assert function(none, ids).shape == (0,)
    assert per_sequence(none, ids).shape == (0,)
    assert lengths(ids).tolist() == []
