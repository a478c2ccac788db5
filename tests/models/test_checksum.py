"""Checksums of large weights must cost neither memory nor another value: engines in other processes compare against these.

Values are pinned as they have been since runs were saved with them. Not covered: CUDA, speed, what a checksum tells apart (see
test_names.py).
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from pretend import DEVICE, JOURNAL

from rollkeel.engines import vllm_worker
from rollkeel.models import checksum, jit
from rollkeel.models.checksum import MASK, begun, pitches_of, read, tensor_checksum
from rollkeel.sync.publish import full_update

PINNED = {
    torch.float32: 14238820305941074618,
    torch.bfloat16: 6409608545275953962,
    torch.float16: 6420024665360450336,
    torch.int8: 18120567560009127746,
    torch.uint8: 18120567560009127746,
    torch.float8_e4m3fn: 18120601524927413732,
    torch.float64: 9194526261965737668,
    torch.int64: 8323513307018660232,
}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("part", [2**19, 64, 7])
@pytest.mark.parametrize("dtype", PINNED)
def test_values_are_what_they_were(
    dtype: torch.dtype, part: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions pass 2**32 on the way."""
    monkeypatch.setattr(checksum, "PART", part)
    if not compiled:
        monkeypatch.setattr(checksum, "_COMPILED", {})
    x = (torch.arange(-500, 500) * 1.37).clamp(-100, 100).abs()
    assert tensor_checksum("model.w", x.to(dtype), 2**32 - 500) == PINNED[dtype]
    assert tensor_checksum("model.w", x, 2**32 - 500, dtype) == PINNED[dtype]


@pytest.mark.parametrize("part", [2**19, 16, 5])
def test_strided_tensors_are_summed_in_their_own_order(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(7, 6, 10, generator=torch.Generator().manual_seed(0))
    forms = [x.permute(2, 0, 1), x[:, ::2], x.expand(3, 7, 6, 10), x[:0], x[0, 0, 0], x.transpose(1, 2)[1]]
    plain = [tensor_checksum("w", form.contiguous()) for form in forms]
    monkeypatch.setattr(checksum, "PART", part)
    assert [tensor_checksum("w", form) for form in forms] == plain


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("part", [2**19, 5])
@pytest.mark.parametrize("shape", [(12,), (7, 10), (4, 5, 6), (3, 1, 8), (2, 3, 4, 5)])
def test_boxes_add_up_to_the_whole(
    shape: tuple[int, ...], part: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksum, "PART", part)
    if not compiled:
        monkeypatch.setattr(checksum, "_COMPILED", {})
    draw = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        whole = (torch.rand(shape, generator=draw) * 99).to(dtype)
        cuts = [sorted({0, n, *torch.randint(n + 1, (2,), generator=draw).tolist()}) for n in shape]
        total, pitches = 0, pitches_of(shape)
        for spans in itertools.product(*(pairwise(cut) for cut in cuts)):
            box = whole[tuple(slice(*span) for span in spans)]
            offset = sum(a * p for (a, _), p in zip(spans, pitches, strict=True))
            ours = [tensor_checksum("w", b, offset, None, pitches) for b in (box, box.clone(), columns_first(box))]
            assert len(set(ours)) == 1  # however it lies
            assert tensor_checksum("w", box, offset + 1, None, pitches) != ours[0]
            total += ours[0]
        assert total % 2**64 == tensor_checksum("w", whole)


def columns_first(box: torch.Tensor) -> torch.Tensor:
    """The same values, the last dimension's the furthest apart in memory."""
    return box.movedim(-1, 0).contiguous().movedim(0, -1)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_box_whose_positions_pass_two_to_the_32_is_the_sum_of_its_elements(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a matrix with rows of 2**31 elements: one passes it in the middle of a row, another one between two."""
    if not compiled:
        monkeypatch.setattr(checksum, "_COMPILED", {})
    box, pitch = torch.arange(40, dtype=torch.int32).view(4, 10), 2**31
    for first in (pitch - 4, pitch, 5):
        alone = sum(
            tensor_checksum("w", box[i, j], first + i * pitch + j) for i, j in itertools.product(range(4), range(10))
        )
        assert tensor_checksum("w", box, first, None, (pitch, 1)) == alone % 2**64


@pytest.mark.skipif(not jit.FOUND, reason="numba is not here")
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 5000])
def test_what_is_copied_before_is_there_and_summed_there(
    count: int, dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Around the size of a block, and where positions pass 2**32 in the middle of one."""
    if not compiled:
        monkeypatch.setattr(checksum, "_COMPILED", {})
    x = (torch.arange(count) * 1.37 % 200).to(dtype)
    for offset in (0, 2**32 - 700, 2**32 - 1024):
        memory = torch.full((count + 4,), 7).to(dtype)
        assert tensor_checksum("w", memory[2:-2], offset, source=x) == tensor_checksum("w", x, offset)
        assert torch.equal(memory[2:-2], x)
        assert memory[[0, 1, -2, -1]].eq(7).all()


def test_a_copy_into_other_forms_and_types() -> None:
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    places = [torch.zeros(10, 6).t(), torch.zeros(6, 20)[:, ::2], torch.zeros(6, 10, dtype=torch.bfloat16)]
    for source in (x, x.t().contiguous().t(), x[::2].repeat_interleave(2, 0)[:6]):
        for place in places:
            got = tensor_checksum("w", place, 3, source=source)
            assert torch.equal(place, source.to(place.dtype))
            assert got == tensor_checksum("w", source.to(place.dtype), 3)
    box, pitches = torch.zeros(6, 10), pitches_of((9, 14))
    assert tensor_checksum("w", box, 5, None, pitches, x) == tensor_checksum("w", x, 5, None, pitches)
    assert torch.equal(box, x)


def test_every_width_is_summed_in_one_pass() -> None:
    assert set(checksum._COMPILED) == {1, 2, 4, 8}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64])
