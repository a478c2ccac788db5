"""What comes back from a move must be what left, to the bit, and what went wrong must leave everything where it was: a moment that is
silently zero trains another model.

Real memory of this process, and the pretend accelerator. Not covered: CUDA's streams and pinned memory; a disk that fails while the
kernel reads from it; moments of 8 bits on the pretend device, which draws no random numbers.
"""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend import DEVICE, JOURNAL

from rollkeel import host, objectives
from rollkeel.config import Config, LoraConfig, ModelConfig, TrainConfig
from rollkeel.errors import RunStopped
from rollkeel.loop.resident import Resident
from rollkeel.memory import moves
from rollkeel.memory.moves import Moves
from rollkeel.memory.shapes import shape_of
from rollkeel.models.loading import load_policy
from rollkeel.recipe import load
from rollkeel.train.state import load_state, save_state
from rollkeel.train.trainer import LocalTrainer
from tests.train.test_replay import make_batch

CUDA = (pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))


def group(device: str = "cpu", numbers: int = 100_000) -> dict[str, torch.Tensor]:
    """Tensors of several dtypes, views of one storage and a scalar."""
    g = torch.Generator().manual_seed(0)
    wide = torch.randn(3, numbers, generator=g).to(device)
    codes = torch.randint(0, 255, (numbers,), generator=g, dtype=torch.uint8).to(device)
    half = torch.randn(numbers, generator=g).bfloat16().to(device)
    return {"first": wide[0], "second": wide[1:], "codes": codes, "half": half, "step": torch.tensor(3.0).to(device)}


def copies(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in named.items()}


