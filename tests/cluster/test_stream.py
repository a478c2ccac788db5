"""Weights that arrive in parts must be all of the weights, once, or nothing may be served: else a token is stamped with a mixture.

What the engine's side does with slices in any order, in every numeric mode, and how the sender cuts them. Not covered: Ray
(test_engines.py), devices other than a CPU.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))

from engine_kit import engine_of, model_of, prompts_of, requests_of
from whole_weights import packed, slices_of

from rollkeel.cluster import engines
from rollkeel.cluster.arriving import Bucket, Weights
from rollkeel.cluster.engine_actor import EngineActor
from rollkeel.cluster.stream import unpacked
from rollkeel.config import EngineConfig
from rollkeel.engines.intake import Intake
from rollkeel.engines.local import LocalEngine
from rollkeel.engines.messages import requests_out
from rollkeel.engines.shared_memory import buckets
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.models.names import checkpoint_views
from rollkeel.models.numerics import MODES, update_checksum
from rollkeel.sync.publish import full_update
from rollkeel.types import WeightSlice, WeightUpdate

SMALL = 4_000
"""Bytes of a slice: less than most weights of the tiny model."""
HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    return model_of(seed=0), model_of(seed=1)


def head_of(version: int, mode: str | None = "fp32") -> WeightUpdate:
    return WeightUpdate(kind="full", base_version=None, version=version, slices=(), checksum=0, mode=mode)


def intake_of(engine: LocalEngine, head: WeightUpdate) -> Intake:
    return Intake(head, engine.memory, engine.capabilities.dtype, engine.retire())


def cut(model: Any, mode: str | None = "fp32", most: int = SMALL) -> list[WeightSlice]:
    return list(slices_of(checkpoint_views(model).items(), mode, most))


@pytest.mark.parametrize("mode", MODES)
def test_parts_in_any_order_are_the_whole_update_to_the_bit(models: tuple[Any, Any], mode: str) -> None:
    parts, whole = (engine_of(models[0], dtype=mode, max_length=32) for _ in range(2))
    expected = whole.update_weights(full_update(checkpoint_views(models[1]).items(), 5, mode))
    slices = cut(models[1], mode)
    assert len(slices) > 2 * len(parts.weights)
    assert max(s.tensor.numel() * 4 for s in slices) <= SMALL
    intake = intake_of(parts, head_of(5, mode))
    assert parts.version < 0
    for place in np.random.default_rng(0).permutation(len(slices)):
        intake.take([slices[place]])
    assert parts.serve(5, *intake.finish(expected.checksum)) == expected
    for name, view in parts.weights.items():
        assert torch.equal(view, whole.weights[name]), name


def test_a_sender_that_does_not_know_the_mode_is_proven_all_the_same(models: tuple[Any, Any]) -> None:
    """An update whose checksums are of the tensors as they are."""
    parts, whole = (engine_of(models[0], dtype="int8", max_length=32) for _ in range(2))
    expected = whole.update_weights(full_update(checkpoint_views(models[1]).items(), 5))
    intake = intake_of(parts, head_of(5, None))
    intake.take(cut(models[1], None))
    assert parts.serve(5, *intake.finish(expected.checksum)) == expected
    assert all(torch.equal(view, whole.weights[name]) for name, view in parts.weights.items())


def changed(slices: list[WeightSlice], name: str, change: Callable[[WeightSlice], list[WeightSlice]]) -> None:
    place = next(i for i, s in enumerate(slices) if s.name == name and s.offset)
    slices[place : place + 1] = change(slices[place])


def bits_flipped(piece: WeightSlice) -> list[WeightSlice]:
    tensor = piece.tensor.clone()
    tensor.view(-1).view(torch.int32)[3] ^= 1
    return [replace(piece, tensor=tensor)]


FAULTS: dict[str, tuple[Callable[[WeightSlice], list[WeightSlice]], str]] = {
    "dropped": (lambda s: [], "1 weights did not arrive, first lm_head.weight"),
    "doubled": (lambda s: [s, s], "lm_head.weight arrived twice"),
    "overlapping": (lambda s: [replace(s, offset=s.offset - 64)], r"lm_head.weight arrived twice: its box at \(\d+, 0\) overlaps"),
    "shifted": (lambda s: [replace(s, tensor=s.tensor.roll(1, 0))], "lm_head.weight arrived with a wrong checksum"),
    "other bytes": (bits_flipped, "lm_head.weight arrived with a wrong checksum"),
    "between rows": (lambda s: [replace(s, offset=s.offset + 1)], r"lm_head.weight has shape \(\d+, 64\) at offset \d+1"),
    "behind the end": (lambda s: [replace(s, offset=288 * 64)], r"at offset 18432, the engine expects \(288, 64\)"),
    "other rows": (lambda s: [replace(s, tensor=s.tensor[:, :32])], r"has shape \(\d+, 32\)"),
    "flat": (lambda s: [replace(s, tensor=s.tensor.reshape(-1))], r"has shape \(\d+,\)"),
    "unknown": (lambda s: [replace(s, name="model.other.weight")], "no weight named model.other.weight"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_stream_that_went_wrong_is_refused_and_nothing_is_served(models: tuple[Any, Any], fault: str) -> None:
    change, message = FAULTS[fault]
    engine, slices = engine_of(models[0], max_length=32), cut(models[1])
    total = full_update(checkpoint_views(models[1]).items(), 1, "fp32").checksum
    changed(slices, HEAD, change)
    intake = intake_of(engine, head_of(1))
    with pytest.raises(EngineFailure, match=message) as refused:  # noqa: PT012
        intake.take(slices)
        engine.serve(1, *intake.finish(total))
    assert "\n" not in str(refused.value)
    assert engine.version < 0
    engine.submit(requests_of(prompts_of(1), max_new_tokens=2))
    with pytest.raises(EngineFailure, match="no proven weights"):
        engine.poll(1.0)


def test_rows_that_overlap_are_no_cover(models: tuple[Any, Any]) -> None:
    """Each of them right, and together as many elements as the weight: rows 0 to 99 twice would hide rows that are missing."""
    engine, views = engine_of(models[0], max_length=32), checkpoint_views(models[1])
    intake = intake_of(engine, head_of(1))
    intake.take([s for s in cut(models[1]) if s.name != HEAD])
    head = views[HEAD]
    intake.take([_rows(head, 0, 100), _rows(head, 200, 288)])
    with pytest.raises(EngineFailure, match=r"arrived twice: its box at \(50, 0\) overlaps one at \(0, 0\)"):
        intake.take([_rows(head, 50, 150)])
    intake = intake_of(engine, head_of(1))
    intake.take([_rows(head, 0, 100), _rows(head, 150, 288)])
    with pytest.raises(EngineFailure, match=r"\d+ weights did not arrive, first model\.embed_tokens\.weight"):
        intake.finish(0)


def _rows(whole: torch.Tensor, first: int, last: int) -> WeightSlice:
    offset, rows = first * whole[0].numel(), whole[first:last]
    return WeightSlice(name=HEAD, tensor=rows, checksum=update_checksum(HEAD, rows, "fp32", offset), offset=offset)


def test_buckets_hold_all_slices_in_order_and_are_no_larger_than_asked(models: tuple[Any, Any]) -> None:
    slices = cut(models[1])
    filled = list(buckets(slices, 10_000))
    assert [s for bucket in filled for s in bucket] == slices
    sizes = [sum(s.tensor.numel() * 4 for s in bucket) for bucket in filled]
    assert max(sizes) <= 10_000
    assert min(sizes[:-1]) > 10_000 - SMALL  # no bucket is sent that had room for the next slice
    assert [len(b) for b in buckets(slices, 1)] == [1] * len(slices)


def test_a_row_larger_than_a_slice_is_cut_no_further_and_a_scalar_is_sent() -> None:
    pairs = [("a", torch.ones(3, 1000)), ("b", torch.tensor(2.0))]
    assert [(s.name, tuple(s.tensor.shape), s.offset) for s in slices_of(pairs, None, 400)] == [
        *(("a", (1, 1000), offset) for offset in (0, 1000, 2000)),
        ("b", (), 0),
    ]


def test_bytes_travel_in_every_dtype_and_from_every_layout_of_memory() -> None:
    draw = torch.rand(6, 4)
    pairs = {
        str(d): (draw * 100).to(d) for d in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8)
    }
    pairs |= {"columns": draw.t(), "every other": draw[::2], "one": draw[3, 2]}
    sent = list(slices_of(pairs.items(), None))
    for came, left in zip(unpacked(*packed(sent)), sent, strict=True):
        assert came.tensor.dtype == left.tensor.dtype
        assert torch.equal(came.tensor, left.tensor)
        assert replace(came, tensor=left.tensor) == left
    assert packed(sent[:1])[1][0].ctypes.data == sent[0].tensor.data_ptr()  # no copy


def of(slices: list[WeightSlice], attempt: int) -> Bucket:
    return Bucket(attempt, *packed(slices), Future())


def test_what_is_left_of_an_earlier_publication_is_refused(models: tuple[Any, Any]) -> None:
    engine = engine_of(models[0], max_length=32)
    weights, slices = Weights(engine), cut(models[1])
    total = full_update(checkpoint_views(models[1]).items(), 5, "fp32").checksum
    assert "nothing was announced" in weights.take(of(slices, 0))
    with pytest.raises(EngineFailure, match="nothing was announced"):
        weights.act(engine, ("finish", 0, total))
    assert weights.act(engine, ("begin", 1, head_of(5)))
    assert weights.take(of(slices[:9], 1)) == ""
    assert weights.act(engine, ("begin", 2, head_of(6)))  # the source of the first one died, and sends all the same
    assert weights.take(of(slices[9:], 1)) == "weights: a bucket of publication 1 arrived in publication 2"
    with pytest.raises(EngineFailure, match="not publication 1"):
        weights.act(engine, ("finish", 1, total))
    assert engine.version < 0
    assert weights.act(engine, ("begin", 3, head_of(6)))
    assert weights.take(of(slices, 3)) == ""
    assert weights.act(engine, ("finish", 3, total)).version == engine.version == 6
    assert "already finished" in weights.take(of(slices, 3))
    with pytest.raises(EngineFailure, match="expected version 6, which this engine had, or a later one"):
        weights.act(engine, ("begin", 4, head_of(5)))


def test_one_refused_bucket_ends_its_publication(models: tuple[Any, Any]) -> None:
    engine = engine_of(models[0], max_length=32)
    weights, slices = Weights(engine), cut(models[1])
    weights.act(engine, ("begin", 1, head_of(5)))
    bad = [replace(slices[0], checksum=1)]
    assert "wrong checksum" in weights.take(of(bad, 1))
    assert "wrong checksum" in weights.take(of(slices, 1))
    with pytest.raises(EngineFailure, match="wrong checksum"):
        weights.act(engine, ("finish", 1, 0))
    assert engine.version < 0


def test_an_actor_that_hosts_an_engine_that_can_rest_lets_it_rest(models: tuple[Any, Any]) -> None:
    class Resting(LocalEngine):
        rested = 0

        def rest(self) -> None:
            self.rested += 1

    engine = Resting(models[0].config, EngineConfig(), max_length=32)
    assert Weights(engine).act(engine, ("rest",)) is True
    assert engine.rested == 1
    other = engine_of(models[0], max_length=32)
    assert Weights(other).act(other, ("rest",)) is True
    with pytest.raises(BadInput, match="unknown message 'dance'"):
        Weights(other).act(other, ("dance",))


def test_messages_that_overtake_each_other_take_effect_in_the_order_of_their_numbers(models: tuple[Any, Any]) -> None:
    """Ray starts the calls of an actor that answers several at one time in any order."""
    actor = EngineActor(models[0].config, EngineConfig(), {"device": "cpu", "max_length": 96})
    said = dict[int, Any]()

    def hear(call: Callable[..., tuple[int, list[bytes]]], *args: Any) -> None:
        first, messages = call(*args)
        said.update({first + i: pickle.loads(message) for i, message in enumerate(messages)})

    while len(said) < 2:
        hear(actor.take)
    assert [said[i][0] for i in range(2)] == ["here", "answer"]
    requests = requests_out(requests_of(prompts_of(3), max_new_tokens=4))
    script: list[Any] = [("begin", 1, head_of(0)), ("submit", requests, False), ("interrupt", [1]), ("progress",)]
    calls = [Thread(target=hear, args=(actor.send, n, pickle.dumps(script[n])), daemon=True) for n in (2, 3, 1, 0)]
    for call in calls:
        call.start()
        time.sleep(0.02)
    for call in calls:
        call.join(30)
    (kind, (rooms, path), _), *answers = [said[i] for i in range(2, 6)]
    assert (kind, rooms) == ("answer", None)
    assert Path(path.partition("#")[0]).exists()
    assert answers == [("answer", value, 0) for value in (True, True, {0: 0, 2: 0})]
    hear(actor.send, 4, pickle.dumps(("close",)))
    assert said[6] == ("gone", "was closed", 0)


def test_a_bucket_does_not_wait_for_an_engine_that_broke(
    models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(weights: Weights, bucket: Bucket) -> str:
        raise RuntimeError("no such device")

    monkeypatch.setattr(Weights, "take", broken)
    monkeypatch.setattr(engines, "BEAT_S", 0.1)
    actor = EngineActor(models[0].config, EngineConfig(), {"device": "cpu", "max_length": 96})
    said = list[Any]()
    while len(said) < 2:
        said += map(pickle.loads, actor.take()[1])
    assert actor.bucket(1, [], []) == actor.bucket(1, [], []) == "weights: the engine has ended"
    assert pickle.loads(actor.take()[1][0]) == ("gone", "died of RuntimeError: no such device", 0)
    assert "no such device" in capsys.readouterr().err
