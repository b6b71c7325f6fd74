"""A layer's buffers on loan: to a primitive that appends and attends on its own, or to a drafter that only reads.

Knows no layouts, no primitives and no drafters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import mlx.core as mx

from mantou.kv.geometry import Geometry
from mantou.kv.pieces import Parts
from mantou.kv.writing import Writing
from mantou.protocols import KVCodec


@dataclass(frozen=True, slots=True)
class Seen:
    """What a layer holds of a group's rows: keys and values [rows, H, span, D], and which columns each row has."""

    keys: mx.array
    values: mx.array
    mask: mx.array | str | None  # bool[rows, 1, 1, span]; None = all of them


class Readable(Protocol):
    """A layout whose columns can be read without storing any."""

    def begin(self, geometry: Geometry, capacity: int) -> None: ...
    def fetch(self) -> tuple[mx.array, mx.array]:
        """Keys and values of the rows of `begin`, as `update_and_fetch` gives them."""
        ...

    def make_mask(self, num_tokens: int) -> mx.array | str | None: ...


@dataclass(frozen=True, slots=True)
class Groups:
    """Parts that a primitive may read and write itself: groups with MLX's affine layout; bits 0 = plain values."""

    bits: int = 0
    group_size: int = 0


def groups_of(codec: KVCodec, head_dim: int) -> Groups | None:
    """None where only the codec can read and write its parts."""
    if codec.raw:
        return Groups()
    bits, most = codec.affine or (0, 0)
    fitting = [size for size in (128, 64, 32) if size <= most and head_dim % size == 0]
    return Groups(bits, fitting[0]) if bits in (4, 8) and fitting else None


@dataclass(frozen=True, slots=True)
class Terms:
    """Where a primitive writes, and what its rows see. Row b of the forward is slot first_slot + b.

    The geometry of a forward keeps them: layers on the same terms have the same object.
    """

    groups: Groups
    start: mx.array  # int32[rows], positions held before this forward
    count: mx.array | None  # int32[rows] real tokens, None = all
    first_slot: int
    writing: Writing  # gets what the primitive returns
    window: int  # 0 = unlimited
    # Position p is in column p % ring, and the mask bool[rows, 1, width, ring] says what is seen; 0 = in column p.
    ring: int = 0
    mask: mx.array | None = None
    # Paged: one slot for all rows, where position p of row b is in column table[b, p // block] * block + p % block.
    table: mx.array | None = None
    block: int = 0


class Loan(NamedTuple):
    """A primitive writes into the buffers, which stay where they are."""

    keys: Parts  # each [slots, kv_heads, capacity, ...]; one part, or integers, scales and biases
    values: Parts
    terms: Terms


def part_shapes(groups: Groups, head_dim: int, dtype: mx.Dtype) -> list[tuple[int, mx.Dtype]]:
    """Width and type of each part's last axis."""
    if not groups.bits:
        return [(head_dim, dtype)]
    per_group = head_dim // groups.group_size, dtype
    return [(head_dim * groups.bits // 32, mx.uint32), per_group, per_group]


def fitted(parts: Parts, lead: tuple[int, int, int], widths: Sequence[tuple[int, mx.Dtype]]) -> Parts | None:
    """The buffers with at least lead[2] columns, contents kept; None if they hold something else."""
    if not parts:
        return tuple(mx.zeros((*lead, width), dtype) for width, dtype in widths)
    slots, heads, columns = lead
    have = 0
    for part, (width, dtype) in zip(parts, widths, strict=True):
        part_slots, part_heads, have, part_width = part.shape
        if (part_slots, part_heads, part_width) != (slots, heads, width) or part.dtype != dtype:
            return None
    if have >= columns:
        return parts
    return tuple(
        mx.concatenate([p, mx.zeros((slots, heads, columns - have, p.shape[3]), p.dtype)], axis=2)
        for p in parts
    )
