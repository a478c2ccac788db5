"""Packing must not change a model: a packed sequence that sees its neighbour trains on garbage without any error.

Every architecture is compared with transformers' own forward of each sequence alone, values and gradients. Not covered:
CUDA kernels, pretrained weights, architectures beyond those listed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rollkeel.errors import BadInput
from rollkeel.models import layout, packed_attention, varlen
from rollkeel.models.experts import SORTED_EXPERTS
from rollkeel.models.layout import Layout
from rollkeel.models.packed import PackedModel, _cuda_varlen

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "head_dim": 32,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS = {
    "llama": (lambda: LlamaConfig(**SMALL), True),
    "qwen2": (lambda: Qwen2Config(**SMALL), True),
    "qwen3": (lambda: Qwen3Config(**SMALL), True),
    "qwen3_moe": (lambda: Qwen3MoeConfig(**SMALL, **EXPERTS, norm_topk_prob=True), True),
    "olmoe": (
        lambda: OlmoeConfig(
            **{k: v for k, v in SMALL.items() if k != "head_dim"}, num_experts=8, num_experts_per_tok=2
        ),
        True,
    ),
    "deepseek_v3": (
        lambda: DeepseekV3Config(
            **{k: v for k, v in SMALL.items() if k not in ("head_dim", "num_key_value_heads")},
            num_key_value_heads=4,
            moe_intermediate_size=32,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=24,
            first_k_dense_replace=1,
        ),
        True,
    ),
    "gpt_oss": (
        lambda: GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
        False,
    ),
    "mistral_window": (lambda: MistralConfig(**SMALL, sliding_window=4), False),
    "gemma2_softcap": (lambda: Gemma2Config(**SMALL, sliding_window=4, query_pre_attn_scalar=32), False),
}
LENGTHS = [5, 12, 5, 1, 30, 12]


def build(make: Callable[[], object], seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(make()).eval()


def row(lengths: list[int], vocab: int = 64) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, vocab, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])
    cu = [0]
    for n in lengths:
        cu.append(cu[-1] + n)
    return ids, positions, cu


def one_by_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: varlen.Spans, scale: float | None
) -> torch.Tensor:
    """`varlen.attend` in plain torch: the queries of a span are the last of its keys."""
    out, borders = [], (spans.queries.tolist(), spans.keys.tolist())
    group = q.shape[1] // k.shape[1]
    for (a, b), (first, end) in zip(*map(itertools.pairwise, borders), strict=True):
        assert end - first <= spans.most_keys
        keys, values = (t[first:end].repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
        mask = torch.ones(b - a, end - first, dtype=torch.bool).tril(end - first - (b - a))
        out.append(
            F.scaled_dot_product_attention(q[a:b].transpose(0, 1), keys, values, mask, scale=scale).transpose(0, 1)
        )
    return torch.cat(out)


@pytest.fixture(autouse=True, params=["kernels", "torch", "gathered"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels do not compute a model, torch's attention does, in buckets of alike lengths; on a GPU one kernel looks at spans of
    queries and of keys that are gathered for it."""
    if request.param != "kernels":
        monkeypatch.setattr(packed_attention, "suits", lambda *_: False)
    if request.param == "gathered":
        monkeypatch.setattr(layout, "gathers", lambda _: True)
        monkeypatch.setattr(varlen, "suits", lambda *_: True)
        monkeypatch.setattr(varlen, "attend", one_by_one)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_packed_sequence_equals_the_sequence_alone(family: str) -> None:
    make, replaceable = CONFIGS[family]
    model = build(make)
    packed = PackedModel(model)
    assert packed.varlen is replaceable
    assert packed.padded == ("" if replaceable else f"attention of {model.config.model_type} cannot be replaced")
    ids, positions, cu = row(LENGTHS)
    weights = torch.randn(len(ids), 64, generator=torch.Generator().manual_seed(2))
    hidden = packed(ids, positions, torch.tensor(cu, dtype=torch.int32))
    (hidden * weights).sum().backward()
    got = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    alone = torch.cat(
        [model.model(input_ids=ids[a:b][None], use_cache=False).last_hidden_state[0] for a, b in itertools.pairwise(cu)]
    )
    (alone * weights).sum().backward()
    torch.testing.assert_close(hidden, alone, rtol=1e-5, atol=1e-5)
    assert got
    for name, p in model.named_parameters():
        if p.grad is not None:
            scale = p.grad.abs().max().item()
            torch.testing.assert_close(
                got[name], p.grad, rtol=0, atol=2e-5 * max(scale, 1e-3), msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("family", [name for name, (_, replaceable) in CONFIGS.items() if replaceable])
def test_parts_that_continue_one_prompt_equal_whole_sequences(family: str) -> None:
    """Two prompts with three and two answers of their own, and a sequence alone between them."""
    model = build(CONFIGS[family][0])
    packed = PackedModel(model)
    prompts, answers = {0: 7, 5: 11}, {0: [4, 9, 4], 5: [1, 6]}
    lengths = [7, 4, 9, 4, 12, 11, 1, 6]
    parents = torch.tensor([-1, 0, 0, 0, -1, -1, 5, 5])
    ids, _, cu = row(lengths)
    parts = [ids[a:b] for a, b in itertools.pairwise(cu)]
    begins = [prompts.get(int(p), 0) for p in parents]
    positions = torch.cat([torch.arange(b, b + n) for b, n in zip(begins, lengths, strict=True)])
    weights = torch.randn(len(ids), 64, generator=torch.Generator().manual_seed(2))
    hidden = packed(ids, positions, cu, parents=parents)
    (hidden * weights).sum().backward()
    got = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss = torch.zeros(())
    for i, part in enumerate(parts):
        before = parts[int(parents[i])] if parents[i] >= 0 else part[:0]
        alone = model.model(input_ids=torch.cat([before, part])[None], use_cache=False).last_hidden_state[
            0, len(before) :
        ]
        torch.testing.assert_close(hidden[cu[i] : cu[i + 1]], alone, rtol=1e-5, atol=1e-5)
        loss = loss + (alone * weights[cu[i] : cu[i + 1]]).sum()
    loss.backward()
    assert {p: [lengths[i] for i in range(8) if parents[i] == p] for p in prompts} == answers
    for name, p in model.named_parameters():
        if p.grad is not None:
            assert (got[name] - p.grad).norm() <= 1e-5 * p.grad.norm().clamp_min(1e-3), name


def test_parts_are_refused_where_the_model_runs_padded() -> None:
    packed = PackedModel(build(CONFIGS["mistral_window"][0]))
    ids, positions, cu = row([4, 3])
    with pytest.raises(BadInput, match="runs padded"):
        packed(ids, positions, cu, parents=torch.tensor([-1, 0]))


def test_neighbours_do_not_matter() -> None:
    model = build(CONFIGS["qwen3_moe"][0])
    packed = PackedModel(model)
    ids, positions, cu = row([6, 7, 9])
    changed = ids.clone()
    changed[:6] = (changed[:6] + 5) % 64
    changed[13:] = (changed[13:] + 5) % 64
    with torch.no_grad():
        one, two = packed(ids, positions, cu), packed(changed, positions, cu)
    torch.testing.assert_close(one[6:13], two[6:13], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(one[:6], two[:6], atol=1e-3)


def test_the_model_is_left_as_it_was_found() -> None:
    model = build(CONFIGS["qwen3_moe"][0]).train()
    before = (model.config._attn_implementation, model.config._experts_implementation)
    packed = PackedModel(model)
    with pytest.raises(IndexError):
        packed(torch.tensor([1, 999]), torch.tensor([0, 1]), [0, 2])
    assert (model.config._attn_implementation, model.config._experts_implementation) == before
    assert model.training


def test_an_attention_that_cannot_run_says_why() -> None:
    """On CUDA a kernel that refuses its arguments once turned every pass into a padded one, without a word."""

    class Refusing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 1:  # the packed row
                raise TypeError("unexpected keyword argument 'enable_gqa'")
            return x

    model = build(CONFIGS["llama"][0])
    model.model.layers[0].input_layernorm = torch.nn.Sequential(Refusing(), model.model.layers[0].input_layernorm)
    packed = PackedModel(model)
    assert not packed.varlen
    assert packed.padded == "TypeError: unexpected keyword argument 'enable_gqa'"


@pytest.mark.parametrize("older", [True, False])
def test_the_kernel_gets_what_its_signature_has(older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 has no `enable_gqa`. Its kernel is not here: only the call is seen."""
    monkeypatch.undo()  # here the kernel itself is asked
    told = list[bool]()

    def of_2_11(q, k, v, cu_q, cu_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):  # type: ignore[no-untyped-def]
        told.append(window_size == (-1, 0) and scale == 0.5 and max_q == max_k == 3)
        return q

    def of_2_13(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):  # type: ignore[no-untyped-def]
        return of_2_11(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window_size) if enable_gqa else None

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", of_2_11 if older else of_2_13)
    q, kv = torch.randn(5, 4, 8), torch.randn(5, 2, 8)
    assert _cuda_varlen(q, kv, kv, Layout.build([3, 2], torch.device("cpu")), 0.5).shape == q.shape
    assert told == [True]


def test_the_probe_rejects_an_attention_that_mixes_sequences() -> None:
    """A recurrent layer passes every check of the config; only running it shows that it looks over the border."""

    class Leaky(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)

    model = build(CONFIGS["llama"][0])
    model.model.layers[0].input_layernorm = torch.nn.Sequential(Leaky(), model.model.layers[0].input_layernorm)
    packed = PackedModel(model)
    assert not packed.varlen
    assert packed.padded == "packed tokens of this model come out as others"
    ids, positions, cu = row(LENGTHS)
    with torch.no_grad():
        alone = [
            model.model(input_ids=ids[a:b][None], use_cache=False).last_hidden_state[0]
            for a, b in itertools.pairwise(cu)
        ]
        torch.testing.assert_close(packed(ids, positions, cu), torch.cat(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [[3], [4, 4, 4], [9, 2, 100, 9, 3, 2], [7, 8, 9, 10]])
def test_layout_covers_every_token_once(lengths: list[int]) -> None:
    layout = Layout.build(lengths, torch.device("cpu"))
    total = sum(lengths)
    flat = torch.arange(1.0, total + 1).view(total, 1, 1)
    parts = []
    for bucket in layout.buckets:
        part = bucket.take(flat).transpose(1, 2).reshape(-1)
        parts.append(part if bucket.real is None else part[bucket.real])
    out = torch.cat(parts)
    out = out if layout.order is None else out[layout.order]
    assert out.tolist() == flat.view(-1).tolist()
    for bucket in layout.buckets:
        assert bucket.rows * bucket.length <= 2 * total + 8 * bucket.rows


def test_sorted_experts_equal_eager_with_idle_experts() -> None:
    make, _ = CONFIGS["qwen3_moe"]
    experts = build(make).model.layers[0].mlp.experts
    x = torch.randn(7, 64, requires_grad=True)
    index = torch.tensor([[0, 3], [3, 0], [5, 3], [0, 5], [3, 5], [5, 0], [0, 3]])
    weights = torch.rand(7, 2, requires_grad=True)
    results = {}
    for name in ("eager", SORTED_EXPERTS):
        experts.config._experts_implementation = name
        out = experts(x, index, weights)
        grads = torch.autograd.grad((out * out).sum(), (x, weights, experts.gate_up_proj, experts.down_proj))
        results[name] = (out, *grads)
    for a, b in zip(results["eager"], results[SORTED_EXPERTS], strict=False):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert results[SORTED_EXPERTS][3][1].abs().max() == 0


@pytest.mark.parametrize("cu", [[0, 3], [1, 4], [0, 2, 2, 4], []])
def test_wrong_borders_are_refused(cu: list[int]) -> None:
    packed = PackedModel(build(CONFIGS["llama"][0]))
    with pytest.raises(BadInput, match="cu_seqlens"):
        packed(torch.arange(4), torch.arange(4), cu)
