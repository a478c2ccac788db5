"""A server on the trainer's device: it must be asleep while weights are trained and awake when it is asked, take no more memory than
is left, and serve the weights that were handed over, or the run ends in an out-of-memory error or learns from the wrong policy.

Two real processes and torch's shared memory of the host in the place of CUDA's handles; `fake_server.py` refuses whatever it is
asked while asleep. Not covered: vLLM's own sleep (test_vllm.py has its handles, on a CPU); CUDA's handles
stand behind `-m cuda` and have not run.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import drain
from fake_backend import FakeBackend, assert_true, fake_engine, request, requests, weights
from fake_server import by_handles

from rollkeel.config import Config, EngineConfig
from rollkeel.engines import keeper, same_device
from rollkeel.engines.backend import ServerSettings
from rollkeel.engines.vllm import VllmBackend
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.memory.plan import beside, plan
from rollkeel.memory.shapes import PUBLIC, shape_of
from rollkeel.protocols import RestingEngine
from rollkeel.sync.publish import full_update
from rollkeel.types import WeightSlice, WeightUpdate

GB = 2**30


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[Any]:
    opened: list[Any] = []

    def make(**config: Any) -> tuple[Any, FakeBackend]:
        made = fake_engine(tmp_path, **config)
        opened.append(made[0])
        return made

    yield make
    for engine in opened:
        engine.close()


@pytest.fixture
def lends(open_engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Any, FakeBackend]:
    """An engine whose server says that it computes where the trainer's weights are."""
    monkeypatch.setattr(keeper, "place", lambda update: "here")
    (tmp_path / "place").write_text("here")
    return open_engine(sleeps=True)


def all_true(engine: Any, policies: dict[int, float], first: int = 0) -> None:
    asked = requests(4, first)
    engine.submit(asked)
    got = drain(engine)
    for r in asked:
        assert_true(r, got[r.id].span, policies)


def test_it_sleeps_between_rollouts_and_weights(open_engine: Any) -> None:
    engine, backend = open_engine(sleeps=True)
    assert isinstance(engine, RestingEngine)
    for version in (2, 3):
        all_true(engine, {version - 1: version - 1.0})
        engine.rest()
        engine.update_weights(weights(float(version), version))
    all_true(engine, {3: 3.0})
    assert backend.state()["calls"] == ["load", *["sleep", "weights", "load", "kv_cache"] * 2]
    assert backend.starts() == 1


def test_nothing_is_asked_of_a_sleeper(open_engine: Any) -> None:
    engine, backend = open_engine(sleeps=True)
    engine.rest()
    with pytest.raises(EngineFailure, match="no proven weights"):
        engine.score([np.array([1, 2, 3])])
    engine.submit([request(1)])
    with pytest.raises(EngineFailure, match="no proven weights"):
        engine.poll(0.1)
    engine.update_weights(weights(2.0, 2))
    assert_true(request(1), drain(engine)[1].span, {2: 2.0})
    assert backend.starts() == 1


def test_no_sleep_with_requests_in_flight(open_engine: Any) -> None:
    engine, backend = open_engine(sleeps=True)
    asked = request(1, 200, stop_token_ids=())
    engine.submit([asked])
    backend.until_sent(5)
    with pytest.raises(EngineFailure, match="1 requests are in flight"):
        engine.rest()
    assert_true(asked, drain(engine)[1].span, {1: 1.0})
    assert backend.state()["calls"] == ["load"]


def test_a_server_without_sleep_is_left_awake(open_engine: Any) -> None:
    engine, backend = open_engine()
    engine.rest()
    all_true(engine, {1: 1.0})
    assert backend.state()["calls"] == ["load"]


@pytest.mark.parametrize("fault", ["cannot_sleep", "cannot_wake", "killed"])
def test_a_sleep_gone_wrong_ends_with_a_new_server(open_engine: Any, fault: str) -> None:
    engine, backend = open_engine(sleeps=True)
    if fault != "killed":
        backend.set(fault)
    engine.rest()
    if fault == "killed":
        os.kill(backend.state()["pid"], signal.SIGKILL)
    engine.update_weights(weights(2.0, 2))
    all_true(engine, {2: 2.0})
    assert backend.state()["calls"] == ["load"]
    assert backend.starts() == 2


def shm() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("torch_")}


def rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def large(version: int) -> WeightUpdate:
    values = torch.full((5, 2**20), float(version))
    return full_update(
        [("policy", torch.tensor([float(version)])), *((f"w{i}", row) for i, row in enumerate(values))], version
    )


@pytest.mark.slow
def test_fifty_publications_by_handles_leave_nothing(lends: tuple[Any, FakeBackend]) -> None:
    engine, backend = lends
    before, sizes = shm(), []
    for version in range(2, 52):
        engine.rest()
        update = large(version)
        assert engine.update_weights(update).checksum == update.checksum
        assert shm() <= before
        sizes.append(rss(os.getpid()) + rss(backend.state()["pid"]))
    assert max(sizes[40:]) - max(sizes[15:25]) < 40 * 2**20, "not two copies of the weights in 25 publications"
    all_true(engine, {51: 51.0})
    assert not list(engine._scratch.glob("weights-*/*.safetensors")), "nothing went through the host"
    assert backend.starts() == 1


