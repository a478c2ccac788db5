"""Routing replay must change which experts a token sees and nothing else: a wrong weight would train a model nobody sampled.

Real tiny models of several families; the explicit computation is a mixture layer written out here by hand. Not covered:
CUDA, models outside transformers' experts interface, how much replay narrows the gap of a rounded engine on trained weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
)

from rollkeel import objectives
from rollkeel.batch.build import TrainingBatch, build_batch
from rollkeel.config import ModelConfig, TrainConfig
from rollkeel.errors import BadInput
from rollkeel.models.loading import Policy, load_policy
from rollkeel.models.packed import PackedModel
from rollkeel.models.routers import RoutingShape, expert_layers, replay_experts
from rollkeel.train.trainer import LocalTrainer
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan

LAYERS, EXPERTS, K = 2, 8, 2


def policy(preset: str = "tiny-qwen3-moe", **overrides: Any) -> Policy:
    return load_policy(ModelConfig(path=f"preset:{preset}", overrides={"initializer_range": 0.25, **overrides}))


def make_batch(
    lengths: tuple[int, ...] = (3, 9, 1, 6),
    seed: int = 0,
    *,
    layers: int = LAYERS,
    prompts: tuple[int, ...] = (),
    shared: bool = False,
) -> TrainingBatch:
    """Random tokens with random distinct experts; those of `prompts`, of these lengths, too. `shared`: members of a group have one."""
    r = np.random.default_rng(seed)

    def routed(count: int) -> np.ndarray:
        return r.permuted(np.tile(np.arange(EXPERTS), (count, layers, 1)), axis=2)[..., :K].astype(np.int16)

    rollouts = []
    for i, n in enumerate(lengths):
        stamp = np.zeros(n, np.int64)
        ids = routed(n)
        read = routed(prompts[i] - 1) if prompts else None
        span = TokenSpan(
            token_ids=r.integers(8, 264, n),
            logprobs=np.full(n, -5.6, np.float32),
            kept_mass=np.ones(n, np.float32),
            versions=stamp,
            kv_versions=stamp,
            experts=ids,
            prompt_experts=rollouts[-1].span.prompt_experts if shared and i % 2 else read,
        )
        prompt = Prompt(
            id=str(i), index=i, text="", token_ids=r.integers(8, 264, prompts[i] if prompts else 4 + i % 3), answer="",
            grader=GraderSpec(name="x"), task="t",
        )  # fmt: skip
        if shared and i % 2:
            prompt = rollouts[-1].prompt
        rollouts.append(
            Rollout(
                id=i, group=i // 2, member=i % 2, prompt=prompt, span=span, status=Status.FINISHED,
                sampling=SamplingParams(), engine="fake", dtype="fp32", reward=0.0,
            )
        )  # fmt: skip
    return build_batch(rollouts, r.normal(size=len(lengths)), "sequence_mean")


def trainer(p: Policy | None = None, *, replay: bool = True, **options: Any) -> LocalTrainer:
    config = TrainConfig(**{"warmup_steps": 0, "lr": 1e-3, **options})
    return LocalTrainer(p or policy(), config, temperature=1.0, total_updates=10, replay_routing=replay)


def weights(t: LocalTrainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in t.model.named_parameters()}


def own_choice(t: LocalTrainer, batch: TrainingBatch) -> torch.Tensor:
    out = torch.empty_like(batch.experts)  # type: ignore[arg-type]
    with torch.no_grad():
        for micro in batch.micro_batches(t.config.micro_batch_tokens):
            experts = t._forward.score(micro, experts=True).experts
            assert experts is not None
            out[micro.indices] = experts
    return out


@pytest.mark.parametrize("normalise", [True, False])
def test_replaying_the_trainers_own_choice_changes_no_bit(normalise: bool) -> None:
    free, bound = (trainer(policy(norm_topk_prob=normalise), replay=r) for r in (False, True))
    batch = make_batch()
    batch = replace(batch, experts=own_choice(free, batch))
    assert torch.equal(free.score(batch).logprobs, bound.score(batch).logprobs)
    a, b = (t.update(batch, objectives.grpo(), old_is_current=True, experts=True) for t in (free, bound))
    assert a.metrics == b.metrics
    assert torch.equal(a.logprobs, b.logprobs)
    assert torch.equal(a.experts, batch.experts)  # type: ignore[arg-type]
    assert torch.equal(b.experts, batch.experts)  # type: ignore[arg-type]
    assert all(torch.equal(w, weights(bound)[n]) for n, w in weights(free).items())


def explicit_block(block: Any, x: torch.Tensor, chosen: torch.Tensor, where: range) -> torch.Tensor:
    """Qwen3-MoE's mixture of one sequence `x [1, n, D]`, token by token; those of `where` go to `chosen [n', k]`."""
    out = []
    for at, h in enumerate(x[0]):
        p = (block.gate.weight @ h).softmax(0)
        ids = chosen[at - where.start].long() if at in where else p.topk(K).indices
        w = p[ids] / p[ids].sum()
        y = torch.zeros_like(h)
        for expert, share in zip(ids.tolist(), w, strict=True):
            gate, up = (block.experts.gate_up_proj[expert] @ h).chunk(2)
            y = y + share * (block.experts.down_proj[expert] @ (F.silu(gate) * up))
        out.append(y)
    return torch.stack(out)[None]


@contextmanager
def explicit(model: Any, chosen: torch.Tensor, where: range) -> Iterator[None]:
    blocks = [layer.mlp for layer in model.model.layers]
    try:
        for i, block in enumerate(blocks):
            block.forward = lambda x, block=block, i=i: explicit_block(block, x, chosen[:, i], where)
        yield
    finally:
        for block in blocks:
            del block.forward


@pytest.mark.parametrize("read", ["not", "alone", "shared"])
def test_another_choice_gives_the_log_probs_and_gradients_of_the_explicit_computation(read: str) -> None:
    """`read`: whether experts of the prompt are replayed as well, and of prompts that answers share in the pass."""
    prompts = {"not": (), "alone": (5, 1, 6, 4), "shared": (40, 40, 36, 36)}[read]
    made = make_batch(prompts=prompts, shared=read == "shared")
    size = 60 if read == "shared" else 20
    t, reference, batch = trainer(micro_batch_tokens=size), policy(), made
    assert batch.experts is not None
    model: Any = reference.model
    want, start, loss = [], 0, torch.zeros(())
    for sequence, prompt in zip(batch.sequences, batch.prompt_lengths, strict=True):
        ids, n = torch.from_numpy(sequence), len(sequence) - prompt
        experts, first = batch.experts[start : start + n], prompt - 1
        if batch.read_experts is not None:
            before = torch.from_numpy(batch.read_experts[batch.sequence_ids[start]][:first])
            experts, first = torch.cat((before, experts)), 0
        with explicit(model, experts, range(first, len(ids) - 1)):
            log_p = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        lp = log_p[prompt - 1 : -1].gather(1, ids[prompt:, None]).squeeze(1)
        window = slice(start, start + n)
        loss = loss - (batch.coefficients[window] * batch.advantages[window] * lp).sum()
        want.append(lp.detach())
        start += n
    got = t.score(batch).logprobs
    torch.testing.assert_close(got, torch.cat(want), rtol=1e-4, atol=2e-5)
    assert (trainer(replay=False).score(batch).logprobs - got).abs().max() > 0.1  # another choice is another model
    loss.backward()
    share = t._forward.packed.varlen and read == "shared"
    for micro in batch.micro_batches(size, replay=True, share=share):
        assert (micro.parents is not None) == share
        lp = t._forward.score(micro).logprobs
        (-(batch.coefficients * batch.advantages)[micro.indices] * lp).sum().backward()
    found = {n: p.grad for n, p in t.model.named_parameters()}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        torch.testing.assert_close(found[name], p.grad, rtol=1e-3, atol=1e-5 * float(p.grad.abs().max()), msg=name)
        assert not name.endswith("gate.weight") or p.grad.abs().max() > 0


def test_the_update_replays_as_the_old_pass_does_and_tells_what_the_routers_would_choose() -> None:
    batch, plain = make_batch(), trainer(replay=False)
    one, two = trainer(), trainer()
    old = one.score(batch)
    a = one.update(batch, objectives.grpo(), old_logprobs=old.logprobs, experts=True)
    assert torch.equal(a.logprobs, old.logprobs)
    b = two.update(batch, objectives.grpo(), old_is_current=True)
    assert a.metrics == b.metrics
    assert a.experts is not None
    # The first layer sees the same tokens with and without replay; deeper ones do not.
    assert torch.equal(a.experts[:, 0], own_choice(plain, batch)[:, 0])
    assert not torch.equal(a.experts, batch.experts)  # type: ignore[arg-type]


def test_the_reference_model_keeps_its_own_choice() -> None:
    batch = make_batch()
    bound, free = trainer(kl_coefficient=0.1), trainer(replay=False, kl_coefficient=0.1)
    assert torch.equal(bound.ref_logprobs(batch), free.ref_logprobs(batch))
    assert not torch.equal(bound.ref_logprobs(batch), bound.score(batch).logprobs)


def test_micro_batches_do_not_matter() -> None:
    batch = make_batch((3, 9, 1, 6, 12, 2, 7, 7))
    sizes = [trainer(micro_batch_tokens=n) for n in (1, 40, 4096)]
    outputs = [t.update(batch, objectives.grpo(), old_is_current=True) for t in sizes]
    for out in outputs[1:]:
        torch.testing.assert_close(out.logprobs, outputs[0].logprobs, rtol=1e-5, atol=1e-5)
        assert out.metrics["optimizer/grad_norm"] == pytest.approx(outputs[0].metrics["optimizer/grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_helper_processes_replay_too() -> None:
    batch = make_batch((3, 9, 1, 6, 12, 2, 7, 7))
    one, two = trainer(), trainer(processes=2)
    try:
        assert torch.allclose(one.score(batch).logprobs, two.score(batch).logprobs, atol=1e-5)
        a, b = (t.update(batch, objectives.grpo(), old_is_current=True, experts=True) for t in (one, two))
        assert torch.allclose(a.logprobs, b.logprobs, atol=1e-5)
        assert a.metrics["optimizer/grad_norm"] == pytest.approx(b.metrics["optimizer/grad_norm"], rel=1e-4)
        assert torch.equal(a.experts.sort(-1).values, b.experts.sort(-1).values)  # type: ignore[union-attr]
    finally:
        two.close()


def broken(batch: TrainingBatch, how: str) -> TrainingBatch:
    experts = batch.experts
    assert experts is not None
    if how == "prompt":
        assert batch.read_experts is not None
        batch.read_experts[1][2, 0, 1] = EXPERTS
        return batch
    if how == "missing":
        return replace(batch, experts=None)
    if how == "layers":
        return replace(batch, experts=experts[:, :1])
    if how == "k":
        return replace(batch, experts=torch.cat([experts, experts[..., :1]], -1))
    changed = experts.clone()
    changed[3, 1, 0] = {"high": EXPERTS, "low": -1, "twice": int(experts[3, 1, 1])}[how]
    return replace(batch, experts=changed)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "carry none"),
        ("layers", r"\[T, 2 layers, 2 per token\].*got \[19, 1, 2\]"),
        ("k", r"\[T, 2 layers, 2 per token\].*got \[19, 2, 3\]"),
        ("high", r"in \[0, 8\).*ids 0 to 8;"),
        ("low", r"in \[0, 8\).*ids -1 to 7;"),
        ("twice", "with repetitions"),
        ("prompt", r"in \[0, 8\).*ids 0 to 8;"),
    ],
)
def test_experts_that_do_not_fit_are_refused_before_anything_runs(how: str, message: str) -> None:
    t, batch = trainer(), broken(make_batch(prompts=(4, 5, 6, 4)), how)
    before = weights(t)
    with pytest.raises(BadInput, match=message) as refused:
        t.update(batch, objectives.grpo(), old_is_current=True)
    assert "\n" not in str(refused.value)
    with pytest.raises(BadInput, match=message):
        t.score(batch)
    assert all(torch.equal(w, before[n]) for n, w in weights(t).items())


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(BadInput, match="no routed experts"):
        trainer(policy("tiny-qwen3"))


COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": K,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.5,
}
SMALL: dict[str, Any] = {"intermediate_size": 32, "moe_intermediate_size": 16}
MLA: dict[str, Any] = {
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
FAMILIES = {
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **COMMON, **SMALL, shared_expert_intermediate_size=16, num_experts=EXPERTS, norm_topk_prob=False
    ),
    "olmoe": lambda: OlmoeConfig(**COMMON, intermediate_size=16, num_experts=EXPERTS),
    "mixtral": lambda: MixtralConfig(**COMMON, intermediate_size=16, num_local_experts=EXPERTS),
    "gpt_oss": lambda: GptOssConfig(**COMMON, head_dim=16, intermediate_size=16, num_local_experts=EXPERTS),
    "deepseek_v3": lambda: DeepseekV3Config(**COMMON, **SMALL, **MLA, n_group=2, topk_group=1),
    "deepseek_v2": lambda: DeepseekV2Config(**COMMON, **SMALL, **MLA, topk_method="greedy"),
}


def packed(config: PretrainedConfig) -> PackedModel:
    torch.manual_seed(0)
    return PackedModel(AutoModelForCausalLM.from_config(config).eval())


def first_layer(model: PackedModel, chosen: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids and weights `[N, k]` that the first layer's experts were given."""
    ids = torch.arange(14) * 5 % 64
    positions, cu = torch.cat([torch.arange(9), torch.arange(5)]), [0, 9, 14]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def see(_module: Any, args: tuple[Any, ...]) -> None:
        seen.append((args[1], args[2]))

    replay = None if chosen is None else (chosen, torch.arange(14))
    handle = expert_layers(model.backbone)[0].register_forward_pre_hook(see)
    try:
        with torch.no_grad():
            model(ids, positions, cu, None, replay)
    finally:
        handle.remove()
    (given,) = seen
    if len(given[0]) == 14:
        return given
    rows = (torch.arange(9) < torch.tensor([[9], [5]])).flatten().nonzero().squeeze(1)  # the padded form
    return given[0][rows], given[1][rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_familys_own_router_weighs_the_replayed_experts(family: str) -> None:
    """Odds between two experts of a token are the router's own, whichever other experts it is sent to."""
    model = packed(FAMILIES[family]())
    shape = model.replayable()
    assert shape == RoutingShape(2 - (family.startswith("deepseek")), K, EXPERTS)
    own_ids, own_weights = first_layer(model, None)

    def sent(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        pair = torch.stack([first, second], 1)
        ids, w = first_layer(model, pair[:, None].expand(-1, shape.layers, -1))
        assert torch.equal(ids, pair)
        assert (w > 0).all()
        return w[:, 0] / w[:, 1]

    a, b = own_ids.unbind(1)
    others = torch.stack([torch.tensor([e for e in range(EXPERTS) if e not in row]) for row in own_ids.tolist()])
    c = others[:, 0]
    torch.testing.assert_close(sent(a, b), own_weights[:, 0] / own_weights[:, 1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sent(a, c) * sent(c, b), sent(a, b), rtol=1e-3, atol=1e-5)
    assert (sent(a, c) - 1).abs().max() > 1e-3  # equal weights would pass the rest


def test_routers_whose_weights_cannot_be_recomputed_are_refused() -> None:
    groups = DeepseekV2Config(**COMMON, **SMALL, **MLA, topk_method="group_limited_greedy", n_group=2, topk_group=1)
    with pytest.raises(BadInput, match="choice of groups has masked"):
        packed(groups).replayable()
    noisy = PhimoeConfig(**COMMON, intermediate_size=16, num_local_experts=EXPERTS)
    with pytest.raises(BadInput, match="not chosen by one top-k"):
        packed(noisy).replayable()


def test_a_pass_that_misses_layers_is_refused_and_leaves_no_hooks() -> None:
    p = policy()
    layers = expert_layers(p.model)
    with (
        pytest.raises(BadInput, match="2 expert layers, saw 0"),
        replay_experts(layers, torch.zeros(1, LAYERS, K, dtype=torch.long), torch.zeros(1, dtype=torch.long)),
    ):
        pass
    assert not any(layer._forward_pre_hooks for layer in layers)
