"""The decode step of `FastForward` on a CPU as compiled loops: one call per layer where PyTorch needs a hundred.

At decode sizes a layer is a few hundred microseconds of arithmetic inside as much dispatch. Here norms, rotary embedding,
attention over the paged cache where it lies, routing and the expert loop are one numba function; matrix products go to the
BLAS that torch ships. Needs numba (extra `cpu`), float32 and that BLAS; elsewhere `FastForward` does the same in PyTorch.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rollkeel.errors import BadInput
from rollkeel.models.forward import FastForward

if TYPE_CHECKING:
    njit: Any = None
    sgemm: Any = None
    FOUND = False
else:
    try:
        import llvmlite.binding
        from numba import njit, types

        _LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
        llvmlite.binding.load_library_permanently(str(_LIBRARY))
        FOUND = platform.machine() == "x86_64" and llvmlite.binding.address_of_symbol("sgemm_") is not None
        sgemm = types.ExternalFunction("sgemm_", types.void(*[types.uintp] * 13))
    except (ImportError, RuntimeError):
        FOUND = False

if not FOUND and not TYPE_CHECKING:

    def njit(**_: Any) -> Any:
        return lambda function: function


# Not cached on disk: code linked from cached pieces rounds differently from code compiled whole, and a resumed run must
# repeat the bits of the run that compiled. No `nnan`/`ninf`: a diverged model must show as NaN, not as whatever is left when NaN is assumed away.
_jit = njit(nogil=True, boundscheck=False, fastmath={"reassoc", "contract", "arcp", "nsz"})


@_jit
def _matmul(a, b, out, beta, call):  # type: ignore[no-untyped-def]
    """out [M, N] = a [M, K] @ b [N, K]ᵀ + beta · out, all row-major. `call` holds BLAS's scalar arguments."""
    flags, sizes, scalars = call
    flags[0], flags[1] = 84, 78  # 'T', 'N': BLAS is column-major, so it is given the transposed problem
    sizes[0], sizes[1], sizes[2] = b.shape[0], a.shape[0], a.shape[1]
    scalars[0], scalars[1] = 1.0, beta
    f, s, c = flags.ctypes.data, sizes.ctypes.data, scalars.ctypes.data
    sgemm(f, f + 1, s, s + 4, s + 8, c, b.ctypes.data, s + 8, a.ctypes.data, s + 8, c + 4, out.ctypes.data, s)


@_jit
def _rms(x, weight, eps, out):  # type: ignore[no-untyped-def]
    for n in range(x.shape[0]):
        total = np.float32(0)
        for d in range(x.shape[1]):
            total += x[n, d] * x[n, d]
        scale = np.float32(1) / np.sqrt(total / np.float32(x.shape[1]) + eps)
        for d in range(x.shape[1]):
            out[n, d] = x[n, d] * scale * weight[d]


@_jit
def _exp_in_place(s, bits, start, stop, top):  # type: ignore[no-untyped-def]
    """s[start:stop] = exp(s − top), by a polynomial that vectorises (relative error 2e-7); `bits` is s as int32."""
    for t in range(start, stop):
        x = max(s[t] - top, np.float32(-87.0))
        e = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
        r = x - e * np.float32(0.693359375) - e * np.float32(-2.12194440e-4)
        p = np.float32(1.9875691500e-4)
        p = p * r + np.float32(1.3981999507e-3)
        p = p * r + np.float32(8.3334519073e-3)
        p = p * r + np.float32(4.1665795894e-2)
        p = p * r + np.float32(1.6666665459e-1)
        p = p * r + np.float32(5.0000001201e-1)
        s[t] = p * r * r + r + np.float32(1.0)
        bits[t] += np.int32(e) << np.int32(23)


@_jit
def _rotate(qkv, heads, norm, eps, cos, sin):  # type: ignore[no-untyped-def]
    """Head norm (if `norm` has rows) and rotary embedding of the first `heads` heads of `qkv [N, all, d]`."""
    half = qkv.shape[2] // 2
    for n in range(qkv.shape[0]):
        for h in range(heads):
            v = qkv[n, h]
            if norm.shape[0]:
                total = np.float32(0)
                for d in range(2 * half):
                    total += v[d] * v[d]
                scale = np.float32(1) / np.sqrt(total / np.float32(2 * half) + eps)
                for d in range(2 * half):
                    v[d] = v[d] * scale * norm[h, d]
            for d in range(half):
                a, b = v[d], v[d + half]
                v[d] = a * cos[n, d] - b * sin[n, d]
                v[d + half] = b * cos[n, d] + a * sin[n, d]


