"""Worker processes must be invisible except in speed: same tokens, same bits every time, and a death that is reported, not waited for.

Real processes (about four seconds each to start). Not covered: several machines, CUDA.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_kit import drain, engine_of, model_of, prompts_of, requests_of, run, same

from rollkeel.config import EngineConfig
from rollkeel.engines import workers
from rollkeel.engines.open import open_engine
from rollkeel.engines.weight_folder import scratch_folder
from rollkeel.engines.workers import WorkerEngine
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.models.names import checkpoint_views
from rollkeel.protocols import Engine
from rollkeel.sync.publish import DirectPublisher, full_update
from rollkeel.types import Status


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of()


@pytest.fixture(scope="module")
def engine(model: Any, interrupted_at_birth: list[int]) -> Iterator[WorkerEngine]:
    """A terminal sends Ctrl-C to all processes; a worker that still imports cannot know that it is none of its business."""
    engine = open_engine(model.config, EngineConfig(processes=2, deadline_s=60), "cpu", 512)
    assert isinstance(engine, WorkerEngine)
    assert isinstance(engine, Engine)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models would come in one part."""
    monkeypatch.setattr(workers, "_PART", 1)


def publish(engine: WorkerEngine, model: Any, version: int) -> None:
    DirectPublisher([engine]).publish(checkpoint_views(model).items(), version)


@pytest.mark.slow
def test_ctrl_c_while_workers_start_is_the_callers(engine: WorkerEngine, interrupted_at_birth: list[int]) -> None:
    assert engine.capabilities
    assert interrupted_at_birth == [w.process.pid for w in engine.parts]


def test_same_tokens_as_in_process_and_bit_identical_twice(engine: WorkerEngine, model: Any) -> None:
    requests = requests_of(prompts_of(31), max_new_tokens=24)
    publish(engine, model, 3)
    assert engine.version == 3
    first, second = run(engine, requests), run(engine, requests)
    here = run(engine_of(model, max_length=512), requests)
    assert sorted(first) == list(range(31))
    for i, segment in first.items():
        assert same(segment.span, here[i].span)
        assert segment.status is here[i].status
        assert set(segment.span.versions.tolist()) == {3}
        np.testing.assert_array_equal(segment.span.token_ids, second[i].span.token_ids)
        np.testing.assert_array_equal(segment.span.logprobs, second[i].span.logprobs)


def test_bad_requests_and_bad_weights_come_back_as_one_line_and_the_workers_live_on(
    engine: WorkerEngine, model: Any
) -> None:
    publish(engine, model, 4)
    good = requests_of(prompts_of(6), max_new_tokens=5)
    expected = run(engine, good)
    with pytest.raises(BadInput, match="outside the vocabulary") as refused:
        engine.submit([*good, replace(good[0], id=9, prompt_ids=np.array([999]))])
    assert "\n" not in str(refused.value)
    assert engine.poll(0.0) == []
    update = full_update(checkpoint_views(model).items(), 5)
    broken = replace(update, slices=[replace(update.slices[0], checksum=1), *update.slices[1:]])
    with pytest.raises(EngineFailure, match="wrong checksum") as failed:
        engine.update_weights(broken)
    assert "\n" not in str(failed.value)
    assert engine.version < 0
    engine.submit(good)
    with pytest.raises(EngineFailure, match="no proven weights"):
        engine.poll(5.0)
    publish(engine, model, 6)
    done = drain(engine)
    assert all(same(done[i].span, expected[i].span) for i in expected)
    assert {v for s in done.values() for v in s.span.versions.tolist()} == {6}


def test_a_refused_part_is_said_at_the_end_and_the_next_update_is_served(
    engine: WorkerEngine, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = list[str]()

    def seen(worker: Any, message: tuple[Any, ...]) -> None:
        sent.append(message[0])
        worker.pipe.send(message)

    monkeypatch.setattr(type(engine.parts[0]), "send", seen)
    update = full_update(checkpoint_views(model).items(), 7, "fp32")
    third = replace(update.slices[3], checksum=update.slices[3].checksum ^ 1)
    with pytest.raises(EngineFailure, match=third.name):
        engine.update_weights(replace(update, slices=[*update.slices[:3], third, *update.slices[4:]]))
    assert sent.count("take") >= 10  # of two workers
    assert engine.version == -1
    publish(engine, model, 8)
    assert engine.version == 8


def test_update_and_interrupt_in_flight(engine: WorkerEngine, model: Any) -> None:
    publish(engine, model, 7)
    engine.submit(requests_of(prompts_of(8), max_new_tokens=400))
    with pytest.raises(BadInput, match="in flight"):
        engine.submit(requests_of(prompts_of(1)))
    time.sleep(0.05)
    publish(engine, model, 8)
    engine.interrupt([0, 7])
    time.sleep(0.05)
    engine.interrupt()
    done = drain(engine)
    assert sorted(done) == list(range(8))
    assert all(s.status in (Status.INTERRUPTED, Status.LENGTH) for s in done.values())
    for segment in done.values():
        versions = segment.span.versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) <= {7, 8}
    assert len(done[0].span) <= len(done[1].span)
    assert engine.poll(0.0) == []


def test_shared_memory_has_no_name_that_a_kill_could_leave_behind(engine: WorkerEngine, model: Any) -> None:
    publish(engine, model, 8)
    for pid in (os.getpid(), *(w.process.pid for w in engine.parts)):
        mapped = [
            line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/memfd:rollkeel-weights" in line
        ]
        assert mapped
        assert all(line.endswith("(deleted)") for line in mapped)


def test_a_killed_worker_fails_its_own_requests_only_and_close_leaves_nothing(engine: WorkerEngine, model: Any) -> None:
    """Last on purpose: it uses the shared engine up."""
    publish(engine, model, 9)
    processes = [w.process for w in engine.parts]
    engine.submit(requests_of(prompts_of(8), max_new_tokens=400))
    os.kill(processes[0].pid, signal.SIGKILL)
    done = drain(engine)
    assert [done[i].status for i in range(8)] == [Status.ENGINE_FAILURE] * 4 + [Status.LENGTH] * 4
    assert "worker 0 died with exit code -9" in done[0].detail
    again = run(engine, requests_of(prompts_of(4), max_new_tokens=3))
    assert [s.status for s in again.values()] == [Status.LENGTH] * 4
    os.kill(processes[1].pid, signal.SIGKILL)
    # The traceback keeps the failed call's frames alive; closing must work all the same.
    with pytest.raises(EngineFailure, match=r"died|no worker process is left") as failed:
        publish(engine, model, 10)
    engine.close()
    engine.close()
    assert failed is not None
    assert not any(p.is_alive() for p in processes)
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def test_memory_that_is_not_there_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for as a whole, from the kernel and not from /dev/shm, which is 64 MB in many a container; what is given is there."""
    before = set(os.listdir("/dev/shm"))
    file = workers._allocated(3 * 2**20)
    assert os.fstat(file).st_blocks * 512 >= 3 * 2**20
    assert set(os.listdir("/dev/shm")) == before
    os.close(file)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    opened = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EngineFailure, match=r"no 8000 MB of memory .*No space left on device.*set engine\.processes=0"):
        workers._allocated(8 * 10**9)
    assert len(os.listdir("/proc/self/fd")) <= len(opened)


@pytest.mark.parametrize(("free", "shared"), [(64 * 2**20, False), (2**34, True)])
def test_a_server_gets_shared_memory_where_there_is_some(
    free: int, shared: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = shutil.disk_usage("/dev/shm")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = scratch_folder()
    assert made.parent == (Path("/dev/shm") if shared else tmp_path)
    made.rmdir()
