"""Inference servers in engine actors: weights of ranks reach them by way of a copy on their host, and are asked about by probes.

Matters because this is how a run over several machines samples with anything but the embedded engine. Real actors and Ray, and
`fake_server.py` behind an engine of one's own. Not covered: vLLM (test_vllm_cluster.py), the copy itself (tests/engines/test_mirrored.py).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))

from engine_kit import drain
from fake_backend import assert_true, ends_well, requests
from fake_server import VOCABULARY, score_of
from whole_weights import OwnWeights

from rollkeel.cluster.engine_actor import Beside
from rollkeel.cluster.engines import ActorEngine
from rollkeel.cluster.publish import StreamPublisher
from rollkeel.config import EngineConfig
from rollkeel.errors import EngineFailure
from rollkeel.sync.proof import Probes

ENGINES = Path(__file__).parent.parent / "engines"
SHAPES = {"policy": (1,), "rest": (4, 3)}
OWN = """
import sys
from pathlib import Path

sys.path.insert(0, {engines!r})
from fake_backend import FakeBackend

from rollkeel.engines.served import ServedEngine


class Fake(ServedEngine):
    def __init__(self, hf_config, config, device, max_length):
        super().__init__(hf_config, config, FakeBackend(Path({faults!r})), python=sys.executable)
"""


class Made:
    """Actors, and the weights that they are to serve."""

    def __init__(self, folder: Path, count: int, **options: Any) -> None:
        own = folder / "own.py"
        own.write_text(OWN.format(engines=str(ENGINES), faults=str(folder)))
        config = EngineConfig(kind=f"{own}:Fake", slots=16, deadline_s=30)
        hf_config = Qwen3Config(vocab_size=VOCABULARY, max_position_embeddings=400)
        self.engine = ActorEngine(
            hf_config, config, [{}] * count, device="cpu", max_length=None, beside=Beside(SHAPES, 1.0), **options
        )
        self.policy = 0.0
        self.publisher = StreamPublisher(self.engine, OwnWeights(self.weights, deadline_s=30))

    def weights(self) -> list[tuple[str, torch.Tensor]]:
        return [("policy", torch.tensor([self.policy])), ("rest", torch.arange(12.0).view(4, 3))]

    def publish(self, policy: float, version: int, probes: Probes | None = None) -> dict[str, float]:
        self.policy = policy
        return dict(self.publisher.publish(None, version, probes=probes))


@pytest.fixture(scope="module")
def made(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    both = Made(tmp_path_factory.mktemp("served"), 2)
    yield both
    both.engine.close()


def probes(policy: float) -> Probes:
    asked = [np.array([1, 2, 3, 4]), np.array([5, 6])]
    said = [np.array(score_of(ids.tolist(), policy), np.float32) for ids in asked]
    return Probes(sequences=asked, trainer=lambda _: said, dtype="fp32")


def test_servers_in_actors_sample_under_what_was_published(made: Made) -> None:
    assert made.engine.capabilities.name == "fake"
    for version in (1, 2):
        told = made.publish(float(version), version, probes(float(version)))
        assert (told["sync/probe_gap_max"], told["sync/probe_retries"]) == (0.0, 0.0)
        asked = requests(8, 10 * version)
        made.engine.submit(asked)
        assert made.engine.shares == [4, 4]
        got = drain(made.engine)
        for r in asked:
            assert ends_well(r, got[r.id])
            assert_true(r, got[r.id].span, {version: float(version)})


def test_new_weights_come_under_running_requests(made: Made) -> None:
    made.publish(3.0, 3)
    asked = requests(8, 40, length=150)
    made.engine.submit(asked)
    end, got = time.monotonic() + 20, dict[int, Any]()
    while min(made.engine.progress().values()) < 5:
        got |= {segment.request_id: segment for segment in made.engine.poll(0.01)}
        assert time.monotonic() < end
    made.publish(4.0, 4)
    got |= drain(made.engine)
    for r in asked:
        assert_true(r, got[r.id].span, {3: 3.0, 4: 4.0})
    assert {int(v) for s in got.values() for v in s.span.versions} == {3, 4}


def test_servers_whose_log_probs_are_not_the_trainers_are_not_believed(made: Made) -> None:
    with pytest.raises(
        EngineFailure, match=r"^engine own\.py:Fake: its log-probs under version 5 are not the trainer's"
    ) as failed:
        made.publish(5.0, 5, probes(99.0))
    assert "\n" not in str(failed.value)
    made.publish(6.0, 6, probes(6.0))


@pytest.mark.slow
def test_a_killed_one_is_replaced_and_its_server_ends_with_it(ray_cluster: None, tmp_path: Path) -> None:
    made = Made(tmp_path, 1, renewals=1)
    made.engine.again = made.publisher.again
    try:
        made.publish(1.0, 1)
        asked = requests(4, length=150)
        made.engine.submit(asked)
        assert made.engine.poll(0.0) == []
        part = made.engine.parts[0]
        servers = started(tmp_path)
        assert len(servers) == 1
        os.kill(part.place[1], signal.SIGKILL)
        got = drain(made.engine)
        for r in asked:
            assert ends_well(r, got[r.id])
            assert_true(r, got[r.id].span, {1: 1.0})
        gone(servers)
        servers = started(tmp_path)
        assert len(servers) == 1
    finally:
        made.engine.close()
    gone(servers)


def started(folder: Path) -> set[int]:
    """Processes of servers that live."""
    out = set[int]()
    for process in Path("/proc").iterdir():
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            zombie = (process / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except (OSError, IndexError):
            continue
        if (
            str(folder).encode() in words
            and any(word.endswith(b"fake_server.py") for word in words[1:2])
            and not zombie
        ):
            out.add(int(process.name))
    return out


def gone(processes: set[int]) -> None:
    end = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in processes):
        assert time.monotonic() < end
        time.sleep(0.1)