def test_a_worker_sums_part_by_part(dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).mul(50).to(dtype)
    monkeypatch.setattr(vllm_worker, "PART", 64)
    if not compiled:
        monkeypatch.setattr(vllm_worker, "njit", None)
    assert vllm_worker.tensor_checksum("w", x) == tensor_checksum("w", x)


PEAK = """
import resource, torch
from rollkeel.engines import vllm_worker
from rollkeel.models import checksum
x = torch.ones(6000, 8192, dtype=torch.bfloat16)
def grown(call):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
checksum.tensor_checksum("w", x[:2])
out = [grown(lambda: checksum.tensor_checksum("w", form, 0, dtype)) for form in (x, x.t()) for dtype in (None, torch.float32)]
checksum._COMPILED, vllm_worker.njit = {}, None
print(*out, grown(lambda: checksum.tensor_checksum("w", x)), grown(lambda: vllm_worker.tensor_checksum("w", x)))
"""


@pytest.mark.slow
def test_no_temporary_grows_with_the_tensor() -> None:
    """96 MB of weights; their int64 positions alone would be 400."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, timeout=600, check=True)
    assert all(int(grown) <= 64 for grown in done.stdout.split()), done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device pretends beside no other")
def test_many_sums_wait_once_for_a_device() -> None:
    """Those of the host are known at once, those of a device in one look, each as alone."""
    made = [torch.randn(n, 3) for n in (1, 700, 5)] + [torch.arange(9, dtype=torch.int8)]
    named = [(f"w{i}", tensor) for i, tensor in enumerate(made)]
    alone = [tensor_checksum(name, tensor) for name, tensor in named]
    JOURNAL.clear()
    there = [(name, tensor.to(DEVICE) if i != 1 else tensor) for i, (name, tensor) in enumerate(named)]
    assert read([begun(name, tensor) for name, tensor in there]) == alone
    assert sum(JOURNAL.reads.values()) == 1
    assert full_update(there, 1).checksum == sum(alone) & MASK
    assert sum(JOURNAL.reads.values()) == 2
    assert read([]) == []
