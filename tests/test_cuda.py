"""The same code path on a GPU: engine and trainer agree there, and a run trains.

Matters because everything else here runs on a CPU. Runs only where CUDA is (`pytest -m cuda`); does not cover speed,
several GPUs, or bit-identical repeats, which CUDA does not promise.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollkeel.config import EngineConfig, ModelConfig, TrainConfig
from rollkeel.engines.kv import Layout
from rollkeel.engines.local import LocalEngine
from rollkeel.loop import steps
from rollkeel.models import varlen
from rollkeel.models.loading import load_policy
from rollkeel.models.names import checkpoint_views
from rollkeel.models.numerics import product
from rollkeel.models.packed import PackedModel
from rollkeel.recipe import load
from rollkeel.sync.publish import DirectPublisher
from rollkeel.train.adamw import AdamW, master
from rollkeel.train.trainer import LocalTrainer
from rollkeel.types import Request, SamplingParams, Segment
from tests.sync.test_one_copy import Writes, opened

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


class Eager:
    """Runs a step from Python each time."""

    def capture(self, step: Callable[[], object]) -> Callable[[], object]:
        return step


@pytest.mark.parametrize(
    ("preset", "dtype"), [("tiny-qwen3", "fp32"), ("tiny-qwen3-tied", "bf16"), ("tiny-qwen3-moe", "bf16")]
)
@pytest.mark.parametrize("asked", [{}, {"temperature": 0.8, "top_p": 0.9, "return_topk": 3}])
def test_a_graph_is_the_step(preset: str, dtype: Any, asked: dict[str, Any]) -> None:
    """To the bit, over rollouts that join and leave, with new weights on the way."""
    policy = load_policy(ModelConfig(path=f"preset:{preset}", overrides={"initializer_range": 0.2}), "cuda")
    runs, said = list[list[Segment]](), ""
    for graphs in (None, Eager()):
        config = EngineConfig(slots=16, forward="fast", dtype=dtype)
        engine = LocalEngine(policy.model.config, config, device="cuda", max_length=256, graphs=graphs)
        publisher, rng = DirectPublisher([engine]), np.random.default_rng(0)
        publisher.publish(checkpoint_views(policy.model).items(), 0)
        for i in range(40):
            sampling = SamplingParams(max_new_tokens=5 * i + 1, seed=1, stop_token_ids=(8, 9, 10), **asked)
            engine.submit([Request(id=i, prompt_ids=rng.integers(11, 264, 1 + i), sampling=sampling)])
        out = engine.advance(40)
        publisher.publish([(name, w * 1.01) for name, w in checkpoint_views(policy.model).items()], 1)
        while engine.busy:
            out += engine.advance(16)
        runs.append(sorted(out, key=lambda s: s.request_id))
        said = said or engine.capabilities.forward
    assert "CUDA graphs" in said or torch.cuda.get_device_capability()[0] < 9
    for played, stepped in zip(*runs, strict=True):
        for name in ("token_ids", "logprobs", "kept_mass", "versions", "topk_logprobs"):
            mine, theirs = getattr(played.span, name), getattr(stepped.span, name)
            assert mine is theirs is None or np.array_equal(mine, theirs), (played.request_id, name)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("tokens", [64, 8192])
def test_prompts_without_padding_are_no_further_from_float32(
    dtype: Any, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Than padded ones: the mean gap of log-probs over groups with shared prompts, answers that are resumed, and pieces of prompts."""
    torch.backends.cuda.matmul.allow_tf32 = False
    name: Any = {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    overrides = {"initializer_range": 0.2, "hidden_size": 128}
    policy = load_policy(ModelConfig(path="preset:tiny-qwen3", dtype=name, overrides=overrides), "cuda")
    calls, counts, gaps, kernel = list[varlen.Spans](), list[int](), list[float](), varlen.attend
    monkeypatch.setattr(varlen, "attend", lambda *given: calls.append(given[3]) or kernel(*given))
    views = {n: w.clone() for n, w in checkpoint_views(policy.model).items()}
    model = policy.model.float()
    for flash in (True, False):
        if not flash:
            monkeypatch.setattr(varlen, "suits", lambda *_: False)
        config = EngineConfig(slots=24, forward="fast", dtype=dtype)
        layout = Layout(prefill_tokens=tokens)
        engine = LocalEngine(policy.model.config, config, device="cuda", max_length=512, layout=layout)
        DirectPublisher([engine]).publish(views.items(), 0)
        rng = np.random.default_rng(0)
        prompts = [rng.integers(8, 264, n) for n in (1, 2, 17, 40, 64, 65, 129, 333)]
        sampling = SamplingParams(max_new_tokens=60, temperature=1.0)
        asked = {i: Request(id=i, prompt_ids=prompts[i % 8], sampling=sampling) for i in range(32)}
        engine.submit(list(asked.values()))
        done = engine.advance(30)
        engine.interrupt(range(0, 32, 2))
        parts = [s for s in engine.poll(0) if s.request_id % 2 == 0]
        engine.submit([replace(asked[s.request_id], prefix=s.span) for s in parts])
        before = {s.request_id: s.span for s in parts}
        while engine.busy:
            done += engine.poll(60)
        far = list[np.ndarray]()
        for s in done:
            span = before[s.request_id].append(s.span) if s.request_id in before else s.span
            prompt = asked[s.request_id].prompt_ids
            ids = torch.from_numpy(np.concatenate([prompt, span.token_ids])).cuda()[None]
            with torch.no_grad():
                p = model(ids).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
            far.append(np.abs(p.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy() - span.logprobs))
        assert sorted(map(len, far)) == [60] * 32
        gaps.append(float(np.concatenate(far).mean()))
        counts.append(len(calls))
    assert counts[0] == counts[1]
    assert any(len(spans.queries) > 2 for spans in calls)
    assert {spans.keys is spans.queries for spans in calls} == {True, False}
    assert gaps[0] < 1.3 * gaps[1] + 1e-4


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
        AdamW([p], betas=(0.9, 0.999), weight_decay=0.1),
        torch.optim.AdamW([full], 1e-6, weight_decay=0.1, fused=True),
    )
    for _ in range(20):
        p.grad = torch.randn(a.shape, device="cuda")
        full.grad = p.grad.clone()
        made.step(1e-6)
        torchs.step()
    rest = made.rest(p)
    assert rest is not None
    masters = master(p.detach().flatten(), rest.flatten())
    last = (masters.view(torch.int32).long() - full.detach().flatten().view(torch.int32).long()).abs()
    if dtype == torch.float16:  # of whose masters torch's kernel is told
        assert last.max() == 0
    else:  # ours keeps to the arithmetic of torch 2.11 to 2.13: another one may round otherwise, once in a step
        assert last.max() <= 20
        assert last.float().mean() < 1


