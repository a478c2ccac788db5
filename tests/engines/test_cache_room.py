"""Without `engine.kv_memory_gb` a GPU's cache takes what the run leaves: too much, and the first update runs out of memory hours later;
too little, and sequences wait for blocks on an empty card.

Sizes are computed by hand, and the device is asked through stand-ins for torch's calls. Not covered: a real card, vLLM's own memory.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollkeel.cluster import machines
from rollkeel.config import EngineConfig
from rollkeel.engines import open as opening
from rollkeel.engines.open import left_gb, open_engine
from rollkeel.loop.room import beside_engine
from rollkeel.memory.plan import OF_ENGINE, Setting, beside_cache, plan
from rollkeel.memory.shapes import PUBLIC, shape_of
from rollkeel.models.loading import Policy
from rollkeel.models.presets import build_preset
from rollkeel.recipe import load

GB = 2**30
CARD = torch.device("cuda")
NAME = "Qwen/Qwen3-0.6B"
LONGEST = Setting(prompt=4096)
LOW = [f"model.path={NAME}", "model.dtype=bfloat16", "engine.dtype=bf16"]


def card(patch: pytest.MonkeyPatch, free: float, total: float, held: float, reserved: float) -> None:
    """A device with so many GiB free, so many reserved by this process, and so many of those in use."""
    patch.setattr(torch.cuda, "mem_get_info", lambda *_: (int(free * GB), int(total * GB)))
    patch.setattr(torch.cuda, "memory_reserved", lambda *_: int(reserved * GB))
    patch.setattr(torch.cuda, "memory_allocated", lambda *_: int(held * GB))


@pytest.mark.parametrize(
    ("free", "held", "reserved", "planned", "room"),
    [
        (90, 10, 10, 40, 0.8 * (90 - 30 - 6)),  # 10 of the 40 are there already
        (50, 10, 50, 40, 0.8 * (90 - 30 - 6)),  # and 40 that a warm start needed no longer are
        (50, 50, 50, 40, 0.8 * (50 - 6)),
        (60, 10, 10, 40, 0.8 * (60 - 30 - 6)),  # others hold 30
        (90, 10, 10, 100, 4.0),  # nothing is left: what there is without a GPU
        (5, 0, 0, 100, 0.4 * 5),
    ],
)
def test_it_is_four_fifths_of_what_is_left(
    free: float, held: float, reserved: float, planned: float, room: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    card(monkeypatch, free, 100, held, reserved)
    assert left_gb(CARD, int(planned * GB)) == pytest.approx(room)


@pytest.mark.parametrize(
    ("asked", "planned", "processes", "given"),
    [(None, 40, 0, 0.8 * 44), (None, 40, 2, 0.4 * 44), (7.0, 40, 0, 7.0), (None, None, 0, None)],
)
def test_engines_get_it_unless_somebody_asked_for_more_or_less(
    asked: float | None, planned: int | None, processes: int, given: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes share it; where nobody planned, an engine looks for itself."""
    card(monkeypatch, 90, 100, 0, 0)
    seen = list[Any]()
    monkeypatch.setattr(opening, "LocalEngine", lambda _, config, **__: seen.append(config))
    monkeypatch.setattr("rollkeel.engines.workers.WorkerEngine", lambda _, config, **__: seen.append(config))
    config = EngineConfig(kv_memory_gb=asked, processes=processes)
    open_engine(None, config, CARD, planned=None if planned is None else planned * GB)
    assert seen[0].kv_memory_gb == (None if given is None else pytest.approx(given))
    open_engine(None, config, "cpu", planned=40 * GB)
    assert seen[1] is config


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_beside_it_lies_what_the_fullest_phase_has(offload: str) -> None:
    config, shape = load(None, [*LOW, f"memory.offload={offload}"]), shape_of(NAME, {})
    parts = plan(config, shape, LONGEST).parts
    if offload == "none":  # KV lies beside everything
        wanted = sum(parts.values()) - parts["KV blocks"]
    else:  # masters and moments are away while KV is there, weights are shared
        wanted = parts["weights"] + parts["engine's buffers"]
    assert beside_cache(config, PUBLIC[NAME]) == wanted
    assert beside_cache(config, {"model_type": "mamba"}) is None


