"""A bias metric that is not the bias misleads whoever studies instability with it: it must be exact, and its parts must add up.

Every sequence of a tiny policy is enumerated, weighted by its probability under q, so that a metric of the batch is its
expectation. The truth needs no ratio: token t is drawn from p, all others of its sequence from q (the first-order objective
that importance-sampled tokens estimate, DPPO paper eq. 8). Not covered: whether a bias destabilises a run.
"""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
import torch
from reference_tokens import Array, Tokens
from test_parallel_invariance import tensors
from test_reference import CASES, expected

from rollkeel.objectives import build
from rollkeel.types import TokenBatch

VOCABULARY, DEPTH, STOP = 3, 3, 0
PARTS = ("ratio", "weight", "clip", "mask", "perturb")


def sequences() -> list[tuple[int, ...]]:
    """All of up to DEPTH tokens; STOP ends one."""
    found = [()]
    for _ in range(DEPTH):
        found = [s for s in found if s and s[-1] == STOP] + [
            (*s, token) for s in found if not s or s[-1] != STOP for token in range(VOCABULARY)
        ]
    return found


def policies(seed: int, gap: float, mismatch: float) -> dict[str, dict[tuple[int, ...], Array]]:
    """Log-probs of p, o and q in every state; `mismatch` is the noise between o and q, `gap` that between p and o."""
    g = np.random.default_rng(seed)
    found: dict[str, dict[tuple[int, ...], Array]] = {"p": {}, "o": {}, "q": {}}
    for state in {s[:i] for s in sequences() for i in range(len(s))}:
        logits = g.normal(size=VOCABULARY)
        for name, noise in (("q", mismatch), ("o", gap), ("p", 0.0)):
            found[name][state] = logits - np.log(np.exp(logits).sum())
            logits = logits + noise * g.normal(size=VOCABULARY)
    return found


def enumerated(seed: int, gap: float = 0.5, mismatch: float = 0.5) -> tuple[Tokens, float]:
    """Every sequence as a batch whose coefficients are q(y)/|y|, and the true objective."""
    known, g = policies(seed, gap, mismatch), np.random.default_rng(seed + 100)
    rows: dict[str, list] = {name: [] for name in ("p", "o", "q", "a", "c", "ids", "states", "tokens")}
    truth = 0.0
    for i, sequence in enumerate(sequences()):
        advantage, size = g.normal(), len(sequence)
        steps = [(sequence[:t], token) for t, token in enumerate(sequence)]
        q = np.array([known["q"][s][x] for s, x in steps])
        for t, (state, token) in enumerate(steps):
            truth += np.exp(np.delete(q, t).sum()) * np.exp(known["p"][state][token]) * advantage / size
            values = {name: known[name][state][token] for name in ("p", "o", "q")}
            values |= {"a": advantage, "c": np.exp(q.sum()) / size, "ids": i, "states": state, "tokens": token}
            for name, value in values.items():
                rows[name].append(value)
    states, sampled = rows.pop("states"), np.array(rows.pop("tokens"))
    full = {name: np.array([known[name][state] for state in states]) for name in ("p", "o", "q")}
    top = np.argsort(-full["q"], axis=1)[:, :2]
    other = np.ones_like(full["q"], dtype=bool)
    np.put_along_axis(other, np.column_stack([top, sampled]), False, axis=1)
    more = {f"top_{n}": np.take_along_axis(full[n], top, axis=1) for n in full}
    more |= {f"rest_{n}": np.where(other, np.exp(full[n]), 0.0).sum(1) for n in full}
    arrays = {name: np.array(values) for name, values in rows.items()}
    return Tokens(**arrays, **more, top_has_sampled=top == sampled[:, None]), truth


def bias(name: str, options: dict, tokens: TokenBatch) -> dict[str, float]:
    objective = build(name, options)
    objective.prepare(tokens)
    metrics = objective(tokens).metrics
    return {k.removeprefix("bias/"): v for k, v in metrics.items() if k.startswith("bias/")}


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_bias_of_every_recipe_is_the_true_one(name, options):
    for seed in range(3):
        t, truth = enumerated(seed)
        found = bias(name, {k: v for k, v in options.items() if k != "gap_penalty"}, tensors(t))
        coefficient = expected(name, {**options, **({"gap_penalty": 0.0} if "gap_penalty" in options else {})}, t)
        actual = (t.c * coefficient.coefficient).sum()
        assert found["delta_j"] == pytest.approx(actual - truth, abs=1e-12)
        assert sum(found.get(f"delta_j_{part}", 0.0) for part in PARTS) == pytest.approx(found["delta_j"], abs=1e-12)


def test_perturbations_and_the_kept_denominator_are_in_the_bias():
    t, truth = enumerated(5)
    for name in ("gspo", "icepop"):
        perturbed = bias(name, {"perturb": [{"distort_low_probability": {"delta": 3.0}}]}, tensors(t))
        factor, coefficient = ref.distortion(t, 3.0), expected(name, {}, t).coefficient
        assert perturbed["delta_j"] == pytest.approx((t.c * coefficient * factor).sum() - truth, abs=1e-12)
        assert perturbed["delta_j_perturb"] == pytest.approx((t.c * coefficient * (factor - 1)).sum(), abs=1e-12)
        assert abs(perturbed["delta_j_perturb"]) > 1e-3
    tight = {"low": 0.8, "high": 1.25}
    plain, kept = (bias("icepop", tight | more, tensors(t)) for more in ({}, {"denominator": "kept"}))
    share = t.c * ref.icepop(t, **tight).keep
    scale = np.array([t.c[t.ids == i].sum() / max(share[t.ids == i].sum(), 1e-300) for i in t.ids])
    moved = t.c * ref.icepop(t, **tight).coefficient * (scale - 1)
    assert kept["delta_j"] - plain["delta_j"] == pytest.approx(moved.sum(), abs=1e-12)
    assert kept["delta_j_perturb"] == pytest.approx(moved.sum(), abs=1e-12)


