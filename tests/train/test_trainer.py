"""The update is where a silent mistake costs a run: micro-batching, resuming or a NaN must not change what is learnt.

Real presets and real objectives on the CPU. Not covered: CUDA, whether learning succeeds (the default recipe shows that).
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig

from rollkeel import objectives
from rollkeel.batch import packing
from rollkeel.batch.build import TrainingBatch, build_batch
from rollkeel.config import ModelConfig, TrainConfig
from rollkeel.errors import BadInput, NonFinite
from rollkeel.models.loading import Policy, load_policy, save_policy
from rollkeel.models.routers import is_router
from rollkeel.recipe import load
from rollkeel.train.optimizer import Schedule
from rollkeel.train.trainer import LocalTrainer
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenBatch, TokenSpan


def policy(preset: str = "tiny-qwen3-moe", seed: int = 0) -> Policy:
    return load_policy(ModelConfig(path=f"preset:{preset}"), seed=seed)


def make_batch(
    n: int = 8, aggregate: str = "sequence_mean", seed: int = 0, *, topk: int = 0, experts: bool = False
) -> TrainingBatch:
    """`topk`, `experts`: with the facts an engine may return beside each token, drawn at random."""
    r = np.random.default_rng(seed)
    rollouts = []
    for i in range(n):
        prompt = Prompt(
            id=str(i),
            index=i,
            text="",
            token_ids=r.integers(8, 288, 4 + i % 3),
            answer="",
            grader=GraderSpec(name="x"),
            task="t",
        )
        length = int(r.integers(1, 12))
        span = TokenSpan(
            token_ids=r.integers(8, 288, length),
            logprobs=np.full(length, -5.6, np.float32),
            kept_mass=np.ones(length, np.float32),
            versions=np.zeros(length, np.int64),
            kv_versions=np.zeros(length, np.int64),
            topk_ids=r.integers(8, 288, (length, topk)) if topk else None,
            topk_logprobs=-r.uniform(1, 9, (length, topk)).astype(np.float32) if topk else None,
            experts=r.permuted(np.tile(np.arange(8), (length, 2, 1)), axis=2)[..., :2].astype(np.int16)
            if experts
            else None,
        )
        rollouts.append(
            Rollout(
                id=100 + i,
                group=i // 2,
                member=i % 2,
                prompt=prompt,
                span=span,
                status=Status.FINISHED,
                sampling=SamplingParams(),
                engine="local",
                dtype="fp32",
                reward=float(i % 2),
            )
        )
    return build_batch(rollouts, r.standard_normal(n), aggregate)


def trainer(p: Policy | None = None, **options) -> LocalTrainer:
    settings = {"warmup_steps": 0, **options}
    return LocalTrainer(p or policy(), TrainConfig(**settings), temperature=1.0, total_updates=10)


def weights(t: LocalTrainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in t.model.named_parameters()}


def update(t: LocalTrainer, batch: TrainingBatch, objective=None) -> dict[str, float]:
    objective = objective or objectives.grpo()
    old, _ = t.logprobs(batch)
    return t.update(batch, objective, old_logprobs=old).metrics


@pytest.mark.parametrize("preset", ["tiny-qwen3-moe", "tiny-qwen3", "tiny-qwen3-tied"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_transformers(preset: str, temperature: float) -> None:
    p, batch = policy(preset), make_batch()
    t = LocalTrainer(p, TrainConfig(micro_batch_tokens=40), temperature=temperature, total_updates=1)
    lp, h = t.logprobs(batch)
    at = 0
    for sequence, start in zip(batch.sequences, batch.prompt_lengths, strict=True):
        ids = torch.from_numpy(sequence)
        with torch.no_grad():
            log_p = torch.log_softmax(p.model(input_ids=ids[None]).logits[0].float() / (temperature or 1.0), -1)
        n = len(ids) - start
        want = log_p[start - 1 : -1].gather(1, ids[start:, None]).squeeze(1)
        torch.testing.assert_close(lp[at : at + n], want, rtol=1e-5, atol=1e-5)
        entropy = -(log_p.exp() * log_p).sum(-1)[start - 1 : -1]
        torch.testing.assert_close(h[at : at + n], entropy, rtol=1e-5, atol=1e-5)
        at += n


def test_micro_batching_does_not_change_the_update() -> None:
    batch, results = make_batch(12), []
    for tokens in (10_000, 40, 1):
        t = trainer(micro_batch_tokens=tokens, lr=1e-3)
        metrics = update(t, batch)
        results.append((metrics, weights(t)))
    for metrics, after in results[1:]:
        assert metrics["optimizer/grad_norm"] == pytest.approx(results[0][0]["optimizer/grad_norm"], rel=1e-4)
        for name, w in after.items():
            # Adam's first step is lr · sign(gradient): only gradients around 0 may differ, and by little.
            assert ((w - results[0][1][name]).abs() > 1e-4).float().mean() < 0.01, name


def gradients(t: LocalTrainer, batch: TrainingBatch) -> dict[str, torch.Tensor]:
    """What the optimizer is handed by one update."""
    kept: dict[str, torch.Tensor] = {}
    step = t._stepper.step

    def watched(*judge: Any) -> dict[str, float]:
        kept.update({n: p.grad.clone() for n, p in t._stepper.named if p.grad is not None})
        return step(*judge)

    t._stepper.step = watched  # type: ignore[method-assign]
    update(t, batch)
    return kept


def test_gradients_of_micro_batches_add_up() -> None:
    """Compared before the optimizer, where nothing hides a wrong scale."""
    batch = make_batch(12)
    whole, parts = (gradients(trainer(micro_batch_tokens=n), batch) for n in (10_000, 30))
    assert whole.keys() == parts.keys()
    for name, g in whole.items():
        assert (g - parts[name]).abs().max() <= 1e-5 * max(1e-3, g.abs().max().item()), name


@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-qwen3-tied", "tiny-qwen3-moe"])
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_prompts_that_are_shared_change_no_gradient(
    preset: str, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three groups of four answers to prompts of 40 tokens; one pass holds them all, small ones split every group."""
    r = np.random.default_rng(3)
    batch = make_batch(12, experts="moe" in preset)
    prompts = [r.integers(8, 288, 40) for _ in range(3)]
    joined = tuple(
        np.concatenate([prompts[i % 3], s[n:]])
        for i, (s, n) in enumerate(zip(batch.sequences, batch.prompt_lengths, strict=True))
    )
    moved = tuple(p - n + 40 for p, n in zip(batch.positions, batch.prompt_lengths, strict=True))
    batch = replace(batch, sequences=joined, prompt_lengths=(40,) * 12, positions=moved)

    def made(least: int, tokens: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, int]:
        monkeypatch.setattr(packing, "SHARED_LEAST", least)
        t = trainer(policy(preset), micro_batch_tokens=tokens, processes=processes, clip_norm=1e9)
        try:
            rows = sum(m.input_ids.numel() for m in t._passes._shares(t._forward, batch, 1, True)[0])
            return gradients(t, batch), t.logprobs(batch)[0], rows
        finally:
            t.close()

    plain, before, tokens = made(10_000, 10_000)
    for limit in (10_000, 70):
        shared, after, fewer = made(16, limit)
        assert fewer < (0.5 if limit > 100 else 0.8) * tokens
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
        for name, g in plain.items():
            assert (g - shared[name]).norm() <= 3e-6 * g.norm().clamp_min(1e-6), name
        gap, size = (
            torch.stack([t.norm() for t in ts]).norm()
            for ts in ([g - shared[n] for n, g in plain.items()], plain.values())
        )
        assert gap <= 1e-6 * size  # as two packings of unshared prompts differ


