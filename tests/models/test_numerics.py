"""Quantised engines are the project's real mismatch source: their rounding must be that of the format, and only where deployments round.

Values by hand on the e4m3, int8 and int4 grids, one scale per row or group, and which weights are left alone. Not covered:
speed, hardware kernels.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollkeel.config import EngineConfig
from rollkeel.engines.local import LocalEngine
from rollkeel.models.names import checkpoint_views
from rollkeel.models.numerics import (
    MODES,
    activation_rounder,
    compute_dtype,
    is_quantised,
    mode_of,
    round_fp8,
    round_int4,
    round_int8,
    weight_rounder,
)
from rollkeel.models.presets import build_preset
from rollkeel.models.routers import is_router
from rollkeel.sync.publish import full_update


def test_fp8_rounds_to_e4m3_with_448_as_the_row_maximum() -> None:
    # The first entry sets the scale to 1; e4m3 has 3 mantissa bits: 16, 18, 20 … and 1, 1.125, 1.25 …, ties to even.
    row = torch.tensor([448.0, 17.0, 19.0, 17.1, 1.06, 1.07, -3.3, 0.0, 0.002])
    want = torch.tensor([448.0, 16.0, 20.0, 18.0, 1.0, 1.125, -3.25, 0.0, 0.001953125])
    torch.testing.assert_close(round_fp8(row), want, rtol=0, atol=0)
    # Half the maximum: half of everything. A second row has a scale of its own.
    both = torch.stack((row / 2, torch.full_like(row, 5.0)))
    torch.testing.assert_close(round_fp8(both), torch.stack((want / 2, torch.full_like(row, 5.0))))


def test_int8_rounds_to_127_steps_per_row() -> None:
    rows = torch.tensor([[127.0, 3.4, -3.6, 0.5, 1.5], [-2.54, 0.011, 0.029, 0.0, 2.0]])
    want = torch.tensor([[127.0, 3.0, -4.0, 0.0, 2.0], [-2.54, 0.02, 0.02, 0.0, 2.0]])
    torch.testing.assert_close(round_int8(rows), want, rtol=0, atol=1e-6)


def test_int4_has_a_scale_per_group_of_32_inputs() -> None:
    row = torch.zeros(1, 64)
    row[0, :4] = torch.tensor([7.0, 1.4, 1.6, -3.5])  # scale 1: … 1, 2, −4 (ties to even)
    row[0, 32:35] = torch.tensor([-70.0, 14.0, 4.0])  # scale 10: 14 → 10, 4 → 0
    want = torch.zeros(1, 64)
    want[0, :4] = torch.tensor([7.0, 1.0, 2.0, -4.0])
    want[0, 32:35] = torch.tensor([-70.0, 10.0, 0.0])
    torch.testing.assert_close(round_int4(row), want, rtol=0, atol=1e-6)
    odd = torch.tensor([[7.0, 1.4, 0.0]])  # 32 does not divide 3: one group per row
    torch.testing.assert_close(round_int4(odd), torch.tensor([[7.0, 1.0, 0.0]]), rtol=0, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.sampled_from([1e-6, 1e-2, 1.0, 1e4]))
def test_rounding_is_idempotent_odd_and_bounded(seed: int, scale: float) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)) * scale
    top = x.abs().amax(-1, keepdim=True)
    for rounder, step in ((round_fp8, 1 / 16), (round_int8, 1 / 254), (round_int4, 1 / 14)):
        y = rounder(x)
        torch.testing.assert_close(rounder(y), y, rtol=1e-6, atol=0)
        torch.testing.assert_close(rounder(-x), -y, rtol=0, atol=0)
        # Floating point errs relative to the value, integers relative to the largest.
        bound = (x.abs() if rounder is round_fp8 else top) * step + top * 2e-5
        assert ((y - x).abs() <= bound).all()
        assert y.isfinite().all()


@pytest.mark.parametrize("rounder", [round_fp8, round_int8, round_int4])
def test_zero_rows_and_dtypes_survive(rounder: object) -> None:
    assert callable(rounder)
    zeros = torch.zeros(2, 32)
    assert torch.equal(rounder(zeros), zeros)
    assert rounder(torch.randn(2, 32).bfloat16()).dtype is torch.bfloat16


def test_modes() -> None:
    assert MODES == ("fp32", "bf16", "fp16", "fp8", "fp8_weights", "int8", "int4")
    assert [m for m in MODES if activation_rounder(m)] == ["fp8"]
    assert [m for m in MODES if weight_rounder(m)] == ["fp8", "fp8_weights", "int8", "int4"]
    assert {m: d for m in MODES if (d := compute_dtype(m)) is not torch.float32} == {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
    }
    assert all(mode_of(compute_dtype(m)) == m for m in ("fp32", "bf16", "fp16"))


@pytest.mark.parametrize(
    ("name", "router", "rounded"),
    [
        ("model.layers.0.mlp.gate.weight", True, False),
        ("model.layers.0.mlp.gate.e_score_correction_bias", True, False),
        ("model.layers.0.mlp.router.weight", True, False),
        ("model.layers.0.block_sparse_moe.gate.weight", True, False),
        ("model.layers.0.mlp.shared_expert_gate.weight", False, False),
        ("model.layers.0.mlp.gate_proj.weight", False, True),
        ("model.layers.0.mlp.experts.3.gate_proj.weight", False, True),
        ("model.layers.0.mlp.experts.gate_up_proj", False, True),
        ("model.layers.0.self_attn.q_proj.weight", False, True),
        ("model.layers.0.self_attn.q_proj.bias", False, False),
        ("model.layers.0.self_attn.q_norm.weight", False, False),
        ("model.layers.0.input_layernorm.weight", False, False),
        ("model.norm.weight", False, False),
        ("model.embed_tokens.weight", False, False),
        ("lm_head.weight", False, False),
    ],
)
def test_what_is_rounded(name: str, router: bool, rounded: bool) -> None:
    shape = (4,) if "norm" in name or "bias" in name else (4, 4)
    assert is_router(name) is router
    assert is_quantised(name, torch.zeros(shape)) is rounded


@pytest.mark.parametrize("mode", ["fp8", "fp8_weights", "int8", "int4"])
@pytest.mark.parametrize("forward", ["fast", "transformers"])
def test_an_engine_rounds_projections_and_nothing_else(mode: str, forward: str) -> None:
    model, _ = build_preset("tiny-qwen3-moe")
    engine = LocalEngine(model.config, EngineConfig(dtype=mode, forward=forward), max_length=32)  # type: ignore[arg-type]
    views = checkpoint_views(model)
    engine.update_weights(full_update(views.items(), 0))
    rounder = weight_rounder(mode)
    assert rounder is not None
    changed = set()
    for name, held in engine._forward.destinations.items():
        if not torch.equal(held, views[name]):
            changed.add(name)
            torch.testing.assert_close(held, rounder(views[name]), rtol=0, atol=0)
    assert changed == {n for n in views if "_proj" in n}
