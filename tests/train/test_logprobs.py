"""Log-probs in chunks must be those of the full logits, value and gradient, and must not hold `[T, V]`.

The memory bound is measured in a fresh process, as the peak of its resident set. Not covered: CUDA memory, the CUDA products
of low-precision inputs.
"""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig

from rollkeel.batch.packing import pack
from rollkeel.errors import BadInput
from rollkeel.models import jit
from rollkeel.train import logprobs as module
from rollkeel.train.head import head_of
from rollkeel.train.logprobs import PolicyForward, token_logprobs


def reference(hidden, weight, targets, temperature, bias=None, scale=1.0, softcap=None):
    z = hidden @ weight.T
    z = (z if bias is None else z + bias) * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_p = torch.log_softmax(z / temperature, -1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def case(total=37, width=8, vocab=50, dtype=torch.float32, seed=0, spread=2.0):
    g = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(total, width, generator=g) * spread).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=g).to(dtype).requires_grad_()
    bias = torch.randn(vocab, generator=g).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (total,), generator=g)
    up = torch.randn(2, total, generator=g)
    return hidden, weight, bias, targets, up


def test_truth_table() -> None:
    """Logits (ln 1, ln 2, ln 5): probabilities 1/8, 2/8, 5/8."""
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(5)]])
    lp, h, _ = token_logprobs(torch.ones(3, 1), weight, torch.tensor([0, 1, 2]))
    assert lp.tolist() == pytest.approx([math.log(1 / 8), math.log(2 / 8), math.log(5 / 8)], abs=1e-6)
    expected = -sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8))
    assert h is not None
    assert h.tolist() == pytest.approx([expected] * 3, abs=1e-6)
    # At temperature ½ probabilities are squared and renormalised: 1/30, 4/30, 25/30.
    lp, _, _ = token_logprobs(torch.ones(3, 1), weight, torch.tensor([0, 1, 2]), temperature=0.5)
    assert lp.tolist() == pytest.approx([math.log(p / 30) for p in (1, 4, 25)], abs=1e-6)
    greedy, none, _ = token_logprobs(torch.ones(1, 1), weight, torch.tensor([2]), temperature=0, entropy=False)
    assert greedy.item() == pytest.approx(math.log(5 / 8), abs=1e-6)
    assert none is None


@pytest.mark.parametrize("numba", [True, False])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("chunk", [1, 8, 37, 100])
@pytest.mark.parametrize("through_entropy", [True, False])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_values_and_gradients_equal_full_logits(monkeypatch, numba, keep, chunk, through_entropy, softcap) -> None:
    monkeypatch.setattr(module, "KEEP_BYTES", 10**9 if keep else 0)
    monkeypatch.setattr(jit, "FOUND", numba and jit.FOUND)
    hidden, weight, bias, targets, up = case()
    options = {"temperature": 0.7, "bias": bias, "scale": 0.5, "softcap": softcap}
    lp, h, _ = token_logprobs(hidden, weight, targets, chunk=chunk, **options)
    lp64, h64 = reference(hidden.double(), weight.double(), targets, 0.7, bias.double(), 0.5, softcap)
    assert h is not None
    torch.testing.assert_close(lp.double(), lp64, rtol=0, atol=5e-6)
    torch.testing.assert_close(h.double(), h64, rtol=0, atol=5e-6)
    inputs = (hidden, weight, bias)
    got = torch.autograd.grad((lp * up[0]).sum() + ((h * up[1]).sum() if through_entropy else 0), inputs)
    want = torch.autograd.grad((lp64 * up[0]).sum() + ((h64 * up[1]).sum() if through_entropy else 0), inputs)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


