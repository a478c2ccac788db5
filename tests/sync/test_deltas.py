"""An engine that adds a delta to weights it does not hold samples from a policy that nobody trained, and every number of the run looks fine.

A thousand random histories of updates, restarts, missed publications and late joiners; a hundred of each fault; the embedded engine,
alone and in worker processes, to the bit what full updates give. Not covered: engine actors of a cluster and vLLM, which take full
updates; a GPU (the arithmetic it uses is in `models/test_delta.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import TINY, cli, files, rows

from rollkeel.config import EngineConfig
from rollkeel.engines.local import LocalEngine
from rollkeel.engines.open import open_engine
from rollkeel.engines.weights import take
from rollkeel.errors import DeltaRefused, EngineFailure
from rollkeel.models.names import checkpoint_views
from rollkeel.models.numerics import compute_dtype, rounded
from rollkeel.models.presets import build_preset
from rollkeel.recipe import load
from rollkeel.sync.history import Delta, History, catch_up, trimmed
from rollkeel.sync.publish import DirectPublisher, full_update
from rollkeel.sync.shared import no_deltas
from rollkeel.types import Capabilities, Proof, WeightUpdate

SHAPES = {"layers.0.up_proj.weight": (48, 50), "norm.weight": (50,), "embed.weight": (50, 31)}
Weights = dict[str, torch.Tensor]
Spoil = Callable[[WeightUpdate], WeightUpdate]


class Engine:
    """The weights of an engine and what it says of them; its memory begins as garbage. `spoil` changes what arrives."""

    def __init__(self, mode: str, shapes: Any = SHAPES) -> None:
        self.destinations = {n: torch.full(s, 7.0, dtype=compute_dtype(mode)) for n, s in shapes.items()}
        self.adapters: Weights = {}
        self.capabilities = Capabilities(name="e", dtype=mode, max_length=8, proves_memory=True)
        self.version, self.spoil = -1, None
        self.seen: list[tuple[str, int | None]] = []

    def update_weights(self, update: WeightUpdate) -> Proof:
        self.seen.append((update.kind, update.base_version))
        base, self.version = self.version, -1
        spoil, self.spoil = self.spoil, None
        checksum, self.version = take(spoil(update) if spoil else update, self, self.capabilities.dtype, base)
        return Proof(version=self.version, checksum=checksum)


def start(rng: np.random.Generator) -> Weights:
    return {n: torch.from_numpy(rng.normal(0, 0.02, s).astype(np.float32)) for n, s in SHAPES.items()}


def moved(weights: Weights, rng: np.random.Generator, share: float) -> Weights:
    """Some elements a percent further."""
    return {n: t * torch.from_numpy(1 + 0.01 * (rng.random(t.shape) < share)).float() for n, t in weights.items()}


def assert_holds(engine: Engine, weights: Weights) -> None:
    mode = engine.capabilities.dtype
    for name, held in engine.destinations.items():
        wanted = rounded(name, weights[name], mode).to(held.dtype)
        assert held.view(torch.uint8).equal(wanted.view(torch.uint8)), name


# -- which updates an engine needs -------------------------------------------------------------------------------------


def deltas(*steps: tuple[int, int, int]) -> list[Delta]:
    return [Delta(base, version, {"w": torch.zeros(size, dtype=torch.uint8)}) for base, version, size in steps]


def test_catching_up_on_paper() -> None:
    kept = deltas((0, 2, 10), (2, 5, 20), (5, 6, 30))
    assert catch_up(5, kept, 6, 100) == kept[2:]
    assert catch_up(0, kept, 6, 100) == kept
    assert catch_up(0, kept, 6, 60) is None  # all weights are no more bytes
    assert catch_up(0, kept[1:], 6, 100) is None  # the first step is no longer kept
    assert catch_up(3, kept, 6, 100) is None
    assert catch_up(-1, kept, 6, 100) is None
    assert catch_up(6, kept, 6, 100) == []
    assert catch_up(5, kept, 7, 100) is None
    assert catch_up(2, [kept[0], kept[2]], 6, 100) is None  # a hole
    assert trimmed(kept, 50) == kept[1:]
    assert trimmed(kept, 49) == trimmed(kept, 0) == kept[2:]
    assert trimmed([], 9) == []


@pytest.mark.parametrize("seeds", [range(200), pytest.param(range(200, 1000), marks=pytest.mark.slow)])
def test_a_thousand_random_histories_end_with_the_trainers_bits(seeds: range) -> None:
    told = {"full": 0, "delta": 0, "several in one": 0}
    for seed in seeds:
        rng = np.random.default_rng(seed)
        mode = ("bf16", "bf16", "fp32", "int8")[seed % 4]
        weights, version, before = start(rng), int(rng.integers(0, 3)), -1
        publisher = DirectPublisher([], kind=("delta", "auto")[seed % 3 == 0])
        engines = [Engine(mode)]
        for _ in range(int(rng.integers(3, 8))):
            happens = rng.random()
            if happens < 0.15:  # a late joiner
                engines.append(Engine(mode))
            elif happens < 0.3:  # a restart
                engines[int(rng.integers(len(engines)))] = Engine(mode)
            present = [e for e in engines if rng.random() < 0.7] or engines[:1]
            publisher.engines = tuple(present)
            assert publisher.publish(weights.items(), version)["sync/deltas_refused"] == 0
            for engine in present:
                assert engine.version == version
                assert_holds(engine, weights)
                kind, base = engine.seen[-1]
                told[kind] += 1
                told["several in one"] += kind == "delta" and base != before
            before = version
            if rng.random() < 0.9:  # a step without an update is published under the same version
                weights = moved(weights, rng, rng.choice([0.001, 0.01, 0.01, 0.03, 1.0]))
                version += int(rng.integers(1, 4))
        publisher.engines = tuple(engines)
        publisher.publish(weights.items(), version)
        for engine in engines:
            assert_holds(engine, weights)
    assert min(told.values()) > 0.15 * len(seeds), told


def test_what_was_published_is_kept_as_bits_and_not_as_the_trainers_tensors() -> None:
    """The trainer changes its tensors in place, and an engine's dtype may be its own."""
    weights = {n: t.bfloat16() for n, t in start(np.random.default_rng(0)).items()}
    engine = Engine("bf16")
    publisher = DirectPublisher([engine], kind="delta")
    for version in range(3):
        publisher.publish(weights.items(), version)
        assert_holds(engine, weights)
        weights["embed.weight"][3, 1] *= 2
    assert [kind for kind, _ in engine.seen] == ["full", "delta", "delta"]


