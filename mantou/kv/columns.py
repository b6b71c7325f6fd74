"""Keys and values as buffers by column: how they grow, are packed, written, fetched, lent and copied.

Knows no requests, and not which position is in which column.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx

from mantou.kv.geometry import Geometry
from mantou.kv.lending import Groups, Loan, Terms, fitted, groups_of, part_shapes
from mantou.kv.pieces import HostParts, Parts, host_views
from mantou.kv.plan import LayerCodec
from mantou.kv.records import RecordCodec, place_of
from mantou.kv.writing import Writing


def scrubbed_columns(num_tokens: int) -> int:
    """Columns that a row of `num_tokens` may have written: padding at most doubles what it feeds."""
    return 2 * num_tokens + 64


def _write(buffer: mx.array, new: mx.array, columns: mx.array | int, lo: int) -> mx.array:
    """buffer[lo + row, :, column] = new[row, :, t], in MLX operations. `columns` int32[rows, 1, width, 1], or the first
    of all rows' columns."""
    rows, _, width, _ = new.shape
    new = new.astype(buffer.dtype)
    if isinstance(columns, int):
        buffer[lo : lo + rows, :, columns : columns + width] = new
        return buffer
    if rows == buffer.shape[0]:
        return mx.put_along_axis(buffer, mx.broadcast_to(columns, new.shape), new, axis=2)
    slots = mx.arange(lo, lo + rows)[:, None]
    buffer[slots, :, columns[:, 0, :, 0]] = new.transpose(0, 2, 1, 3)
    return buffer


class _Lent(NamedTuple):
    """What a layer lends, step after step the same until its buffers are others."""

    wanted: tuple[int, int, mx.Dtype]  # heads, head dimension, type
    columns: int
    groups: Groups
    keys: Parts
    values: Parts