def test_equations_of_the_study():
    """Eq. 10 is the ratio's part of every objective on r; eq. 20 counts Y by value, cut tokens too."""
    t, _ = enumerated(6)
    r, rho = ref.ratio(t.p, t.o), ref.ratio(t.o, t.q)
    for name in ("grpo", "icepop"):
        assert bias(name, {}, tensors(t))["delta_j_ratio"] == pytest.approx(
            (t.c * r * t.a * (1 - rho)).sum(), abs=1e-12
        )
    clipped = t.c * np.where(expected("grpo", {}, t).coefficient == 0, -r * t.a, 0.0)
    assert bias("grpo", {}, tensors(t))["delta_j_clip"] == pytest.approx(clipped.sum(), abs=1e-12)
    s = np.array([np.exp((t.p - t.o)[t.ids == i].mean()) for i in t.ids])
    y = np.minimum(s * t.a, np.clip(s, 1 - 3e-4, 1 + 4e-4) * t.a)
    found = bias("gspo", {"perturb": [{"distort_low_probability": {"delta": 2.0}}]}, tensors(t))
    assert found["delta_inj"] == pytest.approx((t.c * y * (ref.distortion(t, 2.0) - 1)).sum(), abs=1e-12)


GRPO_BAND, GSPO_BAND = (0.8, 1.2), (1 - 3e-4, 1 + 4e-4)


def test_clip_and_distortion_identities_without_mismatch():
    """Eqs. 11–14 and 16–20, whose expectation is under o: with q = o the enumeration is that expectation itself.

    J_clip and J_inj are summed from the answers one by one, in the equations' words; J is the true objective.
    """
    for seed in range(20):
        t, j = enumerated(seed, gap=0.8, mismatch=0.0)
        clipped = distorted = sequence = both = 0.0
        for i in np.unique(t.ids):
            p, o, a, c = (x[t.ids == i] for x in (t.p, t.o, t.a, t.c))
            s = np.exp((p - o).mean())
            for r, old, advantage, weight in zip(np.exp(p - o), np.exp(o), a, c, strict=True):
                phi = 0.0 if r < GRPO_BAND[0] or r > GRPO_BAND[1] else 1.0
                rare = 3.0 if old < 0.1 else 1.0
                y = min(s * advantage, min(max(s, GSPO_BAND[0]), GSPO_BAND[1]) * advantage)
                clipped += weight * phi * r * advantage
                sequence += weight * y
                distorted += weight * rare * y
                both += weight * rare * min(r * advantage, min(max(r, GRPO_BAND[0]), GRPO_BAND[1]) * advantage)
        rare = {"perturb": [{"distort_low_probability": {"delta": 3.0}}]}
        grpo, gspo, cut = bias("grpo", {}, tensors(t)), bias("gspo", rare, tensors(t)), bias("grpo", rare, tensors(t))
        assert j + grpo["delta_clip"] == pytest.approx(clipped, abs=1e-12)  # eqs. 11 and 13
        assert sequence + gspo["delta_inj"] == pytest.approx(distorted, abs=1e-12)  # eqs. 17 and 19
        plain = (t.c * np.minimum(np.exp(t.p - t.o) * t.a, np.clip(np.exp(t.p - t.o), *GRPO_BAND) * t.a)).sum()
        assert plain + cut["delta_inj"] == pytest.approx(both, abs=1e-12)  # a clip and a factor together
        assert cut["delta_j"] == pytest.approx(cut["delta_j_clip"] + cut["delta_j_perturb"], abs=1e-12)
        assert min(abs(grpo["delta_clip"]), abs(gspo["delta_inj"])) > 1e-6
        assert abs(grpo["delta_clip"] - grpo["delta_j_clip"]) > 1e-6  # eq. 12's set is not what PPO cuts


UNBIASED = [
    ("pg_is", {}),
    ("kpop", {"phi": 1e9, "clip_low": 1.0, "clip_high": 1e9}),
    ("icepop", {"low": 0.0, "high": 1e9, "clip_low": 1.0, "clip_high": 1e9}),
]


@pytest.mark.parametrize(("name", "options"), UNBIASED)
def test_no_bias_means_the_true_gradient(name, options):
    """Through the logits of p: the objective's expected gradient is that of the enumerated objective, and the metric is 0."""
    t, _ = enumerated(1)
    known = policies(1, 0.5, 0.5)
    states = sorted(known["p"])
    logits = torch.tensor(np.array([known["p"][s] for s in states]), requires_grad=True)
    places = [(states.index(s[:i]), s[i]) for s in sequences() for i in range(len(s))]
    rows, columns = (torch.tensor(x) for x in zip(*places, strict=True))
    logprobs = logits.log_softmax(1)[rows, columns]
    tokens = tensors(t)
    tokens = TokenBatch(**{**vars(tokens), "logprobs": logprobs})
    (found,) = torch.autograd.grad(-build(name, options).loss(tokens), logits, retain_graph=True)
    others = tokens.coefficients / tokens.rollout_logprobs.exp()  # q of all other tokens, over the length
    (true,) = torch.autograd.grad((others * logprobs.exp() * tokens.advantages).sum(), logits)
    torch.testing.assert_close(found, true, rtol=1e-9, atol=1e-12)
    assert bias(name, options, tokens)["delta_j"] == pytest.approx(0.0, abs=1e-12)
