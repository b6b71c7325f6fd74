"""Full rows in blocks of one pool: a row takes what its own length needs. Knows no requests.

The pool is the buffer of a single slot whose columns `Pages` deals out. A graph is given all rows' columns up to the
longest, lazily; attention that recognises what it was given (`fetched`) reads each row's own blocks instead, and then
the wide copy is never made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from mantou.kv.geometry import Geometry
from mantou.kv.layouts import FullRows
from mantou.kv.lending import Groups, Loan, Terms
from mantou.kv.pages import Pages, Placement
from mantou.kv.pieces import HostParts, Parts, host_is_device
from mantou.kv.plan import LayerCodec
from mantou.protocols import KVCodec

_MOST_FETCHED = 4  # keys and values of two caches that share a place


@dataclass(frozen=True, slots=True)
class Fetched:
    """Keys or values of a paged layer as a forward sees them."""

    array: mx.array  # what the graph was given
    pool: Parts  # each [1, H, columns, ...]
    codec: KVCodec
    dtype: mx.Dtype
    placement: Placement
    span: int

    def rows(self, party: Sequence[int], span: int) -> mx.array:
        """[len(party), H, span, D] of some of the forward's rows."""
        index = self.placement.read(span, party)
        return self.codec.unpack([_gathered(part, index) for part in self.pool], self.dtype)


_fetched: dict[int, Fetched] = {}


def fetched(array: mx.array) -> Fetched | None:
    """What is behind an array that a graph got from a paged layer, if it is one of the last."""
    found = _fetched.get(id(array))
    return found if found is not None and found.array is array else None


def forget_fetched() -> None:
    """So that no pool has a second holder: then the next forward writes in place."""
    _fetched.clear()


def _remember(*found: Fetched) -> None:
    for one in found:
        _fetched[id(one.array)] = one
    while len(_fetched) > _MOST_FETCHED:
        del _fetched[next(iter(_fetched))]


def _gathered(part: mx.array, index: mx.array) -> mx.array:
    """[rows, H, span, ...] of a pool [1, H, columns, ...] in one copy."""
    return mx.take_along_axis(part, index, axis=2)


def _joined(parts: Sequence[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=2)


class PagedRows(FullRows):
    """Position p of a row lives in the row's block p // block."""

    paged = True

    def __init__(self, codec: LayerCodec, pages: Pages) -> None:
        super().__init__(codec, 1)
        self._pages = pages

    def form(self) -> None:
        """Where a row's blocks are is another table in every step."""

    @property
    def _placement(self) -> Placement:
        return self._pages.placed(self.geometry)

    def _grown(self, parts: Parts, like: Parts, capacity: int = 0) -> Parts:
        return super()._grown(parts, like, max(capacity, self._pages.capacity))

    def _written(self, buffer: mx.array, new: mx.array, ring: int) -> mx.array:
        g, placement = self.geometry, self._placement
        new = new.astype(buffer.dtype)
        done = g.write_rows(buffer, new, g.offsets, g.lengths, 0, 0, placement.table, placement.block)
        if done is not None:
            return done
        buffer[mx.zeros((1, 1), mx.int32), :, placement.written] = new.transpose(0, 2, 1, 3)
        return buffer

    def _fetch(self, span: int) -> tuple[mx.array, mx.array]:
        self._span = span
        placement, codec = self._placement, self.codec
        index = placement.read(span)
        keys = codec.keys.unpack([_gathered(part, index) for part in self.keys], self._dtype)
        values = codec.values.unpack([_gathered(part, index) for part in self.values], self._dtype)
        _remember(
            Fetched(keys, self.keys, codec.keys, self._dtype, placement, span),
            Fetched(values, self.values, codec.values, self._dtype, placement, span),
        )
        return keys, values

    def lend(self, x: mx.array, mask: mx.array | str | None, kv_heads: int, head_dim: int) -> Loan | None:
        self.capacity = self._pages.capacity
        return super().lend(x, mask, kv_heads, head_dim)

    def _terms(self, groups: Groups, window: int, ring: int, mask: mx.array | None) -> Terms:
        g, key = self.geometry, (groups.bits, groups.group_size, window, ring, id(mask), id(self._pages))
        if key not in g.terms:
            terms = super()._terms(groups, window, ring, mask)
            g.terms[key] = replace(terms, first_slot=0, table=self._placement.table, block=self._pages.block)
        return g.terms[key]

    # -- what the batch does: rows are entries of the table, so nothing is copied
    def begin(self, geometry: Geometry, capacity: int) -> None:
        self.geometry = geometry

    def resize(self, num_slots: int) -> None:
        if not num_slots:
            self.keys = self.values = ()

    def move(self, source: int, target: int, num_tokens: int) -> None:
        pass

    def swap(self, one: int, other: int, num_one: int, num_other: int) -> None:
        pass

    def scrub(self, slot: int, num_columns: int) -> None:
        if self.keys and (blocks := self._pages.blocks(slot)):
            index = self._pages.columns(slot, 0, len(blocks) * self._pages.block)
            for part in (*self.keys, *self.values):
                part[:, :, index] = 0

    def _rows(self, slot: int, span: int) -> Parts:
        rows = tuple(mx.contiguous(part) for part in self.columns(slot, 0, span))
        mx.eval(rows)  # so that the buffers have one owner again and the next write is in place
        return rows

    def snapshot(self, slot: int, num_tokens: int) -> Parts:
        return self._rows(slot, num_tokens) if self.keys and num_tokens else ()

    def restore(self, slot: int, parts: Parts, num_tokens: int) -> None:
        if parts:
            self._filled(slot, tuple(part[:, :, :num_tokens] for part in parts), 0)

    def columns(self, slot: int, lo: int, hi: int) -> Parts:
        if not self.keys:
            return ()
        if host_is_device():  # a block at a time is copied as it lies
            runs = self._pages.runs(slot, lo, hi)
            return tuple(_joined([p[:, :, a:b] for a, b in runs]) for p in (*self.keys, *self.values))
        index = self._pages.columns(slot, lo, hi)[None, None, :, None]
        return tuple(_gathered(part, index) for part in (*self.keys, *self.values))

    def host_columns(self, slot: int, lo: int, hi: int) -> HostParts:
        return self._lying(0, self._pages.runs(slot, lo, hi))

    def reserve(self, capacity: int) -> Iterator[None]:
        for name in ("keys", "values"):
            parts: Parts = getattr(self, name)
            if parts and parts[0].shape[2] < self._pages.capacity:
                setattr(self, name, self._grown(parts, parts))
                yield

    def fill(self, slot: int, columns: Parts, state: Parts, num_tokens: int) -> None:
        self.restore(slot, columns, num_tokens)

    def _filled(self, slot: int, rows: Parts, capacity: int) -> None:
        """Writes a row's first columns, allocating what is missing."""
        half = self.codec.keys.num_parts
        self.keys, self.values = self._grown(self.keys, rows[:half]), self._grown(self.values, rows[half:])
        num_tokens = rows[0].shape[2]
        runs = self._pages.runs(slot, 0, num_tokens) if host_is_device() else []
        index = None if runs else self._pages.columns(slot, 0, num_tokens)
        for part, row in zip((*self.keys, *self.values), rows, strict=True):
            if index is not None:
                part[:, :, index] = row
            done = 0
            for first, end in runs:
                part[:, :, first:end] = row[:, :, done : done + end - first]
                done += end - first