@pytest.mark.parametrize(("model", "engine"), [("bfloat16", "bf16"), ("float16", "fp16")])
def test_a_low_precision_run_trains_on_the_gpu(model: str, engine: str, tmp_path: Path) -> None:
    words = ["run.steps=2", "sft.steps=20", "eval.items=4", f"model.dtype={model}", f"engine.dtype={engine}"]
    from rollkeel.loop.job import train

    train(load("default", [*words, "run.device=cuda", f"run.dir={tmp_path / 'run'}"]))
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2


@pytest.mark.parametrize(("model", "engine"), [("float32", "fp32"), ("bfloat16", "bf16")])
@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-qwen3-moe"])
def test_under_parity_engine_and_trainer_have_the_same_bits(
    preset: str, model: str, engine: str, tmp_path: Path
) -> None:
    words = ["run.steps=3", "sft.steps=20", "eval.items=4", f"model.dtype={model}", f"engine.dtype={engine}"]
    from rollkeel.loop.job import train

    words += ["run.parity=true", f"model.path=preset:{preset}", "run.device=cuda", f"run.dir={tmp_path / 'run'}"]
    train(load("default", words))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["mismatch/ratio_std"] for row in rows[1:]] == [0.0] * 3
    assert rows[-1]["mismatch/tokens"] > 100


