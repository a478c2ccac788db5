"""A delta that changes one bit too many makes an engine serve weights that nobody trained; one that is damaged must not write at all where it has no business.

Encodings written by hand, the compiled and the plain kernels against each other, every damage of one byte, sizes beside the entropy.
Not covered: speed (`benchmarks/deltas.py`), what an engine does with a delta (`sync/test_deltas.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from benchmarks.deltas import entropy_bytes, weights
from rollkeel.errors import DeltaRefused
from rollkeel.models import delta
from rollkeel.models.delta import Bits, apply, bits_of, changed, decoded, encode, squash

WIDTHS = (1, 2, 4)


@pytest.fixture(params=["compiled", "plain"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(delta, "_COMPILED", {})
    elif not delta.FOUND:
        pytest.skip("no numba here")
    return request.param


def scanned(old: Bits, new: Bits) -> tuple[list[int], list[list[int]]]:
    gaps, planes = np.empty(len(old), np.uint8), np.empty((old.itemsize, len(old)), np.uint8)
    scan = delta._scan if delta._COMPILED else delta._plain_scan
    count, used = scan(old, new, gaps, planes)
    return gaps[:used].tolist(), planes[:, :count].tolist()


def test_gaps_and_differences_are_those_on_paper(kernels: str) -> None:
    old = np.array([5, 5, 5, 5, 0, 255], np.uint8)
    new = np.array([5, 6, 5, 3, 255, 0], np.uint8)
    # Differences +1, -2, -1, +1; folded 2, 3, 1, 2. Unchanged before each: 1, 1, 0, 0.
    assert scanned(old, new) == ([1, 1, 0, 0], [[2, 3, 1, 2]])
    old, new = np.array([0, 1000, 65535], np.uint16), np.array([65535, 1300, 0], np.uint16)
    assert scanned(old, new) == ([0, 0, 0], [[1, 600 % 256, 2], [0, 600 // 256, 0]])  # -1, +300, +1
    old, new = np.zeros(2, np.uint32), np.array([0, 2**31], np.uint32)
    assert scanned(old, new) == ([1], [[255], [255], [255], [255]])  # -2**31, folded 2**32 - 1


@pytest.mark.parametrize(("before", "gaps"), [(254, [254]), (255, [255, 0]), (256, [255, 1]), (600, [255, 255, 90])])
def test_long_gaps_take_several_bytes(before: int, gaps: list[int], kernels: str) -> None:
    old = np.zeros(700, np.uint16)
    new = old.copy()
    new[before] = 1
    assert scanned(old, new) == (gaps, [[2], [0]])
    apply(old, encode(old, new))
    assert np.array_equal(old, new)


def cases(width: int) -> Sequence[tuple[Bits, Bits]]:
    rng, out = np.random.default_rng(width), []
    for count in (0, 1, 2, 255, 256, 257, 3000, delta.CHUNK - 1, delta.CHUNK, delta.CHUNK + 77):
        for share in (0.0, 1e-4, 0.02, 0.5, 1.0) if count < 10_000 else (0.01,):
            old = rng.integers(0, 2 ** (8 * width), count).astype(f"u{width}")
            new, moved = old.copy(), rng.random(count) < share
            new[moved] += rng.choice(np.array([1, -1, 2, -300, 2**31]), moved.sum()).astype(f"u{width}")
            out.append((old, new))
    return out


@pytest.mark.parametrize("width", WIDTHS)
def test_the_new_bits_come_back_from_either_kernel(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for old, new in cases(width):
        made, first = encode(old, new), old.copy()
        apply(first, made)
        assert np.array_equal(first, new)
        assert changed(made) == (old != new).sum()
        with monkeypatch.context() as patch:
            patch.setattr(delta, "_COMPILED", {})
            assert encode(old, new).tobytes() == made.tobytes()
            second = old.copy()
            apply(second, made)
            assert np.array_equal(second, new)


def test_positions_and_differences_for_another_device() -> None:
    """As an engine on a GPU adds them: with torch, to signed integers."""
    for width, signed in ((1, torch.uint8), (2, torch.int16), (4, torch.int32)):
        for old, new in cases(width):
            there = torch.from_numpy(old.copy()).view(signed)
            for positions, differences in decoded(encode(old, new), len(old), width):
                there[torch.from_numpy(positions)] += torch.from_numpy(differences).to(signed)
            assert there.numpy().tobytes() == new.tobytes()


@pytest.mark.parametrize("width", WIDTHS)
def test_several_deltas_in_one(width: int, kernels: str) -> None:
    rng = np.random.default_rng(7)
    versions = [rng.integers(0, 2 ** (8 * width), 5000).astype(f"u{width}")]
    for _ in range(4):
        moved = rng.random(5000) < 0.05
        versions.append(versions[-1] + moved.astype(f"u{width}") * rng.integers(1, 9, 5000).astype(f"u{width}"))
    made = squash([encode(a, b) for a, b in pairwise(versions)])
    assert made.tobytes() == encode(versions[0], versions[-1]).tobytes()
    there_and_back = squash([encode(versions[0], versions[1]), encode(versions[1], versions[0])])
    assert changed(there_and_back) == 0


def test_damage_is_refused_in_a_line_or_stays_within_the_array(kernels: str) -> None:
    """Every byte of a delta, in three ways, and every length: the memory around the array is never touched."""
    rng = np.random.default_rng(3)
    old = rng.integers(0, 2**16, 900).astype(np.uint16)
    new = old + (rng.random(900) < 0.1).astype(np.uint16)
    made, memory, refused = encode(old, new), np.full(900 + 2000, 0xABCD, np.uint16), dict[int, str]()
    damaged = [made[:length] for length in range(len(made))] + [np.append(made, np.uint8(0))]
    lengths = len(damaged)
    for at in range(len(made)):
        for flip in (1, 128, 255):
            damaged.append(made.copy())
            damaged[-1][at] ^= flip
    for case, bad in enumerate(damaged):
        memory[1000:1900] = old
        try:
            apply(memory[1000:1900], bad)
        except DeltaRefused as error:
            refused[case] = str(error)
        assert (memory[:1000] == 0xABCD).all()
        assert (memory[1900:] == 0xABCD).all()
    assert list(refused)[:lengths] == list(range(lengths))
    assert not any("\n" in said for said in refused.values())
    assert len(refused) > len(damaged) / 2  # the rest are other numbers, for the checksum to find


def test_gaps_that_lead_out_are_refused(kernels: str) -> None:
    """A delta as the encoder would never write it, compressed as it should be."""
    part = [delta._ZSTD.compress(np.array(x, np.uint8), asbytes=True) for x in ([2, 0], [2, 2])]
    for count, fine in ((4, True), (3, False)):
        made = delta._HEAD.pack(1, count, 2) + delta._PART.pack(2, 2, *map(len, part)) + b"".join(part)
        bits = np.zeros(count, np.uint8)
        if fine:
            apply(bits, np.frombuffer(made, np.uint8))
            assert bits.tolist() == [0, 0, 1, 1]
            continue
        with pytest.raises(DeltaRefused, match="damaged bytes"):
            apply(bits, np.frombuffer(made, np.uint8))
        assert not bits.any()


@pytest.mark.parametrize(("bits", "said"), [(np.zeros(8, np.uint16), "8 × 2"), (np.zeros(9, np.uint8), "9 × 1")])
def test_a_delta_of_another_array_is_refused(bits: Bits, said: str) -> None:
    made = encode(np.zeros(9, np.uint16), np.ones(9, np.uint16))
    with pytest.raises(DeltaRefused, match=f"expected one of {said} bytes, got one of 9 × 2"):
        apply(bits, made)


@pytest.mark.parametrize(("steps", "most"), [(1, 0.02), (10, 0.10)])
def test_small_steps_make_small_deltas(steps: int, most: float) -> None:
    """bfloat16 weights that AdamW moves at lr 1e-6: a few percent of the bytes, within 1.15 of the entropy of the changes."""
    old, new = (bits_of(t.bfloat16()) for t in weights(2**19, 3, 1e-6, steps))
    made = encode(old, new)
    assert len(made) <= most * new.nbytes
    assert len(made) <= 1.15 * entropy_bytes(old, new)


def test_the_entropy_is_that_on_paper() -> None:
    old = np.zeros(8, np.uint8)
    new = np.array([0, 0, 0, 0, 1, 1, 2, 2], np.uint8)  # 1.5 bits for each element
    assert entropy_bytes(old, new) == pytest.approx(1.5)