def test_gradient_is_that_of_the_objective_over_full_logits() -> None:
    p = policy()
    batch, objective = make_batch(), objectives.kpop(phi=0.1)
    t = trainer(p, clip_norm=1e9)
    old, _ = t.logprobs(batch)
    parts = []
    for sequence, start in zip(batch.sequences, batch.prompt_lengths, strict=True):
        ids = torch.from_numpy(sequence)
        log_p = torch.log_softmax(p.model(input_ids=ids[None]).logits[0], -1)
        parts.append(log_p[start - 1 : -1].gather(1, ids[start:, None]).squeeze(1))
    loss = objective.loss(batch.tokens(torch.cat(parts), old_logprobs=old))
    want = torch.autograd.grad(loss, [q for _, q in t._stepper.named], allow_unused=True)
    norm = torch.stack([g.norm() for g in want if g is not None]).norm().item()
    metrics = t.update(batch, objective, old_logprobs=old).metrics
    assert metrics["optimizer/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_same_inputs_give_the_same_bits() -> None:
    runs = []
    for _ in range(2):
        t = trainer(policy(seed=3))
        metrics = [update(t, make_batch(seed=s)) for s in range(3)]
        runs.append((metrics, weights(t)))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(w, runs[1][1][n]) for n, w in runs[0][1].items())


