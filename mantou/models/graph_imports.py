"""Graph files that make a Metal kernel when imported, and the plain form of what only Metal has. Knows no model."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

_WORDS = "_words"  # an attribute that MLX does not take for a parameter


@contextmanager
def lenient() -> Generator[None]:
    """Within it such imports succeed on any device. Afterwards ternary linear layers work there."""
    if mx.metal.is_available():
        yield
        return
    make_kernel = mx.fast.metal_kernel
    mx.fast.metal_kernel = lambda *args, **options: None
    try:
        yield
    finally:
        mx.fast.metal_kernel = make_kernel
    layers = sys.modules.get("mlx_lm.models.bitlinear_layers")
    if layers is not None:
        layers.BitLinear.execute_matmul_kernel = ternary_matmul


def ternary_matmul(layer: Any, x: mx.array, packed: mx.array) -> mx.array:
    """x [..., in] times the layer's weights, each -1, 0 or 1.

    uint8 packed[out / 4, in] holds those of rows r, r + out / 4, ... in two bits each, plus one. MLX's own two-bit
    product takes them once they are in its order, with scale s and bias -s.
    """
    words = getattr(layer, _WORDS, None)
    if words is None:
        rows = mx.concatenate([(packed >> (2 * i)) & 3 for i in range(4)])[: layer.out_features]
        shifts = 2 * mx.arange(16, dtype=mx.uint32)
        grouped = rows.astype(mx.uint32).reshape(rows.shape[0], -1, 16) << shifts
        words = mx.sum(grouped, axis=-1).astype(mx.uint32)
        setattr(layer, _WORDS, words)
    scale = 1 / layer.weight_scale if layer.invert_weight_scales else layer.weight_scale
    group = 64 if layer.in_features % 64 == 0 else 32
    scales = mx.broadcast_to(scale.astype(x.dtype), (words.shape[0], layer.in_features // group))
    return mx.quantized_matmul(x, words, scales, -scales, transpose=True, group_size=group, bits=2)
