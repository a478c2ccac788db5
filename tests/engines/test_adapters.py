"""Adapters that compute one thing where they are learnt and another where they are sampled from, or once they are saved, train a
model that nobody has. Both forwards, the merge, PEFT's own reading of the folder, and how they reach an engine.

Not covered: CUDA, base weights in bfloat16 under PEFT, adapters on a served engine (refused).
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import drain, prompts_of, requests_of

from rollkeel.config import EngineConfig, LoraConfig, ModelConfig
from rollkeel.engines.local import LocalEngine
from rollkeel.engines.workers import WorkerEngine
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.models.adapters import named_adapters, parameters
from rollkeel.models.loading import Policy, load_policy, save_policy
from rollkeel.models.names import checkpoint_views
from rollkeel.sync.publish import DirectPublisher, adapter_update, full_update
from rollkeel.train.probe import SequenceScorer
from rollkeel.types import Proof, WeightUpdate

CASES = [
    pytest.param("tiny-qwen3", False, id="dense"),
    pytest.param("tiny-qwen3-tied", False, id="tied"),
    pytest.param("tiny-qwen3-moe", False, id="moe"),
    pytest.param("tiny-qwen3-moe", True, id="moe-experts"),
]
PROMPTS = prompts_of(4)


def adapted(preset: str, experts: bool = False, *, moved: bool = True, path: str = "", **options: Any) -> Policy:
    """A policy with adapters; `moved`: which no longer are zero."""
    lora = LoraConfig(rank=4, experts=experts, **options)
    policy = load_policy(ModelConfig(path=path or f"preset:{preset}"), lora=lora)
    draw = torch.Generator().manual_seed(1)
    for p in parameters(policy.model).values() if moved else ():
        p.data += 0.05 * torch.randn(p.shape, generator=draw)
    return policy


def scores(policy: Policy) -> np.ndarray:
    policy.model.eval()
    return np.concatenate(SequenceScorer(policy.model)(PROMPTS))


def engine_of(policy: Policy, **config: Any) -> LocalEngine:
    return LocalEngine(policy.model.config, EngineConfig(**config), max_length=96, lora=policy.lora)


def publish(publisher: DirectPublisher, policy: Policy, version: int) -> None:
    publisher.publish(checkpoint_views(policy.model).items(), version, named_adapters(policy.model))


def sampled(engine: LocalEngine, count: int = 24) -> dict[int, Any]:
    engine.submit(requests_of(PROMPTS, max_new_tokens=count))
    return {i: segment.span for i, segment in drain(engine).items()}


def gap(engine: LocalEngine, policy: Policy) -> float:
    """Largest |engine − trainer| log-prob of what the engine samples."""
    policy.model.eval()
    scorer, worst = SequenceScorer(policy.model), 0.0
    for i, span in sampled(engine).items():
        trainer = scorer([np.concatenate([PROMPTS[i], span.token_ids])])[0][-len(span.token_ids) :]
        worst = max(worst, float(np.abs(trainer - span.logprobs).max()))
    return worst


@pytest.mark.parametrize(("preset", "experts"), CASES)
def test_adapters_that_are_off_leave_every_bit(preset: str, experts: bool) -> None:
    plain, policy = load_policy(ModelConfig(path=f"preset:{preset}")), adapted(preset, experts, moved=False)
    assert len(named_adapters(policy.model)) > 0
    assert np.array_equal(scores(plain), scores(policy))
    base, beside = (LocalEngine(p.model.config, EngineConfig(forward="fast"), lora=p.lora) for p in (plain, policy))
    for engine, p in ((base, plain), (beside, policy)):
        publish(DirectPublisher([engine]), p, 0)
    one, other = sampled(base), sampled(beside)
    assert all(np.array_equal(one[i].logprobs, other[i].logprobs) for i in one)
    assert all(np.array_equal(one[i].token_ids, other[i].token_ids) for i in one)


@pytest.mark.parametrize("forward", ["fast", "transformers"])
@pytest.mark.parametrize(("preset", "experts"), CASES)
def test_engine_and_trainer_agree(preset: str, experts: bool, forward: str) -> None:
    policy = adapted(preset, experts)
    engine = engine_of(policy, forward=forward)
    publish(DirectPublisher([engine]), policy, 7)
    assert engine.version == 7
    assert gap(engine, policy) < 2e-5


def test_some_targets_alone(tmp_path: Path) -> None:
    policy = adapted("tiny-qwen3", targets=("q_proj", "down_proj"))
    assert {name.split(".")[-3] for name in named_adapters(policy.model)} == {"q_proj", "down_proj"}
    engine = engine_of(policy)
    publish(DirectPublisher([engine]), policy, 0)
    assert gap(engine, policy) < 2e-5
    save_policy(policy, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == ["down_proj", "q_proj"]


def test_the_engine_says_that_its_decode_steps_are_not_compiled() -> None:
    said = engine_of(adapted("tiny-qwen3")).capabilities.forward
    assert "train.lora" in said
    with pytest.raises(BadInput, match="adapters"):
        engine_of(adapted("tiny-qwen3"), forward="compiled")


@pytest.mark.parametrize("mode", ["bf16", "fp8", "int4"])
def test_modes_round_the_base_and_not_the_adapters(mode: str) -> None:
    policy = adapted("tiny-qwen3-moe", True)
    engine = engine_of(policy, dtype=mode)
    publish(DirectPublisher([engine]), policy, 0)
    live = named_adapters(policy.model)
    assert all(torch.equal(held, live[name]) for name, held in engine._forward.adapters.items())
    views = checkpoint_views(policy.model)
    assert any(not torch.equal(held.float(), views[name]) for name, held in engine._forward.destinations.items())


@pytest.mark.parametrize(("preset", "experts"), CASES)
def test_merged_and_unmerged_agree(preset: str, experts: bool, tmp_path: Path) -> None:
    policy = adapted(preset, experts)
    save_policy(policy, tmp_path / "adapters")
    merged = load_policy(ModelConfig(path=str(tmp_path / "adapters")))
    assert not parameters(merged.model)
    assert np.abs(scores(merged) - scores(policy)).max() < 1e-5
    assert np.abs(scores(merged) - scores(load_policy(ModelConfig(path=f"preset:{preset}")))).max() > 0.1


@pytest.fixture(scope="module")
def peft() -> Iterator[Any]:
    """The package, installed here or in the folder `ROLLKEEL_PEFT` (`pip install --target FOLDER --no-deps peft accelerate`)."""
    folder = os.environ.get("ROLLKEEL_PEFT", "")
    sys.path += [folder] if folder else []
    try:
        yield importlib.import_module("peft")
    except ImportError as error:
        pytest.skip(f"peft is not installed ({error}); set ROLLKEEL_PEFT to a folder that has it")
    finally:
        sys.path[:] = [path for path in sys.path if path != folder]


@pytest.mark.parametrize(("preset", "experts"), CASES)
def test_peft_loads_the_folder(peft: Any, preset: str, experts: bool, tmp_path: Path) -> None:
    save_policy(load_policy(ModelConfig(path=f"preset:{preset}")), tmp_path / "base")
    policy = adapted(preset, experts, path=str(tmp_path / "base"))
    save_policy(policy, tmp_path / "adapters")
    base = load_policy(ModelConfig(path=str(tmp_path / "base"))).model.eval()
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters")).eval()
    ends, ours = np.cumsum([len(ids) - 1 for ids in PROMPTS])[:-1], scores(policy)
    for ids, mine in zip(PROMPTS, np.split(ours, ends), strict=True):
        with torch.no_grad():
            logits = theirs(input_ids=torch.from_numpy(ids)[None]).logits[0]
        logprobs = logits.log_softmax(-1)[:-1].gather(1, torch.from_numpy(ids[1:])[:, None])[:, 0]
        assert np.abs(logprobs.numpy() - mine).max() < 1e-4
    # And back: what peft writes, rollkeel reads.
    theirs.save_pretrained(str(tmp_path / "theirs"))
    again = load_policy(ModelConfig(path=str(tmp_path / "theirs")))
    assert np.abs(scores(again) - ours).max() < 1e-5


def test_adapters_name_their_base_and_refuse_another(tmp_path: Path) -> None:
    base = load_policy(ModelConfig(path="preset:tiny-qwen3"))
    save_policy(base, tmp_path / "base")
    policy = adapted("", path=str(tmp_path / "base"))
    save_policy(policy, tmp_path / "adapters")
    written = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tmp_path / "base")
    next(base.model.parameters()).data[5, 5] += 1.0
    save_policy(base, tmp_path / "base")
    with pytest.raises(BadInput, match="put the base back") as caught:
        load_policy(ModelConfig(path=str(tmp_path / "adapters")))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("preset", "options", "message"),
    [
        ("tiny-qwen3", {"targets": ("q_prj",)}, "'q_prj'; it has down_proj, gate_proj, k_proj, o_proj, q_proj"),
        ("tiny-qwen3-moe", {"targets": ("gate_proj",)}, "'gate_proj'; it has k_proj, o_proj, q_proj, v_proj"),
        ("tiny-qwen3-moe", {"targets": ("lm_head",)}, "'lm_head'; it has k_proj"),
        ("tiny-qwen3", {"experts": True}, "no routed SwiGLU experts"),
    ],
)
def test_targets_that_are_not_there_are_one_line(preset: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=re.escape(message)) as caught:
        load_policy(ModelConfig(path=f"preset:{preset}"), lora=LoraConfig(rank=2, **options))
    assert "\n" not in str(caught.value)


class Counting:
    """An engine that counts what is published to it."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine, self.updates = engine, list[WeightUpdate]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def update_weights(self, update: WeightUpdate) -> Proof:
        self.updates.append(update)
        return self._engine.update_weights(update)


