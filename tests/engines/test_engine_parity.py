"""Under `run.parity` what the engine records is bit for bit what the trainer computes, whatever either does with its batches.

Engine against `LocalTrainer` on the same weights, and its tokens against themselves. Not covered: engine worker processes
and whole runs (`test_parity_runs.py`), CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import drain, engine_of, model_of, run, steps

from rollkeel.batch.build import TrainingBatch, build_batch
from rollkeel.config import TrainConfig
from rollkeel.errors import BadInput
from rollkeel.models.loading import Policy
from rollkeel.models.names import checkpoint_views
from rollkeel.models.presets import build_tokenizer
from rollkeel.sync.publish import full_update
from rollkeel.train.trainer import LocalTrainer
from rollkeel.types import GraderSpec, Prompt, Request, Rollout, SamplingParams, Status, TokenSpan

PRESETS = ("tiny-qwen3", "tiny-qwen3-moe", "tiny-qwen3-tied")
NEW = 24


def model_in(preset: str, mode: str, seed: int = 0) -> Any:
    model = model_of(preset, seed)
    for p in model.parameters():
        p.data = p.data.to(torch.bfloat16 if mode == "bf16" else torch.float32)
    return model


def asked(groups: int = 10, members: int = 3, **sampling: Any) -> list[Request]:
    """Groups that share their prompts, of lengths on both sides of a block's."""
    rng = np.random.default_rng(1)
    params = SamplingParams(max_new_tokens=NEW, seed=5, **sampling)
    prompts = [rng.integers(3, 288, int(n)) for n in rng.integers(2, 40, groups)]
    return [Request(id=i * members + j, prompt_ids=p, sampling=params) for i, p in enumerate(prompts) for j in range(members)]  # fmt: skip


def batch_of(requests: Sequence[Request], spans: Sequence[TokenSpan]) -> TrainingBatch:
    spec = GraderSpec(name="exact")
    rollouts = [
        Rollout(
            id=r.id, group=r.id // 3, member=r.id % 3, span=s, status=Status.LENGTH, sampling=r.sampling, engine="local", dtype="fp32",
            prompt=Prompt(id=str(r.id // 3), index=r.id // 3, text="", token_ids=r.prompt_ids, answer="", grader=spec, task="none"),
            reward=0.0,
        )
        for r, s in zip(requests, spans, strict=True)
    ]  # fmt: skip
    return build_batch(rollouts, np.zeros(len(rollouts)), "token_mean")


def trainer_of(model: Any, temperature: float = 1.0, **config: Any) -> LocalTrainer:
    policy = Policy(model, build_tokenizer())
    return LocalTrainer(policy, TrainConfig(**config), temperature=temperature, total_updates=1, parity=True)


@pytest.mark.usually("tiny-qwen3-moe-bf16", "tiny-qwen3-tied-fp32")
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.parametrize("preset", PRESETS)
def test_recorded_log_probs_are_the_trainers(preset: str, mode: str) -> None:
    model, experts = model_in(preset, mode), "moe" in preset
    requests = asked(temperature=0.7, return_experts=experts, return_topk=4)
    layouts: list[dict[str, Any]] = [
        {"slots": 64},
        {"slots": 3, "block_size": 5},
        {"slots": 1, "prefix_sharing": False},
        {"slots": 16, "prefill_tokens": 64, "scores": 2048},
    ]
    spans = []
    for layout in layouts:
        done = run(engine_of(model, dtype=mode, forward="parity", **layout), requests)
        spans.append([done[r.id].span for r in requests])
    for other in spans[1:]:
        assert all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(spans[0], other, strict=True))
        assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(spans[0], other, strict=True))
    batch = batch_of(requests, spans[0])
    for budget in (48, 200, 4096):
        scores = trainer_of(model, 0.7, micro_batch_tokens=budget).score(batch, experts=experts)
        assert torch.equal(scores.logprobs, batch.rollout_logprobs)
        assert scores.topk_logprobs is not None
        assert batch.rollout_topk_logprobs is not None
        assert torch.equal(scores.topk_logprobs, batch.rollout_topk_logprobs)
        if experts:
            assert scores.experts is not None
            assert batch.experts is not None
            assert torch.equal(scores.experts, batch.experts)


def test_a_pass_with_gradients_has_the_same_bits() -> None:
    model, requests = model_in("tiny-qwen3-moe", "fp32"), asked(4)
    done = run(engine_of(model, forward="parity"), requests)
    batch = batch_of(requests, [done[r.id].span for r in requests])
    for checkpointing in ("none", "layer"):
        forward = trainer_of(model, checkpointing=checkpointing)._forward
        for micro in batch.micro_batches(300, replay=False, share=True):
            scores = forward.score(micro)
            assert scores.logprobs.requires_grad
            assert torch.equal(scores.logprobs.detach(), batch.rollout_logprobs[micro.indices])


def test_tokens_behind_new_weights_are_those_of_the_new_weights() -> None:
    """Their KV is computed again, so they are fresh for a trainer that has the new weights too."""
    old, new = (model_in("tiny-qwen3-moe", "bf16", seed) for seed in (0, 1))
    requests = asked()
    engine = engine_of(old, dtype="bf16", forward="parity", slots=16)
    engine.submit(requests)
    done = {s.request_id: s for s in steps(engine, 9)}
    engine.update_weights(full_update(checkpoint_views(new).items(), 1))
    done |= drain(engine)
    batch = batch_of(requests, [done[r.id].span for r in requests])
    assert batch.versions is not None
    fresh = batch.versions == 1
    assert 0 < int(fresh.sum()) < len(fresh)
    found = trainer_of(new).score(batch).logprobs
    assert torch.equal(found[fresh], batch.rollout_logprobs[fresh])
    assert not torch.equal(found[~fresh], batch.rollout_logprobs[~fresh])


def test_what_has_no_such_arithmetic_is_refused() -> None:
    model = model_of("tiny-qwen3")
    with pytest.raises(BadInput, match=r"engine\.dtype of fp32 or bf16, got int8"):
        engine_of(model, forward="parity", dtype="int8")
    with pytest.raises(BadInput, match="none or layer, got selective"):
        trainer_of(model, checkpointing="selective")
    model.config.model_type = "gemma"
    with pytest.raises(BadInput, match="got gemma"):
        trainer_of(model)
