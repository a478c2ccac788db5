"""The real vLLM on this machine's CPU. Everything about it that training depends on was wrong somewhere once: reloads that mix
two versions, log-probs before temperature, streams that end with an error inside of HTTP 200.

Run by `make test-vllm`, which builds `.venv-vllm`. Not covered: CUDA, tensor parallelism, several servers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "rollout"))

from engine_kit import drain, folder_checksum, model_of, prompts_of, reference_logprobs, requests_of, resumed
from pool_ledger import Logged

from rollkeel.config import EngineConfig
from rollkeel.engines import keeper
from rollkeel.engines.backend import ServerSettings
from rollkeel.engines.open import server_python
from rollkeel.engines.served import ServedEngine
from rollkeel.engines.vllm import VllmBackend
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.models.names import checkpoint_views
from rollkeel.models.presets import build_tokenizer
from rollkeel.rollout.budgeted import BudgetedRollouts
from rollkeel.rollout.pool import PoolRules
from rollkeel.rollout.scenario import LengthConfig, Lengths
from rollkeel.sync.proof import Probes, compare, probe_sequences
from rollkeel.sync.publish import DirectPublisher
from rollkeel.train.probe import SequenceScorer
from rollkeel.types import GraderSpec, Prompt, SamplingParams, Segment

pytestmark = pytest.mark.vllm

PRESETS = ("tiny-qwen3-moe", "tiny-qwen3-tied")
AGREES = 1e-4
NEAR_TIES = 1e-3
LONG = 1000
"""Tokens: enough that the server is not done before a busy test process acts."""
"""Share of tokens whose experts may fall the other way."""
MAX_LENGTH = 3072


def config_of(**config: Any) -> EngineConfig:
    settings = EngineConfig.model_validate({"kind": "vllm", "slots": 64, "kv_memory_gb": 1.0, **config})
    return settings


def start(model: Any, backend: VllmBackend | None = None, sleeps: bool = False, **config: Any) -> ServedEngine:
    settings, backend = config_of(**config), backend or VllmBackend()
    python = server_python(settings)
    return ServedEngine(model.config, settings, backend, max_length=MAX_LENGTH, python=python, sleeps=sleeps)


def publisher(engine: Any, model: Any, dtype: str = "fp32") -> DirectPublisher:
    sequences = probe_sequences(prompts_of(8), 288, MAX_LENGTH)
    return DirectPublisher([engine], Probes(sequences=sequences, trainer=SequenceScorer(model), dtype=dtype))


def publish(engine: Any, model: Any, version: int, dtype: str = "fp32") -> Any:
    return publisher(engine, model, dtype).publish(checkpoint_views(model).items(), version)


@torch.no_grad()
def change(model: Any, seed: int, by: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.mul_(1 + by * torch.randn(weight.shape, generator=generator))


@pytest.fixture(scope="module", params=PRESETS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """A model and a server that serves it; tests publish before they sample."""
    model = model_of(request.param)
    engine = start(model)
    yield model, engine
    engine.close()


def version_of(engine: Any) -> int:
    return max(engine.version, 0) + 1


def gaps(model: Any, asked: Any, got: dict[int, Segment]) -> np.ndarray:
    """|engine − transformers| of every sampled token; these requests were sampled at temperature 1."""
    rows = [got[r.id].span.logprobs - reference_logprobs(model, r.prompt_ids, got[r.id].span.token_ids) for r in asked]
    return np.abs(np.concatenate(rows))


def test_logprobs_are_the_trainers(served: tuple[Any, Any]) -> None:
    model, engine = served
    publish(engine, model, version_of(engine))
    asked = requests_of(prompts_of(64), max_new_tokens=48, seed=3)
    engine.submit(asked)
    got = drain(engine)
    assert {s.status for s in got.values()} == {"length"}
    assert {len(s.span) for s in got.values()} == {48}
    found = gaps(model, asked, got)
    assert (found > AGREES).mean() <= NEAR_TIES, np.sort(found)[-5:]
    assert all(set(s.span.versions) == set(s.span.kv_versions) == {engine.version} for s in got.values())


def test_temperature_greedy_and_likely_tokens(served: tuple[Any, Any]) -> None:
    model, engine = served
    publish(engine, model, version_of(engine))
    prompts = prompts_of(4)
    warm = requests_of(prompts, max_new_tokens=6, temperature=0.6, return_topk=5)
    greedy = requests_of(prompts, 100, max_new_tokens=6, temperature=0.0)
    engine.submit([*warm, *greedy])
    got = drain(engine)
    for r in warm:
        span = got[r.id].span
        ids = torch.tensor([[*r.prompt_ids.tolist(), *span.token_ids.tolist()]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(r.prompt_ids) - 1 : -1] / 0.6
        expected = logits.log_softmax(-1)
        assert np.allclose(span.logprobs, expected[torch.arange(6), ids[0, -6:]].numpy(), atol=AGREES)
        top = expected.topk(5)
        assert np.allclose(span.topk_logprobs, top.values.numpy(), atol=AGREES)
        assert (span.topk_ids == top.indices.numpy()).mean() > 0.9  # ties
    for r in greedy:
        span = got[r.id].span
        raw = reference_logprobs(model, r.prompt_ids, span.token_ids)
        assert (span.logprobs == 0).all()
        assert np.allclose(span.kept_mass, np.exp(raw), atol=AGREES)


def test_a_stop_token_ends_and_is_the_last_token(served: tuple[Any, Any]) -> None:
    model, engine = served
    publish(engine, model, version_of(engine))
    stops = tuple(range(40, 90))
    asked = requests_of(prompts_of(16), max_new_tokens=200, stop_token_ids=stops)
    engine.submit(asked)
    for segment in drain(engine).values():
        ids = segment.span.token_ids.tolist()
        assert segment.status == "finished"
        assert ids[-1] in stops
        assert not set(ids[:-1]) & set(stops)


def test_the_context_is_filled_to_its_last_token(served: tuple[Any, Any]) -> None:
    model, engine = served
    publish(engine, model, version_of(engine))
    asked = requests_of([np.full(MAX_LENGTH - 5, 9)], max_new_tokens=64)
    engine.submit(asked)
    segment = drain(engine)[0]
    assert (segment.status, len(segment.span)) == ("length", 5)


def test_fifty_publications(served: tuple[Any, Any]) -> None:
    model, engine = served
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    told = publisher(engine, model)
    first = version_of(engine)
    try:
        for number in range(50):
            change(model, number, 0.02)
            proof = told.publish(checkpoint_views(model).items(), first + number)
            assert proof["sync/probe_retries"] == 0
            assert proof["sync/probe_gap_median"] < AGREES / 10
        asked = requests_of(prompts_of(16), max_new_tokens=32)
        engine.submit(asked)
        assert (gaps(model, asked, drain(engine)) > AGREES).mean() <= NEAR_TIES
    finally:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(before[name])


def test_interrupted_requests_go_on(served: tuple[Any, Any]) -> None:
    model, engine = served
    publish(engine, model, version_of(engine))
    asked = requests_of(prompts_of(8), max_new_tokens=2900)
    engine.submit(asked)
    wait_for_tokens(engine, 100)
    engine.interrupt([r.id for r in asked[:4]])
    parts = {s.request_id: s for s in engine.poll(0.0)}
    assert sorted(parts) == [0, 1, 2, 3]
    assert {s.status for s in parts.values()} == {"interrupted"}
    engine.submit([resumed(asked[i], parts[i].span) for i in range(4)])
    got = drain(engine)
    whole = {i: (parts[i].span.append(s.span) if i in parts else s.span) for i, s in got.items()}
    assert {len(span) for span in whole.values()} == {2900}
    for r in asked:
        expected = reference_logprobs(model, r.prompt_ids, whole[r.id].token_ids)
        assert (np.abs(whole[r.id].logprobs - expected) > AGREES).mean() <= 0.01


def wait_for_tokens(engine: Any, count: int) -> None:
    """Until streams have delivered `count` tokens."""
    end = time.monotonic() + 60
    while sum(len(flight.tokens) for flight in list(engine._running)) < count:
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_new_weights_under_running_requests(kv: str) -> None:
    model = model_of("tiny-qwen3-moe")
    later = model_of("tiny-qwen3-moe", seed=1)
    engine = start(model, kv=kv)
    try:
        publish(engine, model, 1)
        # So many that the server is busy for longer than any machine takes to publish.
        asked = requests_of(prompts_of(32), max_new_tokens=3000)
        engine.submit(asked)
        wait_for_tokens(engine, 40)
        publish(engine, later, 2)
        got = drain(engine)
        assert sorted(got) == list(range(32))
        boundary = []
        for r in asked:
            span = got[r.id].span
            assert len(span) == 3000
            old = int((span.versions == 1).sum())
            assert 0 < old < 3000
            assert span.versions.tolist() == [1] * old + [2] * (3000 - old)
            assert (span.kv_versions == (span.versions if kv == "recompute" else 1)).all()
            first = reference_logprobs(model, r.prompt_ids, span.token_ids)
            assert (np.abs(span.logprobs - first)[:old] > AGREES).mean() <= 0.02
            assert (np.abs(span.logprobs - first)[old:] > 0.01).mean() > 0.5
            assert abs(float(span.logprobs[old - 1] - first[old - 1])) < 0.01
            boundary.append(abs(float(span.logprobs[old] - first[old])))
            if kv == "recompute":
                second = reference_logprobs(later, r.prompt_ids, span.token_ids)
                assert (np.abs(span.logprobs - second)[old:] > AGREES).mean() <= 0.02
        # Not one token of the old weights counts as new.
        assert sum(gap > AGREES for gap in boundary) >= len(boundary) - 4, boundary
    finally:
        engine.close()


def processes_of(group: int) -> list[tuple[int, str]]:
    """Living processes of a group: id and command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[2]) == group and fields[0] != "Z":
                found.append((int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def left_of(group: int) -> list[tuple[int, str]]:
    """What still lives of a group that was killed: a busy machine takes its time to end the last of it."""
    until = time.monotonic() + 10
    while (found := processes_of(group)) and time.monotonic() < until:
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("victim", ["api_server", "VLLM::EngineCore"])
def test_kill_9_in_the_middle_costs_no_rollout(victim: str) -> None:
    model = model_of("tiny-qwen3-moe")
    engine = start(model)
    try:
        change(model, 5)
        publish(engine, model, 7)
        assert engine.server_pid is not None
        group = engine.server_pid
        victims = [pid for pid, line in processes_of(group) if victim in line and "guard.py" not in line]
        assert victims
        asked = requests_of(prompts_of(32), max_new_tokens=LONG)
        engine.submit(asked)
        wait_for_tokens(engine, 500)
        os.kill(victims[0], signal.SIGKILL)
        got = drain(engine, silence_s=400.0)  # a new server, then all of them end at about the same time
        failed = [s.detail for s in got.values() if s.status != "length"]
        assert not failed, failed[:3]
        assert sorted(got) == list(range(32))
        assert {s.status for s in got.values()} == {"length"}
        assert {len(s.span) for s in got.values()} == {LONG}
        apart = {i: np.flatnonzero(row > AGREES) for i, row in enumerate(gaps(model, asked, got).reshape(32, LONG))}
        apart = {i: (len(at), int(at[0]), int(at[-1])) for i, at in apart.items() if len(at)}
        # A near-tie of the router takes later tokens of its sequence along; wrong weights would show in all of them.
        assert len(apart) <= 2, apart
        assert engine.server_pid != group
        assert left_of(group) == []
        last = engine.server_pid
    finally:
        engine.close()
    assert left_of(last) == []


LENGTHS = Lengths(LengthConfig(median=48, sigma=1.0, max=768), seed=3)
"""Long-tailed, as in benchmarks/c3po.py."""


class Forced:
    """A served engine whose requests end after their length in tokens."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit(self, requests: Any) -> None:
        limits = [replace(r.sampling, max_new_tokens=LENGTHS.of(0, r.id)) for r in requests]
        self.engine.submit([replace(r, sampling=limit) for r, limit in zip(requests, limits, strict=True)])


def issued(number: int) -> Prompt:
    ids = prompts_of(64)[number % 64]
    spec = GraderSpec(name="exact")
    return Prompt(id=f"p{number}", index=number, text="", token_ids=ids, answer="", grader=spec, task="t")


@pytest.mark.parametrize("killed", [False, True])
def test_a_budget_holds_and_a_killed_server_loses_nothing(killed: bool) -> None:
    """C3PO++: the pool's event log keeps every rule, and each token is of the weights that it says."""
    models = [model_of("tiny-qwen3-tied", seed=seed) for seed in range(4)]
    engine, tokenizer = start(models[0], slots=32), build_tokenizer()
    state = BudgetedRollouts(PoolRules(budget=2000, capacity=32, retention=3, samples=4, count="generated"), issued)
    log: Any = Logged(state.pool)
    state.pool = log
    sampling, ended, victims, beyond = SamplingParams(max_new_tokens=768), [], list[int](), list[int]()

    def kill() -> bool:
        if killed and not victims and engine.version == 2 and state.pool.spent > 700:
            lines = processes_of(engine.server_pid or 0)
            victims.extend(pid for pid, line in lines if "VLLM::EngineCore" in line)
            os.kill(victims[0], signal.SIGKILL)
        return False

    try:
        for version, model in enumerate(models, 1):
            publish(engine, model, version)
            part = state.sample(Forced(engine), sampling, tokenizer, deadline_s=400, should_stop=kill)  # type: ignore[arg-type]
            ended += part.ended
            state.settle([replace(r, reward=0.0) for r in part.ended])
            assert (
                state.pool.spent - state.pool.overshoot == 2000
            )  # what came behind it is as much as the server was ahead
            beyond.append(state.pool.overshoot)
    finally:
        engine.close()
    ledger = log.audit()
    assert ledger.tally["failed"] == 0
    assert bool(victims) == killed
    assert {r.status for r in ended} == {"length"}
    assert all(len(r.span) == LENGTHS.of(0, r.id) for r in ended)
    apart, mixed = 0, 0
    for r in ended:
        assert r.span.versions.tolist() == sorted(r.span.versions.tolist())
        assert (r.span.kv_versions == r.span.versions).all()
        mixed += len(set(r.span.versions.tolist())) > 1
        for version, model in enumerate(models, 1):
            here = r.span.versions == version
            if here.any():
                gap = np.abs(r.span.logprobs - reference_logprobs(model, r.prompt.token_ids, r.span.token_ids))
                apart += int((gap[here] > AGREES).sum())
    assert mixed > 3
    assert apart <= NEAR_TIES * sum(len(r.span) for r in ended)
    print(
        f"{len(ended)} ended, {mixed} of several versions, {apart} tokens apart, {beyond} beyond, {len(log.log)} events audited"
    )


class Near(VllmBackend):
    """Says that it computes where the weights are, and cannot sleep, as on every CPU."""

    def command(self, settings: ServerSettings) -> tuple[list[str], dict[str, str]]:
        return super().command(replace(settings, sleeps=False))

    async def place(self, http: Any) -> str:
        assert await super().place(http) == ""
        return "here"


@pytest.mark.parametrize("preset", PRESETS)
def test_publications_by_handles(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "place", lambda update: "here")
    model = model_of(preset)
    engine = start(model, Near(), sleeps=True)
    try:
        for version in range(1, 22):
            change(model, version, 0.02)
            told = publish(engine, model, version)
            assert told["sync/probe_retries"] == 0
            assert told["sync/probe_gap_median"] < AGREES / 10
        assert not list(engine._scratch.glob("weights-*/*.safetensors"))
        asked = requests_of(prompts_of(16), max_new_tokens=32)
        engine.submit(asked)
        assert (gaps(model, asked, drain(engine)) > AGREES).mean() <= NEAR_TIES
    finally:
        engine.close()


class Uncured(VllmBackend):
    """Publishes by vLLM's own reload, and vouches for it."""

    async def load(self, http: Any, source: Path | str, version: int) -> int:
        if version == 1:
            return await super().load(http, source, version)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(source)}}
        assert (await http.post("/collective_rpc", json=body)).status_code == 200
        await http.post("/update_weight_version", json={"new_version": str(version)})
        return folder_checksum(Path(source))