@pytest.mark.skipif(not jit.FOUND, reason="torch's entropy is 3e-4 off")
@pytest.mark.parametrize("threads", [1, 3])
def test_a_large_vocabulary_in_float64(threads: int) -> None:
    """Long sums in float32 alone would be off by 1e-5. A row of less than a vector is in `test_truth_table`."""
    hidden, weight, bias, targets, up = case(total=9, vocab=150_001, spread=1.0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        lp, h, _ = token_logprobs(hidden, weight, targets, bias=bias, chunk=4)
        assert h is not None
        got = torch.autograd.grad((lp * up[0]).sum() + (h * up[1]).sum(), (hidden, weight, bias))
    finally:
        torch.set_num_threads(before)
    lp64, h64 = reference(hidden.double(), weight.double(), targets, 1.0, bias.double())
    torch.testing.assert_close(lp.double(), lp64, rtol=0, atol=3e-6)
    torch.testing.assert_close(h.double(), h64, rtol=0, atol=3e-6)
    want = torch.autograd.grad((lp64 * up[0]).sum() + (h64 * up[1]).sum(), (hidden, weight, bias))
    for a, b, bound in zip(got, want, (2e-4, 1e-5, 1e-5), strict=True):  # the first is a product of 150,000 terms
        assert (a - b).abs().max() <= bound * b.abs().max()


@pytest.mark.parametrize("numba", [True, False])
def test_a_row_that_is_no_number_shows_and_its_neighbours_stay(monkeypatch, numba: bool) -> None:
    monkeypatch.setattr(jit, "FOUND", numba and jit.FOUND)
    for value in (math.nan, math.inf):
        for place in (0, 49):
            hidden, weight, bias, targets, _ = case()
            with torch.no_grad():
                hidden[5] = 0
                hidden[5, 0] = value
                weight[:, 0] = 0
                weight[place, 0] = 1
            lp, h, _ = token_logprobs(hidden, weight, targets, bias=bias)
            lp.sum().backward()
            assert h is not None
            assert hidden.grad is not None
            for rows in (lp.detach(), h.detach(), hidden.grad.sum(1)):
                assert [n for n in range(37) if not torch.isfinite(rows[n])] == [5], (value, place)


def test_gradient_through_entropy_alone_and_partial_inputs() -> None:
    hidden, weight, _, targets, up = case()
    _, h, _ = token_logprobs(hidden, weight.detach(), targets, chunk=9)
    assert h is not None
    (got,) = torch.autograd.grad((h * up[1]).sum(), hidden)
    (want,) = torch.autograd.grad((reference(hidden, weight, targets, 1.0)[1] * up[1]).sum(), hidden)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("chunk", [1, 8, 37, 100])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_logprobs_at_further_ids_are_those_of_full_logits_and_carry_no_gradient(
    monkeypatch, keep, chunk, softcap
) -> None:
    monkeypatch.setattr(module, "KEEP_BYTES", 10**9 if keep else 0)
    hidden, weight, bias, targets, up = case()
    ids = torch.randint(0, 50, (37, 6), generator=torch.Generator().manual_seed(5))
    ids[:, 0] = targets
    options = {"temperature": 0.7, "bias": bias, "scale": 0.5, "softcap": softcap, "chunk": chunk}
    lp, h, topk = token_logprobs(hidden, weight, targets, topk_ids=ids, **options)
    alone, _, none = token_logprobs(hidden, weight, targets, **options)
    assert none is None
    assert topk is not None
    assert not topk.requires_grad
    assert torch.equal(lp, alone)
    assert torch.equal(topk[:, 0], lp.detach())
    for j in range(6):
        want, _ = reference(hidden.double(), weight.double(), ids[:, j], 0.7, bias.double(), 0.5, softcap)
        torch.testing.assert_close(topk[:, j].double(), want.detach(), rtol=0, atol=5e-6)
    inputs = (hidden, weight, bias)
    assert h is not None
    got, want = (torch.autograd.grad((x * up[0]).sum(), inputs) for x in (lp, alone))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(BadInput, match=r"topk_ids \[36, 6\]"):
        token_logprobs(hidden, weight, targets, topk_ids=ids[1:], **options)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), chunk=st.integers(1, 40), spread=st.sampled_from([0.0, 1.0, 30.0]))
