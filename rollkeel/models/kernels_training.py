"""Elementwise parts of the training forward and backward as single passes over memory; see `fused.py`."""

from __future__ import annotations

import numpy as np

from rollkeel.models.jit import entry, exp, jit

_ROW = "float32[:, ::1]"
_FLOAT = "float32[::1]"
_REAL = "float32"
_SIZE = "int64"


@entry(_ROW, _FLOAT, _REAL, _ROW, _FLOAT)
def norm_forward(x, weight, eps, out, scales):
    """out = x · weight / rms(x) per row of `x [N, D]`; `scales [N]` receives 1 / rms."""
    for n in range(x.shape[0]):
        total = np.float32(0)
        for d in range(x.shape[1]):
            total += x[n, d] * x[n, d]
        scales[n] = np.float32(1) / np.sqrt(total / np.float32(x.shape[1]) + eps)
        for d in range(x.shape[1]):
            out[n, d] = x[n, d] * scales[n] * weight[d]


@jit
def _norm_row(g, x, weight, scale, dx, dweight):
    """Backward of one row: dx, and dweight added to."""
    dot = np.float32(0)
    for d in range(len(x)):
        dot += g[d] * weight[d] * x[d]
    pull = scale * scale * scale * dot / np.float32(len(x))
    for d in range(len(x)):
        dweight[d] += g[d] * x[d] * scale
        dx[d] = g[d] * weight[d] * scale - x[d] * pull


@entry(_ROW, _ROW, _FLOAT, _FLOAT, _ROW, _FLOAT)
def norm_backward(g, x, weight, scales, dx, dweight):
    """Gradients of `norm_forward` by x and, added to `dweight [D]`, by the weight."""
    for n in range(x.shape[0]):
        _norm_row(g[n], x[n], weight, scales[n], dx[n], dweight)


@entry(_ROW, _FLOAT, _REAL, _SIZE, _ROW, _ROW, _ROW, _FLOAT)
def rotary_forward(x, weight, eps, heads, cos, sin, out, scales):
    """Norm (where `weight` is not empty) and rotary embedding of `x [N · heads, d]`; `cos`, `sin`: `[N, d/2]`."""
    half = x.shape[1] // 2
    for n in range(x.shape[0]):
        c = cos[n // heads]
        s = sin[n // heads]
        scale = np.float32(1)
        if len(weight):
            total = np.float32(0)
            for d in range(2 * half):
                total += x[n, d] * x[n, d]
            scale = np.float32(1) / np.sqrt(total / np.float32(2 * half) + eps)
            scales[n] = scale
            for d in range(half):
                a = x[n, d] * scale * weight[d]
                b = x[n, d + half] * scale * weight[d + half]
                out[n, d] = a * c[d] - b * s[d]
                out[n, d + half] = b * c[d] + a * s[d]
        else:
            for d in range(half):
                out[n, d] = x[n, d] * c[d] - x[n, d + half] * s[d]
                out[n, d + half] = x[n, d + half] * c[d] + x[n, d] * s[d]


@entry(_ROW, _ROW, _FLOAT, _FLOAT, _SIZE, _ROW, _ROW, _ROW, _FLOAT)
def rotary_backward(g, x, weight, scales, heads, cos, sin, dx, dweight):
    """Gradients of `rotary_forward`; the rotation's backward is the rotation by the opposite angle."""
    half = x.shape[1] // 2
    turned = np.empty(2 * half, np.float32)
    for n in range(x.shape[0]):
        c = cos[n // heads]
        s = sin[n // heads]
        for d in range(half):
            turned[d] = g[n, d] * c[d] + g[n, d + half] * s[d]
            turned[d + half] = g[n, d + half] * c[d] - g[n, d] * s[d]
        if len(weight):
            _norm_row(turned, x[n], weight, scales[n], dx[n], dweight)
        else:
            dx[n] = turned


@entry(_ROW, _ROW, _ROW)
def swiglu_backward(g, hidden, out):
    """Gradient `[N, 2W]` of silu(gate) · up by `hidden [N, 2W]` = [gate | up]: silu'(x) = σ(x) + silu(x) · (1 − σ(x))."""
    width = g.shape[1]
    silu = np.empty(width, np.float32)
    slope = np.empty(width, np.float32)
    for n in range(hidden.shape[0]):
        gate = hidden[n, :width]
        up = hidden[n, width:]
        d_gate = out[n, :width]
        d_up = out[n, width:]
        dy = g[n]
        for d in range(width):
            sigmoid = np.float32(1) / (np.float32(1) + exp(min(-gate[d], np.float32(80))))
            silu[d] = gate[d] * sigmoid
            slope[d] = sigmoid + silu[d] * (np.float32(1) - sigmoid)
        for d in range(width):
            d_gate[d] = dy[d] * up[d] * slope[d]
        for d in range(width):
            d_up[d] = dy[d] * silu[d]
