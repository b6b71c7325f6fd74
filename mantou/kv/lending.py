"""A layer's buffers on loan to a primitive that appends and attends on its own. Knows no layouts and no primitives."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mantou.kv.pieces import Parts


@dataclass(frozen=True, slots=True)
class Loan:
    """Where a primitive writes, and what its rows see. Row b of the forward is slot first_slot + b.

    The layout holds no reference meanwhile, so that the buffers can be written in place; they are given back with
    `take_back`.
    """

    keys: mx.array  # [slots, kv_heads, capacity, head_dim]
    values: mx.array
    start: mx.array  # int32[rows], positions held before this forward
    count: mx.array | None  # int32[rows] real tokens, None = all
    first_slot: int
    window: int  # 0 = unlimited


def fitted(parts: Parts, shape: tuple[int, int, int, int], dtype: mx.Dtype) -> mx.array | None:
    """The one buffer with at least shape[2] columns, contents kept; None if it holds something else."""
    if not parts:
        return mx.zeros(shape, dtype)
    (buffer,) = parts
    have = buffer.shape[2]
    if buffer.dtype != dtype or (*buffer.shape[:2], buffer.shape[3]) != (*shape[:2], shape[3]):
        return None
    if have >= shape[2]:
        return buffer
    pad = mx.zeros((*shape[:2], shape[2] - have, shape[3]), dtype)
    return mx.concatenate([buffer, pad], axis=2)
