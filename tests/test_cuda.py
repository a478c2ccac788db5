"""The same code path on a GPU: engine and trainer agree there, and a run trains.

Matters because everything else here runs on a CPU. Runs only where CUDA is (`pytest -m cuda`); does not cover speed,
several GPUs, or bit-identical repeats, which CUDA does not promise.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rollkeel.config import EngineConfig, ModelConfig, TrainConfig
from rollkeel.engines.local import LocalEngine
from rollkeel.models.loading import load_policy
from rollkeel.models.numerics import product
from rollkeel.recipe import load
from rollkeel.sync.publish import DirectPublisher
from rollkeel.train.adamw import AdamW, master
from rollkeel.train.trainer import LocalTrainer
from rollkeel.types import Request, SamplingParams

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("preset", ["tiny-qwen3-moe", "tiny-qwen3", "tiny-qwen3-tied"])
def test_engine_and_trainer_agree_in_fp32(preset: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    policy = load_policy(ModelConfig(path=f"preset:{preset}", overrides={"initializer_range": 0.2}), "cuda")
    trainer = LocalTrainer(policy, TrainConfig(), temperature=1.0, total_updates=1, device="cuda")
    engine = LocalEngine(policy.model.config, EngineConfig(slots=16), device="cuda", max_length=128)
    DirectPublisher([engine]).publish(trainer.named_weights(), 0)
    rng = np.random.default_rng(0)
    requests = [
        Request(id=i, prompt_ids=rng.integers(8, 264, 10 + i), sampling=SamplingParams(max_new_tokens=48))
        for i in range(40)
    ]
    engine.submit(requests)
    worst, tokens = 0.0, 0
    segments = []
    while part := engine.poll(60):
        segments += part
    assert len(segments) == len(requests)
    with torch.no_grad():
        for s in segments:
            prompt = requests[s.request_id].prompt_ids
            ids = torch.from_numpy(np.concatenate([prompt, s.span.token_ids])).cuda()[None]
            p = policy.model(ids).logits[0].float().log_softmax(-1)[len(prompt) - 1 : -1]
            p = p.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy()
            gap = np.abs(p - s.span.logprobs)
            worst, tokens = max(worst, float(np.quantile(gap, 0.99))), tokens + len(gap)
    assert tokens > 1000
    assert worst < 1e-4


def test_a_run_trains_on_the_gpu(tmp_path: Path) -> None:
    from rollkeel.loop.job import train

    config = load(
        "default",
        [
            "run.device=cuda", "run.steps=3", "sft.steps=20", "eval.items=8", "eval.samples=2",
            f"run.dir={tmp_path / 'run'}", 
        ],
    )  # fmt: skip
    folder = train(config)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[-1]["mismatch/ratio_std"] < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_float32_and_masters_those_of_adamw(dtype: torch.dtype) -> None:
    a, b = torch.randn(33, 64, device="cuda").to(dtype), torch.randn(64, 40, device="cuda").to(dtype)
    assert product(a, b).dtype == torch.float32
    torch.testing.assert_close(product(a, b).double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)
    p = torch.nn.Parameter(a.clone())
    full = torch.nn.Parameter(a.float())
    made, torchs = (
        AdamW([p], betas=(0.9, 0.999), weight_decay=0.0),
        torch.optim.AdamW([full], 1e-6, weight_decay=0, fused=True),
    )
    for _ in range(20):
        p.grad = torch.randn(a.shape, device="cuda")
        full.grad = p.grad.clone()
        made.step(1e-6)
        torchs.step()
    rest = made.rest(p)
    assert rest is not None
    assert torch.equal(master(p.detach().flatten(), rest.flatten()), full.detach().flatten())


@pytest.mark.parametrize(("model", "engine"), [("bfloat16", "bf16"), ("float16", "fp16")])
def test_a_low_precision_run_trains_on_the_gpu(model: str, engine: str, tmp_path: Path) -> None:
    words = ["run.steps=2", "sft.steps=20", "eval.items=4", f"model.dtype={model}", f"engine.dtype={engine}"]
    from rollkeel.loop.job import train

    train(load("default", [*words, "run.device=cuda", f"run.dir={tmp_path / 'run'}"]))
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2