def test_auto_sends_deltas_where_few_elements_change() -> None:
    rng = np.random.default_rng(1)
    weights = {"embed.weight": torch.from_numpy(rng.normal(0, 0.02, (640, 8)).astype(np.float32))}
    engine = Engine("fp32", {"embed.weight": (640, 8)})
    publisher = DirectPublisher([engine], kind="auto")
    told = []
    for version, step in enumerate((8, 3, 6, 1)):
        told.append(publisher.publish(weights.items(), version))
        weights = {n: t.clone() for n, t in weights.items()}
        weights["embed.weight"][:, :step] += 1e-3  # that share of eighths
    told.append(publisher.publish(weights.items(), 4))
    assert [row["sync/deltas"] for row in told] == [0, 0, 0, 0, 1]
    assert [row.get("sync/changed") for row in told] == [None, 1, 3 / 8, 6 / 8, 1 / 8]
    assert [row["sync/bytes"] for row in told[:4]] == [640 * 8 * 4] * 4
    assert told[4]["sync/bytes"] < 640 * 8 / 4 * 4
    assert_holds(engine, weights)


def test_kept_deltas_are_bounded() -> None:
    rng = np.random.default_rng(2)
    history, weights = History("delta", "fp32"), start(rng)
    size = sum(t.numel() * 4 for t in weights.values() if t.dim() > 1)
    for version in range(40):
        history.advance(full_update(weights.items(), version, "fp32"))
        weights = {n: t.clone() for n, t in weights.items()}
        weights["embed.weight"].view(-1)[rng.integers(0, 1550, 90)] += 1
    assert 2 < len(history.kept) < 30
    assert sum(one.nbytes for one in history.kept) <= size / 4
    assert history.kept[-1].version == 39


# -- faults ------------------------------------------------------------------------------------------------------------


def flipped(update: WeightUpdate, rng: np.random.Generator) -> WeightUpdate:
    slices = list(update.slices)
    which = int(rng.integers(len(slices)))
    tensor = slices[which].tensor.clone()
    data = tensor.view(-1).view(torch.uint8)
    data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    slices[which] = replace(slices[which], tensor=tensor)
    return replace(update, slices=slices)


def dropped(update: WeightUpdate, rng: np.random.Generator) -> WeightUpdate:
    gone = int(rng.integers(len(update.slices)))
    return replace(update, slices=[piece for i, piece in enumerate(update.slices) if i != gone])


