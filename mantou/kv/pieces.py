"""KV of one row off the device: what prefix stores keep, move between tiers and write to disk. Knows no slots.

A stack holds the equally shaped parts of many layers, so that a piece of a 30-layer model is a few arrays and not
hundreds.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx
import numpy as np

T = TypeVar("T")
Parts = tuple[mx.array, ...]
HostParts = tuple[tuple[np.ndarray, ...], ...]
"""A layer's parts, each as arrays [1, H, some columns, d] that lie one behind the other."""

# numpy has no bfloat16: its bits travel as uint16.
_AS_BITS = {"bfloat16": mx.uint16}
_NUMPY_BITS = {"bfloat16": "uint16"}


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


@dataclass(frozen=True, slots=True)
class Piece:
    """Keys and values of positions [lo, hi): stacks [members, 1, H, hi - lo, d]."""

    lo: int
    hi: int
    stacks: tuple[Stack, ...]

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in self.stacks)

    def cut(self, lo: int, hi: int, *, copy: bool = False) -> Piece:
        """The positions [lo, hi), which it holds; with `copy`, bytes of its own."""
        if (lo, hi) == (self.lo, self.hi):
            return self
        taken = [stack.data[..., lo - self.lo : hi - self.lo, :] for stack in self.stacks]
        arrays = [np.ascontiguousarray(data) for data in taken] if copy else taken
        stacks = [Stack(a, s.dtype, s.members) for a, s in zip(arrays, self.stacks, strict=True)]
        return Piece(lo, hi, tuple(stacks))


@dataclass(frozen=True, slots=True)
class State:
    """Recurrent layers' state after `num_tokens` tokens: stacks [members, 1, ...]."""

    num_tokens: int
    stacks: tuple[Stack, ...]

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in self.stacks)


@dataclass(slots=True)
class CopiedRow:
    """A row of which `piece` is off the device (`RowKV`). No store gets other columns of it now: `lacking` is the first
    that was asked for."""

    piece: Piece
    since: int | None = None
    lacking: int | None = None

    def columns(self, lo: int, hi: int) -> Piece:
        if self.piece.lo <= lo and hi <= self.piece.hi:
            return self.piece.cut(lo, hi, copy=True)
        self.lacking = lo if self.lacking is None else min(lo, self.lacking)
        return Piece(hi, hi, ())

    def state(self) -> State | None:
        return None


def on_device(data: np.ndarray, dtype: str) -> mx.array:
    """A copy with MLX's dtype of the same bits."""
    array = mx.array(data)
    return array.view(getattr(mx, dtype)) if dtype in _AS_BITS else array


def to_host(layers: Sequence[Parts]) -> tuple[Stack, ...]:
    """Copies each layer's parts, which may be slices of its buffers, off the device."""
    groups: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for layer, parts in enumerate(layers):
        for part, array in enumerate(parts):
            groups.setdefault((*array.shape, str(array.dtype)), []).append((layer, part))
    copy = _gather if host_is_device() else _transfer
    found: list[Stack] = []
    for members in groups.values():
        arrays = [layers[layer][part] for layer, part in members]
        found.append(Stack(copy([_bits(array) for array in arrays]), _name(arrays[0]), tuple(members)))
    return tuple(found)


def host_is_device() -> bool:
    """Whether arrays lie where numpy reads them, so that a copy of a part costs no more than its bytes."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def host_views(arrays: Sequence[mx.array]) -> list[np.ndarray]:
    """The bits of arrays, where they are. The views must be gone before a buffer among them is written."""
    bits = [_bits(array) for array in arrays]
    mx.eval(bits)  # nothing to wait for where they are buffers that numpy knows the type of
    return [np.array(array, copy=False) for array in bits]


def _name(array: mx.array) -> str:
    return str(array.dtype).rsplit(".", 1)[-1]


def _bits(array: mx.array) -> mx.array:
    name = _name(array)
    return array.view(_AS_BITS[name]) if name in _AS_BITS else array


def _transfer(arrays: Sequence[mx.array]) -> np.ndarray:
    """One array, made on the device: a transfer costs more than a copy there."""
    return np.array(mx.stack(list(arrays)))


def _gather(arrays: Sequence[mx.array]) -> np.ndarray:
    """One copy, straight from where they are: fresh memory is what costs time on a CPU.

    The views are gone when this returns, so that the buffers have one owner again and are written in place.
    """
    mx.eval(arrays)
    views = [np.array(array, copy=False) for array in arrays]
    return np.stack(views)


def finished(work: Generator[None, None, T]) -> T:
    """What work in parts gives, without a pause."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


class Packing:
    """Columns on their way off the device, a layer at a time."""

    def __init__(self, layers: Sequence[Parts]) -> None:
        """`layers`: for their shapes only."""
        groups: dict[tuple[object, ...], list[tuple[int, int]]] = {}
        for layer, parts in enumerate(layers):
            for part, array in enumerate(parts):
                groups.setdefault((*array.shape, str(array.dtype)), []).append((layer, part))
        self._places: dict[tuple[int, int], tuple[np.ndarray, int]] = {}
        found: list[Stack] = []
        for members in groups.values():
            array = layers[members[0][0]][members[0][1]]
            name = _name(array)
            data = np.empty((len(members), *array.shape), _NUMPY_BITS.get(name, name))
            found.append(Stack(data, name, tuple(members)))
            self._places |= {member: (data, index) for index, member in enumerate(members)}
        self.stacks = tuple(found)

    def take(self, layer: int, parts: HostParts) -> None:
        """Copies one layer; `parts` may be views of its buffers, and are not kept."""
        for part, arrays in enumerate(parts):
            data, index = self._places[layer, part]
            done = 0
            for array in arrays:
                end = done + array.shape[-2]
                data[index, ..., done:end, :] = array
                done = end


class Unpacking:
    """Pieces on their way to the device, a layer at a time."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._places: dict[int, list[tuple[int, int, int]]] = {}  # layer -> (part, stack, member)
        for index, stack in enumerate(pieces[0].stacks if pieces else ()):
            for member, (layer, part) in enumerate(stack.members):
                self._places.setdefault(layer, []).append((part, index, member))
        self._joined: dict[tuple[object, ...], np.ndarray] = {}  # used for every layer: fresh memory is slow

    def columns(self, layer: int, num_columns: int) -> Parts:
        """The layer's parts [1, H, num_columns, d]: the pieces' columns, then zeros."""
        return tuple(
            self._part(index, member, num_columns) for _, index, member in sorted(self._places.get(layer, ()))
        )

    def _part(self, index: int, member: int, num_columns: int) -> mx.array:
        first = self._pieces[0].stacks[index]
        shape = (*first.data.shape[1:-2], num_columns, first.data.shape[-1])
        joined = self._joined.get((shape, first.dtype))
        if joined is None:
            joined = self._joined[shape, first.dtype] = np.zeros(shape, first.data.dtype)
        for piece in self._pieces:
            joined[..., piece.lo : piece.hi, :] = piece.stacks[index].data[member]
        return on_device(joined, first.dtype)


def states(state: State | None, num_layers: int) -> list[Parts]:
    """Each layer's parts of a recurrent state."""
    found: list[dict[int, mx.array]] = [{} for _ in range(num_layers)]
    for stack in state.stacks if state else ():
        for member, (layer, part) in enumerate(stack.members):
            found[layer][part] = on_device(stack.data[member], stack.dtype)
    return [tuple(parts[i] for i in range(len(parts))) for parts in found]