LARGE = "Qwen/Qwen3-4B"
COLOCATED = ["cluster.trainers=1", "cluster.engines=1", "cluster.placement=colocated"]


@pytest.mark.parametrize("held", [0.0, 16.1, 66.0], ids=["first", "rank has loaded", "in the place of a lost one"])
def test_a_colocated_engine_finds_the_same_room_whenever_it_starts(
    held: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank, another process, holds of the card already is part of the plan: it must not be taken off twice."""
    config = load(None, [f"model.path={LARGE}", *LOW[1:], "train.checkpointing=layer", *COLOCATED])
    planned = beside_cache(config, PUBLIC[LARGE])
    assert planned is not None
    # Weights and remainders, gradients, moments of 8 bytes; an engine's weights; passes, buffers and messages beside them.
    assert 18 * 4.022e9 < planned < 18 * 4.022e9 + 16e9
    card(monkeypatch, 139.8 - held, 139.8, 0, 0)
    assert left_gb(CARD, planned, others=True) == pytest.approx(0.8 * (139.8 * 0.94 - planned / GB))
    if held:
        assert left_gb(CARD, planned) < left_gb(CARD, planned, others=True) - min(0.7 * held, 40)


def test_engine_actors_are_told_that_ranks_hold_some_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs, where they look at a device; engines of a CPU are told nothing."""
    told = list[dict[str, Any]]()
    monkeypatch.setattr(machines, "ElasticEngine", lambda *_, **about: told.append(about) or SimpleNamespace())
    run: Any = machines.RayMachines.__new__(machines.RayMachines)
    run._config, run.policy = load(None, COLOCATED), Policy(*build_preset("tiny-qwen3-moe", 1))
    run._places, run._count = SimpleNamespace(engine=None, there=None, leave=None), 1
    for run._gpus in (1, 0):
        run._engines()
    assert (told[0]["planned"], told[0]["others"]) == (beside_engine(run._config, run.policy), True)
    assert not {"planned", "others"} & told[1].keys()


@pytest.mark.parametrize("placement", ["disaggregated", "colocated"])
def test_an_engine_on_a_device_of_its_own_has_nobody_beside_it(placement: str) -> None:
    config = load(None, [*LOW, "cluster.trainers=2", "cluster.engines=2", f"cluster.placement={placement}"])
    parts = plan(config, shape_of(NAME, {}), LONGEST).parts
    own = sum(parts[name] for name in OF_ENGINE) - parts["KV blocks"]
    ranks = sum(parts.values()) - own - parts["KV blocks"]
    assert beside_cache(config, PUBLIC[NAME]) == own + (ranks if placement == "colocated" else 0)


@pytest.mark.parametrize(("words", "prompt"), [([], 4096), (["engine.max_length=30000"], 30_000 - 256)])
def test_long_prompts_are_kept_room_for(words: list[str], prompt: int) -> None:
    """Qwen3-0.6B, everything kept: a sequence is never split."""
    config = load(None, [*LOW, "sampling.max_new_tokens=256", "train.micro_batch_tokens=512", *words])
    short = plan(config, shape_of(NAME, {}), Setting(prompt=256)).parts["activations"]
    assert short % 512 == 0
    parts = plan(config, shape_of(NAME, {}), Setting(prompt=prompt)).parts
    assert parts["activations"] == short // 512 * (prompt + 256)
    assert beside_cache(config, PUBLIC[NAME]) == sum(parts.values()) - parts["KV blocks"]


def test_runs_tell_it_where_an_engine_needs_to_know() -> None:
    config = load(None, ["engine.kv_memory_gb=null"])
    policy = Policy(*build_preset("tiny-qwen3-moe", 1))
    found, count = beside_engine(config, policy), sum(p.numel() for p in policy.model.parameters())
    assert found is not None
    assert found > 4 * 4 * count  # weights, gradients and moments
    config = load(None, ["engine.kv_memory_gb=null", "train.lora.rank=4", "train.lora.experts=true"])
    assert beside_engine(config, policy) < found
    server = load(None, ["engine.kind=vllm", "engine.server.options={gpu-memory-utilization: 0.5}"])
    assert beside_engine(server, policy) is None
