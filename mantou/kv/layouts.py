"""Where a layer's keys and values live: full rows, rings of a sliding window. Knows no requests.

Each layout is what an mlx-lm graph expects of a cache (`offset`, `update_and_fetch`, `make_mask`, `lengths`, item
access), over left-aligned rows with their own lengths:

    slot 0  |#########.......|     # = kept token, . = free or rejected (never visible, overwritten later)
    slot 1  |####............|     rewind = a smaller length; join and leave touch no neighbour

A ring has window + slack columns, position p in column p % size. A rejected token only overwrote position
p - size, which no live window reaches, so a ring rewinds by length as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

import mlx.core as mx

from mantou.kv.columns import Columns
from mantou.kv.geometry import Geometry
from mantou.kv.lending import Loan
from mantou.kv.pieces import HostParts, Parts
from mantou.kv.plan import LayerCodec


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
