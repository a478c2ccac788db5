"""Log-probs and their gradient by kernels: what a wrong one trains on, nobody sees.

Against float64 at vocabularies that fill no block. Not covered: speed; products of low precision, which are cuBLAS's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollkeel.models import gpu
from rollkeel.models.gpu import logprobs as kernels
from rollkeel.train import logprobs as module
from rollkeel.train.logprobs import token_logprobs


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 128)


def case(device: str, total: int, vocab: int, spread: float = 2.0) -> tuple[torch.Tensor, ...]:
    """hidden, weight, bias, targets, ids, and the gradients of both results."""
    generator = torch.Generator().manual_seed(vocab)
    floats = [(total, 8), (vocab, 8), (vocab,), (2, total)]
    hidden, weight, bias, up = (torch.randn(shape, generator=generator) for shape in floats)
    targets, ids = (torch.randint(0, vocab, shape, generator=generator) for shape in ((total,), (total, 3)))
    targets[: min(total, 2)] = vocab - 1
    return tuple(t.to(device) for t in (hidden * spread, weight, bias, targets, ids, up))


def results(given: tuple[torch.Tensor, ...], options: dict[str, Any], entropy: bool) -> list[torch.Tensor]:
    """Log-probs, entropies, log-probs of `ids`, and the gradients of hidden states, weight and bias."""
    hidden, weight, bias, targets, ids, up = given
    inputs = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    about = {**options, "bias": inputs[2], "topk_ids": ids}
    logprobs, entropies, topk = token_logprobs(inputs[0], inputs[1], targets, **about)
    assert entropies is not None
    assert topk is not None
    loss = (logprobs * up[0]).sum() + ((entropies * up[1]).sum() if entropy else 0.0)
    return [logprobs, entropies, topk, *torch.autograd.grad(loss, inputs)]


def expected(given: tuple[torch.Tensor, ...], options: dict[str, Any], entropy: bool) -> list[torch.Tensor]:
    *floats, targets, ids, up = (t.double().requires_grad_() if t.is_floating_point() else t for t in given)
    z = (floats[0] @ floats[1].T + floats[2]) * options["scale"]
    cap = options["softcap"]
    log_p = ((z if cap is None else cap * torch.tanh(z / cap)) / options["temperature"]).log_softmax(-1)
    logprobs, entropies = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    loss = (logprobs * up[0]).sum() + ((entropies * up[1]).sum() if entropy else 0.0)
    return [logprobs, entropies, log_p.gather(1, ids), *torch.autograd.grad(loss, floats)]


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(
    ("vocab", "temperature", "entropy", "chunk", "kept"),
    [(1, 1.0, True, 8, False), (131, 0.7, True, 8, False), (259, 1.3, False, 100, True), (256, 1.0, True, 3, True)],
)
def test_values_and_gradients(
    device: str, vocab: int, temperature: float, entropy: bool, chunk: int, kept: bool, softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, "KEEP_BYTES", 10**9 if kept else 0)
    given = case(device, 13, vocab)
    options = {"temperature": temperature, "scale": 0.5, "softcap": softcap, "chunk": chunk}
    calls = list[str]()
    for name in ("statistics", "gradient"):
        real = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, _of=(name, real), **b: calls.append(_of[0]) or _of[1](*a, **b))
    got, want = results(given, options, entropy), expected(given, options, entropy)
    assert calls == ["statistics"] * -(-13 // chunk) + ["gradient"] * -(-13 // chunk)
    for mine, true in zip(got[:3], want[:3], strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=0, atol=5e-6)
    for mine, true in zip(got[3:], want[3:], strict=True):
        assert (mine - true).abs().max() <= 1e-5 * true.abs().max() + 1e-6 * (vocab == 1)


def test_the_block_that_runs_by_default(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 4096)
    given, options = case(device, 3, 8197), {"temperature": 1.0, "scale": 1.0, "softcap": None}
    for mine, true in zip(results(given, options, True), expected(given, options, True), strict=True):
        assert (mine - true).abs().max() <= 1e-5 * max(1.0, float(true.detach().abs().max()))


def test_extreme_logits(device: str) -> None:
    """Nearly certain rows: neither log-probs above 0 nor entropies below; gradients stay finite."""
    given = case(device, 13, 259, spread=60.0)
    got = results(given, {"temperature": 0.5, "scale": 1.0, "softcap": None}, True)
    assert all(t.isfinite().all() for t in got)
    assert (got[0] <= 0).all()
    assert (got[1] >= 0).all()
    assert (got[2] <= 0).all()


def test_a_row_is_the_same_alone_and_among_others(device: str) -> None:
    logits, generator = torch.empty(7, 259), torch.Generator().manual_seed(0)
    logits = (torch.randn(logits.shape, generator=generator) * 5).to(device)
    targets, ids = torch.arange(7, device=device), torch.arange(14, device=device).view(7, 2)
    up = torch.randn(7, generator=generator).to(device)

    def of(rows: slice) -> list[torch.Tensor]:
        z = logits[rows].clone()
        room = {name: torch.empty_like(up[rows]) for name in ("normaliser", "logprobs", "entropies")}
        topk = z.new_empty(len(z), 2)
        kernels.statistics(z, targets[rows], ids[rows], 1.3, 0.0, topk=topk, **room)
        about = targets[rows], room["normaliser"], room["entropies"], up[rows], up[rows]
        return [*room.values(), topk, kernels.gradient(z, *about, 1.3, 0.0, z)]

    whole = of(slice(None))
    for row in range(7):
        for alone, among in zip(of(slice(row, row + 1)), whole, strict=True):
            assert torch.equal(alone, among[row : row + 1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_diverged_row_shows(device: str, bad: float) -> None:
    hidden, weight, _, targets, ids, _ = case(device, 5, 259)
    hidden[2, 3] = bad
    for out in token_logprobs(hidden, weight, targets, topk_ids=ids):
        assert out is not None
        assert out.flatten(1).isnan().all(-1).nonzero().tolist() == [[2]] if out.dim() > 1 else out.isnan().tolist()[2]


def test_a_second_backward_gets_the_same(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that were kept are not those that the gradient is written to; the switch counts when the forward is."""
    monkeypatch.setattr(module, "KEEP_BYTES", 10**9)
    hidden, weight, _, targets, _, up = case(device, 5, 131)
    hidden.requires_grad_()
    out, _, _ = token_logprobs(hidden, weight, targets)
    first = torch.autograd.grad(out @ up[0], hidden, retain_graph=True)[0]
    monkeypatch.setenv(gpu.SWITCH, "0")
    assert torch.equal(torch.autograd.grad(out @ up[0], hidden)[0], first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kept", "biased"), [(True, False), (False, False), (False, True)])
def test_gradients_of_low_precision_weights_are_rounded_once(
    device: str, dtype: torch.dtype, kept: bool, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of logits is written in the dtype that products take, but for a bias, whose sum is float32's."""
    monkeypatch.setattr(module, "KEEP_BYTES", 10**9 if kept else 0)
    written = list[torch.Tensor]()
    real: Any = kernels.gradient
    monkeypatch.setattr(kernels, "gradient", lambda *a: written.append(real(*a)) or written[-1])
    hidden, weight, bias, targets, _, up = case(device, 13, 259)
    inputs = [t.to(dtype).requires_grad_() for t in (hidden, weight)] + [bias.requires_grad_()] * biased
    logprobs, entropies, _ = token_logprobs(inputs[0], inputs[1], targets, chunk=5, bias=bias if biased else None)
    assert entropies is not None
    got = torch.autograd.grad((logprobs * up[0] + entropies * up[1]).sum(), inputs)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    z = exact[0] @ exact[1].T + (exact[2] if biased else 0.0)
    z.retain_grad()
    log_p = z.log_softmax(-1)
    truth = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (truth[0] * up[0] + truth[1] * up[1]).sum().backward()
    assert z.grad is not None
    assert {t.dtype for t in written} == {torch.float32 if biased else dtype}
    cut = dtype == torch.bfloat16 and device == "cpu"  # by the interpreter; the compiled kernel rounds
    dz, place = torch.cat(written).double(), 2.0 ** ((-8 if dtype == torch.bfloat16 else -11) + cut)
    assert ((dz - z.grad).abs() <= (1e-5 if biased else place) * z.grad.abs() + 2e-5).all()
    if not biased and not cut:  # as often above as below
        side = (dz.abs() > z.grad.abs())[z.grad.abs() > 1e-3].float().mean()
        assert 0.4 < side < 0.6
    for mine, true in zip(got, exact, strict=True):
        assert true.grad is not None
        assert (mine.double() - true.grad).abs().max() <= 2 * place * true.grad.abs().max()


def test_chunks_grow_for_low_precision_alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 4)
    rows = list[int]()
    real = kernels.statistics
    monkeypatch.setattr(kernels, "statistics", lambda z, *a, **b: rows.append(len(z)) or real(z, *a, **b))
    hidden, weight, bias, targets, _, _ = case(device, 21, 131)
    low = hidden.bfloat16(), weight.bfloat16()
    usual = [4] * 5 + [1]
    cases: list[tuple[tuple[torch.Tensor, torch.Tensor], dict[str, Any], list[int]]] = [
        (low, {}, [16, 5]),
        (low, {"chunk": 20}, [20, 1]),
        (low, {"bias": bias}, usual),
        ((hidden, weight), {}, usual),
    ]
    for (h, w), options, sizes in cases:
        rows.clear()
        token_logprobs(h, w, targets, **options)
        assert rows == sizes
    monkeypatch.setattr(module, "WIDE_BYTES", 6 * 131 * 4 * 2)
    rows.clear()
    token_logprobs(*low, targets)
    assert rows == [8, 8, 5]
