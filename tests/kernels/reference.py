"""Float64 references in numpy, and how far a result is from one. Knows nothing of the kernels."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

# Largest error over largest value. Quantised products see activations of 16 (or 8) bits a unit of 32; a single result
# may cancel, so their error is measured against products of absolute values (`product_error`).
EXACT, QUANTISED, INT8 = 2e-6, 2e-5, 4e-3
ROUNDING = {
    mx.float32: 0.0,
    mx.bfloat16: 2.0**-8,
    mx.float16: 2.0**-11,
}  # half a unit in the last place, with slack


def f64(a: mx.array) -> Array:
    return np.array(a.astype(mx.float32)).astype(np.float64)


def error(ours: mx.array, want: Array) -> float:
    got = f64(ours)
    assert got.shape == want.shape, (got.shape, want.shape)
    assert np.isfinite(got).all()
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-30))


def product_error(ours: mx.array, x: Array, weights: Array, want: Array | None = None) -> float:
    """Of ours ~ x [m, k] @ weights [n, k].T, or of `want`, which adds steps of order one to the product."""
    got = f64(ours)
    want = x @ weights.T if want is None else want
    assert got.shape == want.shape, (got.shape, want.shape)
    assert np.isfinite(got).all()
    return float(np.abs(got - want).max() / (np.abs(x) @ np.abs(weights).T).max())


def normal(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    generator = np.random.default_rng([seed, *shape])
    return mx.array(generator.standard_normal(shape).astype(np.float32)).astype(dtype)


def dequantised(w: mx.array, scales: mx.array, biases: mx.array, group: int, bits: int) -> Array:
    """[rows, k] from MLX's packing, values unpacked by hand: a little-endian bit stream a row."""
    rows = np.array(w).view(np.uint8).reshape(w.shape[0], -1)
    stream = np.unpackbits(rows, axis=1, bitorder="little")
    values = stream.reshape(w.shape[0], -1, bits) @ (1 << np.arange(bits))
    return values * np.repeat(f64(scales), group, 1) + np.repeat(f64(biases), group, 1)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps) * weight + bias


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_erf(x: Array) -> Array:
    # Abramowitz and Stegun are too coarse: integrate the density by erf's own series is slow; MLX has erf in f32.
    erf = np.array(mx.erf(mx.array((x / np.sqrt(2)).astype(np.float32)))).astype(np.float64)
    return 0.5 * x * (1 + erf)


def rope(x: Array, dims: int, traditional: bool, frequencies: Array, positions: Array) -> Array:
    """x [B, H, T, D]; positions [B, T]."""
    angles = positions[:, None, :, None] * frequencies
    c, s = np.cos(angles), np.sin(angles)
    y = x.copy()
    half = dims // 2
    first, second = (
        (slice(0, dims, 2), slice(1, dims, 2)) if traditional else (slice(0, half), slice(half, dims))
    )
    a, b = x[..., first], x[..., second]
    y[..., first], y[..., second] = a * c - b * s, a * s + b * c
    return y


def attention(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    visible: Array,
    bias: Array | None = None,
    sinks: Array | None = None,
) -> Array:
    """q [B, H, T, D], k and v [B, Hk, S, ...], visible bool [B, 1 or H, T, S]."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = q @ k.swapaxes(-1, -2) * scale + (0 if bias is None else bias)
    scores = np.where(visible, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None, None])
    e = np.exp(scores - top)
    total = e.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks[:, None, None] - top))
    return e / total @ v