def test_what_is_published_is_the_adapters_alone() -> None:
    policy = adapted("tiny-qwen3-moe")
    engine = Counting(engine_of(policy))
    publisher = DirectPublisher([engine])  # type: ignore[list-item]
    for version in (4, 5, 6):
        publish(publisher, policy, version)
    sizes = [sum(s.tensor.numel() * s.tensor.element_size() for s in update.slices) for update in engine.updates]
    # q 64→128, k and v 64→64, o 128→64 of two layers, rank 4, float32
    adapters = 2 * 4 * 4 * ((64 + 128) + 2 * (64 + 64) + (128 + 64))
    assert sizes == [sum(4 * v.numel() for v in checkpoint_views(policy.model).values()), *[adapters] * 3]
    kinds = [(u.kind, u.base_version, u.version) for u in engine.updates]
    assert kinds == [("full", None, 4), ("adapter", 4, 4), ("adapter", 4, 5), ("adapter", 4, 6)]


def _swapped(update: WeightUpdate) -> WeightUpdate:
    one, *rest = update.slices
    other = next(s for s in rest if s.tensor.shape == one.tensor.shape)
    names = {one.name: other.name, other.name: one.name}
    return replace(update, slices=[replace(s, name=names.get(s.name, s.name)) for s in update.slices])