def test_a_restart_writes_the_weights_that_are_still_there(lends: tuple[Any, FakeBackend]) -> None:
    engine, backend = lends
    update = weights(2.0, 2)
    engine.update_weights(update)
    os.kill(backend.state()["pid"], signal.SIGKILL)
    all_true(engine, {2: 2.0})
    assert backend.starts() == 2
    update.slices[0].tensor.fill_(9.0)  # trained on, and the server is lost before they are published
    engine._keeper.weights.folder.rename(engine._scratch / "gone")
    os.kill(backend.state()["pid"], signal.SIGKILL)
    engine.submit(requests(4, 10))
    with pytest.raises(EngineFailure, match="wrong checksum"):
        drain(engine)


@pytest.mark.cuda
def test_cuda_memory_is_lent_and_given_back(open_engine: Any, tmp_path: Path) -> None:
    def on_card(version: int) -> WeightUpdate:
        values = torch.full((2**24,), float(version)).cuda()
        return full_update([("policy", values[:1]), ("w", values)], version)

    (tmp_path / "place").write_text(same_device.place(on_card(0)))
    engine, backend = open_engine(sleeps=True)
    for version in range(2, 12):
        engine.rest()
        update = on_card(version)
        assert engine.update_weights(update).checksum == update.checksum
        assert not engine._keeper.weights.folder.exists()
        assert torch.cuda.memory_allocated() < 3 * 2**26
    all_true(engine, {11: 11.0})
    assert backend.starts() == 1


def changed(message: str, how: str) -> str:
    asked = json.loads(message)
    first = asked["parts"][0]
    if how == "missing":
        first["rows"].pop()
    elif how == "outside":
        first["rows"][-1][3] += 2**30
    elif how == "unknown":
        first["handle"][1] = "/torch_1_2_3"
    elif how == "swapped":
        rows = first["rows"]
        rows[1][3], rows[2][3] = rows[2][3], rows[1][3]
    return json.dumps(asked)


@pytest.mark.parametrize(
    ("how", "complaint"),
    [("missing", "handles for 2 of 3 tensors"), ("outside", "outside of its buffer"), ("unknown", "torch_1_2_3")],
)
def test_a_worker_refuses_handles_that_are_not_whole(how: str, complaint: str) -> None:
    worker = by_handles()
    with same_device.lent(three(), 1) as message:
        assert complaint in worker.rollkeel_take(changed(message, how))["error"]


def test_a_worker_refuses_late_handles() -> None:
    worker, update = by_handles(), three()
    with same_device.lent(update, 1) as early, same_device.lent(update, 2) as message:
        assert int(worker.rollkeel_take(message)["checksum"]) == update.checksum
        assert "update 1 came after those of 2" in worker.rollkeel_take(early)["error"]
    assert "error" in by_handles().rollkeel_take(message), "their memory was given back"


def test_wrong_bytes_are_told_by_the_checksum() -> None:
    worker, update = by_handles(), three()
    with same_device.lent(update, 1) as message:
        assert int(worker.rollkeel_take(changed(message, "swapped"))["checksum"]) != update.checksum


def three() -> WeightUpdate:
    values = torch.arange(12.0).view(3, 4)
    return full_update([("a", values.t()), ("b", values[1]), ("c", values[2].flip(0))], 1)


@pytest.mark.parametrize("part", [1, 100, same_device.PART_BYTES])
def test_what_is_lent_is_what_was_published(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_device, "PART_BYTES", part)
    x = torch.randn(7, 9, 3, generator=torch.Generator().manual_seed(0))
    tensors = {"t": x.permute(2, 0, 1), "h": x[1].bfloat16(), "b": x[0] > 0, "one": torch.tensor(3, dtype=torch.int16)}
    worker, update = by_handles(), full_update([(k, v) for k, v in tensors.items() if k != "b"], 1)
    with same_device.lent(update, 1) as message:
        assert int(worker.rollkeel_take(message)["checksum"]) == update.checksum
    assert all(torch.equal(worker.loaded[piece.name], piece.tensor) for piece in update.slices)


def test_a_part_of_a_tensor_is_not_lent() -> None:
    update = three()
    parts = [replace(update.slices[0], offset=4), *update.slices[1:]]
    with pytest.raises(EngineFailure, match="whole tensors"), same_device.lent(replace(update, slices=parts), 1):
        pass


def test_weights_on_the_host_go_by_way_of_a_folder() -> None:
    assert same_device.place(three()) == ""


def test_the_share_is_what_training_leaves() -> None:
    share = same_device.memory_share(free=100 * GB, total=140 * GB, needed=40 * GB, weights=8 * GB, kv=0)
    assert 56.9 < share * 140 <= 57.0
    with pytest.raises(BadInput, match=r"20\.0 of 80\.0 GiB .* training takes 10\.0 .* needs 17\.0; lower") as error:
        same_device.memory_share(20 * GB, 80 * GB, needed=10 * GB, weights=8 * GB, kv=4 * GB, copies=8 * GB)
    assert "\n" not in str(error.value)
    with pytest.raises(BadInput, match=r"needs 29\.0"):
        same_device.memory_share(free=20 * GB, total=80 * GB, needed=0, weights=8 * GB, kv=20 * GB)