def doubled(update: WeightUpdate, rng: np.random.Generator) -> WeightUpdate:
    again = update.slices[int(rng.integers(len(update.slices)))]
    slices = list(update.slices)
    slices.insert(int(rng.integers(len(slices) + 1)), again)
    return replace(update, slices=slices)


def of_another_base(update: WeightUpdate, rng: np.random.Generator) -> WeightUpdate:
    assert update.base_version is not None
    return replace(update, base_version=update.base_version + int(rng.choice([-2, -1, 1, 2])))


def cut(update: WeightUpdate, rng: np.random.Generator) -> WeightUpdate:
    """A buffer that was too small for all of a slice."""
    slices = [piece if piece.tensor.dtype != torch.uint8 else None for piece in update.slices]
    which = int(rng.choice([i for i, piece in enumerate(slices) if piece is None]))
    slices = list(update.slices)
    tensor = slices[which].tensor
    slices[which] = replace(slices[which], tensor=tensor[: int(rng.integers(len(tensor)))])
    return replace(update, slices=slices)


FAULTS = {"flipped bit": flipped, "dropped": dropped, "doubled": doubled, "wrong base": of_another_base, "cut": cut}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_hundred_faults_are_caught_before_anything_is_served(fault: str) -> None:
    """Either the engine refuses the delta and serves nothing, or what arrived was the same all the same; then all weights help."""
    harmless, said = 0, list[str]()
    for seed in range(100):
        rng = np.random.default_rng(seed)
        engine, weights = Engine("bf16"), start(rng)
        publisher = DirectPublisher([engine], kind="delta")
        publisher.publish(weights.items(), 3)
        weights = moved(weights, rng, 0.1)
        history, full = publisher._histories["bf16"], full_update(weights.items(), 5, "bf16")
        history.advance(full)
        update = history.update(full, 3)
        assert update.kind == "delta"
        try:
            engine.update_weights(FAULTS[fault](update, rng))
        except DeltaRefused as error:
            said.append(str(error))
            assert engine.version == -1
            with pytest.raises(DeltaRefused, match="none that are proven"):
                engine.update_weights(update)
        else:
            harmless += 1
            assert_holds(engine, weights)
        told = DirectPublisher([engine]).publish(weights.items(), 5)
        assert told
        assert_holds(engine, weights)
    # Low bits of a float32 that travels whole are rounded away, and zstd has bits that say nothing.
    assert not any("\n" in line for line in said)
    assert harmless <= (30 if fault == "flipped bit" else 0)


def test_a_base_of_the_right_version_with_other_bits_is_refused() -> None:
    rng = np.random.default_rng(5)
    engine, weights = Engine("bf16"), start(rng)
    publisher = DirectPublisher([engine], kind="delta")
    publisher.publish(weights.items(), 0)
    engine.destinations["embed.weight"].view(torch.int16)[4, 2] ^= 1  # a bit of memory
    history, full = publisher._histories["bf16"], full_update(moved(weights, rng, 0.1).items(), 1, "bf16")
    history.advance(full)
    with pytest.raises(DeltaRefused, match=r"memory of embed\.weight is not what was published"):
        engine.update_weights(history.update(full, 0))


def test_a_delta_of_another_mode_is_refused() -> None:
    engine = Engine("bf16")
    DirectPublisher([engine]).publish(start(np.random.default_rng(0)).items(), 0)
    update = full_update(start(np.random.default_rng(1)).items(), 1, "fp16")
    with pytest.raises(DeltaRefused, match="a delta of fp16 weights 0, the engine has bf16 weights 0"):
        engine.update_weights(replace(update, kind="delta", base_version=0))


def test_an_engine_that_refuses_a_delta_gets_all_weights_in_the_same_publication() -> None:
    rng = np.random.default_rng(8)
    engine, weights = Engine("bf16"), start(rng)
    publisher = DirectPublisher([engine], kind="delta")
    publisher.publish(weights.items(), 0)
    weights = moved(weights, rng, 0.1)
    engine.spoil = lambda update: dropped(update, rng)
    told = publisher.publish(weights.items(), 1)
    assert engine.seen == [("full", None), ("delta", 0), ("full", None)]
    assert (told["sync/deltas"], told["sync/deltas_refused"], engine.version) == (1, 1, 1)
    assert_holds(engine, weights)
    engine.spoil = lambda update: replace(update, slices=update.slices[1:])
    engine.version = -1  # so that it gets all weights, of which one is lost: that ends the run
    with pytest.raises(EngineFailure, match="did not arrive"):
        publisher.publish(weights.items(), 2)


# -- engines -----------------------------------------------------------------------------------------------------------