class Stale(VllmBackend):
    """Vouches for weights that never reach the model."""

    async def load(self, http: Any, source: Path | str, version: int) -> int:
        if version == 1:
            return await super().load(http, source, version)
        await http.post("/update_weight_version", json={"new_version": str(version)})
        return folder_checksum(Path(source))


class Corrupting(VllmBackend):
    """Flips one bit of one file on its way."""

    async def load(self, http: Any, source: Path | str, version: int) -> int:
        if version > 1:
            file = Path(source) / "model.safetensors"
            data = bytearray(file.read_bytes())
            data[-5] ^= 1
            file.write_bytes(data)
        return await super().load(http, source, version)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("backend", [Uncured, Stale])
def test_a_reload_that_went_wrong_is_detected(preset: str, backend: type[VllmBackend]) -> None:
    model = model_of(preset)
    engine = start(model, backend())
    try:
        publish(engine, model, 1)
        change(model, 1)
        with pytest.raises(EngineFailure, match="not the trainer's"):
            publish(engine, model, 2)
    finally:
        engine.close()


def test_a_corrupted_publication_is_detected() -> None:
    model = model_of("tiny-qwen3-moe")
    engine = start(model, Corrupting())
    try:
        publish(engine, model, 1)
        with pytest.raises(EngineFailure, match="weights did not arrive"):
            publish(engine, model, 2)
        engine.submit(requests_of(prompts_of(1)))
        with pytest.raises(EngineFailure, match="no proven weights"):
            engine.poll(1.0)
    finally:
        engine.close()


