"""Publication writes through checkpoint names: a view that is not the tensor the file would hold sends wrong weights with right checksums.

Views against what `save_pretrained` writes, for many architectures; writing through a view changes the model. Checksums:
they add up over parts and notice every change of bits, order or place. Not covered: sharded or quantised checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_forward import CASES, build
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.core_model_loading import Chunk, WeightConverter

from rollkeel.errors import BadInput
from rollkeel.models import checksum
from rollkeel.models.checksum import MASK, tensor_checksum
from rollkeel.models.names import checkpoint_views
from rollkeel.models.presets import PRESETS, build_preset

FAMILIES = [
    "llama",
    "llama-tied",
    "qwen2",
    "qwen3-moe",
    "qwen3-moe-mixed",
    "olmoe",
    "mixtral",
    "deepseek-v3",
    "gpt-oss",
]


def models() -> dict[str, Any]:
    return {**dict.fromkeys(FAMILIES), **{f"preset:{p}": None for p in PRESETS}}


def make(name: str) -> Any:
    return build_preset(name.removeprefix("preset:"))[0] if name.startswith("preset:") else build(CASES[name][0])


@pytest.mark.parametrize("name", models())
def test_views_are_what_save_pretrained_writes(name: str, tmp_path: Path) -> None:
    model = make(name)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    views = checkpoint_views(model)
    assert set(views) == set(saved)
    for key, tensor in saved.items():
        assert views[key].shape == tensor.shape
        assert torch.equal(views[key], tensor), key


@pytest.mark.parametrize("name", models())
def test_writing_through_views_writes_every_parameter_once(name: str) -> None:
    model = make(name)
    views = checkpoint_views(model)
    for number, view in enumerate(views.values(), 1):
        view.fill_(number)
    again = checkpoint_views(model)
    for number, view in enumerate(again.values(), 1):
        assert (view == number).all()
    # Nothing is left over, and nothing was written twice: element counts match.
    parameters = {p.data_ptr(): p for p in model.state_dict().values() if p.is_floating_point()}
    assert sum(v.numel() for v in views.values()) == sum(p.numel() for p in parameters.values())
    assert all((p >= 1).all() for p in parameters.values())


def test_a_name_that_several_parameters_make_is_refused() -> None:
    model = make("preset:tiny-qwen3")
    apart = ["self_attn.q_proj.weight", "self_attn.k_proj.weight"]
    model._weight_conversions = [WeightConverter("self_attn.qk_proj.weight", apart, [Chunk(dim=0)])]
    with pytest.raises(BadInput, match=r"qk_proj.weight: not a strided piece of one parameter"):
        checkpoint_views(model)


LARGE = {
    "8B": (Qwen3Config(vocab_size=151936, hidden_size=4096, num_hidden_layers=36, intermediate_size=12288,
        num_attention_heads=32, num_key_value_heads=8), Qwen3ForCausalLM, 8.19e9, 399),
    "4 layers of 30B-A3B": (Qwen3MoeConfig(vocab_size=151936, hidden_size=2048, num_hidden_layers=4, num_experts=128,
        num_attention_heads=32, num_key_value_heads=4, num_experts_per_tok=8, moe_intermediate_size=768),
        Qwen3MoeForCausalLM, 3.08e9, 1575),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_a_large_model_needs_no_number_per_weight(name: str) -> None:
    """The first has 8 billion: an index of each would not fit here."""
    config, kind, size, tensors = LARGE[name]
    with torch.device("meta"):
        model = kind(config)
    views = checkpoint_views(model)
    assert sum(v.numel() for v in views.values()) == sum(p.numel() for p in model.parameters())
    assert sum(v.numel() for v in views.values()) == pytest.approx(size, rel=0.01)
    assert len(views) == tensors


def test_one_pass_and_ten_give_the_same_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """One side may have numba and the other not."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e30
    sums = []
    for compiled in (checksum._COMPILED, {}):
        monkeypatch.setattr(checksum, "_COMPILED", compiled)
        places = (0, 2**32 - 1000, 2**32 - 1, 2**40)
        sums.append([tensor_checksum("w", x[3:990].view(3, -1), offset) for offset in places])
        sums[-1] += [tensor_checksum("w", x.bfloat16()), tensor_checksum("w", x, dtype=torch.bfloat16)]
    assert sums[0] == sums[1]


def _rearranged(x: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = x.shape
    return {
        "flipped": x.flip(0),
        "rolled": x.roll(1, 0),
        "transposed": x.t().reshape(rows, columns),
        "two rows swapped": x[[1, 0, *range(2, rows)]],
        "two columns swapped": x[:, [1, 0, *range(2, columns)]],
        "halves swapped": torch.cat((x[rows // 2 :], x[: rows // 2])),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [2, 3, 16, 64, 96])
def test_rows_of_the_same_numbers_in_another_order_are_told_apart(width: int, dtype: torch.dtype) -> None:
    """A sum that is linear in position and value cannot: both rows add up to the same."""
    random = torch.Generator().manual_seed(width)
    for _ in range(100):
        numbers = torch.randint(1, 4, (width,), generator=random).to(dtype)
        x = torch.stack([numbers[torch.randperm(width, generator=random)] for _ in range(width)])
        name = f"model.layers.{int(torch.randint(99, (), generator=random))}.w"
        for what, other in _rearranged(x).items():
            assert torch.equal(x, other) == (tensor_checksum(name, x) == tensor_checksum(name, other)), what


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.integers(2, 200),
    cut=st.integers(1, 199),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.float8_e4m3fn]),
)
def test_checksums_add_up_over_parts(seed: int, size: int, cut: int, dtype: torch.dtype) -> None:
    x = (torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 50).to(dtype)
    cut = min(cut, size - 1)
    parts = tensor_checksum("w", x[:cut]) + tensor_checksum("w", x[cut:], cut)
    assert parts & MASK == tensor_checksum("w", x)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), byte=st.integers(0, 4 * 60 - 1), bit=st.integers(0, 7))
def test_every_flipped_bit_is_noticed(seed: int, byte: int, bit: int) -> None:
    x = torch.randn(60, generator=torch.Generator().manual_seed(seed))
    before = tensor_checksum("w", x)
    x.view(torch.uint8)[byte] ^= 1 << bit
    assert tensor_checksum("w", x) != before


def test_swaps_shifts_names_and_missing_zeros_are_noticed() -> None:
    x = torch.randn(40, generator=torch.Generator().manual_seed(0))
    sums = {"plain": tensor_checksum("w", x)}
    swapped = x.clone()
    swapped[[3, 29]] = x[[29, 3]]
    sums["swapped"] = tensor_checksum("w", swapped)
    sums["rolled"] = tensor_checksum("w", x.roll(1))
    sums["offset"] = tensor_checksum("w", x, 1)
    sums["other name"] = tensor_checksum("v", x)
    sums["shorter"] = tensor_checksum("w", x[:-1])
    sums["zero behind"] = tensor_checksum("w", torch.cat((x, torch.zeros(1))))
    sums["bfloat16"] = tensor_checksum("w", x.bfloat16())
    sums["negative zero"] = tensor_checksum("w", torch.cat((x, -torch.zeros(1))))
    assert len(set(sums.values())) == len(sums)
    assert all(0 <= s <= MASK for s in sums.values())
    assert tensor_checksum("w", x, dtype=torch.bfloat16) == sums["bfloat16"]
    assert tensor_checksum("w", x.view(8, 5).t().contiguous().t()) == sums["plain"]  # strides are no content
    assert tensor_checksum("w", x[:0]) == 0