WRONG: dict[str, tuple[Callable[[WeightUpdate], WeightUpdate], str]] = {
    "skipped": (lambda u: replace(u, slices=u.slices[1:]), "1 weights did not arrive, first base_model.model"),
    "swapped": (_swapped, "wrong checksum"),
    "of another base": (lambda u: replace(u, base_version=1), "belong to weights 1, the engine has 0"),
    "wrong total": (lambda u: replace(u, checksum=u.checksum ^ 1), "expected"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_adapters_stop_before_a_token_is_stamped(case: str) -> None:
    change, message = WRONG[case]
    policy = adapted("tiny-qwen3")
    engine = engine_of(policy)
    publish(DirectPublisher([engine]), policy, 0)
    with pytest.raises(EngineFailure, match=message) as caught:
        engine.update_weights(change(adapter_update(named_adapters(policy.model), 1, 0)))
    assert "\n" not in str(caught.value)
    assert engine.version < 0
    engine.submit(requests_of(PROMPTS[:1], max_new_tokens=4))
    with pytest.raises(EngineFailure, match="no proven weights"):
        engine.poll(1.0)
    publish(DirectPublisher([engine]), policy, 2)
    assert engine.version == 2


def test_adapters_beside_a_base_that_did_not_arrive_are_refused() -> None:
    policy = adapted("tiny-qwen3")
    engine = engine_of(policy)
    publish(DirectPublisher([engine]), policy, 0)
    whole = full_update(checkpoint_views(policy.model).items(), 1)
    with pytest.raises(EngineFailure, match="did not arrive"):
        engine.update_weights(replace(whole, slices=whole.slices[:-1]))
    with pytest.raises(EngineFailure, match="none that are proven"):
        engine.update_weights(adapter_update(named_adapters(policy.model), 1, 0))
    assert engine.version < 0


def test_an_engine_without_adapters_and_one_without_a_base_refuse_them() -> None:
    policy = adapted("tiny-qwen3")
    update = adapter_update(named_adapters(policy.model), 1, 0)
    for engine, message in (
        (LocalEngine(policy.model.config, EngineConfig()), "opened without adapters"),
        (engine_of(policy), "none that are proven"),
    ):
        with pytest.raises(EngineFailure, match=message):
            engine.update_weights(update)


def test_worker_processes_serve_adapters() -> None:
    policy = adapted("tiny-qwen3-moe", True)
    alone = engine_of(policy)
    together = WorkerEngine(policy.model.config, EngineConfig(processes=2), max_length=96, lora=policy.lora)
    try:
        for engine in (alone, together):
            publish(DirectPublisher([engine]), policy, 3)
        one, other = sampled(alone), sampled(together)  # type: ignore[arg-type]
    finally:
        together.close()
    assert all(np.array_equal(one[i].token_ids, other[i].token_ids) for i in one)
