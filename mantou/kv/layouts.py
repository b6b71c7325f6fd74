"""Where a layer's keys and values live: full rows, rings of a sliding window. Knows no requests.

Each layout is what an mlx-lm graph expects of a cache (`offset`, `update_and_fetch`, `make_mask`, `lengths`, item
access), over left-aligned rows with their own lengths:

    slot 0  |#########.......|     # = kept token, . = free or rejected (never visible, overwritten later)
    slot 1  |####............|     rewind = a smaller length; join and leave touch no neighbour

A ring has window + slack columns, position p in column p % size. A rejected token only overwrote position
p - size, which no live window reaches, so a ring rewinds by length as well.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

import mlx.core as mx

from mantou.kv.geometry import Geometry
from mantou.kv.lending import Loan, fitted, groups_of, part_shapes
from mantou.kv.pieces import HostParts, Parts, host_views
from mantou.kv.plan import LayerCodec
from mantou.kv.records import RecordCodec, place_of


class Layout(Protocol):
    """One layer's storage for all slots. `KVBatch` is the only caller besides the model graph."""

    def begin(self, geometry: Geometry, capacity: int) -> None: ...
    def resize(self, num_slots: int) -> None: ...
    def move(self, source: int, target: int, num_tokens: int) -> None: ...
    def swap(self, one: int, other: int, num_one: int, num_other: int) -> None: ...
    def clear(self, slot: int) -> None: ...
    def scrub(self, slot: int, num_columns: int) -> None:
        """Zeros in what no row reads but all multiply by 0: the first columns of a slot that is empty."""
        ...

    @property
    def can_rewind(self) -> bool:
        """Whether `rewind` can keep a part of the forward in progress; else it only takes all of it back."""
        ...

    def rewind(self, geometry: Geometry, kept: Sequence[int]) -> bool:
        """Forget all but kept[i] of the forward's tokens. False if the forward must be run again up to `kept`."""
        ...

    def hold(self) -> Any:
        """The state of all rows by reference, for `give_back`; None for layers that a length rewinds."""
        ...

    def give_back(self, held: Any) -> None: ...
    def snapshot(self, slot: int, num_tokens: int) -> Parts: ...
    def restore(self, slot: int, parts: Parts, num_tokens: int) -> None: ...
    def columns(self, slot: int, lo: int, hi: int) -> Parts:
        """The row's positions [lo, hi), each [1, H, hi - lo, d], lazily and perhaps as a slice of the buffer; () for
        layers without columns."""
        ...

    def host_columns(self, slot: int, lo: int, hi: int) -> HostParts:
        """The same where the host is the device, if possible as views of the buffers: to evaluate even a slice is to
        wait for another thread. They must be gone before the next forward."""
        ...

    def state(self, slot: int) -> Parts:
        """The row's state after its last token, each [1, ...]; () for layers without a state."""
        ...

    def reserve(self, capacity: int) -> Iterator[None]:
        """Room for that many columns, in parts of work; nothing where nothing is stored yet."""
        ...

    def fill(self, slot: int, columns: Parts, state: Parts, num_tokens: int) -> None:
        """Makes the row hold `num_tokens` positions: `columns` are at least all of them, from 0 on, and as many as were
        reserved; `state` is the one after them."""
        ...

    def arrays(self) -> list[mx.array]: ...
    @property
    def paged(self) -> bool:
        """Whether rows share a pool of blocks."""
        ...

    @property
    def boundary(self) -> int:
        """The length at which a row changes how it is stored, 0 for never. A forward should end there."""
        ...

    @property
    def num_columns(self) -> int:
        """How many positions back from the newest written one it holds; sys.maxsize for all."""
        ...

    @property
    def nbytes(self) -> int: ...


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
        self.keys: Parts = ()
        self.values: Parts = ()
        self._dtype: mx.Dtype = mx.float32
        self._span = 0

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
        g, groups = self.geometry, groups_of(self.codec.keys, head_dim)
        if groups is None or groups != groups_of(self.codec.values, head_dim):
            return None
        if (g.num_rows, g.width) != tuple(x.shape[:2]):
            return None
        # While a prefix is copied in, in parts, one of the two may have grown already.
        columns = max([self.capacity, *(part.shape[2] for part in (*self.keys, *self.values))])
        lead, widths = (self.num_slots, kv_heads, columns), part_shapes(groups, head_dim, x.dtype)
        keys, values = fitted(self.keys, lead, widths), fitted(self.values, lead, widths)
        if keys is None or values is None:
            return None
        self.keys = self.values = ()
        self._span = self.span
        return Loan(keys, values, groups, g.offsets, g.lengths, g.group.lo, window, ring, mask)

    def take_back(self, keys: Parts, values: Parts, dtype: mx.Dtype) -> None:
        """Ends a loan: the buffers with this forward's tokens in them, and the type of what was stored."""
        self.keys, self.values, self._dtype = keys, values, dtype

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
        return [*self.keys, *self.values]

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
        return sum(part.nbytes for part in (*self.keys, *self.values))


