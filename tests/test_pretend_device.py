"""Whole runs on a device that is not the CPU. CUDA would refuse an operation on tensors of two devices, and would stand still at
every read of a value: both show here, on a machine without a GPU.

Not covered: what needs real kernels (see `pretend.py`); an engine in processes of its own, which samples on the CPU here while
the trainer uses the device: they are spawned, and know no device of this one; inference servers.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_runs import LOOPS, MODELS, NUMBERS, RUNS, TINY, combined
from pretend import DEVICE, JOURNAL

from rollkeel import advantages, objectives
from rollkeel.batch.build import TrainingBatch, build_batch
from rollkeel.config import EngineConfig, LoraConfig, ModelConfig, TrainConfig
from rollkeel.engines.local import LocalEngine
from rollkeel.engines.slots import LOOK
from rollkeel.loop import assemble, job
from rollkeel.loop.learn import OldScores, seen_of, updates_metrics, watch
from rollkeel.models.adapters import named_adapters, parameters
from rollkeel.models.loading import Policy, load_policy
from rollkeel.models.packed import PackedModel
from rollkeel.recipe import load
from rollkeel.sync.publish import DirectPublisher
from rollkeel.train.trainer import LocalTrainer
from rollkeel.types import GraderSpec, Prompt, Request, Rollout, SamplingParams, Segment, Status

ONCE = {
    "record/checks.py changeable",
    "models/packed.py PackedModel._padded",
    "models/packed.py PackedModel._probe",
    "models/packed.py PackedModel._run",  # of the padded batch that the probe compares with
    "models/packed.py PackedModel.replayable",
    "train/head.py _check_head",
}
"""At the start of a run."""
KEPT = {
    "models/checksum.py read",
    "models/part_files.py write.put_tensor",
    "models/adapter_files.py save_adapters",
    "engines/kv.py PagedCache._brought",
    "engines/shared_memory.py write",
    "memory/moves.py InHost.leave",
}
"""Whole tensors that leave the device: publications, checkpoints, KV that is kept, what waits in host memory."""
STEP = {
    "record/oddities.py credited",
    "record/mismatch.py mismatch_metrics",
    "record/routing.py routing_metrics",
    "batch/build.py TrainingBatch.parts",
    "loop/learn.py _learn",
    "loop/learn.py credit_of",
    "loop/learn.py seen_of",
    "loop/learn.py store",
    "analyzer/capture.py Recorder.__call__",
    "analyzer/sides.py TrainerSide.capture",
    "train/probe.py SequenceScorer.__call__",
    "models/routers.py RoutingShape.check",
    "models/routers.py _Replay.arrive",
}
"""A few times in a step."""
UPDATE = {
    "objectives/segments.py starts",
    "objectives/segments.py lengths",
    "objectives/objective.py Objective.prepare",
    "objectives/reductions.py Reductions.read",
    "objectives/rejection.py RandomRule.prepare",
    "objectives/thresholds.py Budget.solve",
    "objectives/thresholds.py Controller.solve",
    "objectives/thresholds.py Controller.update",
    "objectives/thresholds.py Share.solve",
    "objectives/thresholds.py Top.solve",
    "objectives/thresholds.py _between",
    "train/optimizer.py ChangedShare.since",
    "train/optimizer.py Stepper.step",
    "train/soundness.py finite",
    "train/soundness.py still",
    "train/soundness.py Fresh.apart",
    "train/soundness.py Fresh.judge",
    "train/trainer.py LocalTrainer.update",
    "train/mesh.py Mesh.losses",
}
"""A few times in an update."""
MICRO = {"objectives/checks.py check_tokens", "train/sft.py _step.loss_of"}
"""Once in a micro-batch."""
DECODE = {"engines/local.py LocalEngine._look", "engines/slots.py _brought"}
"""Once in `LOOK` decode steps: what has ended, and its tokens."""
ENDED = {"engines/kv.py PagedCache.noted"}
"""Once for a rollout that ends, where the experts of its prompt are to be replayed."""
ALLOWED = ONCE | KEPT | STEP | UPDATE | MICRO | DECODE | ENDED


@pytest.fixture(autouse=True)
def on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs use the device, and the journal begins anew."""
    open_engine = assemble.open_engine

    def opened(hf_config: Any, config: EngineConfig, device: Any, **options: Any) -> Any:
        return open_engine(hf_config, config, "cpu" if config.processes else device, **options)

    monkeypatch.setattr(assemble, "open_engine", opened)
    monkeypatch.setattr(assemble, "resolve_device", lambda name: torch.device(DEVICE))
    JOURNAL.clear()