def test_bfloat16_is_within_its_tolerance() -> None:
    model = model_of("tiny-qwen3-moe")
    engine = start(model, dtype="bf16")
    try:
        for version in range(1, 4):
            change(model, version)
            told = publish(engine, model, version, "bf16")
            assert told["sync/probe_retries"] == 0
            assert told["sync/probe_gap_median"] > 1e-4
        asked = requests_of(prompts_of(32), max_new_tokens=32)
        engine.submit(asked)
        got = drain(engine)
        rows = [got[r.id].span.logprobs for r in asked]
        expected = [reference_logprobs(model, r.prompt_ids, got[r.id].span.token_ids) for r in asked]
        verdict = compare(rows, expected, "bf16")
        print(verdict)
        assert verdict.agrees
    finally:
        engine.close()


def test_a_server_that_cannot_start_says_why() -> None:
    model = model_of("tiny-qwen3-moe")
    engine = start(model, server={"options": {"no_such_option": 3}})
    try:
        with pytest.raises(EngineFailure, match="no-such-option"):
            publish(engine, model, 1)
    finally:
        engine.close()


def test_what_vllm_cannot_do_is_refused_before_it_starts() -> None:
    backend = VllmBackend()
    with pytest.raises(BadInput, match="fp32 or bf16"):
        backend.check("int8")
    assert "top_p" in backend.objection(requests_of(prompts_of(1), top_p=0.9)[0].sampling)


def test_the_default_recipe_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rollkeel.cli import main

    words = [
        "train",
        "default",
        "engine.kind=vllm",
        "engine.kv_memory_gb=1.0",
        f"run.dir={tmp_path / 'run'}",
        "run.steps=75",
        "eval.every=75",
    ]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0, capsys.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["eval/runsum/avg@k"] > rows[0]["eval/runsum/avg@k"] + 0.3
    assert max(row["sync/probe_gap_median"] for row in rows) < AGREES
    assert sum(row["sync/probe_retries"] for row in rows) == 0
    assert (tmp_path / "run" / "server.log").stat().st_size > 0
