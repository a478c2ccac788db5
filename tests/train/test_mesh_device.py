"""One rank of several on a device: a sum that brings a CPU tensor to the GPU's communicator, or a CPU scalar beside its tensors, ends every
update of every cluster run with GPUs, and no test on CPUs sees it.

The device only pretends (pretend.py), the other ranks are not there: collectives note where their tensors lie and leave in place what
this rank has. So values mean nothing here; test_mesh.py has real ranks. Not covered: FSDP (which wants a device's streams), NCCL itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pretend import DEVICE, JOURNAL, PretendTensor
from torch.distributed import distributed_c10d

from rollkeel import objectives
from rollkeel.cluster.ranks import Rank
from rollkeel.config import ModelConfig, SftConfig, TrainConfig
from rollkeel.models.loading import load_policy
from rollkeel.train import mesh as meshes
from rollkeel.train.mesh import TRAVELLED, Mesh
from rollkeel.train.optimizer import ChangedShare, Schedule, Stepper
from rollkeel.train.sft import run_sft
from rollkeel.train.trainer import LocalTrainer
from rollkeel.train.tree import norm
from tests.train.test_replay import make_batch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the device pretends beside no other")


class Travelled(list[tuple[str, str]]):
    """(Collective, device) of every tensor that went to other ranks."""

    def note(self, name: str) -> Callable[..., Any]:
        def collective(*tensors: Any, **_: Any) -> None:
            flat = [t for one in tensors for t in (one if isinstance(one, list) else [one])]
            self.extend((name, "there" if type(t) is PretendTensor else "cpu") for t in flat if torch.is_tensor(t))
            if name == "all_to_all_single":
                same = tensors[0].shape == tensors[1].shape
                tensors[0].copy_(tensors[1]) if same else tensors[0].zero_()
            elif name == "all_gather":
                for out in tensors[0]:
                    out.copy_(tensors[1])

        return collective


@pytest.fixture
def travelled(monkeypatch: pytest.MonkeyPatch) -> Travelled:
    seen = Travelled()
    for name in ("all_reduce", "all_to_all_single", "all_gather"):
        monkeypatch.setattr(dist, name, seen.note(name))
    for name in ("get_rank", "get_group_rank", "get_global_rank"):
        monkeypatch.setattr(distributed_c10d, name, lambda *_: 0)
    monkeypatch.setattr(meshes.Mesh, "everyone", lambda self, value: [value] * self.size)
    JOURNAL.clear()
    return seen


def one_of(**sizes: int) -> Mesh:
    groups = {meshes._several(Mesh(**sizes), names): object() for names in TRAVELLED}
    return Mesh(**sizes, groups={names: group for names, group in groups.items() if names})


def trainer(mesh: Mesh, preset: str = "tiny-qwen3-moe", **train: Any) -> LocalTrainer:
    policy = load_policy(ModelConfig(path=f"preset:{preset}", overrides={"initializer_range": 0.25}), DEVICE)
    config = TrainConfig.model_validate(
        {"warmup_steps": 0, "micro_batch_tokens": 32, "mesh": mesh_sizes(mesh), **train}
    )
    return LocalTrainer(policy, config, temperature=1.0, total_updates=3, device=DEVICE, mesh=mesh)


def mesh_sizes(mesh: Mesh) -> dict[str, int]:
    return {name: getattr(mesh, name) for name in meshes.SIZES}


@pytest.mark.parametrize(
    ("sizes", "preset", "reduce"),
    [
        ({"replicate": 2}, "tiny-qwen3-moe", "sum"),
        ({"replicate": 2}, "tiny-qwen3-moe", "tree"),
        ({"expert": 2}, "tiny-qwen3-moe", "sum"),
        ({"context": 2}, "tiny-qwen3", "sum"),
        ({"tensor": 2}, "tiny-qwen3", "sum"),
        ({"replicate": 2, "tensor": 2}, "tiny-qwen3-tied", "sum"),
    ],
    ids=str,
)
def test_an_update_brings_nothing_of_the_cpu(
    sizes: dict[str, int], preset: str, reduce: str, travelled: Travelled
) -> None:
    made = trainer(one_of(**sizes), preset, reduce=reduce)
    batch = make_batch(layers=2).to(torch.device(DEVICE))
    made.score(batch)
    out = made.update(batch, objectives.grpo(), old_is_current=True)
    assert out.logprobs.device.type == DEVICE
    assert travelled
    assert {where for _, where in travelled} == {"there"}
    assert dict(JOURNAL.mixed) == {}


def test_supervised_steps_bring_nothing_of_the_cpu(travelled: Travelled) -> None:
    made = trainer(one_of(replicate=2))
    pairs = [(torch.arange(8, 12).numpy(), torch.arange(20, 26).numpy())] * 4
    run_sft(made.policy, lambda where: [pairs[i % 4] for i in where], SftConfig(steps=2, batch_size=4), trainer=made)
    assert travelled
    assert {where for _, where in travelled} == {"there"}
    assert dict(JOURNAL.mixed) == {}


@pytest.mark.parametrize("sizes", [{"shard": 2}, {"expert": 2}], ids=str)
def test_sums_over_a_model_stay_on_the_device(
    sizes: dict[str, int], travelled: Travelled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, of two weights: norm, its form by rows, and the share of weights that moved."""
    mesh = one_of(**sizes)
    monkeypatch.setattr(meshes.Mesh, "over_shards", lambda self, t: self.over_model(t))
    p = torch.nn.Parameter(torch.tensor([3.0, 4.0]).to(DEVICE))
    p.grad = torch.tensor([3.0, 4.0]).to(DEVICE)
    stepper = Stepper([("w", p)], Schedule(lr=1.0, warmup_steps=0, kind="constant", total=9), mesh=mesh, clip_norm=9.0)
    assert float(stepper._norm([p.grad])) == 5.0
    if mesh.shard == 1:
        assert float(norm([p], mesh)) == 5.0
    changed = ChangedShare(stepper.adamw, mesh, [p])
    before = changed.look()
    with torch.no_grad():
        p.add_(torch.tensor([0.0, 1.0]).to(DEVICE))
    assert changed.since(before) == 0.5
    assert mesh.losses([], torch.device(DEVICE)) == [0.0]
    assert mesh.losses([p.sum().detach()], torch.device(DEVICE)) == [8.0]
    assert {where for _, where in travelled} == {"there"}
    assert dict(JOURNAL.mixed) == {}


@pytest.mark.parametrize(("device", "backend"), [("cuda", "cpu:gloo,cuda:nccl"), ("cpu", "gloo")])
def test_ranks_meet_by_a_backend_for_each_device(device: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects travel between CPUs, which NCCL alone would bring to the GPU."""
    asked = list[Any]()

    def meet(backend: str, **_: Any) -> None:
        asked.append(backend)
        raise RuntimeError("nobody there")

    monkeypatch.setattr(dist, "init_process_group", meet)
    monkeypatch.setattr("rollkeel.cluster.ranks.device_of", lambda _: torch.device(device))
    rank: Any = Rank.__new__(Rank)
    rank._world, rank._rank, rank._config = 2, 0, None
    with pytest.raises(Exception, match="nobody there"):
        rank._join("127.0.0.1", 1, 1.0)
    assert asked == [backend]