@pytest.mark.parametrize(("model", "engine"), [("float32", "fp32"), ("bfloat16", "bf16")])
@pytest.mark.parametrize("words", [[], ["model.path=preset:tiny-qwen3-tied"], ["train.lora.rank=4"]])
def test_trainer_and_engine_hold_the_weights_once(model: str, engine: str, words: list[str], tmp_path: Path) -> None:
    """While the engine is opened they wait in host memory, so that the GPU never holds them twice."""
    words = [f"model.dtype={model}", f"engine.dtype={engine}", *words]
    with opened(tmp_path, "run.device=cuda", "run.steps=2", *words) as run:
        assert run.apart == ""
        assert isinstance(run.engine, LocalEngine)
        run.publish()
        with Writes(run.engine.weights) as seen:
            run.publish()
        assert seen.bytes == 0
        steps.train(run, 0)
        views = checkpoint_views(run.trainer.model)
        assert {n: v.data_ptr() for n, v in views.items()} == {n: v.data_ptr() for n, v in run.engine.weights.items()}
        assert all(p.is_cuda for p in run.trainer.model.parameters())


def kept_apart(policy: Any, parents: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden states of answers, and gradients, of two prompts of 40 tokens with eight answers each: shared, or each with its own copy."""
    rng, lengths, above, ids, positions = np.random.default_rng(0), [], [], [], []
    answers = [rng.integers(8, 264, 5 + 3 * i) for i in range(16)]
    prompts = [rng.integers(8, 264, 40) for _ in range(2)]
    for i, answer in enumerate(answers):
        if parents and i % 8 == 0:
            above.append(-1)
            lengths.append(40)
            ids.append(prompts[i // 8])
            positions.append(np.arange(40))
        above.append(9 * (i // 8) if parents else -1)
        ids.append(answer if parents else np.concatenate([prompts[i // 8], answer]))
        lengths.append(len(ids[-1]))
        positions.append(np.arange(40, 40 + len(answer)) if parents else np.arange(lengths[-1]))
    cu = np.cumsum([0, *lengths]).tolist()
    row, places = (torch.from_numpy(np.concatenate(a)).cuda() for a in (ids, positions))
    policy.model.zero_grad()
    hidden = PackedModel(policy.model)(row, places, cu, parents=torch.tensor(above) if parents else None)
    members = [i for i, n in enumerate(above) if n >= 0] if parents else range(16)
    own = torch.cat([hidden[cu[i] : cu[i + 1]][-len(a) :] for i, a in zip(members, answers, strict=True)])
    (own.float() * torch.sin(torch.arange(own.numel(), device="cuda").view_as(own))).sum().backward()
    return own.detach(), {n: p.grad.float() for n, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("dtype", "far"), [("float32", 1e-4), ("bfloat16", 0.05)])
@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-qwen3-moe"])
def test_shared_prompts_have_the_gradients_of_prompts_apart(preset: str, dtype: Any, far: float) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    policy = load_policy(
        ModelConfig(path=f"preset:{preset}", dtype=dtype, overrides={"initializer_range": 0.2}), "cuda"
    )
    (apart, theirs), (shared, ours) = (kept_apart(policy, parents) for parents in (False, True))
    assert (shared.float() - apart.float()).norm() < far * apart.float().norm()
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() < 2 * far * gradient.norm().clamp_min(1e-3), name


def test_experts_without_tokens_get_no_gradient() -> None:
    """Grouped products over no rows at all must be 0 and not what memory held."""
    torch.empty(2**26, device="cuda").fill_(float("nan"))  # which a kernel that writes nothing would show
    weight = torch.randn(8, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    rows = torch.randn(48, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([0, 16, 16, 16, 48, 48, 48, 48], dtype=torch.int32, device="cuda")
    torch.nn.functional.grouped_mm(rows, weight.transpose(1, 2), offs=ends).float().sum().backward()
    assert weight.grad is not None
    used = torch.tensor([1, 4], device="cuda")
    assert torch.isfinite(weight.grad).all()
    assert weight.grad.abs().amax((1, 2)).nonzero().flatten().tolist() == used.tolist()
