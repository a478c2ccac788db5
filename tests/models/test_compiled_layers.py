"""`train.compile`: layers that go through torch.compile must learn the same, for every length, and say where they cannot.

Gradients are compared with those of the modules: dense, tied and mixtures, free and replayed routing, with checkpointing and with
adapters. Here layers are traced and differentiated as for a compiler and run by torch's own kernels; inductor's C++ is a slow
test. Not covered: inductor's kernels for CUDA, and speed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.utils

from rollkeel import objectives
from rollkeel.config import LoraConfig, ModelConfig, Recompute, TrainConfig
from rollkeel.errors import BadInput
from rollkeel.models import compiled_layers
from rollkeel.models.adapters import parameters
from rollkeel.models.loading import load_policy
from rollkeel.models.packed import PackedModel
from rollkeel.train.trainer import LocalTrainer
from tests.models.test_checkpointing import IDS, POSITIONS, gradients, preset
from tests.train.test_trainer import make_batch


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layers, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def near(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 1e-5) -> bool:
    return a.keys() == b.keys() and all((x - b[n]).norm() <= tolerance * b[n].norm() for n, x in a.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-qwen3-tied", "tiny-qwen3-moe"])
def test_gradients_are_those_of_the_modules(name: str) -> None:
    net = preset(name)
    plain, ours = (PackedModel(net, fuse=False, compiled=c) for c in (False, True))
    want = gradients(plain)
    assert near(gradients(ours), want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert all("forward" not in m.__dict__ for m in net.modules())
    if name == "tiny-qwen3-moe":
        own, told = list[torch.Tensor](), list[torch.Tensor]()
        assert near(gradients(ours, experts=told), gradients(plain, experts=own))
        assert all(map(torch.equal, own, told))
        where = torch.arange(0, len(IDS), 3)
        replay = ((torch.stack(own, 1) + 3) % 8)[where], where
        bound = gradients(ours, replay=replay)
        assert near(bound, gradients(plain, replay=replay))
        assert not near(bound, want)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["layer", "selective"])
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3-moe"])
def test_checkpointing_goes_together_with_it(name: str, mode: str) -> None:
    net = preset(name)
    assert near(
        gradients(PackedModel(net, recompute=Recompute(mode), compiled=True)), gradients(PackedModel(net, fuse=False))
    )


@pytest.mark.slow
def test_neither_layers_nor_lengths_are_compiled_again() -> None:
    """A model of 36 layers, or a new length, would else reach torch's limit of recompilations, and run as if nothing were set."""
    made = load_policy(ModelConfig(path="preset:tiny-qwen3", overrides={"num_hidden_layers": 12, "hidden_size": 16}))
    packed, graphs = PackedModel(made.model, compiled=True), torch._dynamo.utils.counters["stats"]
    first = graphs["unique_graphs"]
    assert 0 < first <= 4
    for lengths in ([5, 9], [40, 2, 2, 2], [17]):
        ids = torch.arange(sum(lengths)) % 90 + 8
        cu = torch.tensor([0, *lengths]).cumsum(0)
        packed(ids, torch.cat([torch.arange(n) for n in lengths]), cu).sum().backward()
    assert graphs["unique_graphs"] <= 3 * first  # once more with gradient, and for a batch that needs no reordering
    assert not torch._dynamo.utils.counters["recompile_limit"]


@pytest.mark.slow
def test_a_trainer_learns_the_same() -> None:
    results = []
    for compiled in (False, True):
        policy = load_policy(ModelConfig(path="preset:tiny-qwen3-moe", overrides={"initializer_range": 0.25}))
        config = TrainConfig(compile=compiled, warmup_steps=0, lr=1e-3, micro_batch_tokens=16, clip_norm=1e9)
        trainer = LocalTrainer(policy, config, temperature=1.0, total_updates=2)
        batch = make_batch(6)
        out = trainer.update(batch, objectives.grpo(), old_is_current=True)
        results.append((out.metrics["optimizer/grad_norm"], trainer.logprobs(batch)[0]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-3, rtol=1e-3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow
def test_adapters_learn_the_same() -> None:
    made = load_policy(ModelConfig(path="preset:tiny-qwen3"), lora=LoraConfig(rank=4))
    for p in parameters(made.model).values():
        p.data.uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(1))
    plain, ours = (gradients(PackedModel(made.model, fuse=False, compiled=c)) for c in (False, True))
    assert len(plain) > 4
    assert near(ours, plain)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision(dtype: Any) -> None:
    made = load_policy(ModelConfig(path="preset:tiny-qwen3", dtype=dtype, overrides={"initializer_range": 0.25}))
    plain, ours = (gradients(PackedModel(made.model, fuse=False, compiled=c)) for c in (False, True))
    assert near(ours, plain, 0.05)


def test_what_cannot_be_compiled_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise OSError("no compiler\nin the path")

    monkeypatch.setattr(compiled_layers, "BACKEND", broken)
    with pytest.raises(BadInput, match=r"^train\.compile: .*no compiler in the path.*; set train\.compile=false$"):
        PackedModel(preset("tiny-qwen3"), compiled=True)


def test_what_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(graph: torch.fx.GraphModule, _: Any) -> Any:
        return lambda *args: [x * 1.1 if torch.is_tensor(x) and x.is_floating_point() else x for x in graph(*args)]

    monkeypatch.setattr(compiled_layers, "BACKEND", wrong)
    with pytest.raises(BadInput, match="something else"):
        PackedModel(preset("tiny-qwen3"), compiled=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3-moe"])
def test_inductor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layers, "BACKEND", "inductor")
    net = preset(name)
    plain, ours = (PackedModel(net, fuse=False, compiled=c) for c in (False, True))
    assert near(gradients(ours), gradients(plain))
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS, POSITIONS, [0, 7, 10, 22]), plain(IDS, POSITIONS, [0, 7, 10, 22]))
