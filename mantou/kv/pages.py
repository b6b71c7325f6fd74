"""Which blocks of a pool hold which row's columns. One table for all layers of a batch; knows no keys and no values.

    slot 0  [ 2  3  7 ]      a row of 140 tokens in blocks of 64: position p is column table[p // 64] * 64 + p % 64
    slot 1  [ 4 ]            blocks of a row need not be neighbours, and a row takes as many as it has tokens
    free      5  6

Two blocks belong to no row. ZEROS stands where a row has no block but its neighbours have, and is never written; SINK
takes what is written for padding and idle rows, and is never read.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import mlx.core as mx
import numpy as np

from mantou.kv.blocks import NUM_SPECIAL, blocks_for, pool_bucket
from mantou.kv.geometry import Geometry

ZEROS, SINK = 0, 1
# Rows are fetched together unless fetching the shorter ones on their own spares at least so many columns.
MIN_SPARED = 1024


class Unpaged:
    """The bookkeeping of a batch whose layers keep a buffer a slot: there is none."""

    def resize(self, num_slots: int) -> None: ...
    def hold(self, slot: int, start: int, end: int) -> None: ...
    def release(self, slot: int) -> None: ...
    def move(self, source: int, target: int) -> None: ...
    def swap(self, one: int, other: int) -> None: ...
    def forget(self) -> None: ...
    def check_integrity(self) -> None: ...

    num_blocks = num_held = 0


class Pages:
    """The table. Columns from `limit` on are not kept, except of forwards that begin below it."""

    def __init__(self, block: int, limit: int = sys.maxsize) -> None:
        self.block = block
        self.limit = limit
        self.num_blocks = 0  # that a pool needs by now, the two special ones included
        self.num_slots = 0
        self._table = np.zeros((0, 0), np.int32)  # [slots, most blocks of a row]
        self._held: list[int] = []
        self._free: list[int] = []  # a heap: low blocks first
        self._below: dict[int, Pages] = {}
        self._placed: Placement | None = None
        # All layers ask for the same runs one after the other, and many forwards for the same tables; what changes the
        # table forgets them.
        self._runs: tuple[tuple[int, int, int], list[tuple[int, int]]] | None = None
        self._tables: dict[tuple[int, int, int], mx.array] = {}

    def below(self, limit: int) -> Pages:
        """The table of layers that keep a row's first `limit` columns only; it follows this one."""
        if limit not in self._below:
            self._below[limit] = Pages(self.block, limit)
            self._below[limit].resize(self.num_slots)
        return self._below[limit]

    @property
    def capacity(self) -> int:
        """Columns of a pool."""
        return max(self.num_blocks, NUM_SPECIAL) * self.block

    @property
    def num_held(self) -> int:
        """Blocks that rows hold now."""
        return sum(self._held)

    def resize(self, num_slots: int) -> None:
        for slot in range(num_slots, self.num_slots):
            self.release(slot)
        self._changed()
        table = np.full((num_slots, self._table.shape[1] if num_slots else 0), ZEROS, np.int32)
        kept = min(num_slots, self.num_slots)
        table[:kept] = self._table[:kept, : table.shape[1]]
        self._table, self.num_slots = table, num_slots
        self._held = (self._held + [0] * num_slots)[:num_slots]
        if not num_slots:  # the pools are freed with the rows
            self._free, self.num_blocks = [], 0
        for pages in self._below.values():
            pages.resize(num_slots)

    def _changed(self) -> None:
        self._runs, self._tables = None, {}

    def hold(self, slot: int, start: int, end: int) -> None:
        """Blocks for the row's first `end` columns, of which the first `start` are there."""
        for pages in self._below.values():
            pages.hold(slot, start, end)
        needed = blocks_for(end if start < self.limit else min(end, self.limit), self.block)
        have = self._held[slot]
        if needed <= have:
            return
        if needed > self._table.shape[1]:
            self._table = np.pad(self._table, [(0, 0), (0, max(needed - self._table.shape[1], 4))])
        self._changed()
        self._grow(needed - have)
        self._table[slot, have:needed] = [heapq.heappop(self._free) for _ in range(needed - have)]
        self._held[slot] = needed

    def _grow(self, num_wanted: int) -> None:
        if len(self._free) >= num_wanted:
            return
        before = max(self.num_blocks, NUM_SPECIAL)
        self.num_blocks = NUM_SPECIAL + pool_bucket(self.num_held + num_wanted, self.block)
        for block in range(before, self.num_blocks):
            heapq.heappush(self._free, block)

    def release(self, slot: int) -> None:
        for pages in self._below.values():
            pages.release(slot)
        for block in self.blocks(slot):
            heapq.heappush(self._free, block)
        self._changed()
        self._table[slot] = ZEROS
        self._held[slot] = 0

    def move(self, source: int, target: int) -> None:
        self.release(target)
        self.swap(source, target)

    def swap(self, one: int, other: int) -> None:
        self._changed()
        self._table[[one, other]] = self._table[[other, one]]
        self._held[one], self._held[other] = self._held[other], self._held[one]
        for pages in self._below.values():
            pages.swap(one, other)

    def blocks(self, slot: int) -> list[int]:
        return [int(block) for block in self._table[slot, : self._held[slot]]]

    def columns(self, slot: int, lo: int, hi: int) -> mx.array:
        """int32[hi - lo]: where the row's positions [lo, hi) are in a pool."""
        return mx.array(self._columns(slot, lo, hi))

    def _columns(self, slot: int, lo: int, hi: int) -> np.ndarray:
        positions = np.arange(lo, hi)
        blocks = self._table[slot, positions // self.block]
        return (blocks * self.block + positions % self.block).astype(np.int32)

    def runs(self, slot: int, lo: int, hi: int) -> list[tuple[int, int]]:
        """The same as (first column, one past the last) of neighbours, in the order of the positions."""
        if lo == hi:
            return [(0, 0)]
        if self._runs is None or self._runs[0] != (slot, lo, hi):
            columns = self._columns(slot, lo, hi)
            edges = [0, *(np.flatnonzero(np.diff(columns) != 1) + 1).tolist(), len(columns)]
            runs = [(int(columns[a]), int(columns[b - 1]) + 1) for a, b in pairwise(edges)]
            self._runs = (slot, lo, hi), runs
        return self._runs[1]

    def placed(self, geometry: Geometry) -> Placement:
        """Where a forward's tokens go; made once for all layers."""
        if self._placed is None or self._placed.geometry is not geometry:
            group = geometry.group
            rows = self._table[group.lo : group.hi].copy()
            self._placed = Placement(self.block, rows, geometry, self._tables)
        return self._placed

    def forget(self) -> None:
        """The forward in progress is over."""
        self._placed = None
        for pages in self._below.values():
            pages.forget()

    def check_integrity(self) -> None:
        """Raises AssertionError if a block is lost, has two owners, or is one of the special ones."""
        owned = [block for slot in range(self.num_slots) for block in self.blocks(slot)]
        every = sorted([*owned, *self._free])
        assert every == list(range(NUM_SPECIAL, max(self.num_blocks, NUM_SPECIAL))), (owned, self._free)
        for slot, held in enumerate(self._held):
            assert (self._table[slot, held:] == ZEROS).all(), (slot, self._table[slot])
        for pages in self._below.values():
            pages.check_integrity()


class Placement:
    """The columns that one forward writes and reads, as device arrays made when they are asked for."""

    def __init__(
        self, block: int, rows: np.ndarray, geometry: Geometry, tables: dict[tuple[int, int, int], mx.array]
    ) -> None:
        self.block = block
        self.geometry = geometry
        self._rows = rows
        self._tables = tables  # of forwards with the same rows before
        self._reads: dict[tuple[int, ...], mx.array] = {}

    @cached_property
    def _width(self) -> int:
        """Blocks that hold every position of the forward."""
        g = self.geometry
        return max((max(g.starts) + g.width - 1) // self.block + 1, self._rows.shape[1])

    @cached_property
    def _blocks(self) -> np.ndarray:
        """int32[rows, blocks] for writing: wide enough for every position of the forward, SINK where a row has none."""
        table = np.full((len(self._rows), self._width), SINK, np.int32)
        table[:, : self._rows.shape[1]] = np.where(self._rows == ZEROS, SINK, self._rows)
        return table

    @cached_property
    def table(self) -> mx.array:
        """For kernels that write, but no padding, and read no further than a row goes."""
        group = self.geometry.group
        key = (group.lo, group.hi, self._width)
        if key not in self._tables:
            self._tables[key] = mx.array(self._blocks)
        return self._tables[key]

    @cached_property
    def seen(self) -> mx.array:
        """The same for kernels that only read, perhaps what a mask then hides."""
        g = self.geometry
        wide = np.full(
            (len(self._rows), max(blocks_for(g.span, self.block), self._rows.shape[1])), ZEROS, np.int32
        )
        wide[:, : self._rows.shape[1]] = self._rows
        return mx.array(wide)

    @cached_property
    def written(self) -> mx.array:
        """int32[rows, width]: the column of every token, real or not."""
        g = self.geometry
        steps = np.arange(g.width)[None]
        positions = np.array(g.starts)[:, None] + steps
        blocks = np.take_along_axis(self._blocks, positions // self.block, axis=1)
        blocks = np.where(steps < np.array(g.group.num_tokens)[:, None], blocks, SINK)
        return mx.array((blocks * self.block + positions % self.block).astype(np.int32))

    def read(self, span: int, rows: Sequence[int] | None = None) -> mx.array:
        """int32[rows, 1, span, 1]: where their first `span` columns are."""
        key = (span, *(rows or ()))
        if key not in self._reads:
            count = blocks_for(span, self.block)
            table = self._rows if rows is None else self._rows[list(rows)]
            wide = np.full((len(table), count), ZEROS, np.int32)
            wide[:, : min(count, table.shape[1])] = table[:, :count]
            columns = wide[:, :, None] * self.block + np.arange(self.block, dtype=np.int32)
            self._reads[key] = mx.array(columns.reshape(len(table), 1, -1, 1)[:, :, :span])
        return self._reads[key]

    @cached_property
    def parties(self) -> tuple[tuple[int, ...], ...]:
        """The rows in groups of like lengths, longest first: each group is fetched up to its longest row only."""
        g = self.geometry
        active = [s + g.width if n else 0 for s, n in zip(g.starts, g.group.num_tokens, strict=True)]
        least = min(need for need in active if need)
        needs = [need or least for need in active]  # idle rows go with the shortest
        order = sorted(range(len(needs)), key=lambda row: -needs[row])
        parties: list[list[int]] = []
        first = 0
        for at, row in enumerate(order):
            left = len(order) - at
            spared = left * (needs[order[first]] - needs[row])
            if not parties or (2 * needs[row] <= needs[order[first]] and spared >= MIN_SPARED):
                parties.append([])
                first = at
            parties[-1].append(row)
        return tuple(tuple(sorted(party)) for party in parties)

    def span_of(self, party: Sequence[int]) -> int:
        """Columns that a party reads: whole blocks, and no more than all rows together would."""
        g = self.geometry
        need = max(s + g.width if g.group.num_tokens[r] else 1 for r in party for s in (g.starts[r],))
        return min(blocks_for(need, self.block) * self.block, g.span)