def test_resume_is_bit_identical() -> None:
    whole = trainer(policy(seed=1), schedule="cosine", warmup_steps=2)
    for s in range(4):
        last = update(whole, make_batch(seed=s))
    first = trainer(policy(seed=1), schedule="cosine", warmup_steps=2)
    for s in range(2):
        update(first, make_batch(seed=s))
    state = copy.deepcopy(first.state_dict())
    second = trainer(policy(seed=9), schedule="cosine", warmup_steps=2)
    second.load_state_dict(state)
    assert second.version == first.version == 2
    for s in range(2, 4):
        resumed = update(second, make_batch(seed=s))
    assert resumed == last
    expected = weights(whole)
    assert all(torch.equal(w, expected[n]) for n, w in weights(second).items())


def test_a_state_of_another_shape_is_refused() -> None:
    small, large = trainer(policy("tiny-qwen3")), trainer(policy("tiny-qwen3-moe"))
    before = weights(large)
    with pytest.raises(BadInput, match=r"weight model\.layers\.0.*resume with the same model"):
        large.load_state_dict(small.state_dict())
    assert all(torch.equal(w, before[n]) for n, w in weights(large).items())


class Poison:
    """An objective whose loss, or only its gradient, is not finite."""

    needs = frozenset({"old_logprobs"})

    def __init__(self, where: str) -> None:
        self.where = where

    def prepare(self, batch: TokenBatch) -> None:
        pass

    def loss(self, tokens: TokenBatch) -> torch.Tensor:
        if self.where == "loss":
            return tokens.logprobs.sum() * float("inf")
        # √0: the value is finite, the derivative is not.
        return (tokens.logprobs - tokens.logprobs.detach()).sqrt().sum()

    def __call__(self, tokens: TokenBatch):
        raise AssertionError("a refused update must not report metrics")


@pytest.mark.parametrize(("where", "message"), [("loss", "loss is"), ("gradient", "gradient of .* is not finite")])
def test_non_finite_stops_the_step_and_leaves_everything_untouched(where: str, message: str) -> None:
    t, batch = trainer(), make_batch()
    update(t, batch)
    before = copy.deepcopy(t.state_dict())
    with pytest.raises(NonFinite, match=message):
        t.update(batch, Poison(where), old_logprobs=t.logprobs(batch)[0])
    after = t.state_dict()
    assert t.version == 1
    assert all(torch.equal(w, after["weights"][n]) for n, w in before["weights"].items())
    for name, moments in before["optimizer"]["moments"].items():
        assert all(torch.equal(v, after["optimizer"]["moments"][name][k]) for k, v in moments.items())
    assert all(p.grad is None for p in t.model.parameters())


def test_a_non_finite_logprob_names_rollout_and_token() -> None:
    p = policy()
    t, batch = trainer(p), make_batch()
    with torch.no_grad():
        p.model.get_input_embeddings().weight[int(batch.sequences[2][-2])] = float("nan")
    with pytest.raises(NonFinite, match=r"log-prob of rollout \d+, response token \d+"):
        t.update(batch, objectives.icepop(), old_logprobs=batch.rollout_logprobs)


