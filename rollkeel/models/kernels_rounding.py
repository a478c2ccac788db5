"""Rounding of weights and activations on a CPU in one visit to memory, to the bit what the plain torch code in `numerics` gives.

Without fast mathematics: a division turned into a product by the reciprocal rounds otherwise.
"""

from __future__ import annotations

import numpy as np

from rollkeel.models.jit import njit

_NORMAL = np.int32(0x3C800000)
"""Bits of 2⁻⁶, the smallest normal e4m3 number; below it they are multiples of 2⁻⁹."""


def _grid(x, bits, limit, fp8, out, out_bits):  # type: ignore[no-untyped-def]
    """Rows of `x` to the grid of `limit` steps on either side (`fp8`: to e4m3 numbers), one scale per row.

    `bits`, `out_bits`: the same memory as int32. The largest magnitude is found among integers, where NaN is the largest.
    """
    for row in range(x.shape[0]):
        largest = np.int32(0)
        for i in range(x.shape[1]):
            largest = max(largest, bits[row, i] & np.int32(0x7FFFFFFF))
        out_bits[row, 0] = largest
        scale = out[row, 0]
        if scale < np.float32(1e-12):
            scale = np.float32(1e-12)
        scale = scale / limit
        for i in range(x.shape[1]):
            out[row, i] = abs(x[row, i]) / scale
        if fp8:
            for i in range(x.shape[1]):
                b = out_bits[row, i]
                even = (b + np.int32(0x7FFFF) + ((b >> np.int32(20)) & np.int32(1))) & np.int32(~0xFFFFF)
                out_bits[row, i] = even if b >= _NORMAL else b
            for i in range(x.shape[1]):
                v = out[row, i]
                tiny = (v + np.float32(16384.0)) - np.float32(16384.0)
                out[row, i] = (tiny if v < np.float32(0.015625) else v) * scale
        else:
            for i in range(x.shape[1]):
                out[row, i] = ((out[row, i] + np.float32(8388608.0)) - np.float32(8388608.0)) * scale
        for i in range(x.shape[1]):
            out_bits[row, i] |= bits[row, i] & np.int32(-0x80000000)


grid = njit(
    "void(float32[:, ::1], int32[:, ::1], float32, boolean, float32[:, ::1], int32[:, ::1])",
    cache=True,
    nogil=True,
    boundscheck=False,
    error_model="numpy",
)(_grid)