@pytest.mark.parametrize(
    ("dtype", "options", "sleeps", "share"),
    [
        ("bf16", {}, False, 0.95),  # 60 GB of weights and nothing beside them
        ("bf16", {"tensor-parallel-size": 2}, False, 0.95),
        (
            "bf16",
            {"tensor_parallel_size": 2},
            True,
            None,
        ),  # copies of all weights on the one device that hands them over
        ("fp32", {}, False, None),
        ("fp32", {"tensor-parallel-size": 2, "pipeline-parallel-size": 2}, False, 0.95),
    ],
)
def test_what_fits_is_not_refused(
    dtype: str, options: dict[str, Any], sleeps: bool, share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 billion weights on an empty card of 80 GiB, from a trainer in bfloat16; copies have the trainer's numbers."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (80 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    piece = WeightSlice(name="w", tensor=torch.empty(30_000, 10**6, dtype=torch.bfloat16, device="meta"), checksum=0)
    update = WeightUpdate(kind="full", base_version=None, version=1, slices=[piece], checksum=0)
    asked = EngineConfig.model_validate({"kind": "vllm", "dtype": dtype, "server": {"options": options}})
    if share is None:
        with pytest.raises(BadInput, match=r"engine\.kind=vllm: 80\.0 of 80\.0 GiB"):
            same_device.share_of(asked, "cuda", 0, update, sleeps)
    else:
        assert same_device.share_of(asked, "cuda", 0, update, sleeps) == share
    assert same_device.share_of(asked, "cpu", 0, update, sleeps) is None


def test_while_a_server_samples_only_what_stays_is_planned() -> None:
    fields = PUBLIC["Qwen/Qwen3-1.7B"]
    config = Config.model_validate(
        {"model": {"path": "Qwen/Qwen3-1.7B", "dtype": "bfloat16"}, "engine": {"kind": "vllm"}}
    )
    stays = beside(config, fields)
    assert stays == pytest.approx(shape_of("Qwen/Qwen3-1.7B", {}).parameters * (2 + 2 + 8))
    overlapped = config.model_copy(update={"run": config.run.model_copy(update={"loop": "async"})})
    assert beside(overlapped, fields) == plan(config, shape_of("Qwen/Qwen3-1.7B", {})).total > stays
    with pytest.raises(
        BadInput, match=r"'mamba' are not known .*; set gpu_memory_utilization in engine\.server\.options"
    ):
        beside(config, {"model_type": "mamba"})


def engine_config(**server: Any) -> EngineConfig:
    return EngineConfig.model_validate({"kind": "vllm", "server": server})


def test_who_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert same_device.can_sleep(engine_config(), "cuda")
    assert not same_device.can_sleep(engine_config(), "cpu")
    assert not same_device.can_sleep(engine_config(url="http://h:1"), "cuda")
    assert not same_device.can_sleep(engine_config(options={"enable-sleep-mode": False}), "cuda")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    assert not same_device.can_sleep(engine_config(), "cpu")
    with pytest.raises(BadInput, match=r"PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True, .*; unset it"):
        same_device.can_sleep(engine_config(), "cuda:0")


def words_of(tmp_path: Path, config: EngineConfig, device: str, **more: Any) -> list[str]:
    (tmp_path / "weights").mkdir(exist_ok=True)
    settings = ServerSettings.of(config, max_length=64, python="python", device=device, **more)
    return VllmBackend().command(replace(settings, model=tmp_path / "weights", port=1))[0]


def test_vllm_is_told(tmp_path: Path) -> None:
    words = words_of(tmp_path, engine_config(), "cuda", sleeps=True, share=0.41)
    assert "--enable-sleep-mode" in words
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.41"
    assert "--kv-cache-memory-bytes" not in words
    fixed = EngineConfig.model_validate({"kind": "vllm", "kv_memory_gb": 6})
    words = words_of(tmp_path, fixed, "cuda", share=0.41)
    assert words[words.index("--kv-cache-memory-bytes") + 1] == str(6 * GB)
    assert "--enable-sleep-mode" not in words
    assert "--hf-overrides" not in words
    low = EngineConfig.model_validate({"kind": "vllm", "dtype": "bf16"})
    words = words_of(tmp_path, low, "cuda", share=0.41)
    assert json.loads(words[words.index("--hf-overrides") + 1]) == {"head_dtype": "float32"}
    own = EngineConfig.model_validate({**low.model_dump(), "server": {"options": {"hf-overrides": {"a": 1}}}})
    words = words_of(tmp_path, own, "cuda", share=0.41)
    assert json.loads(words[words.index("--hf-overrides") + 1]) == {"a": 1}
    words = words_of(tmp_path, fixed, "cpu")
    assert not {"--gpu-memory-utilization", "--kv-cache-memory-bytes", "--enable-sleep-mode"} & set(words)
