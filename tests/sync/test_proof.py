"""A wrong reload must be told from honest rounding. Called too early, runs stop for nothing; too late, they train on nobody's tokens.

Pure comparison, and a publisher over engines that lie in known ways. Not covered: how large the gaps of a real server are
(tests/engines/test_vllm.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollkeel.batch.packing import pack
from rollkeel.config import EngineConfig
from rollkeel.errors import EngineFailure
from rollkeel.models.presets import build_preset
from rollkeel.sync.proof import TOLERANCES, Probes, compare, probe_sequences
from rollkeel.sync.publish import DirectPublisher
from rollkeel.train.probe import SequenceScorer
from rollkeel.types import Capabilities, FloatArray, IntArray, Proof, WeightUpdate

TRUE = [np.linspace(-4, -0.1, 40, dtype=np.float32), np.linspace(-2, -1, 24, dtype=np.float32)]
WEIGHTS = {"w": torch.arange(6.0)}


def off(by: float) -> list[FloatArray]:
    return [row - np.float32(by) for row in TRUE]


@pytest.mark.parametrize(
    ("dtype", "gap", "agrees"),
    [
        ("fp32", 0.0, True),
        ("fp32", 5e-6, True),
        ("fp32", 2e-4, False),
        ("bf16", 0.011, True),
        ("bf16", 0.3, False),
        ("fp8", 0.025, True),
        *[(dtype, 0.3, False) for dtype in TOLERANCES if dtype != "int4"],
        *[(dtype, 0.7, False) for dtype in TOLERANCES],
    ],
)
def test_everything_off_by(dtype: str, gap: float, agrees: bool) -> None:
    verdict = compare(off(gap), TRUE, dtype)
    assert verdict.agrees == agrees
    assert verdict.metrics()["sync/probe_gap_max"] == pytest.approx(gap, abs=1e-6)


def test_a_near_tie_that_falls_the_other_way_is_honest() -> None:
    engine = off(1e-6)
    engine[0][17] -= 0.4
    verdict = compare(engine, TRUE, "fp32")
    assert verdict.agrees
    assert verdict.max == pytest.approx(0.4, abs=1e-3)


def test_stale_experts_of_a_few_tokens_are_caught_by_the_mean() -> None:
    engine = off(1e-6)
    engine[0][::6] -= 0.5
    verdict = compare(engine, TRUE, "fp32")
    assert verdict.median < 1e-5
    assert not verdict.agrees


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_never_agrees(bad: float) -> None:
    engine = off(0.0)
    engine[1][3] = bad
    assert not compare(engine, TRUE, "bf16").agrees


def test_missing_logprobs_are_an_error() -> None:
    with pytest.raises(EngineFailure, match="as many log-probs"):
        compare([TRUE[0][:-1], TRUE[1]], TRUE, "fp32")


def test_a_tolerance_of_ones_own() -> None:
    assert compare(off(0.3), TRUE, "fp32", 0.5).agrees
    assert not compare(off(1e-3), TRUE, "bf16", 1e-4).agrees


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(TOLERANCES)), st.integers(0, 2**32 - 1), st.floats(0.3, 3.0))
def test_a_wrong_reload_is_always_caught_and_noise_never(dtype: str, seed: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    honest = [row + rng.normal(0, TOLERANCES[dtype].median / 3, len(row)) for row in TRUE]
    assert compare(honest, TRUE, dtype).agrees
    wrong = [row + rng.normal(0, size * 1.8, len(row)) for row in TRUE]  # mean |gap| about 1.4 × size
    assert not compare(wrong, TRUE, dtype).agrees


def test_every_dtype_has_a_tolerance() -> None:
    fields = EngineConfig.model_fields["dtype"].annotation
    assert set(fields.__args__) == set(TOLERANCES)  # type: ignore[union-attr]


class Server:
    """A probed engine whose reload works from the `works_from`-th publication on."""

    def __init__(self, works_from: int = 1, gap: float = 0.5) -> None:
        self.works_from, self.gap, self.updates, self.version = works_from, gap, 0, -1
        self.capabilities = Capabilities(name="server", dtype="fp32", max_length=64)

    def submit(self, requests: Any) -> None: ...
    def poll(self, timeout_s: float) -> Any: ...
    def interrupt(self, ids: Any = None) -> None: ...
    def close(self) -> None: ...

    def update_weights(self, update: WeightUpdate) -> Proof:
        self.updates += 1
        self.version = update.version
        return Proof(version=update.version, checksum=update.checksum)

    def score(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        return off(0.0 if self.updates >= self.works_from else self.gap)


def publisher(engine: Any) -> DirectPublisher:
    probes = Probes(sequences=[np.arange(41), np.arange(25)], trainer=lambda ids: TRUE, dtype="fp32")
    return DirectPublisher([engine], probes)


def test_a_good_publication_is_measured() -> None:
    told = publisher(Server()).publish(WEIGHTS.items(), 3)
    assert told["sync/probe_gap_max"] == 0.0
    assert told["sync/probe_retries"] == 0.0


def test_a_wrong_reload_is_published_once_more() -> None:
    server = Server(works_from=2)
    told = publisher(server).publish(WEIGHTS.items(), 3)
    assert server.updates == 2
    assert told["sync/probe_retries"] == 1.0


def test_a_reload_that_stays_wrong_ends_the_run() -> None:
    server = Server(works_from=99)
    with pytest.raises(EngineFailure, match=r"server: .* version 3 .* 0\.5, .* at most 0\.0001") as refused:
        publisher(server).publish(WEIGHTS.items(), 3)
    assert server.updates == 2
    assert "\n" not in str(refused.value)


def test_an_engine_without_a_score_is_not_probed() -> None:
    told = publisher(LocalLike()).publish(WEIGHTS.items(), 1)
    assert set(told) == {"time/sync_s"}


class LocalLike:
    """As much of an embedded engine as a publisher uses."""

    version = -1
    capabilities = Capabilities(name="local", dtype="fp32", max_length=8)

    def update_weights(self, update: WeightUpdate) -> Proof:
        self.version = update.version
        return Proof(version=update.version, checksum=update.checksum)


def test_the_trainers_side_is_transformers_own() -> None:
    model = build_preset("tiny-qwen3-moe", 0)[0].eval()
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 288, n) for n in (2, 17, 40)]
    for ids, got in zip(sequences, SequenceScorer(model, chunk=16)(sequences), strict=True):
        row = torch.from_numpy(ids)[None]
        with torch.no_grad():
            expected = model(input_ids=row).logits[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
        assert np.allclose(got, expected.numpy(), atol=1e-5)
    assert pack([0], [sequences[0]], [1], [0]).targets.tolist() == [sequences[0][1]]


def test_probe_sequences_fit_and_reach_the_whole_vocabulary() -> None:
    prompts = [np.arange(5), np.arange(300) % 288, np.array([1])]
    found = probe_sequences(prompts, 288, 20)
    assert [len(ids) for ids in found] == [19, 19, 17]
    assert all(int(ids.min()) >= 0 and int(ids.max()) < 288 for ids in found)
    again = probe_sequences(prompts, 288, 20)
    assert all(np.array_equal(a, b) for a, b in zip(found, again, strict=True))
    assert [len(ids) for ids in probe_sequences(prompts, 288, 4096)] == [21, 256, 17]
