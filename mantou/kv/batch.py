"""The one owner of all running rows' KV: slots, lengths, buffers. Knows no requests, no text, no sampling."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mantou.kv.geometry import Geometry, WriteRows, no_write_rows
from mantou.kv.layouts import Layout
from mantou.kv.pieces import Parts, Piece, State, to_device, to_host
from mantou.protocols import Group, Hit

# Columns that buffers grow by at first: a short answer neither zeroes nor copies more than it needs.
_CAPACITY_STEP = 64

LayoutMaker = Callable[[int], Sequence[Layout]]  # num_slots -> one layout a layer


@dataclass(frozen=True, slots=True)
class RowSnapshot:
    """One row's KV up to `num_tokens`, detached from its slot: evaluated arrays, one tuple a layer."""

    num_tokens: int
    layers: tuple[Parts, ...]
    first_column: int = 0  # what came before it was overwritten in a ring

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self.layers for part in parts)


def capacity_bucket(num_tokens: int, step: int = _CAPACITY_STEP) -> int:
    """Columns to allocate for rows of `num_tokens`: multiples of `step`, at most a quarter too many beyond 1k."""
    while step * 8 < num_tokens:
        step *= 2
    return -(-num_tokens // step) * step


class KVBatch:
    """`num_slots` rows of KV. Only the model thread touches it.

    A forward is `begin(group)`, the model graph over `layers`, then `commit(group, kept)`.
    """

    def __init__(
        self,
        make_layouts: LayoutMaker,
        *,
        array_offsets: bool = True,
        mask_axes: int = 4,
        span_step: int = 1,
        write_rows: WriteRows = no_write_rows,
    ) -> None:
        self._write_rows = write_rows
        self._make_layouts = make_layouts
        self._array_offsets = array_offsets
        self._mask_axes = mask_axes
        self._span_step = span_step
        self.layers: Sequence[Layout] = make_layouts(0)
        self.lengths: list[int] = []
        # How far back every layer holds columns, and where in each slot that begins by now.
        self.num_kept_columns = min((layer.num_columns for layer in self.layers), default=sys.maxsize)
        self._first_columns: list[int] = []
        self.geometry: Geometry | None = None

    @property
    def num_slots(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def _capacity(self, num_tokens: int) -> int:
        """Small steps where only what is used costs time; whole spans where attention reads multiples of them."""
        return capacity_bucket(num_tokens, max(self._span_step, _CAPACITY_STEP))

    def resize(self, num_slots: int) -> None:
        """Rows beyond `num_slots` are dropped, new ones are empty. At 0 all buffers are freed."""
        if num_slots == self.num_slots:
            return
        if num_slots == 0:
            self.layers = self._make_layouts(0)
            self.lengths, self._first_columns = [], []
            return
        for layer in self.layers:
            layer.resize(num_slots)
        self.lengths = (self.lengths + [0] * num_slots)[:num_slots]
        self._first_columns = (self._first_columns + [0] * num_slots)[:num_slots]

    def begin(self, group: Group) -> Geometry:
        """Sets where the next forward writes and what it sees. Positions are checked here: the writes are not."""
        starts = self.lengths[group.lo : group.hi]
        if len(starts) != len(group.num_tokens) or max(group.num_tokens) > group.width:
            raise ValueError(f"group {group} does not fit {self.num_slots} slots")
        geometry = Geometry(
            group,
            starts,
            array_offsets=self._array_offsets,
            mask_axes=self._mask_axes,
            span_step=self._span_step,
            write_rows=self._write_rows,
        )
        capacity = self._capacity(max(starts) + group.width)
        for layer in self.layers:
            layer.begin(geometry, capacity)
        for slot, start in enumerate(starts, group.lo):
            self._lose_columns(slot, start + group.width)
        self.geometry = geometry
        return geometry

    def commit(self, group: Group, kept: Sequence[int]) -> bool:
        """Row i keeps kept[i] <= num_tokens[i] of the forward. False: run it again, masked to `kept`, and commit."""
        assert self.geometry is not None
        if not all(0 <= k <= n for k, n in zip(kept, group.num_tokens, strict=True)):
            raise ValueError(f"a forward of {group.num_tokens} tokens cannot keep {kept}")
        if tuple(kept) != group.num_tokens:
            done = [layer.rewind(self.geometry, kept) for layer in self.layers]
            if not all(done):
                return False
        for i, num_tokens in enumerate(kept):
            self.lengths[group.lo + i] += num_tokens
        self.geometry = None
        return True

    def abort(self) -> None:
        """Drops a forward that raised: recurrent layers get their state back, the rest was never visible."""
        if self.geometry is not None:
            for layer in self.layers:
                layer.rewind(self.geometry, [0] * self.geometry.num_rows)
            self.geometry = None

    def release(self, slot: int) -> None:
        """The row is gone; what it held is invisible from now on."""
        self.lengths[slot] = 0

    def clear(self, slot: int) -> None:
        """An empty row, for a sequence that starts from nothing."""
        self.lengths[slot] = self._first_columns[slot] = 0
        for layer in self.layers:
            layer.clear(slot)

    def move(self, source: int, target: int) -> None:
        """Copies one row over another; `source` is empty afterwards."""
        for layer in self.layers:
            layer.move(source, target, self.lengths[source])
        self.lengths[target], self._first_columns[target] = self.lengths[source], self._first_columns[source]
        self.lengths[source] = 0

    def swap(self, one: int, other: int) -> None:
        held = self.snapshot(one)
        self.move(other, one)
        self.restore(other, held)

    def snapshot(self, slot: int) -> RowSnapshot:
        num_tokens = self.lengths[slot]
        layers = tuple(layer.snapshot(slot, num_tokens) for layer in self.layers)
        return RowSnapshot(num_tokens, layers, self._first_columns[slot])

    def restore(self, slot: int, snapshot: RowSnapshot) -> None:
        for layer, parts in zip(self.layers, snapshot.layers, strict=True):
            layer.restore(slot, parts, snapshot.num_tokens)
        self.lengths[slot], self._first_columns[slot] = snapshot.num_tokens, snapshot.first_column

    def columns(self, slot: int, lo: int, hi: int) -> Piece:
        """A copy of the row's keys and values at positions [lo, hi), in host memory.

        From a later `lo` on if a ring has overwritten some of them; the caller has to look at the piece's own.
        """
        lo = min(max(lo, self._first_columns[slot]), hi)
        if lo == hi:
            return Piece(hi, hi, ())
        return Piece(lo, hi, to_host([layer.columns(slot, lo, hi) for layer in self.layers]))

    def state(self, slot: int) -> State | None:
        """A copy of the row's recurrent state after its last token; None if the model has none."""
        stacks = to_host([layer.state(slot) for layer in self.layers])
        return State(self.lengths[slot], stacks) if stacks else None

    def fill(self, slot: int, hit: Hit) -> None:
        """Makes the row what it was when the hit's pieces were copied."""
        num_layers = len(self.layers)
        columns = to_device([piece.stacks for piece in hit.pieces], num_layers, axis=3)
        states = to_device([hit.state.stacks] if hit.state else [], num_layers, axis=None)
        capacity = self._capacity(hit.num_tokens + 1)
        for layer, parts, state in zip(self.layers, columns, states, strict=True):
            layer.fill(slot, parts, state, hit.num_tokens, capacity)
        self.lengths[slot], self._first_columns[slot] = hit.num_tokens, 0
        self._lose_columns(slot, hit.num_tokens)

    def _lose_columns(self, slot: int, num_written: int) -> None:
        """Columns up to `num_written` were written, padding and rejected drafts included."""
        self._first_columns[slot] = max(self._first_columns[slot], num_written - self.num_kept_columns)

    def arrays(self) -> list[mx.array]:
        """Every buffer, to be evaluated together with the step's outputs."""
        return [array for layer in self.layers for array in layer.arrays()]

    def check_integrity(self) -> None:
        """Raises AssertionError if a buffer does not fit the slots. Called when idle in debug and in tests."""
        assert all(length >= 0 for length in self.lengths), self.lengths
        for layer in self.layers:
            for array in layer.arrays():
                assert array.shape[0] == self.num_slots, (array.shape, self.num_slots)


@dataclass(frozen=True, slots=True)
class RowView:
    """One row of a batch as a prefix store sees it (`RowKV`)."""

    batch: KVBatch
    slot: int

    def columns(self, lo: int, hi: int) -> Piece:
        return self.batch.columns(self.slot, lo, hi)

    def state(self) -> State | None:
        return self.batch.state(self.slot)