class Columns:
    """Keys and values as [slots, H, columns, d] buffers, one per codec part. Shared by full rows and rings."""

    boundary = 0
    can_rewind = True
    paged = False
    num_columns = sys.maxsize

    def __init__(self, codec: LayerCodec, num_slots: int) -> None:
        self.codec = codec
        self._records = codec.keys if isinstance(codec.keys, RecordCodec) else None
        self.num_slots = num_slots
        self.geometry: Geometry
        self.capacity = 0
        self._keys: Parts = ()
        self._values: Parts = ()
        self._writing = Writing()  # of the primitive that had the buffers last
        self._lent: _Lent | None = None
        self._dtype: mx.Dtype = mx.float32
        self._span = 0
        self._groups: dict[int, Groups | None] = {}  # by head_dim

    @property
    def keys(self) -> Parts:
        self._writing.settle()
        return self._keys

    @keys.setter
    def keys(self, parts: Parts) -> None:
        self._keys, self._lent = parts, None

    @property
    def values(self) -> Parts:
        self._writing.settle()
        return self._values

    @values.setter
    def values(self, parts: Parts) -> None:
        self._values, self._lent = parts, None

    @property
    def offset(self) -> mx.array | int:
        return self.geometry.offset

    def hold(self) -> None:
        """A length rewinds columns: there is nothing to hold."""

    def give_back(self, held: None) -> None:
        pass

    def _grown(self, parts: Parts, like: Parts, capacity: int = 0) -> Parts:
        """Buffers with `capacity` columns, by default the layer's; contents kept."""
        capacity = capacity or self.capacity
        if parts and parts[0].shape[2] >= capacity:
            return parts
        grown = []
        for i, new in enumerate(like):
            shape = (self.num_slots, new.shape[1], capacity, new.shape[3])
            if not parts:
                grown.append(mx.zeros(shape, new.dtype))
                continue
            missing = capacity - parts[i].shape[2]
            # Padding makes one new buffer, joining with zeros would make two: fresh memory is what costs time.
            grown.append(mx.pad(parts[i], [(0, 0), (0, 0), (0, missing), (0, 0)]))
        return tuple(grown)

    def _store(self, keys: mx.array, values: mx.array, ring: int) -> None:
        self._dtype = keys.dtype
        packed_keys, packed_values = self._packed(keys, values)
        self.keys = self._grown(self.keys, packed_keys)
        self.values = self._grown(self.values, packed_values)
        self.keys = tuple(self._written(b, n, ring) for b, n in zip(self.keys, packed_keys, strict=True))
        self.values = tuple(
            self._written(b, n, ring) for b, n in zip(self.values, packed_values, strict=True)
        )

    def _packed(self, keys: mx.array, values: mx.array) -> tuple[Parts, Parts]:
        if self._records is not None:
            return (self._records.pack_both(keys, values),), ()
        return self.codec.keys.pack(keys), self.codec.values.pack(values)

    def _written(self, buffer: mx.array, new: mx.array, ring: int) -> mx.array:
        """buffer[slot, :, column] = new[row, :, t]. Donates `buffer` when nothing else holds it."""
        g = self.geometry
        if g.uniform and not ring:
            return _write(buffer, new, g.longest, g.group.lo)
        done = g.write_rows(buffer, new.astype(buffer.dtype), g.offsets, g.lengths, g.group.lo, ring)
        if done is not None:
            return done
        return _write(buffer, new, g.columns(ring), g.group.lo)

    def _fetch(self, span: int) -> tuple[mx.array, mx.array]:
        self._span = span
        if self._records is not None:
            place = place_of(self.geometry, span, self._ring)
            return self._records.fetch(self.keys[0], place, self._dtype)
        group = self.geometry.group
        read = slice(group.lo, group.hi)
        keys = self.codec.keys.unpack([part[read, :, :span] for part in self.keys], self._dtype)
        values = self.codec.values.unpack([part[read, :, :span] for part in self.values], self._dtype)
        return keys, values

    @property
    def span(self) -> int:
        """Columns that a fetch of this forward gives."""
        return self.geometry.span

    @property
    def _ring(self) -> int:
        """Position p is in column p % ring; 0 = in column p."""
        return 0

    def fetch(self) -> tuple[mx.array, mx.array]:
        """What the rows hold, without storing anything."""
        return self._fetch(self.span)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the last `update_and_fetch` of this forward returned, for layers that share a donor's KV."""
        return self._fetch(self._span)

    def _loan(
        self,
        x: mx.array,
        kv_heads: int,
        head_dim: int,
        window: int,
        ring: int = 0,
        mask: mx.array | None = None,
    ) -> Loan | None:
        g = self.geometry
        rows, width, _ = x.shape
        if rows != g.num_rows or width != g.width:
            return None
        wanted, lent = (kv_heads, head_dim, x.dtype), self._lent
        if lent is None or lent.wanted != wanted or lent.columns < self.capacity:
            lent = self._fit(*wanted)
            if lent is None:
                return None
        self._writing, self._span = g.writing, self.span
        return Loan(lent.keys, lent.values, self._terms(lent.groups, window, ring, mask))

    def _fit(self, kv_heads: int, head_dim: int, dtype: mx.Dtype) -> _Lent | None:
        """Makes the buffers what a primitive wants; None where they cannot be."""
        groups, columns = self._lent_groups(head_dim), self.capacity
        if groups is None:
            return None
        # While a prefix is copied in, in parts, one of the two may have grown already.
        for parts in (self._keys, self._values):
            if parts and parts[0].shape[2] > columns:
                columns = parts[0].shape[2]
        lead, widths = (self.num_slots, kv_heads, columns), part_shapes(groups, head_dim, dtype)
        keys, values = fitted(self._keys, lead, widths), fitted(self._values, lead, widths)
        if keys is None or values is None:
            return None
        self._keys, self._values, self._dtype = keys, values, dtype
        self._lent = _Lent((kv_heads, head_dim, dtype), columns, groups, keys, values)
        return self._lent

    def _lent_groups(self, head_dim: int) -> Groups | None:
        """How a primitive reads and writes the parts, if it can."""
        if head_dim not in self._groups:
            keys, values = groups_of(self.codec.keys, head_dim), groups_of(self.codec.values, head_dim)
            self._groups[head_dim] = keys if keys == values else None
        return self._groups[head_dim]

    def _terms(self, groups: Groups, window: int, ring: int, mask: mx.array | None) -> Terms:
        # The terms keep the mask alive. In numbers, since every layer looks.
        g, key = self.geometry, (groups.bits, groups.group_size, window, ring, id(mask))
        if key not in g.terms:
            g.terms[key] = Terms(groups, g.offsets, g.lengths, g.group.lo, g.writing, window, ring, mask)
        return g.terms[key]

    def resize(self, num_slots: int) -> None:
        def fit(part: mx.array) -> mx.array:
            if num_slots <= part.shape[0]:
                return mx.contiguous(part[:num_slots])
            pad = mx.zeros((num_slots - part.shape[0], *part.shape[1:]), part.dtype)
            return mx.concatenate([part, pad], axis=0)

        self.keys = tuple(fit(part) for part in self.keys) if num_slots else ()
        self.values = tuple(fit(part) for part in self.values) if num_slots else ()
        self.num_slots = num_slots

    def _rows(self, slot: int, span: int) -> Parts:
        rows = tuple(mx.contiguous(p[slot : slot + 1, :, :span]) for p in (*self.keys, *self.values))
        mx.eval(rows)  # so that the buffers have one owner again and the next write is in place
        return rows

    def _lying(self, slot: int, runs: Sequence[tuple[int, int]]) -> HostParts:
        """Runs of a slot's columns, as views."""
        views = host_views([*self.keys, *self.values])
        return tuple(tuple(view[slot : slot + 1, :, a:b] for a, b in runs) for view in views)

    def move(self, source: int, target: int, num_tokens: int) -> None:
        if self.keys and num_tokens:
            self._filled(target, self._rows(source, min(num_tokens, self.keys[0].shape[2])), 0)

    def swap(self, one: int, other: int, num_one: int, num_other: int) -> None:
        held = self.snapshot(one, num_one)
        self.move(other, one, num_other)
        if num_other:  # whether there are numbers in a row is known after its first draw only
            self.scrub(other, scrubbed_columns(num_other))
        self.restore(other, held, num_one)

    def clear(self, slot: int) -> None:
        pass  # a length of 0 hides everything

    def scrub(self, slot: int, num_columns: int) -> None:
        for part in (*self.keys, *self.values):
            part[slot : slot + 1, :, :num_columns] = 0

    def rewind(self, geometry: Geometry, kept: Sequence[int]) -> bool:
        return True  # the batch's lengths say it all

    def snapshot(self, slot: int, num_tokens: int) -> Parts:
        return self._rows(slot, min(num_tokens, self.keys[0].shape[2])) if self.keys else ()

    def restore(self, slot: int, parts: Parts, num_tokens: int) -> None:
        if parts:
            self._filled(slot, parts, parts[0].shape[2])

    def state(self, slot: int) -> Parts:
        return ()

    def reserve(self, capacity: int) -> Iterator[None]:
        wanted = max(self.capacity, min(capacity, self.num_columns))
        for name in ("keys", "values"):
            parts: Parts = getattr(self, name)
            if parts and parts[0].shape[2] < wanted:
                setattr(self, name, self._grown(parts, parts, wanted))
                yield
        self.capacity = wanted

    def _filled(self, slot: int, rows: Parts, capacity: int) -> None:
        """Writes a row's first columns, allocating what is missing."""
        self.capacity = max(self.capacity, capacity)
        half = self.codec.keys.num_parts
        if rows and not self.keys and self.num_slots == 1 and rows[0].shape[2] >= self.capacity:
            self.keys, self.values = rows[:half], rows[half:]
            return
        self.keys, self.values = self._grown(self.keys, rows[:half]), self._grown(self.values, rows[half:])
        for part, row in zip((*self.keys, *self.values), rows, strict=True):
            part[slot : slot + 1, :, : row.shape[2]] = row

    def arrays(self) -> list[mx.array]:
        return [*self._keys, *self._values]

    def put(self, arrays: Sequence[mx.array]) -> None:
        """Makes these its arrays, in the order of `arrays()`."""
        num_keys = len(self.keys)
        self.keys, self.values = tuple(arrays[:num_keys]), tuple(arrays[num_keys:])

    def form(self) -> Hashable | None:
        """What decides, beside shapes of arrays, how the forward that began is built; None if it has to be built anew.

        Rows of one length are read without a mask and written as a slice. Built so each time they are quicker than
        compiled with a mask, unless attention reads records and draws its own.
        """
        grows = any(part.shape[2] < self.capacity for part in (*self.keys, *self.values))
        if not self.keys or grows or (self.geometry.uniform and self._records is None):
            return None
        return self._ring, self.capacity, self._dtype

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self._keys, *self._values))  # asked for by other threads, too