def test_freeze_router_freezes_routers_alone() -> None:
    t = trainer(freeze_router="router", lr=1e-2)
    before = weights(t)
    update(t, make_batch())
    changed = {n for n, w in weights(t).items() if not torch.equal(w, before[n])}
    routers = {n for n in before if is_router(n)}
    assert routers == {f"model.layers.{i}.mlp.gate.weight" for i in range(2)}
    assert changed == set(before) - routers


@pytest.mark.parametrize(("what", "held"), [("off", ""), ("bias", "router.bias"), ("router", "router.")])
def test_biases_alone_are_frozen_and_not_their_routers(what: str, held: str) -> None:
    """GPT-OSS: the biases of its routers have gradients, while those of DeepSeek-V3 and its kin are buffers."""
    sizes: dict[str, Any] = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(GptOssConfig(**sizes, **heads, num_local_experts=8, num_experts_per_tok=2))
    config = TrainConfig(freeze_router=what, lr=1e-2)  # type: ignore[arg-type]
    t = LocalTrainer(replace(policy(), model=model), config, temperature=1.0, total_updates=1)
    before = {n: w.detach().clone() for n, w in model.named_parameters()}
    update(t, make_batch())
    still = {n for n, w in model.named_parameters() if torch.equal(w, before[n])}
    assert still == {n for n in before if held and held in n}


@pytest.mark.parametrize(("written", "read"), [("true", "router"), ("false", "off"), ("off", "off"), ("bias", "bias")])
def test_freeze_router_reads_what_it_was_before(written: str, read: str) -> None:
    assert load(None, [f"train.freeze_router={written}"]).train.freeze_router == read


def test_reference_stays_where_the_run_started() -> None:
    t, batch = trainer(kl_coefficient=0.1, lr=1e-2), make_batch()
    start, _ = t.logprobs(batch)
    objective = objectives.grpo(kl_coefficient=0.1)
    metrics = t.update(batch, objective, old_logprobs=start, ref_logprobs=t.ref_logprobs(batch)).metrics
    assert metrics["loss/kl"] == pytest.approx(0.0, abs=1e-6)
    assert torch.equal(t.ref_logprobs(batch), start)
    assert not torch.equal(t.logprobs(batch)[0], start)
    with pytest.raises(BadInput, match="kl_coefficient"):
        trainer().ref_logprobs(batch)


def test_entropy_gets_its_gradient_when_the_objective_asks() -> None:
    batch = make_batch()
    flat = trainer(lr=1e-2)
    before = float(flat.logprobs(batch)[1].mean())
    for _ in range(3):
        update(flat, batch, objectives.grpo(entropy_coefficient=-0.0))
    up = trainer(lr=1e-2)
    for _ in range(3):
        update(up, batch, objectives.grpo(entropy_coefficient=1.0))
    assert float(up.logprobs(batch)[1].mean()) > float(flat.logprobs(batch)[1].mean())
    assert before > 0


def test_prepare_sees_the_whole_batch_before_any_gradient() -> None:
    seen = []

    class Watch(Poison):
        needs = frozenset({"prepare"})

        def prepare(self, batch: TokenBatch) -> None:
            seen.append(batch.logprobs.clone())

        def loss(self, tokens: TokenBatch) -> torch.Tensor:
            seen.append(tokens.logprobs.numel())
            return -(tokens.coefficients * tokens.logprobs).sum()

        def __call__(self, tokens: TokenBatch):
            ones = torch.ones(len(tokens.logprobs))
            return type("Out", (), {"metrics": {"x": 1.0}, "keep": ones.bool(), "weight": ones})

    t, batch = trainer(micro_batch_tokens=30), make_batch()
    current, _ = t.logprobs(batch)
    assert t.update(batch, Watch("")).metrics["x"] == 1.0
    assert torch.equal(seen[0], current)
    assert len(seen) > 2
    assert sum(seen[1:]) == len(batch)