def reads(*places: str) -> Counter[str]:
    """How often our functions waited for the device; of `places` where given."""
    out = Counter[str]()
    for at, count in JOURNAL.reads.items():
        out[at.split(":")[0]] += count
    return Counter({at: n for at, n in out.items() if at in places}) if places else out


def clean() -> None:
    assert dict(JOURNAL.mixed) == {}
    assert {at: n for at, n in JOURNAL.reads.items() if at.split(":")[0] not in ALLOWED} == {}


def ran(loop: str, settings: list[str], folder: Path) -> None:
    job.train(load("default", [*TINY, *settings, f"run.dir={folder}"]))
    clean()
    drawn = JOURNAL.operations["nextafter"]  # once in a decode step
    assert loop == "async" or drawn >= 64
    if loop not in (
        "budgeted",
        "kept",
        "async",
    ):  # the last tokens of a budget are counted at every step, and these are few
        assert sum(reads(*DECODE).values()) <= drawn / 8


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_a_budget_of_some_size_is_looked_at_now_and_then(kv: str, tmp_path: Path) -> None:
    """Near its end a budget is counted at every step, and so is a small one."""
    words = ["run.loop=budgeted", "rollout.budget={tokens: 1500, capacity: 6}", f"engine.kv={kv}", "run.steps=1"]
    words += ["sampling.max_new_tokens=80", "engine.max_length=96"]
    job.train(load("default", [*TINY, *words, "model.path=preset:tiny-qwen3", f"run.dir={tmp_path / 'run'}"]))
    clean()
    drawn = JOURNAL.operations["nextafter"]
    assert drawn >= 64
    assert sum(reads(*DECODE).values()) <= drawn / 8


@pytest.mark.usually("budgeted", "async", "lora", "low")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_stays_on_its_device(name: str, tmp_path: Path) -> None:
    ran(name, RUNS[name], tmp_path / "run")


@pytest.mark.usually(
    "sync-tiny-qwen3-moe-bf16", "lag-tiny-qwen3-tied-fp16", "budgeted-tiny-qwen3-int8", "kept-tiny-qwen3-moe-lora",
    "async-tiny-qwen3-tied-bf16",
)  # fmt: skip
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop_with_every_model_and_dtype(loop: str, model: str, numbers: str, tmp_path: Path) -> None:
    ran(loop, combined(loop, model, numbers), tmp_path / "run")


def policy(name: str, device: str, lora: LoraConfig | None = None, **overrides: Any) -> Policy:
    fields = {"hidden_size": 32, "initializer_range": 0.3, **overrides}
    return load_policy(ModelConfig(path=f"preset:{name}", overrides=fields), device, lora=lora)


def sampled(device: str, preset: str, part: int) -> list[Segment]:
    """Requests of many lengths and stops in fewer slots, with new weights and an interruption on the way."""
    made = policy(preset, device)
    engine = LocalEngine(made.model.config, EngineConfig(slots=5, forward="fast"), device=device, max_length=96)
    publisher, rng = DirectPublisher([engine]), np.random.default_rng(0)
    publisher.publish(assemble.checkpoint_views(made.model).items(), 0)
    prompts = [rng.integers(8, 264, n) for n in (3, 3, 17, 30, 5, 5, 5, 16)]
    for i, prompt in enumerate(prompts):
        about = {"return_topk": i % 3, "stop_token_ids": tuple(range(8, 20)), "seed": 1}
        engine.submit([Request(id=i, prompt_ids=prompt, sampling=SamplingParams(max_new_tokens=9 * i + 1, **about))])
    out = engine.advance(part)
    publisher.publish(assemble.checkpoint_views(made.model).items(), 1)
    out += engine.advance(3)
    engine.interrupt([6])
    while engine.busy:
        out += engine.poll(9)
    return sorted(out, key=lambda s: s.request_id)


