"""Tiny runs that use all of what a device computes: every loop, model and dtype, and the settings that go apart from them."""

from __future__ import annotations

TINY = [
    "run.steps=1",
    "data.options.digits=2",
    "sft.steps=0",
    "sft.batch_size=8",
    "model.overrides.hidden_size=32",
    "sampling.max_new_tokens=32",
    "reward.overlong.buffer=32",  # answers of random tokens get rewards that vary
    "rollout.prompts=4",
    "rollout.samples=2",
    "train.updates_per_step=2",
    "train.micro_batch_tokens=96",
    "eval.every=0",
    "eval.items=2",
    "eval.samples=1",
    "eval.greedy=false",
    "report.samples=0",
]

RUNS = {
    "sync": ["sft.steps=1", "checkpoint.every=1"],
    "lag": ["model.path=preset:tiny-qwen3", "experiment.lag=1", "engine.dtype=bf16", "run.steps=2"],
    "budgeted": ["model.path=preset:tiny-qwen3-tied", "run.loop=budgeted", "rollout.budget={tokens: 40, capacity: 4}", "engine.dtype=fp8", "run.steps=2"],
    "kept": ["model.path=preset:tiny-qwen3", "run.loop=budgeted", "rollout.budget={tokens: 40, capacity: 4}", "engine.kv=keep", "engine.dtype=int4", "run.steps=2"],
    "async": ["run.loop=async", "engine.processes=1", "engine.dtype=int8", "run.steps=2"],
    "replayed": ["rollout.routing=replay", "model.dtype=bfloat16", "engine.dtype=bf16", "train.updates_per_step=1"],
    "truncated": ["objective.name=dppo_topk_kl", "sampling.top_p=0.9", "train.kl_coefficient=0.1", "train.kl_in=reward", "engine.dtype=int8"],
    "half": ["model.path=preset:tiny-qwen3-tied", "model.dtype=float16", "engine.dtype=fp16", "sft.steps=1"],
    "low": ["model.dtype=bfloat16", "engine.dtype=bf16", "train.lora.rank=3", "train.lora.experts=true", "train.checkpointing=layer", "train.checkpointed_layers=1"],
    "lora": ["train.lora.rank=4", "train.lora.experts=true", "run.steps=2", "checkpoint.every=1", "train.kl_coefficient=0.1"],
    "offloaded": ["memory.offload=all", "engine.dtype=bf16", "train.kl_coefficient=0.1", "run.steps=2", "checkpoint.every=1", "eval.every=1"],
    "rounded": ["experiment.rounding=int8", "engine.dtype=int8", "train.kl_coefficient=0.1", "train.entropy_coefficient=0.01", "trace.tensors_every=1"],
}  # fmt: skip
ON_A_CARD = {
    "eight": ["model.path=preset:tiny-qwen3-tied", "model.dtype=bfloat16", "engine.dtype=bf16", "train.moments=int8", "train.checkpointing=selective", "sft.steps=1"],
}  # fmt: skip
"""What the device that only pretends has no generator for."""


LOOPS = {
    "sync": [],
    "lag": ["experiment.lag=1"],
    "budgeted": ["run.loop=budgeted", "rollout.budget={tokens: 40, capacity: 4}"],
    "kept": ["run.loop=budgeted", "rollout.budget={tokens: 40, capacity: 4}", "engine.kv=keep"],
    "async": ["run.loop=async", "engine.processes=1"],
}
MODELS = ("tiny-qwen3", "tiny-qwen3-tied", "tiny-qwen3-moe")
NUMBERS = {
    "fp32": [],
    "bf16": ["model.dtype=bfloat16", "engine.dtype=bf16"],
    "fp16": ["model.dtype=float16", "engine.dtype=fp16"],
    "int8": ["engine.dtype=int8"],
    "lora": ["train.lora.rank=4", "train.lora.experts=true"],
}


def combined(loop: str, model: str, numbers: str) -> list[str]:
    """Settings of one loop, model and dtype."""
    settings = [f"model.path=preset:{model}", "run.steps=2", "sft.steps=1", *LOOPS[loop], *NUMBERS[numbers]]
    if numbers == "lora" and model != "tiny-qwen3-moe":
        settings.remove("train.lora.experts=true")
    return settings
