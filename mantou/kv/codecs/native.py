"""Keys and values as the model computes them, in its own dtype. Knows no rows and no layers."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


class Native:
    """One part: the values themselves."""

    name = "native"
    raw = True
    affine = None
    packing = None
    num_parts = 1

    def pack(self, x: mx.array) -> tuple[mx.array, ...]:
        return (x,)

    def unpack(self, parts: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        return parts[0]

    def bytes_per_token(self, num_heads: int, head_dim: int, itemsize: int) -> float:
        return num_heads * head_dim * itemsize

    def check(self, head_dim: int) -> None:
        pass


class Nothing:
    """For values that no graph reads: an index keeps keys only."""

    name = "nothing"
    raw = False
    affine = None
    packing = None
    num_parts = 0

    def pack(self, x: mx.array) -> tuple[mx.array, ...]:
        return ()

    def unpack(self, parts: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        return mx.zeros((), dtype)

    def bytes_per_token(self, num_heads: int, head_dim: int, itemsize: int) -> float:
        return 0.0

    def check(self, head_dim: int) -> None:
        pass
