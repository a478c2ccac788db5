"""Trainer and engine compute with one copy of the weights. If that changed a bit, or an engine served what nobody published, every number of a run would be in doubt.

Whole runs with one copy and with two (of an engine that is somebody's own), resumed from each other; layouts of many architectures;
what a publication writes and reads; memory that is no longer shared. Not covered: a GPU (`test_cuda.py`), the room it saves
(`memory/test_plan.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import TINY, assert_same, cli, events, files, rows
from torch.utils._python_dispatch import TorchDispatchMode

from rollkeel.engines.local import LocalEngine
from rollkeel.errors import EngineFailure
from rollkeel.loop.assemble import assemble, policy_of
from rollkeel.loop.assemble import opened as opened_engine
from rollkeel.loop.run import Run
from rollkeel.models import checksum, numerics
from rollkeel.models.loading import load_policy, save_policy
from rollkeel.models.names import checkpoint_views, move_into
from rollkeel.recipe import load
from rollkeel.record.live import LiveView
from rollkeel.record.runfolder import RunFolder
from rollkeel.record.stopping import StopFlag
from rollkeel.sync.shared import two_copies
from tests.models.test_forward import CASES, build

SHORT = [*TINY, "run.steps=8", "checkpoint.every=4"]
BUDGETED = ["run.loop=budgeted", "rollout.budget={tokens: 36, capacity: 30, retention: 1}"]
RUNS = {
    "default": [],
    "tied in bf16": ["model.path=preset:tiny-qwen3-tied", "model.dtype=bfloat16", "engine.dtype=bf16"],
}
SLOW = {
    "lag": ["experiment.lag=3"],
    "kept KV": [*BUDGETED, "engine.kv=keep"],
    "default in bf16": ["model.dtype=bfloat16", "engine.dtype=bf16"],
    "replayed routing": ["rollout.routing=replay"],
    "recomputed KV": BUDGETED,
    "dense": ["model.path=preset:tiny-qwen3"],
    "tied": ["model.path=preset:tiny-qwen3-tied"],
    "dense in bf16": ["model.path=preset:tiny-qwen3", "model.dtype=bfloat16", "engine.dtype=bf16"],
    "in fp16": ["model.dtype=float16", "engine.dtype=fp16"],
    "of transformers": ["engine.forward=transformers"],
}


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded engine as somebody's own: it has weights of its own, whatever the config."""
    file = tmp_path_factory.mktemp("own") / "apart.py"
    file.write_text(
        "from rollkeel.engines.local import LocalEngine\n\n\n"
        "def engine(hf_config, config, device, max_length):\n"
        "    return LocalEngine(hf_config, config, device=device, max_length=max_length)\n"
    )
    return f"engine.kind={file}:engine"


def copies(run: Path) -> list[int]:
    return [e["copies"] for e in events(run) if e["event"] == "weights"]