@pytest.mark.parametrize("objective", [objectives.grpo(), objectives.kpop()], ids=["grpo", "kpop"])
def test_old_is_current_equals_a_pass_of_its_own(objective) -> None:
    results = []
    for current in (False, True):
        t, batch = trainer(micro_batch_tokens=40), make_batch()
        old = None if current else t.logprobs(batch)[0]
        out = t.update(batch, objective, old_logprobs=old, old_is_current=current)
        results.append((out.metrics, out.logprobs, weights(t)))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert all(torch.equal(w, results[1][2][n]) for n, w in results[0][2].items())


def test_topk_logprobs_are_those_of_full_logits_and_reach_the_objective() -> None:
    """In the prepass, in the old pass, in every micro-batch and in the metrics; never with a gradient."""
    seen: list[tuple[str, TokenBatch]] = []

    class Watch(Poison):
        needs = frozenset({"prepare", "topk_ids", "topk_logprobs", "old_topk_logprobs"})

        def prepare(self, batch: TokenBatch) -> None:
            seen.append(("prepare", batch))

        def loss(self, tokens: TokenBatch) -> torch.Tensor:
            seen.append(("loss", tokens))
            return -(tokens.coefficients * tokens.logprobs).sum()

        def __call__(self, tokens: TokenBatch):
            seen.append(("metrics", tokens))
            ones = torch.ones(len(tokens.logprobs))
            return type("Out", (), {"metrics": {}, "keep": ones.bool(), "weight": ones})

    p = policy()
    t, batch = trainer(p, micro_batch_tokens=30), make_batch(topk=4)
    assert batch.topk_ids is not None
    want, at = torch.empty(len(batch), 4), 0
    for sequence, start in zip(batch.sequences, batch.prompt_lengths, strict=True):
        ids = torch.from_numpy(sequence)
        with torch.no_grad():
            log_p = torch.log_softmax(p.model(input_ids=ids[None]).logits[0].float(), -1)[start - 1 : -1]
        window = slice(at, at + len(log_p))
        want[window] = log_p.gather(1, batch.topk_ids[window])
        at += len(log_p)
    old = t.score(batch).topk_logprobs
    assert old is not None
    torch.testing.assert_close(old, want, rtol=1e-5, atol=1e-5)
    t.update(batch, Watch(""), old_logprobs=batch.rollout_logprobs, old_topk_logprobs=old + 1)
    assert [kind for kind, _ in seen] == ["prepare", *["loss"] * (len(seen) - 2), "metrics"]
    order = torch.cat([micro.indices for micro in batch.micro_batches(30)])
    for kind, index in (("prepare", slice(None)), ("loss", order), ("metrics", slice(None))):
        parts = [b for k, b in seen if k == kind]
        got = torch.cat([b.topk_logprobs for b in parts if b.topk_logprobs is not None])
        assert not got.requires_grad
        torch.testing.assert_close(got, want[index], rtol=1e-5, atol=1e-5)
        assert torch.equal(
            torch.cat([b.old_topk_logprobs for b in parts if b.old_topk_logprobs is not None]), (old + 1)[index]
        )
        assert torch.equal(torch.cat([b.topk_ids for b in parts if b.topk_ids is not None]), batch.topk_ids[index])


@pytest.mark.parametrize("name", ["dppo_topk_tv", "dppo_topk_kl"])
@pytest.mark.parametrize("anchor", ["rollout", "old"])
def test_topk_objectives_train_with_any_old_pass(name: str, anchor: str) -> None:
    objective = objectives.RECIPES[name](k=4, anchor=anchor)
    results = []
    for current in (False, True):
        t, batch = trainer(micro_batch_tokens=40), make_batch(topk=4)
        old = None if current else t.score(batch)
        known = {} if old is None else {"old_logprobs": old.logprobs, "old_topk_logprobs": old.topk_logprobs}
        results.append(t.update(batch, objective, old_is_current=current, **known).metrics)
    assert results[0] == results[1]
    assert results[0]["optimizer/grad_norm"] > 0