@pytest.mark.parametrize(("preset", "part"), [("tiny-qwen3", LOOK + 3), ("tiny-qwen3", 5), ("tiny-qwen3-moe", 5)])
def test_tokens_are_those_of_the_cpu(preset: str, part: int) -> None:
    """What is looked at every few steps is cut where it ended: nothing behind a stop, nothing lost. The experts of a layer are one
    product there: with a wrong border between two of them the log-probs would be others."""
    here, there = sampled("cpu", preset, part), sampled(DEVICE, preset, part)
    assert [(s.request_id, s.status) for s in here] == [(s.request_id, s.status) for s in there]
    assert {s.status for s in here} == {Status.FINISHED, Status.LENGTH, Status.INTERRUPTED}
    for mine, theirs in zip(here, there, strict=True):
        n = min(len(mine.span), len(theirs.span))  # one that is interrupted may have come into its slot later
        assert mine.status is Status.INTERRUPTED or len(mine.span) == len(theirs.span) == n
        for name in ("token_ids", "logprobs", "topk_ids", "topk_logprobs"):
            one, other = getattr(mine.span, name), getattr(theirs.span, name)
            assert (one is None) == (other is None)
            np.testing.assert_allclose([] if one is None else one[:n], [] if other is None else other[:n], atol=1e-5)
    clean()


def adapted(device: str, rank: int) -> tuple[dict[str, torch.Tensor], list[Segment]]:
    """Gradients of adapters beside routed experts, and what an engine samples with the same adapters."""
    lora = LoraConfig(rank=rank, experts=True)
    made = policy("tiny-qwen3-moe", device, num_hidden_layers=1, hidden_size=16, lora=lora)
    for name, p in parameters(made.model).items():
        drawn = torch.rand(p.shape, generator=torch.Generator().manual_seed(len(name)))
        p.data.copy_((drawn - 0.5).to(device))
    engine = LocalEngine(made.model.config, EngineConfig(slots=8), device=device, max_length=40, lora=lora)
    adapters = named_adapters(made.model)
    DirectPublisher([engine]).publish(assemble.checkpoint_views(made.model).items(), 0, adapters)
    rng = np.random.default_rng(0)
    asked = SamplingParams(max_new_tokens=6)
    engine.submit([Request(id=i, prompt_ids=rng.integers(8, 264, 4 + i), sampling=asked) for i in range(4)])
    ended: list[Segment] = []
    while engine.busy:
        ended += engine.poll(9)
    ids, positions = torch.from_numpy(rng.integers(8, 264, 24)), torch.arange(12).repeat(2)
    hidden = PackedModel(made.model)(ids.to(device), positions.to(device), [0, 12, 24])
    (hidden.cpu() * torch.linspace(-1, 1, hidden.numel()).view(hidden.shape)).sum().backward()
    grads = {name: p.grad.cpu() for name, p in parameters(made.model).items() if p.grad is not None}
    return grads, sorted(ended, key=lambda s: s.request_id)


@pytest.mark.parametrize("rank", [1, 3, 4, 8])
def test_adapters_of_experts_are_those_of_the_cpu(rank: int) -> None:
    """There the adapters of all experts are one product, too, which wants rows of 16 bytes."""
    (here, mine), (there, theirs) = adapted("cpu", rank), adapted(DEVICE, rank)
    assert here.keys() == there.keys()
    assert any("experts" in name for name in here)
    for name, grad in here.items():
        assert grad.abs().sum() > 0
        assert (there[name] - grad).norm() < 1e-5 * grad.norm()
    for one, other in zip(mine, theirs, strict=True):
        assert one.span.token_ids.tolist() == other.span.token_ids.tolist()
        np.testing.assert_allclose(one.span.logprobs, other.span.logprobs, atol=1e-5)
    assert reads("models/adapters.py _experts", "models/forward.py FastForward._by_expert") == Counter()


@pytest.fixture(scope="module")
def trainer() -> LocalTrainer:
    config = TrainConfig(lr=1e-4, kl_coefficient=0.1)
    made = policy("tiny-qwen3", DEVICE, num_hidden_layers=1, hidden_size=16, vocab_size=264)
    return LocalTrainer(made, config, temperature=1.0, total_updates=99, device=DEVICE)