@_jit
def _attend(qkv, heads, kv_heads, keys, values, table, positions, scale, scores, out):  # type: ignore[no-untyped-def]
    """Store each token's key and value in its block, then attend over the sequence's blocks; `out [N, heads * d]`."""
    size, width, group = keys.shape[1], qkv.shape[2], heads // kv_heads
    bits = scores.view(np.int32)
    for b in range(qkv.shape[0]):
        n = positions[b] + 1
        for h in range(kv_heads):
            row = table[b, positions[b] // size] * kv_heads + h
            for d in range(width):
                keys[row, positions[b] % size, d] = qkv[b, heads + h, d]
                values[row, positions[b] % size, d] = qkv[b, heads + kv_heads + h, d]
            for g in range(group):
                q, s = qkv[b, h * group + g], scores[g]
                top = np.float32(-3e38)
                for j in range((n + size - 1) // size):
                    block = keys[table[b, j] * kv_heads + h]
                    for i in range(min(size, n - j * size)):
                        dot = np.float32(0)
                        for d in range(width):
                            dot += q[d] * block[i, d]
                        dot *= scale
                        s[j * size + i] = dot
                        top = max(top, dot)
                _exp_in_place(s, bits[g], 0, n, top)
                total = np.float32(0)
                for t in range(n):
                    total += s[t]
                o = out[b, (h * group + g) * width : (h * group + g + 1) * width]
                for d in range(width):
                    o[d] = 0
                for j in range((n + size - 1) // size):
                    block = values[table[b, j] * kv_heads + h]
                    for i in range(min(size, n - j * size)):
                        w = s[j * size + i]
                        for d in range(width):
                            o[d] += w * block[i, d]
                for d in range(width):
                    o[d] /= total


@_jit
def _route(h, router, normalise, chosen, weights):  # type: ignore[no-untyped-def]
    """The `k` most probable experts of each token and their weights, most probable first."""
    experts, k = router.shape[0], chosen.shape[1]
    p = np.empty(experts, np.float32)
    for n in range(h.shape[0]):
        top = np.float32(-3e38)
        for e in range(experts):
            dot = np.float32(0)
            for d in range(h.shape[1]):
                dot += h[n, d] * router[e, d]
            p[e] = dot
            top = max(top, dot)
        total = np.float32(0)
        for e in range(experts):
            p[e] = math.exp(p[e] - top)
            total += p[e]
        kept = np.float32(0)
        for i in range(k):
            best = 0
            for e in range(experts):
                if p[e] > p[best]:
                    best = e
            chosen[n, i], weights[n, i] = best, p[best] / total
            kept += weights[n, i]
            p[best] = -1
        if normalise:
            for i in range(k):
                weights[n, i] /= kept


@_jit
def _experts(h, up, down, chosen, weights, x, call):  # type: ignore[no-untyped-def]
    """x += Σ weight · expert(h) over each token's chosen experts; one matrix product per expert and projection."""
    n, k = chosen.shape
    wide, width, dim = up.shape[1], down.shape[2], h.shape[1]
    start = np.zeros(up.shape[0] + 1, np.int64)
    for t in range(n):
        for i in range(k):
            start[chosen[t, i] + 1] += 1
    for e in range(up.shape[0]):
        start[e + 1] += start[e]
    at = start.copy()
    rows = np.empty((n * k, dim), np.float32)
    owner = np.empty(n * k, np.int64)
    share = np.empty(n * k, np.float32)
    for t in range(n):
        for i in range(k):
            j = at[chosen[t, i]]
            at[chosen[t, i]] += 1
            rows[j], owner[j], share[j] = h[t], t, weights[t, i]
    mid, act, y = np.empty((n * k, wide), np.float32), np.empty((n * k, width), np.float32), rows
    for e in range(up.shape[0]):
        if start[e] < start[e + 1]:
            _matmul(rows[start[e] : start[e + 1]], up[e], mid[start[e] : start[e + 1]], 0.0, call)
    gate = np.empty(width, np.float32)
    gate_bits = gate.view(np.int32)
    for j in range(n * k):
        for d in range(width):
            gate[d] = -mid[j, d] if mid[j, d] > -80 else np.float32(80)
        _exp_in_place(gate, gate_bits, 0, width, np.float32(0))
        for d in range(width):
            act[j, d] = mid[j, d] / (np.float32(1) + gate[d]) * mid[j, width + d]
    for e in range(up.shape[0]):
        if start[e] < start[e + 1]:
            _matmul(act[start[e] : start[e + 1]], down[e], y[start[e] : start[e + 1]], 0.0, call)
    for j in range(n * k):
        for d in range(dim):
            x[owner[j], d] += share[j] * y[j, d]


@_jit
def _layer(x, w, shape, keys, values, table, positions, cos, sin, eps, scale, normalise, chosen, call):  # type: ignore[no-untyped-def]
    """One decoder layer on `x [N, D]` in place. `w` and `shape`: see `CompiledDecode`."""
    norm1, qkv_weight, bias, qk_norm, out_weight, norm2, router, up, down = w
    heads, kv_heads, width = shape
    h = np.empty_like(x)
    _rms(x, norm1, eps, h)
    qkv = np.empty((len(x), qkv_weight.shape[0]), np.float32)
    _matmul(h, qkv_weight, qkv, 0.0, call)
    if len(bias):
        qkv += bias
    parts = qkv.reshape(len(x), heads + 2 * kv_heads, width)
    _rotate(parts, heads + kv_heads, qk_norm, eps, cos, sin)
    mixed = np.empty((len(x), heads * width), np.float32)
    scores = np.empty((heads // kv_heads, table.shape[1] * keys.shape[1]), np.float32)
    _attend(parts, heads, kv_heads, keys, values, table, positions, scale, scores, mixed)
    _matmul(mixed, out_weight, x, 1.0, call)
    _rms(x, norm2, eps, h)
    weights = np.ones((len(x), chosen.shape[1]), np.float32)
    if len(router):
        _route(h, router, normalise, chosen, weights)
    else:
        chosen[:] = 0
    _experts(h, up, down, chosen, weights, x, call)


def compiled_decode(forward: object) -> CompiledDecode:
    """`CompiledDecode` of `forward`. Raises `BadInput` where it cannot run or would compute something else."""
    if not FOUND:
        raise BadInput(
            "engine.forward=compiled: expected numba and torch's BLAS on x86-64 Linux; pip install rollkeel[cpu] or use auto"
        )
    if (
        not isinstance(forward, FastForward)
        or forward.device.type != "cpu"
        or forward.dtype != torch.float32
        or not forward.exact_activations
        or any(layer.out_bias is not None for layer in forward.layers)
    ):
        raise BadInput("engine.forward=compiled: expected float32 arithmetic on a CPU without output biases; use auto")
    return CompiledDecode(forward)


class CompiledDecode:
    """Decode steps on the weights of a `FastForward`, whose storage it reads: updates in place are seen at once."""

    def __init__(self, forward: FastForward) -> None:
        none = torch.zeros(0)
        self._forward = forward
        self._layers = []
        for layer in forward.layers:
            tensors = (
                layer.norm1,
                layer.qkv,
                none if layer.qkv_bias is None else layer.qkv_bias,
                none.view(0, 0) if layer.qk_norm is None else layer.qk_norm,
                layer.out,
                layer.norm2,
                none.view(0, 0) if layer.router is None else layer.router,
                layer.up,
                layer.down,
            )
            self._layers.append(tuple(t.numpy() for t in tensors))
        self._shape = (forward.heads, forward.kv_heads, forward.head_dim)
        self._call = (np.zeros(2, np.uint8), np.zeros(3, np.int32), np.zeros(2, np.float32))

    def hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        store: Callable[[int, int, int], tuple[np.ndarray, np.ndarray]],
        experts: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """As `FastForward.hidden` for one token per sequence; `store(layer, kv_heads,
        width)` gives the layer's key and value blocks."""
        f = self._forward
        x = f.embedding.index_select(0, ids)
        angle = positions[:, None].float() * f.inverse_frequency
        cos, sin = (angle.cos() * f.rope_factor).numpy(), (angle.sin() * f.rope_factor).numpy()
        place, blocks = positions.contiguous().numpy(), table.contiguous().numpy()
        data = x.numpy()
        for index, layer in enumerate(self._layers):
            moe = len(layer[6]) > 0
            chosen = np.empty((len(data), f.top_k if moe else 1), np.int64)
            keys, values = store(index, f.kv_heads, f.head_dim)
            _layer(
                data, layer, self._shape, keys, values, blocks, place, cos, sin,
                np.float32(f.eps), np.float32(f.scale), f.norm_topk, chosen, self._call,
            )  # fmt: skip
            if experts is not None and moe:
                experts.append(torch.from_numpy(chosen))
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), f.norm, f.eps)
