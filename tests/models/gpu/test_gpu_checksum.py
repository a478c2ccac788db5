"""Checksums by a kernel are the integers of the other path: engines elsewhere compare against them, and so do saved runs.

Not covered: speed; what a checksum tells apart (see test_names.py).
"""

from __future__ import annotations

import pytest
import torch

from rollkeel.models import checksum, gpu
from rollkeel.models.checksum import tensor_checksum
from rollkeel.models.gpu import checksum as kernels

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64, torch.int8, torch.uint8, torch.int64
]  # fmt: skip


def both(monkeypatch: pytest.MonkeyPatch, tensor: torch.Tensor, offset: int, dtype: torch.dtype | None = None) -> int:
    """The kernel's, which must be that of the CPU."""
    got = tensor_checksum("model.w", tensor, offset, dtype)
    with monkeypatch.context() as patch:
        patch.setenv(gpu.SWITCH, "0")
        assert got == tensor_checksum("model.w", tensor.cpu(), offset, dtype)
    return got


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 256)


@pytest.mark.parametrize("offset", [0, 2**32 - 500, 2**40 + 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_integers_are_the_same(device: str, dtype: torch.dtype, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = (torch.arange(-500, 501) * 1.37).clamp(-100, 100).to(device)
    x = (x.abs() if dtype is torch.uint8 else x).to(dtype)
    whole = both(monkeypatch, x, offset)
    assert both(monkeypatch, x[:1], offset) != whole
    monkeypatch.setattr(checksum, "PART_OF_KERNEL", 100)
    assert both(monkeypatch, x, offset) == whole


def test_other_values_and_orders(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(7, 6, 10, generator=torch.Generator().manual_seed(0)).to(device)
    for form in (x.permute(2, 0, 1), x[:, ::2], x[:0], x[0, 0, 0], x.to(torch.bfloat16).transpose(1, 2)[1]):
        both(monkeypatch, form, 0)
        both(monkeypatch, form, 0, torch.float16)


def test_the_kernel_is_taken_and_no_value_is_as_wide_as_the_tensor(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[torch.Tensor]()
    monkeypatch.setattr(kernels, "block_sums", lambda *a, _of=kernels.block_sums: made.append(_of(*a)) or made[-1])
    x = torch.ones(2**16, dtype=torch.bfloat16, device=device)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    tensor_checksum("w", x)
    assert [len(sums) for sums in made] == [256]
    assert device == "cpu" or torch.cuda.max_memory_allocated() - before < 2**16