@pytest.fixture(scope="module")
def rollouts(trainer: LocalTrainer) -> list[Rollout]:
    """Four groups of four, of lengths and rewards that differ, each with some of the tokens its policy held likely."""
    engine = LocalEngine(trainer.model.config, EngineConfig(slots=16, dtype="bf16"), device=DEVICE, max_length=40)
    DirectPublisher([engine]).publish(trainer.named_weights(), 0)
    rng, spec = np.random.default_rng(0), GraderSpec(name="exact")
    prompts = [
        Prompt(index=g, id=str(g), text="", token_ids=rng.integers(8, 264, 4 + g), answer="", grader=spec, task="")
        for g in range(4)
    ]
    about = [SamplingParams(max_new_tokens=3 + i, return_topk=20, seed=i) for i in range(16)]
    engine.submit([Request(id=i, prompt_ids=prompts[i // 4].token_ids, sampling=a) for i, a in enumerate(about)])
    ended: list[Segment] = []
    while engine.busy:
        ended += engine.poll(9)
    return [
        Rollout(id=s.request_id, group=s.request_id // 4, member=s.request_id % 4, prompt=prompts[s.request_id // 4],
            span=s.span, status=s.status, sampling=about[s.request_id], engine="local", dtype="bf16", reward=float(s.request_id % 3 > 0))
        for s in sorted(ended, key=lambda s: s.request_id)
    ]  # fmt: skip


def update(trainer: LocalTrainer, objective: objectives.Objective, whole: TrainingBatch, limit: int) -> int:
    """One update with all that a step tells of it, in micro-batches of `limit` tokens; how many these were."""
    trainer.config = trainer.config.model_copy(update={"micro_batch_tokens": limit})
    old, ref = trainer.score(whole), trainer.ref_logprobs(whole)
    JOURNAL.clear()
    output = trainer.update(
        whole, objective, old_logprobs=old.logprobs, old_topk_logprobs=old.topk_logprobs, ref_logprobs=ref
    )
    micros = len(list(whole.micro_batches(limit)))
    passes = 2 if "prepare" in objective.needs else 1
    assert sum(reads(*MICRO).values()) <= passes * micros + 2  # and what the whole batch is checked for
    scores = OldScores(old=old, ref=ref)
    updates_metrics(objective, [whole], [output])
    watch(objective, whole, [whole], scores, [output], 0)
    seen_of([whole], scores, [output], 0)
    return micros


@pytest.mark.usually("kpop", "icepop", "ac_mis_po", "dppo_*", "gspo", "m2po", "grpo")
@pytest.mark.parametrize("name", sorted(objectives.RECIPES))
def test_every_objective_waits_once_in_a_micro_batch(name: str, trainer: LocalTrainer, rollouts: list[Rollout]) -> None:
    objective = objectives.build(name, {}, kl_coefficient=0.1)
    rewards, groups = [r.reward for r in rollouts], [r.group for r in rollouts]
    credit = advantages.compute(objective.advantage, rewards, groups, [len(r.span) for r in rollouts])
    whole = build_batch(rollouts, credit, objective.aggregate).to(DEVICE)
    assert update(trainer, objective, whole, 40) > 4
    clean()
    seen = reads(*UPDATE)
    assert update(trainer, objective, whole, 10_000) == 1
    assert reads(*UPDATE) == seen


@pytest.mark.parametrize("name", sorted(advantages.ESTIMATORS))
def test_every_advantage_reaches_the_device(name: str, trainer: LocalTrainer, rollouts: list[Rollout]) -> None:
    rewards, groups = [r.reward for r in rollouts], [r.group for r in rollouts]
    credit = advantages.compute(name, rewards, groups, [len(r.span) for r in rollouts])
    whole = build_batch(rollouts, None, "token_mean").to(DEVICE)
    JOURNAL.clear()
    parts = whole.parts([list(credit[:8]), list(credit[8:])], "token_mean")
    clean()
    assert torch.cat([p.advantages for p in parts]).isfinite().all()
