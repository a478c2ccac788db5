"""Draws by a kernel: a token that was not drawn from what its log-prob says would bias every ratio.

Not covered: speed; truncation, which PyTorch computes before.
"""

from __future__ import annotations

import pytest
import torch

from rollkeel.engines.sampling import Sampled, SamplingRows, sample
from rollkeel.models.gpu import sampling as kernels

ALMOST_ONE = 1 - 2**-53


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 64)


def drawn(logits: torch.Tensor, uniform: torch.Tensor, temperature: float = 1.0) -> Sampled:
    rows = torch.ones(len(logits), device=logits.device)
    return sample(
        logits.clone(),
        SamplingRows(rows * temperature, rows, rows.long() * 0, rows * 0, temperature == 0, temperature != 1),
        uniform,
    )


@pytest.mark.usually("*-0.5-1.0-1", "*-0.5-1.0-131", "*-4.0-0.7-1001", "*-40.0-1.0-64")
@pytest.mark.parametrize("vocab", [1, 64, 131, 1001])
@pytest.mark.parametrize(("spread", "temperature"), [(0.5, 1.0), (4.0, 0.7), (40.0, 1.0)])
def test_tokens_and_log_probs(device: str, vocab: int, spread: float, temperature: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(40, vocab, generator=generator) * spread).to(device)
    uniform = torch.rand(40, generator=generator, dtype=torch.float64).to(device)
    out = drawn(logits, uniform, temperature)
    log_p = (logits.double() / temperature).log_softmax(-1)
    cdf = log_p.exp().cumsum(-1)
    above = cdf.gather(1, out.ids[:, None])[:, 0] - uniform
    below = uniform - (cdf - log_p.exp()).gather(1, out.ids[:, None])[:, 0]
    assert float(torch.minimum(above, below).min()) > -1e-6
    torch.testing.assert_close(
        out.logprobs.double(), log_p.gather(1, out.ids[:, None])[:, 0], rtol=0, atol=1e-5 + 1e-7 * spread
    )
    assert (out.logprobs <= 0).all()


def test_edges_never_select_probability_zero(device: str) -> None:
    edges = torch.tensor([0.0, 2**-53, 0.5, 1 - 2**-24, 1 - 2**-30, ALMOST_ONE], dtype=torch.float64, device=device)
    for front, behind in ((0, 70), (70, 0), (64, 64), (1, 200)):
        probs = torch.tensor([0.0] * front + [0.7, *[0.0] * 66, 0.3] + [0.0] * behind, device=device)
        out = drawn(probs.log().repeat(len(edges), 1), edges)
        assert out.ids.tolist() == [front, front, front, *[front + 67] * 3]
        assert out.logprobs.isfinite().all()
    assert drawn(probs.log()[None], edges[2:3], temperature=0.0).ids.tolist() == [1]


@pytest.mark.slow
def test_frequencies(device: str) -> None:
    probs = torch.tensor([0.05, 0.2, 0.0, 0.45, 0.3], device=device)
    uniform = (torch.arange(400, dtype=torch.float64, device=device) + 0.5) / 400
    out = drawn(probs.log().repeat(400, 1), uniform)
    assert torch.bincount(out.ids, minlength=5).tolist() == [20, 80, 0, 180, 120]


def test_a_row_is_the_same_alone_and_among_others(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 1001, generator=generator).to(device)
    uniform = torch.rand(9, generator=generator, dtype=torch.float64).to(device)
    whole = drawn(logits, uniform)
    for row in range(9):
        alone = drawn(logits[row : row + 1], uniform[row : row + 1])
        assert torch.equal(alone.ids, whole.ids[row : row + 1])
        assert torch.equal(alone.logprobs, whole.logprobs[row : row + 1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_diverged_row_shows(device: str, bad: float) -> None:
    logits = torch.zeros(3, 200, device=device)
    logits[1, 150] = bad
    out = drawn(logits, torch.full((3,), 0.4, dtype=torch.float64, device=device))
    assert out.logprobs.isfinite().tolist() == [True, False, True]
    assert 0 <= int(out.ids.min()) <= int(out.ids.max()) < 200


def test_the_kernel_is_taken(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()
    monkeypatch.setattr(kernels, "draw", lambda *a, _of=kernels.draw: calls.append(1) or _of(*a))
    drawn(torch.zeros(2, 5, device=device), torch.zeros(2, dtype=torch.float64, device=device))
    assert calls == [1]