class FullRows(Columns):
    """Position p of a row lives in column p."""

    def begin(self, geometry: Geometry, capacity: int) -> None:
        self.geometry = geometry
        self.capacity = max(self.capacity, capacity)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._store(keys, values, 0)
        return self._fetch(self.span)

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        g = self.geometry
        inside = not window_size or g.end <= window_size
        if g.uniform and inside and not return_array:
            return None if g.width == 1 else "causal"
        return g.causal_mask(g.span, 0 if inside else int(window_size or 0))

    def columns(self, slot: int, lo: int, hi: int) -> Parts:
        return tuple(p[slot : slot + 1, :, lo:hi] for p in (*self.keys, *self.values))

    def host_columns(self, slot: int, lo: int, hi: int) -> HostParts:
        return self._lying(slot, [(lo, hi)])

    def fill(self, slot: int, columns: Parts, state: Parts, num_tokens: int) -> None:
        if columns:
            self._filled(slot, columns, columns[0].shape[2])

    def lend(self, x: mx.array, mask: mx.array | str | None, kv_heads: int, head_dim: int) -> Loan | None:
        """The buffers for a primitive over hidden states x [rows, width, ...], or None where only the layout can store
        and mask: a codec that nobody else knows, or a mask that the graph made on its own.
        """
        own = not isinstance(mask, mx.array) or mask is self.geometry.causal_mask(self.geometry.span, 0)
        return self._loan(x, kv_heads, head_dim, 0) if own else None


class WindowRing(Columns):
    """A ring of window + slack columns. Until it wraps it is a full row, and costs as little as one."""

    def __init__(self, codec: LayerCodec, num_slots: int, window: int, slack: int) -> None:
        super().__init__(codec, num_slots)
        self.window = window
        self.size = self.num_columns = window + slack
        self._wrapped = False

    def begin(self, geometry: Geometry, capacity: int) -> None:
        assert geometry.width <= self.size - self.window + 1, "a forward may not outrun the ring's slack"
        self.geometry = geometry
        self.capacity = max(self.capacity, min(capacity, self.size))
        # An idle row may be longer than the active ones, so it decides too.
        self._wrapped = max(geometry.end, max(geometry.starts) + geometry.width) > self.size
        if self._wrapped:
            self.capacity = self.size

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._store(keys, values, self._ring)
        return self._fetch(self.span)

    @property
    def _ring(self) -> int:
        return self.size if self._wrapped else 0

    @property
    def span(self) -> int:
        return self.size if self._wrapped else min(self.geometry.span, self.capacity)

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        g, window = self.geometry, window_size or self.window
        if self._wrapped:
            return g.ring_mask(self.size, window)
        if g.uniform and g.end <= window and not return_array:
            return None if g.width == 1 else "causal"
        return g.causal_mask(self.span, window)

    def columns(self, slot: int, lo: int, hi: int) -> Parts:
        where = mx.arange(lo, hi) % self.size
        return tuple(mx.take(p[slot : slot + 1], where, axis=2) for p in (*self.keys, *self.values))

    def host_columns(self, slot: int, lo: int, hi: int) -> HostParts:
        edges = [lo, *range((lo // self.size + 1) * self.size, hi, self.size), hi]
        return self._lying(slot, [(a % self.size, a % self.size + b - a) for a, b in pairwise(edges)])

    def fill(self, slot: int, columns: Parts, state: Parts, num_tokens: int) -> None:
        if not columns:
            return
        lo = max(num_tokens - self.size, 0)  # what came before was overwritten, or is outside every window
        where = mx.array(sorted(range(lo, num_tokens), key=lambda position: position % self.size))
        rows = tuple(mx.take(part, where, axis=2) for part in columns)
        capacity = columns[0].shape[2]
        self._filled(slot, rows, self.size if num_tokens > self.size else min(capacity, self.size))

    def lend(self, x: mx.array, mask: mx.array | str | None, kv_heads: int, head_dim: int) -> Loan | None:
        """As for full rows. A wrapped ring is lent with its mask, because columns are not positions any more."""
        g = self.geometry
        if self._wrapped:
            ring_mask = g.ring_mask(self.size, self.window)
            own = mask is ring_mask and ring_mask.ndim == 4
            return self._loan(x, kv_heads, head_dim, 0, self.size, ring_mask) if own else None
        own = not isinstance(mask, mx.array) or mask is g.causal_mask(self.span, self.window)
        return self._loan(x, kv_heads, head_dim, self.window) if own else None


Rows = FullRows | WindowRing
"""Layouts that keep keys and values by column."""