def test_prepare_is_called_once_and_sees_current_log_probs_as_old_where_they_are() -> None:
    seen = []

    class Watch(Poison):
        needs = frozenset({"prepare", "old_logprobs"})

        def prepare(self, batch: TokenBatch) -> None:
            seen.append(batch)

        def loss(self, tokens: TokenBatch) -> torch.Tensor:
            return -(tokens.coefficients * tokens.logprobs).sum()

        def __call__(self, tokens: TokenBatch):
            ones = torch.ones(len(tokens.logprobs))
            return type("Out", (), {"metrics": {}, "keep": ones.bool(), "weight": ones})

    t, batch = trainer(micro_batch_tokens=30), make_batch()
    current, _ = t.logprobs(batch)
    t.update(batch, Watch(""), old_is_current=True)
    (only,) = seen
    assert torch.equal(only.logprobs, current)
    assert torch.equal(only.old_logprobs, current)


def test_experts_of_the_update_are_those_its_routers_chose() -> None:
    p = policy()
    t, batch = trainer(p, micro_batch_tokens=40), make_batch(experts=True)
    assert t.update(batch, objectives.grpo(), old_is_current=True).experts is None
    chosen: list[torch.Tensor] = []
    for name, module in p.model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _m, _a, out: chosen.append(out[2]))
    at, want = 0, torch.empty(len(batch), 2, 2, dtype=torch.int16)
    for sequence, start in zip(batch.sequences, batch.prompt_lengths, strict=True):
        chosen.clear()
        with torch.no_grad():
            p.model(input_ids=torch.from_numpy(sequence)[None])
        n = len(sequence) - start
        want[at : at + n] = torch.stack(chosen, 1)[start - 1 : -1].to(torch.int16)
        at += n
    got = t.update(batch, objectives.grpo(), old_is_current=True, experts=True).experts
    assert got is not None
    assert torch.equal(got.sort(-1).values, want.sort(-1).values)


def test_experts_are_left_out_where_nobody_has_them_and_refused_where_they_do_not_fit() -> None:
    dense, moe = trainer(policy("tiny-qwen3")), trainer()
    options = {"old_is_current": True, "experts": True}
    assert dense.update(make_batch(experts=True), objectives.grpo(), **options).experts is None
    assert moe.update(make_batch(), objectives.grpo(), **options).experts is None
    batch = make_batch(experts=True)
    assert batch.experts is not None
    with pytest.raises(BadInput, match=r"\[1, 2\] per token, the trainer \[2, 2\]"):
        moe.update(replace(batch, experts=batch.experts[:, :1]), objectives.grpo(), **options)


@pytest.mark.parametrize("preset", ["tiny-qwen3-moe", "tiny-qwen3-tied"])
def test_named_weights_are_the_checkpoint(preset: str, tmp_path) -> None:
    p = policy(preset)
    t = trainer(p)
    update(t, make_batch())
    save_policy(p, tmp_path)
    from safetensors.torch import load_file

    disk = load_file(tmp_path / "model.safetensors")
    live = dict(t.named_weights())
    assert set(live) == set(disk)
    assert all(torch.equal(w, disk[n]) for n, w in live.items())
    lp, _ = t.logprobs(make_batch())
    again = trainer(Policy(AutoModelForCausalLM.from_pretrained(tmp_path), p.tokenizer)).logprobs(make_batch())[0]
    torch.testing.assert_close(lp, again, rtol=1e-5, atol=1e-5)


def test_schedules_by_hand() -> None:
    constant = Schedule(lr=1.0, warmup_steps=4)
    assert [constant(i) for i in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    cosine = Schedule(lr=1.0, warmup_steps=2, kind="cosine", total=7, min_lr_ratio=0.2)
    assert [cosine(i) for i in (0, 1, 2, 4, 6, 99)] == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2, 0.2])


def test_weight_decay_spares_vectors() -> None:
    t = trainer(weight_decay=0.5)
    before = {n: p.detach().clone() for n, p in t.model.named_parameters()}
    for p in t.model.parameters():
        p.grad = torch.zeros_like(p)
    t._stepper.adamw.step(0.1)
    for name, p in t.model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * (0.95 if p.dim() > 1 else 1.0), msg=name)
