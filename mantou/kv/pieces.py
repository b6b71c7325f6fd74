"""KV of one row off the device: what prefix stores keep, move between tiers and write to disk. Knows no slots.

A stack holds the equally shaped parts of many layers, so that a piece of a 30-layer model is a few arrays and not
hundreds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

Parts = tuple[mx.array, ...]

# numpy has no bfloat16: its bits travel as uint16.
_AS_BITS = {"bfloat16": mx.uint16}


@dataclass(frozen=True, slots=True)
class Stack:
    """Host bytes [len(members), ...]; member i is part `members[i][1]` of layer `members[i][0]`.

    `dtype` is MLX's name of it; `data` has the numpy dtype of the same bits.
    """

    data: np.ndarray
    dtype: str
    members: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def on_device(self) -> mx.array:
        array = mx.array(self.data)
        return array.view(getattr(mx, self.dtype)) if self.dtype in _AS_BITS else array


@dataclass(frozen=True, slots=True)
class Piece:
    """Keys and values of positions [lo, hi): stacks [members, 1, H, hi - lo, d]."""

    lo: int
    hi: int
    stacks: tuple[Stack, ...]

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in self.stacks)

    def cut(self, hi: int) -> Piece:
        """The part of it up to position `hi`, without a copy."""
        if hi >= self.hi:
            return self
        kept = tuple(Stack(s.data[..., : hi - self.lo, :], s.dtype, s.members) for s in self.stacks)
        return Piece(self.lo, hi, kept)


@dataclass(frozen=True, slots=True)
class State:
    """Recurrent layers' state after `num_tokens` tokens: stacks [members, 1, ...]."""

    num_tokens: int
    stacks: tuple[Stack, ...]

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in self.stacks)


def to_host(layers: Sequence[Parts]) -> tuple[Stack, ...]:
    """Copies each layer's parts off the device, with one wait."""
    groups: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for layer, parts in enumerate(layers):
        for part, array in enumerate(parts):
            groups.setdefault((*array.shape, str(array.dtype)), []).append((layer, part))
    stacked = [mx.stack([layers[layer][part] for layer, part in members]) for members in groups.values()]
    names = [str(array.dtype).rsplit(".", 1)[-1] for array in stacked]
    bits = [a.view(_AS_BITS[n]) if n in _AS_BITS else a for a, n in zip(stacked, names, strict=True)]
    mx.eval(bits)
    return tuple(
        Stack(np.array(array), name, tuple(members))
        for array, name, members in zip(bits, names, groups.values(), strict=True)
    )


def to_device(pieces: Sequence[tuple[Stack, ...]], num_layers: int, *, axis: int | None) -> list[Parts]:
    """Each layer's parts again, lazily; several pieces are joined along `axis` of a stack."""
    found: list[dict[int, mx.array]] = [{} for _ in range(num_layers)]
    for index, stack in enumerate(pieces[0] if pieces else ()):
        arrays = [piece[index].on_device() for piece in pieces]
        joined = arrays[0] if axis is None or len(arrays) == 1 else mx.concatenate(arrays, axis=axis)
        for member, (layer, part) in enumerate(stack.members):
            found[layer][part] = joined[member]
    return [tuple(parts[i] for i in range(len(parts))) for parts in found]
