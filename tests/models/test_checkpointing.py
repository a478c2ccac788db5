"""Checkpointing must save memory and change nothing: gradients of another pass train another model, without any error.

Gradients are compared bit for bit on a CPU: dense, tied and mixtures, packed and padded, with rollkeel's own passes and
transformers' modules, with free and replayed routing, from trainer to helper process. Saved bytes are counted on the meta device at
Qwen3-4B's shape. Not covered: CUDA, time, reward models (their forward is transformers' own).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import AutoModelForCausalLM, Qwen3Config

from rollkeel import objectives
from rollkeel.config import LoraConfig, ModelConfig, Recompute, TrainConfig
from rollkeel.models import checkpointing, jit, packed_attention
from rollkeel.models import packed as packed_module
from rollkeel.models.adapters import attach
from rollkeel.models.checkpointing import _Results
from rollkeel.models.loading import load_policy
from rollkeel.models.packed import PackedModel
from rollkeel.models.routers import expert_layers, record_experts
from rollkeel.train.trainer import LocalTrainer
from tests.train.test_replay import make_batch

MODES = ("layer", "selective")
WAYS = tuple(map(Recompute, ("none", *MODES)))
LENGTHS = [7, 3, 12]
IDS = torch.arange(sum(LENGTHS)) * 7 % 96 + 8
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])
CU = torch.tensor([0, *LENGTHS]).cumsum(0)


def preset(name: str) -> Any:
    return load_policy(ModelConfig(path=f"preset:{name}", overrides={"initializer_range": 0.25})).model.eval()


def gradients(packed: PackedModel, **options: Any) -> dict[str, torch.Tensor]:
    packed.model.zero_grad()
    hidden = packed(IDS, POSITIONS, CU, **options)
    hidden.mul(torch.sin(torch.arange(hidden.numel()) * 0.37).view_as(hidden)).sum().backward()
    return {n: p.grad.clone() for n, p in packed.model.named_parameters() if p.grad is not None} | {"": hidden.detach()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["fused", "modules", "padded"])
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3-tied", "tiny-qwen3-moe"])
def test_every_gradient_has_the_same_bits(name: str, form: str, mode: str) -> None:
    net = preset(name)
    plain, less = (PackedModel(net, fuse=form == "fused", recompute=Recompute(m)) for m in ("none", mode))
    plain.varlen = less.varlen = form != "padded"
    assert same(gradients(plain), gradients(less))
    assert saved_bytes(less) < 0.6 * saved_bytes(plain)
    assert all("forward" not in m.__dict__ for m in net.modules())


@pytest.mark.parametrize("mode", MODES)
def test_the_first_layers_alone(mode: str) -> None:
    """One of two keeps less than both and more than none; a third layer that is not there is no error."""
    ways = [Recompute(mode, layers) for layers in (0, 1, 2, 3, None)]
    packed = [PackedModel(preset("tiny-qwen3-moe"), recompute=way) for way in ways]
    every, *others = map(gradients, packed)
    assert all(same(every, other) for other in others)
    none, one, *both = map(saved_bytes, packed)
    assert none > one > both[0] == both[1] == both[2]
    layers = packed[1].model.model.layers
    assert [layer.module for layer in packed[1]._checkpointed] == [layers[0]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padded", [False, True])
def test_routes_are_drawn_and_told_once_and_replayed_ones_stay(mode: str, padded: bool) -> None:
    net = preset("tiny-qwen3-moe")
    plain, less = (PackedModel(net, recompute=Recompute(m)) for m in ("none", mode))
    plain.varlen = less.varlen = not padded
    own, told = list[torch.Tensor](), list[torch.Tensor]()
    assert same(gradients(plain, experts=own), gradients(less, experts=told))
    assert len(told) == 2
    assert all(map(torch.equal, own, told))
    where = torch.arange(0, len(IDS), 3)
    ids = ((torch.stack(own, 1) + 3) % 8)[where]
    told.clear()
    bound = [gradients(p, replay=(ids, where), experts=list[torch.Tensor]()) for p in (plain, less)]
    assert same(*bound)
    assert not same(bound[0], gradients(plain))


def test_the_second_run_goes_to_the_experts_of_the_first() -> None:
    """A router whose scores have changed in between, as rounding may change them on a GPU, does not change the routes."""
    net = preset("tiny-qwen3-moe")
    less = PackedModel(net, recompute=Recompute("layer"))
    first = list[torch.Tensor]()
    hidden = less(IDS, POSITIONS, CU, first)
    for layer in net.model.layers:
        layer.mlp.gate.weight.data.neg_()
    with record_experts(expert_layers(net)) as again:
        hidden.sum().backward()
    assert len(again) == len(first)
    assert all(map(torch.equal, reversed(again), first))


def test_a_retained_graph_runs_its_layers_a_third_time() -> None:
    less = PackedModel(preset("tiny-qwen3-moe"), recompute=Recompute("selective"))
    loss = less(IDS, POSITIONS, CU).square().sum()
    weights = [p for n, p in less.model.named_parameters() if n.startswith("model")]
    once, twice = (torch.autograd.grad(loss, weights, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, once, twice))


@pytest.mark.parametrize(
    ("processes", "replay"),
    [(1, False), (1, True), *(pytest.param(2, replay, marks=pytest.mark.slow) for replay in (False, True))],
)
def test_updates_of_the_trainer_have_the_same_bits(processes: int, replay: bool) -> None:
    results = []
    for mode in ("none", *MODES):
        policy = load_policy(ModelConfig(overrides={"initializer_range": 0.25}))
        config = TrainConfig(checkpointing=mode, warmup_steps=0, lr=1e-3, processes=processes, micro_batch_tokens=16)
        trainer = LocalTrainer(policy, config, temperature=1.0, total_updates=2, replay_routing=replay)
        try:
            batch = make_batch()
            out = trainer.update(batch, objectives.grpo(), old_is_current=True, experts=True)
            assert out.experts is not None
            results.append(dict(trainer.model.named_parameters()) | {"experts": out.experts, "p": out.logprobs})
        finally:
            trainer.close()
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_scoring_without_gradient_lends_nothing() -> None:
    less = PackedModel(preset("tiny-qwen3"), recompute=Recompute("layer"))
    with torch.no_grad():
        hidden = less(IDS, POSITIONS, CU)
    assert torch.equal(hidden, PackedModel(less.model)(IDS, POSITIONS, CU))


def saved_bytes(packed: PackedModel) -> int:
    """Bytes that a pass keeps for its backward, weights apart."""
    weights = {p.untyped_storage()._cdata for p in packed.model.parameters()}
    return kept_by(lambda: packed(IDS, POSITIONS, CU), weights)


def kept_by(run: Any, weights: set[int]) -> int:
    storages: dict[int, torch.UntypedStorage] = {}

    def see(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    class Seen(_Results):
        def __init__(self, names: frozenset[str]) -> None:
            super().__init__(names)
            results.append(self)

    results = list[_Results]()
    with pytest.MonkeyPatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        patch.setattr(checkpointing, "_Results", Seen)
        out = run()
    assert out.requires_grad
    tree_map_only(torch.Tensor, see, [r.kept for r in results])  # outside autograd
    return sum(s.nbytes() for key, s in storages.items() if key not in weights)


class Counted(TorchDispatchMode):
    """Counts attention operations."""

    runs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        self.runs += ("scaled_dot_product" in name or "packed_attention" in name) and "backward" not in name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(("mode", "again"), [("none", 0), ("selective", 0), ("layer", 2)])
def test_selective_does_not_compute_attention_again(
    mode: str, again: int, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers; kernels take both lengths of sequences at once."""
    if not kernels:
        monkeypatch.setattr(packed_attention, "suits", lambda *_: False)
    packed = PackedModel(preset("tiny-qwen3"), recompute=Recompute(mode))
    hidden = packed(IDS, POSITIONS, CU)
    with Counted() as counted:
        hidden.sum().backward()
    assert counted.runs == again * (1 if kernels and jit.FOUND else 2)