@pytest.mark.usually("tied in bf16")
@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_run_is_the_same_to_the_bit_with_one_copy_and_with_two(
    name: str, apart: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for run, words, said in ((one, [], "weights once"), (two, [apart], "weights twice: engine.kind=")):
        code, out, err = cli(capsys, "train", *SHORT, *{**RUNS, **SLOW}[name], *words, f"run.dir={run}")
        assert (code, err) == (0, "")
        assert said in out
    assert (copies(one), copies(two)) == ([1], [2])
    assert rows(one)[-1]["version"] > 2
    assert_same(one, two)
    assert files(one / "model", "README.md") == files(two / "model", "README.md")
    for step in (4, 8):
        state = f"checkpoints/step_{step:06d}/state"
        assert files(one / state) == files(two / state)


@pytest.mark.parametrize("first", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_goes_on_with_the_other_number_of_copies(
    first: int, apart: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {1: "engine.kind=local", 2: apart}
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert cli(capsys, "train", *SHORT, f"run.dir={whole}")[0] == 0
    assert cli(capsys, "train", *SHORT, "run.steps=4", words[first], f"run.dir={run}")[0] == 0
    assert cli(capsys, "train", "--resume", run, "run.steps=8", words[3 - first])[0] == 0
    assert copies(run) == [first, 3 - first]
    assert_same(run, whole)


@contextmanager
def opened(tmp_path: Path, *words: str) -> Iterator[Run]:
    """A run before its first publication."""
    config, view = load(None, [*TINY, "sft.steps=0", *words, f"run.dir={tmp_path / 'run'}"]), LiveView()
    folder = RunFolder.create(tmp_path / "run", config)
    with StopFlag(view) as stop:
        run = assemble(config, folder, policy_of(config, config.train.lora), view, stop)
        try:
            yield run
        finally:
            run.close()
            folder.close()


class Writes(TorchDispatchMode):
    """Bytes that operations wrote to `places`."""

    def __init__(self, places: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.storages, self.bytes = {t.untyped_storage().data_ptr() for t in places.values()}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        writes = func._schema.is_mutable and isinstance(args[0], torch.Tensor)
        if writes and args[0].untyped_storage().data_ptr() in self.storages:
            self.bytes += args[0].numel() * args[0].element_size()
        return out


def engine_of(run: Run) -> LocalEngine:
    assert isinstance(run.engine, LocalEngine)
    return run.engine


@pytest.mark.parametrize("words", [[], ["model.path=preset:tiny-qwen3-tied"], ["train.lora.rank=2"]])
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_publication_copies_nothing_and_sums_every_weight_once(
    words: list[str], mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine in bf16 has weights of its own here."""
    summed = list[torch.Tensor]()

    def counting(sum_of: Callable[..., Any]) -> Callable[..., Any]:
        def counted(name: str, tensor: torch.Tensor, *about: Any) -> Any:
            summed.append(tensor)
            return sum_of(name, tensor, *about)

        return counted

    with opened(tmp_path, f"engine.dtype={mode}", *words) as run:
        weights = engine_of(run).weights
        size = sum(w.numel() * w.element_size() for w in weights.values())
        for one in (checksum.tensor_checksum, checksum.begun):
            monkeypatch.setattr(numerics, one.__name__, counting(one))
        with Writes(weights) as seen:
            run.publish()
        assert run.engine.version == 0
        sums = sum(t.numel() for t in summed) / sum(w.numel() for w in weights.values())
        beside = sum(t.numel() for t in run.trainer.named_adapters().values()) / sum(
            w.numel() for w in weights.values()
        )
        assert (seen.bytes, bool(run.apart)) == ((0, False) if mode == "fp32" else (size, True))
        assert sums == pytest.approx((1 if mode == "fp32" else 2) + 2 * beside)


def test_a_step_is_in_the_engine_before_it_is_published_and_served_behind_it(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        run.publish()
        with torch.no_grad():
            for p in run.trainer.model.parameters():
                p.mul_(1.5)
        assert run.engine.version == 0
        views = dict(run.trainer.named_weights())
        assert views.keys() == engine_of(run).weights.keys()
        assert all(torch.equal(views[name], held) for name, held in engine_of(run).weights.items())
        run.publish()


@pytest.mark.parametrize("whose", ["trainer", "engine"])
def test_memory_that_is_no_longer_shared_ends_the_run_by_name(whose: str, tmp_path: Path) -> None:
    """The first publication has been proven: what was proven then says nothing about the tensor that is there now."""
    with opened(tmp_path) as run:
        run.publish()
        name = "model.layers.1.self_attn.k_proj.weight"
        if whose == "trainer":
            parameter = run.trainer.model.get_parameter(name)
            parameter.data = parameter.data.clone()
        else:
            engine_of(run).weights[name] = engine_of(run).weights[name].clone()
        with pytest.raises(
            EngineFailure, match=r"k_proj\.weight is not in the memory that trainer and engine share"
        ) as ended:
            run.publish()
        assert "\n" not in str(ended.value)
        assert run.engine.version < 0


def test_a_parameter_that_got_other_memory_is_published_from_there(tmp_path: Path) -> None:
    """With two copies as well: views of what it was before would be proven and be wrong."""
    with opened(tmp_path, "engine.dtype=bf16") as run:
        run.publish()
        norm = run.trainer.model.get_parameter("model.norm.weight")
        norm.data = norm.data * 2
        run.publish()
        assert torch.equal(engine_of(run).weights["model.norm.weight"], norm.bfloat16())


def test_a_poisoned_weight_is_not_served(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        run.publish()
        with torch.no_grad():
            run.trainer.model.get_parameter("model.norm.weight")[3] = float("nan")
        run.publish()
        with pytest.raises(EngineFailure, match="not finite under version 0"):
            run.feed.draw(run.clock(1), 0)


@pytest.mark.parametrize("forward", ["auto", "transformers"])
@pytest.mark.parametrize("case", CASES)
def test_every_architecture_keeps_its_values_its_ties_and_its_files(case: str, forward: str, tmp_path: Path) -> None:
    model = build(CASES[case][0])
    policy = load_policy(load(None, []).model)
    whole = type(policy)(model, policy.tokenizer)
    save_policy(whole, tmp_path / "before")
    before = {name: view.clone() for name, view in checkpoint_views(model).items()}
    engine = LocalEngine(model.config, load(None, [f"engine.forward={forward}"]).engine, max_length=32)
    assert move_into(model, engine.weights) == ""
    after = checkpoint_views(model)
    assert list(after) == list(before)
    for name, view in after.items():
        assert view.data_ptr() == engine.weights[name].data_ptr()
        assert torch.equal(view, before[name])
    save_policy(whole, tmp_path / "after")
    assert files(tmp_path / "after") == files(tmp_path / "before")


def test_another_layout_is_left_alone() -> None:
    model = build(CASES["llama"][0])
    before = {name: view.data_ptr() for name, view in checkpoint_views(model).items()}
    places = {name: view.clone() for name, view in checkpoint_views(model).items()}
    name = "model.layers.0.mlp.up_proj.weight"
    for bad in (places[name].bfloat16(), places[name].t().contiguous().t(), places[name][1:]):
        assert move_into(model, {**places, name: bad}) == name
    assert move_into(model, {**places, "more": places[name]}) == "more"
    assert move_into(model, {}) == next(iter(before))
    assert {name: view.data_ptr() for name, view in checkpoint_views(model).items()} == before


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], ""),
        (["model.dtype=bfloat16", "engine.dtype=bf16"], ""),
        (["model.dtype=float16", "engine.dtype=fp16", "train.kl_coefficient=0.1"], ""),
        ([*BUDGETED, "engine.kv=keep"], ""),
        (["experiment.lag=4", "train.lora.rank=4"], ""),
        (["engine.kind=vllm"], "engine.kind=vllm"),
        (["run.loop=async", "engine.processes=1"], "engine.processes"),
        (["engine.dtype=fp8"], "engine.dtype=fp8"),
        (["engine.dtype=fp8_weights"], "engine.dtype=fp8_weights"),
        (["engine.dtype=bf16"], "engine.dtype=bf16"),
        (["model.dtype=bfloat16"], "engine.dtype=fp32"),
        (["train.processes=2"], "train.processes"),
        (["experiment.rounding=int8"], "experiment.rounding"),
    ],
)
def test_the_rule(words: list[str], reason: str) -> None:
    assert two_copies(load(None, words)).startswith(reason) if reason else not two_copies(load(None, words))


@pytest.mark.parametrize(("mode", "shared"), [("fp32", True), ("bf16", False)])
def test_commands_that_only_sample_hold_one_copy(mode: str, shared: bool) -> None:
    """`rollkeel eval`, `rollout` and `chat`, and the rehearsal before a warm start, whose policy is then trained where it lies."""
    config = load("default", [*TINY, f"engine.dtype={mode}"])
    policy = policy_of(config)
    before = {name: view.clone() for name, view in checkpoint_views(policy.model).items()}
    with opened_engine(config, policy) as engine:
        assert isinstance(engine, LocalEngine)
        views = checkpoint_views(policy.model)
        same = [views[name].data_ptr() == place.data_ptr() for name, place in engine.weights.items()]
        assert same == [shared] * len(before)
        assert engine.version == 0
    assert all(torch.equal(view, before[name]) for name, view in checkpoint_views(policy.model).items())