def test_logprobs_are_at_most_zero_and_entropy_within_its_bounds(seed: int, chunk: int, spread: float) -> None:
    hidden, weight, _, targets, _ = case(seed=seed, spread=spread)
    lp, h, _ = token_logprobs(hidden, weight, targets, chunk=chunk)
    assert h is not None
    assert torch.isfinite(lp).all()
    assert (lp <= 0).all()
    assert (h >= 0).all()
    assert (h <= math.log(50) + 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_low_precision_inputs_nothing_is_rounded_but_their_gradients(dtype: torch.dtype) -> None:
    hidden, weight, bias, targets, up = case(dtype=dtype, spread=3.0)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    want = reference(*wide[:2], targets, 1.0, wide[2])[0]
    for exact in (False, True):
        for p in (weight, bias):
            p.grad_dtype = torch.float32 if exact else dtype
        lp, _, _ = token_logprobs(hidden, weight, targets, chunk=8, bias=bias)
        torch.testing.assert_close(lp.double(), want, rtol=1e-5, atol=1e-5)  # logits in `dtype` would be off by 1e-2
        got = torch.autograd.grad((lp * up[0]).sum(), (hidden, weight, bias))
        assert [g.dtype for g in got] == [dtype, *2 * [torch.float32 if exact else dtype]]
        for i, (g, w) in enumerate(
            zip(got, torch.autograd.grad((want * up[0]).sum(), wide, retain_graph=True), strict=True)
        ):
            bound = 1e-6 if exact and i else torch.finfo(dtype).eps / 2  # rounded once, at the end
            assert (g - w).abs().max() <= bound * w.abs().max(), (exact, i)


@pytest.mark.parametrize(("kwargs", "message"), [({"temperature": -1.0}, "temperature"), ({"chunk": 0}, "chunk")])
def test_bad_arguments_are_refused(kwargs, message) -> None:
    hidden, weight, _, targets, _ = case()
    with pytest.raises(BadInput, match=message):
        token_logprobs(hidden, weight, targets, **kwargs)
    with pytest.raises(BadInput, match="targets"):
        token_logprobs(hidden, weight, targets[1:])


COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "pad_token_id": 0,
    "initializer_range": 0.5,
}
HEADS = {
    "llama": lambda: LlamaConfig(**COMMON),
    "gemma2": lambda: Gemma2Config(**COMMON, head_dim=16, final_logit_softcapping=3.0),
    "granite": lambda: GraniteConfig(**COMMON, logits_scaling=4.0),
    "cohere": lambda: CohereConfig(**COMMON, logit_scale=0.25),
}


@pytest.mark.parametrize("family", HEADS)
def test_heads_of_real_architectures(family: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(HEADS[family]()).eval()
    forward = PolicyForward(model, chunk=4)
    ids = torch.randint(1, 64, (11,))
    with torch.no_grad():
        lp = forward.score(pack([0], [ids.numpy()], [1], [0]), temperature=0.8).logprobs
        logits = model(input_ids=ids[None]).logits[0].float() / 0.8
    want = torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None]).squeeze(1)
    torch.testing.assert_close(lp, want, rtol=1e-5, atol=1e-5)


def test_a_head_that_is_not_linear_is_refused() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(HEADS["llama"]()).eval()
    model.lm_head.register_forward_hook(lambda _m, _i, out: out * 2)
    with pytest.raises(BadInput, match="head"):
        head_of(model)


MEASURE = """
    import resource, sys, threading, time
    import torch
    from rollkeel.train.logprobs import token_logprobs
    torch.set_num_threads(1)
    T, V, D, chunk, entropy, K = int(sys.argv[1]), 150_000, 16, 256, sys.argv[2] == "1", int(sys.argv[3])
    def rss():
        return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
    hidden = torch.randn(T, D, requires_grad=True)
    weight = torch.randn(V, D, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    targets = torch.randint(0, V, (T,))
    ids = torch.randint(0, V, (T, K)) if K else None
    # Reach the steady state of allocator and thread pools before the measurement.
    lp, h, _ = token_logprobs(hidden[:8], weight, targets[:8], chunk=8)
    (lp.sum() + h.sum()).backward()
    base, peak, done = rss(), 0, False
    def watch():
        global peak
        while not done:
            peak = max(peak, rss()); time.sleep(0.001)
    thread = threading.Thread(target=watch); thread.start()
    lp, h, topk = token_logprobs(hidden, weight, targets, chunk=chunk, topk_ids=ids)
    ((lp + h) if entropy else lp).sum().backward()
    done = True; thread.join()
    print(peak - base - T * D * 4 - T * K * 4)
"""


def extra_bytes(total: int, entropy: bool, topk: int = 0) -> int:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), str(total), str(int(entropy)), str(topk)],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return int(done.stdout)


BOUND = 3 * 256 * 150_000 * 4 + 64 * 2**20


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("topk", [0, 20])
def test_peak_memory_at_a_large_vocabulary(topk: int) -> None:
    assert extra_bytes(512, entropy=True, topk=topk) <= BOUND


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("entropy", "topk"), [(False, 0), (True, 0), (False, 20)])
def test_peak_memory_does_not_grow_with_tokens(entropy: bool, topk: int) -> None:
    small, large = extra_bytes(4096, entropy, topk), extra_bytes(16384, entropy, topk)
    assert small <= BOUND
    assert large <= BOUND
    assert large <= 1.05 * small
