"""Recurrent layers' state by slot: a layout without columns. Knows no requests."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import mlx.core as mx

from mantou.kv.geometry import Geometry
from mantou.kv.pieces import HostParts, Parts
from mantou.kv.tape import Running, Tape, make_current


def _aligned(one: mx.array, other: mx.array) -> tuple[mx.array, mx.array]:
    """Both as wide as the wider, ends together: a graph that keeps its last few tokens has fewer of them at first."""
    if one.ndim != 2 or one.shape[1] == other.shape[1]:
        return one, other
    width = max(one.shape[1], other.shape[1])
    wide, widened = (mx.pad(a, [(0, 0), (width - a.shape[1], 0)]) for a in (one, other))
    return wide, widened


class RecurrentState:
    """Arrays [slots, ...] that each step replaces (convolution tails, linear-attention and SSM states).

    A snapshot is a reference, because MLX arrays are replaced and not mutated. A rewind runs the recurrence again up to
    what was kept, where the forward left a tape; else it restores the state from before the forward and asks for the
    forward to be run again, masked.
    """

    left_padding = None
    num_columns = sys.maxsize  # none to lose
    boundary = 0
    paged = False

    def __init__(self, num_arrays: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self.cache: list[mx.array | None] = [None] * num_arrays
        self.geometry: Geometry
        self._before: list[mx.array | None] = list(self.cache)
        self._tape: Tape | None = None

    # -- what the graph sees: the rows of the forward in progress
    def __getitem__(self, index: int) -> mx.array | None:
        make_current(Running(self._tape, self.geometry.lengths))
        state = self.cache[index]
        if state is None or not any(self.geometry.starts):
            return None  # a graph may treat a first token differently (recurrent_gemma does), so zeros will not do
        group = self.geometry.group
        return state if group.hi - group.lo == self.num_slots else state[group.lo : group.hi]

    def __setitem__(self, index: int, new: mx.array) -> None:
        make_current(Running(self._tape, self.geometry.lengths))
        if self._tape is not None:
            self._tape.arrays[index] = new
        self._store(index, new)

    def _store(self, index: int, new: mx.array) -> None:
        group, old = self.geometry.group, self.cache[index]
        if old is None:
            old = mx.zeros((self.num_slots, *new.shape[1:]), new.dtype)
        old, new = _aligned(old, new)
        if not all(group.num_tokens):  # idle rows keep their state
            active = mx.array([n > 0 for n in group.num_tokens]).reshape(-1, *[1] * (new.ndim - 1))
            new = mx.where(active, new, old[group.lo : group.hi])
        if group.hi - group.lo == self.num_slots:
            self.cache[index] = new
        else:
            self.cache[index] = mx.concatenate([old[: group.lo], new, old[group.hi :]], axis=0)

    def __bool__(self) -> bool:
        return True

    @property
    def offset(self) -> mx.array | int:
        return self.geometry.offset

    @property
    def lengths(self) -> mx.array | None:
        return self.geometry.lengths

    def advance(self, num_tokens: int) -> None:
        pass  # the geometry of each forward is made anew

    def make_mask(self, num_tokens: int) -> mx.array | None:
        lengths = self.geometry.lengths
        return None if lengths is None else mx.arange(num_tokens)[None] < lengths[:, None]

    # -- what the batch does
    def begin(self, geometry: Geometry, capacity: int) -> None:
        self.geometry = geometry
        self._before = list(self.cache)
        self._tape = Tape(geometry.width) if geometry.rewindable else None

    @property
    def can_rewind(self) -> bool:
        return self._tape is not None and self._tape.complete

    def rewind(self, geometry: Geometry, kept: Sequence[int]) -> bool:
        make_current(None)
        tape, self._tape = self._tape, None
        after = tape.rewound(mx.array(list(kept), dtype=mx.int32)) if tape is not None and any(kept) else None
        self.cache = list(self._before)
        for index, array in (after or {}).items():
            self._store(index, array)
        return after is not None

    def hold(self) -> list[mx.array | None]:
        return list(self.cache)

    def give_back(self, held: list[mx.array | None]) -> None:
        self.cache = list(held)

    def resize(self, num_slots: int) -> None:
        def fit(state: mx.array | None) -> mx.array | None:
            if state is None or not num_slots:
                return None
            if num_slots <= state.shape[0]:
                return state[:num_slots]
            pad = mx.zeros((num_slots - state.shape[0], *state.shape[1:]), state.dtype)
            return mx.concatenate([state, pad], axis=0)

        self.cache = [fit(state) for state in self.cache]
        self.num_slots = num_slots

    def _set_row(self, slot: int, rows: Sequence[mx.array | None]) -> None:
        def put(state: mx.array | None, row: mx.array | None) -> mx.array | None:
            if state is None and row is None:
                return None
            if state is None:
                assert row is not None
                state = mx.zeros((self.num_slots, *row.shape[1:]), row.dtype)
            if row is None:
                row = mx.zeros((1, *state.shape[1:]), state.dtype)
            state, row = _aligned(state, row)
            return mx.concatenate([state[:slot], row.astype(state.dtype), state[slot + 1 :]], axis=0)

        self.cache = [put(state, row) for state, row in zip(self.cache, rows, strict=True)]

    def move(self, source: int, target: int, num_tokens: int) -> None:
        self._set_row(target, [None if s is None else s[source : source + 1] for s in self.cache])

    def swap(self, one: int, other: int, num_one: int, num_other: int) -> None:
        held = self.snapshot(one, num_one)
        self.move(other, one, num_other)
        self.restore(other, held, num_one)

    def clear(self, slot: int) -> None:
        self._set_row(slot, [None] * len(self.cache))

    def scrub(self, slot: int, num_columns: int) -> None:
        pass  # a state is its own row's, and the next one starts from `clear`

    def snapshot(self, slot: int, num_tokens: int) -> Parts:
        rows = tuple(mx.contiguous(s[slot : slot + 1]) for s in self.cache if s is not None)
        mx.eval(rows)
        return rows

    def restore(self, slot: int, parts: Parts, num_tokens: int) -> None:
        self._set_row(slot, list(parts) if parts else [None] * len(self.cache))

    def columns(self, slot: int, lo: int, hi: int) -> Parts:
        return ()

    def host_columns(self, slot: int, lo: int, hi: int) -> HostParts:
        return ()

    def state(self, slot: int) -> Parts:
        return tuple(mx.zeros((1, 0)) if s is None else mx.contiguous(s[slot : slot + 1]) for s in self.cache)

    def reserve(self, capacity: int) -> Iterator[None]:
        return iter(())  # its size is the same for any length

    def fill(self, slot: int, columns: Parts, state: Parts, num_tokens: int) -> None:
        self._set_row(slot, [row if row.size else None for row in state] or [None] * len(self.cache))

    def arrays(self) -> list[mx.array]:
        return [state for state in self.cache if state is not None]

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.arrays())
