"""Captures are evidence: looking must change nothing, and a file must give back every bit or say in one line why not.

Not covered: captures written by other programs; files larger than memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from analyzer_kit import model_of, reference_of, tokens_of
from safetensors.torch import save_file
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rollkeel.analyzer.capture import (
    Capture,
    Recorder,
    Tokens,
    key_of,
    load_capture,
    order_of,
    save_capture,
    tensor_name,
    trim,
)
from rollkeel.analyzer.compare import compare, compare_logprobs
from rollkeel.analyzer.sides import EngineSide, TrainerSide, engine_forward
from rollkeel.analyzer.view import render
from rollkeel.engines.kv import PagedCache
from rollkeel.engines.prefill import prefill_step
from rollkeel.errors import BadInput, Corrupt
from rollkeel.models.forward import FastForward
from rollkeel.models.names import checkpoint_views
from rollkeel.models.packed import VARLEN_ATTENTION, varlen_attention


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of("tiny-qwen3-moe", layers=3)


def engine_of(model: Any, mode: str = "fp32") -> FastForward:
    forward = engine_forward(model.config, checkpoint_views(model).items(), mode)
    assert isinstance(forward, FastForward)
    return forward


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp8"])
def test_an_observed_forward_computes_the_same_bits(model: Any, mode: str) -> None:
    forward, tokens = engine_of(model, mode), tokens_of()

    def hidden() -> torch.Tensor:
        cache, jobs = PagedCache(8, 64, forward.dtype), [([1], tokens.sequences[0], 0)]
        ids, positions, step = prefill_step(jobs, 64, 0, torch.device("cpu"))
        return forward.hidden(ids, positions, lambda i, q, k, v: cache.attend(step, i, q, k, v, forward.scale))

    plain = hidden()
    seen: list[tuple[int | None, str]] = []
    forward.observe = lambda layer, name, value: seen.append((layer, name))
    assert torch.equal(hidden(), plain)
    assert len(seen) == 2 + 3 * 16
    assert order_of(seen)[0] == (None, "embedding")


def test_looking_at_the_trainer_leaves_it_as_it_was(model: Any) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    settings, state = model.config._attn_implementation, torch.random.get_rng_state()
    TrainerSide(model).capture(tokens_of())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.config._attn_implementation == settings
    assert torch.equal(torch.random.get_rng_state(), state)
    assert ALL_ATTENTION_FUNCTIONS[VARLEN_ATTENTION] is varlen_attention
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_file_gives_back_every_bit(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    found = EngineSide(engine_of(model, "bf16"), model.config, "bf16").capture(tokens_of())
    save_capture(path, found)
    again = load_capture(path)
    assert (again.name, again.mode, again.model_type) == ("engine bf16", "bf16", "qwen3_moe")
    assert again.values.keys() == found.values.keys()
    for key, value in found.values.items():
        assert again.values[key].dtype == value.dtype
        assert torch.equal(again.values[key], value)
    assert torch.equal(again.logprobs.nan_to_num(), found.logprobs.nan_to_num())
    assert again.tokens.starts == found.tokens.starts
    assert again.tokens.prompt_lengths == found.tokens.prompt_lengths
    assert not list(tmp_path.glob(".*"))


def test_two_files_are_compared_like_two_sides(model: Any, tmp_path: Path) -> None:
    tokens, forward = tokens_of(), engine_of(model)
    forward.layers[1].out *= 1.05
    sides = [TrainerSide(model).capture(tokens), EngineSide(forward, model.config, "fp32").capture(tokens)]
    for i, side in enumerate(sides):
        save_capture(tmp_path / f"{i}.safetensors", side)
    found = compare(*(load_capture(tmp_path / f"{i}.safetensors") for i in range(2)), judge=reference_of(model))
    assert found.first == (1, "o_proj")
    assert found.side == 1
    assert found.as_dict()["first"] == {"layer": 1, "operation": "o_proj"}
    assert render(found) is not None


def test_some_layers_only(model: Any) -> None:
    found = TrainerSide(model).capture(tokens_of(), layers=[2])
    assert {layer for layer, name in found.values if name == "q_proj"} == {2}
    assert (1, "mlp_residual") in found.values
    assert (1, "q_proj") not in found.values
    rows = compare(found, found, reference_of(model)).rows
    assert {row.key[0] for row in rows} == {None, 2}
    assert all(row.sides[0] is not None and row.ratio < 2 for row in rows)


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-100]), Corrupt, "not whole"),
        (lambda p: p.write_bytes(b"{"), Corrupt, "not whole"),
        (lambda p: save_file({"x": torch.zeros(2)}, p), BadInput, "recorded by rollkeel"),
        (lambda p: p.unlink(), BadInput, "no such file"),
    ],
)
def test_a_damaged_file_is_one_line(model: Any, tmp_path: Path, damage: Any, error: type, says: str) -> None:
    path = tmp_path / "one.safetensors"
    save_capture(path, TrainerSide(model).capture(tokens_of()))
    damage(path)
    with pytest.raises(error, match=says) as told:
        load_capture(path)
    assert "\n" not in str(told.value)


def test_other_tokens_are_refused(model: Any) -> None:
    side = TrainerSide(model)
    with pytest.raises(BadInput, match="same tokens"):
        compare(side.capture(tokens_of(1)), side.capture(tokens_of(2)), reference_of(model))


def test_tokens() -> None:
    tokens = Tokens((np.arange(4), np.arange(3)), (1, 2))
    assert tokens.starts == [0, 4, 7]
    assert len(tokens) == 7
    assert tokens.response.tolist() == [False, True, True, True, False, False, True]
    assert tokens.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert len(trim(tokens, sequences=1, limit=100).sequences) == 1
    assert [len(s) for s in trim(tokens, sequences=2, limit=5).sequences] == [4]
    assert [len(s) for s in trim(tokens, sequences=2, limit=3).sequences] == [3]
    for bad in (((), ()), ((np.arange(2),), (2,)), ((np.arange(2),), (0,))):
        with pytest.raises(BadInput):
            Tokens(*bad)


def test_names_of_tensors() -> None:
    for key in ((None, "embedding"), (3, "q_rope")):
        assert key_of(tensor_name(key)) == key
    keys = [(None, "final_norm"), (1, "input_norm"), (0, "mlp"), (0, "q_rope"), (None, "embedding")]
    assert order_of(keys) == [keys[4], keys[3], keys[2], keys[1], keys[0]]


def test_a_recorder_puts_parts_together() -> None:
    recorder = Recorder(3)
    for rows in ([0, 2], [1]):
        recorder.rows = torch.tensor(rows)
        recorder(0, "mlp", torch.tensor(rows)[:, None].float())
    assert recorder.values[0, "mlp"][:, 0].tolist() == [0, 1, 2]


def test_the_gap_by_hand() -> None:
    tokens = Tokens((np.arange(4),), (1,))
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 4)

    def side(name: str, logprobs: list[float], experts: list[int]) -> Capture:
        values: Any = {(0, "router"): logits, (0, "experts"): torch.tensor(experts)[:, None]}
        return Capture(
            name=name, mode="fp32", model_type="x", tokens=tokens, values=values, logprobs=torch.tensor(logprobs)
        )

    class Nobody:
        def judge(self, capture: Capture) -> Any:
            return iter(())

    nan = float("nan")
    a, b = side("a", [nan, -1.0, -1.0, -2.0], [0, 0, 0, 0]), side("b", [nan, -1.0, -2.0, -2.0], [0, 1, 0, 1])
    found = compare(a, b, Nobody())
    # Token 2 is predicted at position 1, where the experts differ; the last position predicts nothing.
    assert found.flips is not None
    assert found.flips.count == 1
    assert found.flips.places == [(0, 2, 1)]
    assert found.flips.explained == 0, "expert 1 is not the best of B's logits"
    assert found.gap.tokens == 3
    assert found.gap.max == pytest.approx(1.0)
    assert found.gap.k3 == pytest.approx((np.e - 1 - 1) / 3)
    assert found.gap.share == pytest.approx(1.0)
    assert found.gap.rms_flipped == pytest.approx(1.0)
    assert found.gap.rms_unflipped == pytest.approx(0.0)


def test_log_probs_alone_give_a_gap_and_no_operation() -> None:
    a = torch.tensor([-1.0, -2.0, -3.0])
    near, far = compare_logprobs(("t", "s"), a, a + 1e-5, "fp32"), compare_logprobs(("t", "s"), a, a - 0.5, "fp32")
    assert near.healthy
    assert not far.healthy
    assert far.first == (None, "logprobs")
    assert "no operation can be named" in far.verdict
    assert not far.rows