def assert_equal(named: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in named.items():
        assert torch.equal(tensor.detach().cpu(), expected[name]), name


@pytest.mark.parametrize("device", ["cpu", DEVICE, pytest.param("cuda", marks=CUDA)])
def test_what_comes_back_is_what_left(device: str, tmp_path: Path) -> None:
    named, moves = group(device), Moves(tmp_path)
    before, objects = copies(named), dict(named)
    for _ in range(2):
        moves.out("some", [named])
        moves.settle()
        assert moves.away("some")
        assert_equal(named, before)  # a checkpoint reads it where it is
        assert all(tensor.device.type == "cpu" for tensor in named.values())
        moves.back("some")
        moves.settle()
        assert not moves.away("some")
        assert_equal(named, before)
        assert all(named[name] is tensor for name, tensor in objects.items())
        objects["second"].mul_(2)
        before["second"].mul_(2)
        assert_equal(named, before)
    assert moves.measured()[0] == pytest.approx(4 * 1_500_000, rel=0.02)
    assert moves.measured()[0] == 0
    assert list(tmp_path.iterdir()) == []
    moves.close()


def test_memory_leaves_and_no_copy_stays(tmp_path: Path) -> None:
    moments = [{"exp_avg": torch.randn(25_000_000), "exp_avg_sq": torch.rand(25_000_000)}]
    sums, size = [t.sum() for t in moments[0].values()], 200_000_000
    moves, files = Moves(tmp_path), len(os.listdir("/proc/self/fd"))
    full = host.resident()[0]
    moves.out("moments", moments)
    moves.settle()
    assert full - host.resident()[0] > 0.99 * size
    host.forget_peak()
    moves.back("moments")
    moves.settle()
    now, peak = host.resident()
    assert abs(now - full) < 0.01 * size
    assert peak < full + 0.01 * size
    assert [t.sum() for t in moments[0].values()] == sums
    moves.close()
    assert len(os.listdir("/proc/self/fd")) == files


def refuse_second(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The second call of a function of the system fails, as on a full or broken disk."""
    calls, real = [0], getattr(os, name)

    def failing(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    monkeypatch.setattr(os, name, failing)


def test_a_full_disk_leaves_everything_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, moves = group(), Moves(tmp_path)
    before = copies(named)
    refuse_second(monkeypatch, "pwrite")
    moves.out("some", [named])
    with pytest.raises(RunStopped, match=r"memory\.offload: .*No space left on device.*memory\.offload=none"):
        moves.settle()
    assert not moves.away("some")
    named["first"].add_(1)
    before["first"].add_(1)
    moves.out("some", [named])
    moves.close()
    assert not moves.away("some")
    assert_equal(named, before)


def assert_comes_back(moves: Moves, named: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
    """After a return that failed nothing is lost, and the next one succeeds."""
    assert moves.away("some")
    assert_equal(named, before)
    moves.back("some")
    moves.close()
    assert not moves.away("some")
    assert_equal(named, before)


def test_a_failed_return_leaves_everything_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, moves = group(), Moves(tmp_path)
    before = copies(named)
    moves.out("some", [named])
    moves.settle()
    with monkeypatch.context() as broken:
        refuse_second(broken, "preadv")
        moves.back("some")
        with pytest.raises(RunStopped, match="No space"):
            moves.settle()
    assert_comes_back(moves, named, before)


def test_memory_that_lacks_on_the_way_back_is_told_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, moves = group(DEVICE), Moves(tmp_path)
    before = copies(named)
    moves.out("some", [named])
    moves.settle()
    real, calls = torch.UntypedStorage.resize_, [0]

    def full(storage: Any, size: int) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise torch.OutOfMemoryError("no memory")
        return real(storage, size)

    with monkeypatch.context() as small:
        small.setattr(torch.UntypedStorage, "resize_", full)
        with pytest.raises(torch.OutOfMemoryError):
            moves.back("some")
    assert_comes_back(moves, named, before)


KINDS: dict[str, tuple[str, dict[str, Any], TrainConfig]] = {
    "dense": ("tiny-qwen3", {}, TrainConfig(warmup_steps=0)),
    "mixture": ("tiny-qwen3-moe", {}, TrainConfig(warmup_steps=0)),
    "int8 moments": ("tiny-qwen3", {}, TrainConfig(warmup_steps=0, moments="int8")),
    "masters": ("tiny-qwen3", {"dtype": "bfloat16"}, TrainConfig(warmup_steps=0)),
    "adapters": ("tiny-qwen3", {}, TrainConfig(warmup_steps=0, lora=LoraConfig(rank=4))),
}


def trained(
    kind: str, device: str, folder: Path, level: str, saved: Path | None = None
) -> tuple[list[dict[str, float]], Any]:
    """Metrics of five updates with a reference, phases as a run has them, and the state at the end; `saved`: where a checkpoint is
    written while everything is away, from which a new trainer goes on."""
    preset, model, train = KINDS[kind]
    train = train.model_copy(update={"kl_coefficient": 0.1, "lr": 1e-3})
    config = load(None, ["engine.dtype=fp8", f"memory.offload={level}"])
    about = Config(model=ModelConfig(path=f"preset:{preset}", **model), train=train)

    def begin() -> tuple[LocalTrainer, Resident]:
        policy = load_policy(about.model, device, lora=train.lora if train.lora.rank else None)
        trainer = LocalTrainer(policy, train, temperature=1.0, total_updates=5, device=device)
        return trainer, Resident(config, trainer, folder)

    trainer, resident = begin()
    batch, rows = make_batch((5, 9, 3, 6)), list[dict[str, float]]()
    for step in range(5):
        resident.enter("rollout")
        if saved is not None and step == 3:
            resident.enter("checkpoint")
            save_state(saved, trainer.state_dict())
            resident.close()
            trainer, resident = begin()
            trainer.load_state_dict(load_state(saved))
            resident.enter("rollout")
        resident.enter("score")
        ref = trainer.ref_logprobs(batch)
        resident.enter("update")
        objective = objectives.build("grpo", {}, kl_coefficient=0.1)
        rows.append(trainer.update(batch, objective, ref_logprobs=ref, old_is_current=True).metrics)
        resident.enter("publish")
        rows.append({"weights": sum(float(w.double().sum().cpu()) for _, w in trainer.named_weights())})
    resident.enter("checkpoint")
    resident.close()
    return rows, trainer.state_dict()


def flat(state: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(state, dict):
        return {name: state.detach().cpu() if isinstance(state, torch.Tensor) else state}
    return {key: value for k, v in state.items() for key, value in flat(v, f"{name}/{k}").items()}


def assert_same(ours: Any, theirs: Any) -> None:
    assert ours[0] == theirs[0]
    one, other = flat(ours[1]), flat(theirs[1])
    assert one.keys() == other.keys()
    assert [
        k for k in one if not (torch.equal(one[k], other[k]) if torch.is_tensor(one[k]) else one[k] == other[k])
    ] == []


@pytest.mark.usually("mixture-cpu", "masters-cpu", "adapters-pretend")
@pytest.mark.parametrize(
    ("kind", "device"),
    [
        *((kind, "cpu") for kind in KINDS),
        *((kind, DEVICE) for kind in ("masters", "adapters")),
        *(pytest.param(kind, DEVICE, marks=pytest.mark.slow) for kind in ("dense", "mixture")),
    ],
)
def test_five_updates_have_the_bits_of_a_trainer_that_moves_nothing(kind: str, device: str, tmp_path: Path) -> None:
    JOURNAL.clear()
    stayed = trained(kind, device, tmp_path, "none")
    moved = trained(kind, device, tmp_path, "all", tmp_path / "state")
    assert JOURNAL.mixed == {}
    assert len(stayed[0]) == 10
    assert_same(moved, stayed)


def test_a_moment_that_changes_while_it_is_away_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above would find one."""
    stayed, real = trained("dense", "cpu", tmp_path, "none"), host.write_pages

    def spoilt(file: int, offset: int, address: int, size: int) -> None:
        real(file, offset, address, size)
        os.pwrite(file, b"\x01", offset + size - 2)

    monkeypatch.setattr(host, "write_pages", spoilt)
    with pytest.raises(AssertionError):
        assert_same(trained("dense", "cpu", tmp_path, "all"), stayed)


def test_slabs_hold_every_tensor_and_waste_little() -> None:
    """Moments and remainders of models as they are, tensor by tensor; alone each would take the next power of two."""
    for name in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"):
        sizes = [
            size * math.prod(whole)
            for _, whole, n in shape_of(name, {}).tensors()
            for size in (4, 4, 2)
            for _ in range(n)
        ]
        slabs, places = moves.packed(tuple(sizes))
        assert all(size & (size - 1) == 0 for size in slabs)
        ends = dict[int, int]()
        for (slab, start), size in sorted(zip(places, sizes, strict=True)):
            assert start >= ends.get(slab, 0)
            assert start % moves.ALIGNED == 0
            ends[slab] = start + size
        assert all(end <= slabs[slab] for slab, end in ends.items())
        assert sum(slabs) <= 1.02 * sum(sizes)
        assert sum(map(moves._power, sizes)) > 1.2 * sum(sizes)
    assert moves.packed(()) == ([], [])
    assert moves.packed((1, 2**20 + 1)) == ([2**21], [(0, 2**20 + 64), (0, 0)])
