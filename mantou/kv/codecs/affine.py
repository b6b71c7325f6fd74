"""Uniform groups: a scale and a bias for every few values along the head dimension. Knows no rows and no layers."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mantou.errors import ConfigError
from mantou.kv.shapes import Packing

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)  # what MLX quantises by
DEFAULT_GROUP = 64


class Affine:
    """Three parts: packed uint32 words, scales and biases, as `mx.quantize` makes them.

    `group_size` is the most values that share a scale; a head dimension that it does not divide takes a smaller one.
    """

    raw = False
    num_parts = 3

    def __init__(self, bits: int, group_size: int = DEFAULT_GROUP) -> None:
        self.bits = bits
        self.group_size = group_size
        self.name = f"kv{bits}" if group_size == DEFAULT_GROUP else f"kv{bits}g{group_size}"
        self.affine = bits, group_size
        self.packing = Packing(bits, group_size)

    def _group(self, head_dim: int) -> int:
        for size in sorted(GROUP_SIZES, reverse=True):
            if size <= self.group_size and head_dim % size == 0:
                return size
        raise ConfigError(
            f"Keys and values of {self.bits} bits need a head dimension divisible by 32, this model has {head_dim}; "
            "run without --kv-quant."
        )

    def pack(self, x: mx.array) -> tuple[mx.array, ...]:
        return tuple(mx.quantize(x, group_size=self._group(x.shape[-1]), bits=self.bits))

    def unpack(self, parts: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        weight, scales, biases = parts
        group = weight.shape[-1] * 32 // self.bits // scales.shape[-1]
        return mx.dequantize(weight, scales, biases, group_size=group, bits=self.bits).astype(dtype)

    def bytes_per_token(self, num_heads: int, head_dim: int, itemsize: int) -> float:
        return num_heads * (head_dim * self.bits / 8 + 2 * itemsize * head_dim / self._group(head_dim))

    def check(self, head_dim: int) -> None:
        self._group(head_dim)