def on_cuda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, _: float = 0.0) -> torch.Tensor:
    return packed_module._cuda_varlen(q, k, v, packed_module._LAYOUT.get(), scaling).flatten(1)


def kept_on_meta(
    config: Any,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    ways: Sequence[Recompute] = WAYS,
    lora: LoraConfig | None = None,
) -> list[float]:
    """Bytes per token that autograd keeps of one sequence of 2,048 tokens as on a CUDA device, for each of `ways`."""
    monkeypatch.setattr(packed_module, "_replaceable", lambda *_: False)  # its probe needs values
    monkeypatch.setattr(packed_module, "_attend", on_cuda)
    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        if lora is not None:
            attach(net, lora, device="meta")
        ids, positions = torch.zeros(2048, dtype=torch.int64), torch.zeros(2048, dtype=torch.int64)
    weights, kept = {p.untyped_storage()._cdata for p in net.parameters()}, []
    for way in ways:
        packed = PackedModel(net, recompute=way)
        packed.varlen = True
        kept.append(kept_by(lambda packed=packed: packed(ids, positions, [0, 2048]), weights) / 2048)
    return kept


def test_qwen3_4b_keeps_a_thirtieth(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Qwen3Config(
        hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        intermediate_size=9728, vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    every, *less = kept_on_meta(config, torch.bfloat16, monkeypatch)
    assert [round(count / 1000) for count in (every, *less)] == [6146, 200, 499]
    # Of nine of the 36 layers, beside what the last norm keeps; of none.
    end = 2560 * (4 + 2)
    nine = [(9 * (of_all - end) + 27 * (every - end)) / 36 + end for of_all in less]
    ways = [*(Recompute(mode, 9) for mode in MODES), Recompute("layer", 0)]
    assert kept_on_meta(config, torch.bfloat16, monkeypatch, ways) == pytest.approx([*nine, every], rel=1e-4)