def model_of() -> Any:
    return build_preset("tiny-qwen3-moe", 0, {"initializer_range": 0.02})[0]


def nudge(model: Any, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=1e-6)


@pytest.mark.parametrize(
    ("mode", "forward"),
    [
        ("bf16", "fast"),
        ("fp32", "auto"),
        ("fp8", "fast"),
        pytest.param("bf16", "transformers", marks=pytest.mark.slow),
    ],
)
def test_the_embedded_engine_holds_what_full_updates_give(mode: Any, forward: Any) -> None:
    model = model_of()
    engine, other = (LocalEngine(model.config, EngineConfig(dtype=mode, forward=forward), max_length=32) for _ in "12")
    by_delta, whole = DirectPublisher([engine], kind="delta"), DirectPublisher([other])
    for version in range(4):
        told = by_delta.publish(checkpoint_views(model).items(), version)
        whole.publish(checkpoint_views(model).items(), version)
        assert told["sync/deltas"] == (version > 0)
        assert told["sync/deltas_refused"] == 0
        for name, held in engine.weights.items():
            wanted = other.weights[name].contiguous().view(torch.uint8)
            assert held.contiguous().view(torch.uint8).equal(wanted), name
        nudge(model, version)


@pytest.fixture(scope="module")
def workers() -> Iterator[Any]:
    engine = open_engine(model_of().config, EngineConfig(processes=1, dtype="bf16", deadline_s=60), "cpu", 64)
    yield engine
    engine.close()


def test_worker_processes_take_deltas(workers: Any) -> None:
    model = model_of()
    publisher = DirectPublisher([workers], kind="delta")
    first = publisher.publish(checkpoint_views(model).items(), 3)
    nudge(model, 1)
    second = publisher.publish(checkpoint_views(model).items(), 5)
    assert (first["sync/deltas"], second["sync/deltas"], workers.version) == (0, 1, 5)
    assert second["sync/bytes"] < first["sync/bytes"] / 20
    nudge(model, 2)
    full = full_update(checkpoint_views(model).items(), 7, "bf16")
    history = publisher._histories["bf16"]
    history.advance(full)
    bad = flipped(history.update(full, 5), np.random.default_rng(0))
    with pytest.raises(DeltaRefused):
        workers.update_weights(bad)
    assert workers.version == -1
    with pytest.raises(DeltaRefused, match="none that are proven"):
        workers.update_weights(history.update(full, 5))
    publisher.publish(checkpoint_views(model).items(), 8)
    assert workers.version == 8


@pytest.mark.parametrize("kind", ["delta", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_run_is_the_same_to_the_bit_with_deltas(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, "run.steps=3", "engine.dtype=bf16", "train.lr=1e-6", "checkpoint.every=2", "eval.every=2"]
    full, run = tmp_path / "full", tmp_path / "run"
    assert cli(capsys, "train", *words, f"run.dir={full}")[0] == 0
    assert cli(capsys, "train", *words, "run.steps=2", f"sync.kind={kind}", f"run.dir={run}")[0] == 0
    assert cli(capsys, "train", "--resume", run, "run.steps=3")[0] == 0
    told = [{k: v for k, v in row.items() if k.startswith("sync/")} for row in rows(run)]
    assert [row["sync/deltas"] for row in told] == [0, 1, 1, 1]
    assert told[2]["sync/bytes"] < told[0]["sync/bytes"] / 10
    assert 0 < told[2]["sync/changed"] < 0.25
    assert [{k: v for k, v in row.items() if not k.startswith("sync/")} for row in rows(run)] == rows(full)
    assert files(run / "model", "README.md") == files(full / "model", "README.md")
    assert files(run / "rollouts") == files(full / "rollouts")


# -- what a run says of it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "apart", "why"),
    [
        ([], "two copies", ""),
        (["engine.processes=2"], "two copies", ""),
        ([], "", "one copy"),
        (["engine.kind=vllm"], "two copies", "engine.kind=vllm"),
        (["train.lora.rank=4"], "two copies", "adapters"),
        (["cluster.engines=1"], "two copies", ""),
    ],
)
def test_where_no_deltas_are_sent(words: list[str], apart: str, why: str) -> None:
    assert why in no_deltas(load(None, words), apart)
    assert bool(why) == bool(no_deltas(load(None, words), apart))


def test_a_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY, "run.steps=1", "sync.kind=delta", f"run.dir={tmp_path / 'run'}"]
    code, out, _ = cli(capsys, "train", *words)
    assert code == 0
    assert "sync.kind=delta sends no deltas: trainer and engine compute with one copy" in " ".join(out.split())
