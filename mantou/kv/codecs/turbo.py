"""Rotated keys and values: after a random rotation every coordinate is nearly normal, whatever the model made of it.

The rotation is Hadamard's after random signs, so it keeps lengths and inner products and undoes itself (TurboQuant,
Zandieh et al. 2025, with the randomised Hadamard transform of QuIP#, Tseng et al. 2024, for the random rotation).
Keys are then stored in uniform groups, values by the codebook that is best for a normal distribution. Knows no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from statistics import NormalDist

import mlx.core as mx
import numpy as np

from mantou.errors import ConfigError
from mantou.kv.shapes import Packing
from mantou.protocols import KVCodec

HEAD_DIMS = (64, 128, 256, 512)
_SEED = 20261130  # of the signs; stored blocks depend on it
_SMALLEST = 1e-20  # a vector of zeros stays one


@cache
def _signs(head_dim: int) -> np.ndarray:
    return np.random.default_rng((_SEED, head_dim)).choice(np.array([-1.0, 1.0], np.float32), head_dim)


def rotate(x: mx.array) -> mx.array:
    """[..., D] -> float32[..., D] of the same length; D is a power of two."""
    return mx.hadamard_transform(x.astype(mx.float32) * mx.array(_signs(x.shape[-1])))


def rotate_back(y: mx.array) -> mx.array:
    return mx.hadamard_transform(y.astype(mx.float32)) * mx.array(_signs(y.shape[-1]))


@cache
def normal_codebook(bits: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(2^bits levels, the edges between them) with the least mean square error for a standard normal value.

    Lloyd's iteration: edges half way between levels, levels at the mean of what lies between two edges.
    """
    normal = NormalDist()
    count = 1 << bits
    levels = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    edges: list[float] = []
    for _ in range(500):
        edges = [(a + b) / 2 for a, b in pairwise(levels)]
        density = [0.0, *(normal.pdf(e) for e in edges), 0.0]
        mass = [0.0, *(normal.cdf(e) for e in edges), 1.0]
        levels = [(density[i] - density[i + 1]) / max(mass[i + 1] - mass[i], _SMALLEST) for i in range(count)]
    return tuple(levels), tuple(edges)


class Codebook:
    """Two parts: indices of `bits` bits in uint32 words (the bit order of `mx.quantize`), and one scale a vector."""

    raw = False
    affine = None
    num_parts = 2

    def __init__(self, bits: int) -> None:
        assert bits in (2, 3, 4)
        self.bits = bits
        self.name = f"codebook{bits}"
        self._levels, self._edges = normal_codebook(bits)
        self.packing = Packing(bits, levels=self._levels, edges=self._edges)

    def pack(self, x: mx.array) -> tuple[mx.array, ...]:
        x = x.astype(mx.float32)
        deviation = mx.maximum(mx.sqrt(mx.mean(x * x, axis=-1, keepdims=True)), _SMALLEST)
        ordered = x / deviation
        index = sum((ordered > edge).astype(mx.uint32) for edge in self._edges[1:]) + (
            ordered > self._edges[0]
        )
        level = mx.array(self._levels)[index]
        # The scale that brings the levels nearest to x, which is not quite the deviation.
        scale = mx.sum(x * level, axis=-1, keepdims=True) / mx.sum(level * level, axis=-1, keepdims=True)
        return _pack_bits(index, self.bits), scale

    def unpack(self, parts: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        words, scale = parts
        level = mx.array(self._levels)[_unpack_bits(words, self.bits)]
        return (level * scale.astype(mx.float32)).astype(dtype)

    def bytes_per_token(self, num_heads: int, head_dim: int, itemsize: int) -> float:
        return num_heads * (head_dim * self.bits / 8 + itemsize)

    def check(self, head_dim: int) -> None:
        pass


def _pack_bits(index: mx.array, bits: int) -> mx.array:
    """uint32[..., D] below 2^bits -> uint32[..., D * bits / 32], value i at bits i * bits .. of the little-endian row.

    D is a multiple of 32.
    """
    whole = 8 if bits == 3 else 32 // bits  # values that end together with a byte, or with a word
    shifts = mx.arange(whole, dtype=mx.uint32) * bits
    grouped = index.reshape(*index.shape[:-1], -1, whole) << shifts
    words = mx.sum(grouped, axis=-1).astype(mx.uint32)
    if bits != 3:
        return words
    in_bytes = mx.stack([words, words >> 8, words >> 16], axis=-1) & 255
    return in_bytes.astype(mx.uint8).reshape(*index.shape[:-1], -1).view(mx.uint32)


def _unpack_bits(words: mx.array, bits: int) -> mx.array:
    """The indices again, uint8[..., D]."""
    ones = mx.ones((*words.shape[:-1], words.shape[-1] // bits), mx.float32)  # a scale for every 32 values
    values = mx.dequantize(words, ones, mx.zeros_like(ones), group_size=32, bits=bits)
    return values.astype(mx.uint8)


class Rotated:
    """Stores the rotated vector with another codec."""

    raw = False
    affine = None

    def __init__(self, inner: KVCodec, head_dims: Sequence[int] = HEAD_DIMS) -> None:
        self.inner = inner
        self.head_dims = head_dims
        self.name = f"rotated-{inner.name}"
        self.num_parts = inner.num_parts
        self.packing = replace(inner.packing, signs=_signs) if inner.packing else None

    def pack(self, x: mx.array) -> tuple[mx.array, ...]:
        return tuple(
            part if part.dtype == mx.uint32 else part.astype(x.dtype) for part in self.inner.pack(rotate(x))
        )

    def unpack(self, parts: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        return rotate_back(self.inner.unpack(parts, mx.float32)).astype(dtype)

    def bytes_per_token(self, num_heads: int, head_dim: int, itemsize: int) -> float:
        return self.inner.bytes_per_token(num_heads, head_dim, itemsize)

    def check(self, head_dim: int) -> None:
        if head_dim not in self.head_dims:
            sizes = ", ".join(str(size) for size in self.head_dims)
            raise ConfigError(
                f"--kv-quant turbo needs a head dimension of {sizes}, this model has {head_dim}; "
                "use --kv-quant 8 or 4."
            )
