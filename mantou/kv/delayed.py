"""A layer whose rows are native while they are short and packed from a threshold on. Knows no requests.

Which of the two a forward's row reads follows from its length alone, so it does not depend on neighbours, chunks or
drafts. A row is packed once, all of it, when it has reached the threshold:

    length   0 ........... start ...............
    native   |#############|                     kept below `start`, for stores that copy columns later
    packed                 |====================|  positions 0 .. of a row that has reached `start`

As columns for a store a position beyond `start` is the bytes of its packed parts under the dtype and width of native
values. So a piece has one shape wherever it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import mlx.core as mx

from mantou.kv.geometry import Geometry
from mantou.kv.layouts import Rows
from mantou.kv.lending import Loan
from mantou.kv.pieces import HostParts, Parts, host_views
from mantou.kv.plan import LayerCodec


class Delayed:
    """Two layouts of one kind. `make` gives one for a codec."""

    can_rewind = True

    def __init__(self, make: Callable[[LayerCodec], Rows], codec: LayerCodec) -> None:
        assert codec.below is not None and codec.below.raw
        self.boundary = codec.start
        self.native = make(codec.below)
        self.packed = make(replace(codec, start=0, below=None))
        self._is_packed = [False] * self.native.num_slots
        self._reads: tuple[bool, bool] = (True, False)  # native, packed
        self.geometry: Geometry

    @property
    def paged(self) -> bool:
        return self.packed.paged

    @property
    def num_columns(self) -> int:
        return self.native.num_columns

    @property
    def offset(self) -> mx.array | int:
        return self.geometry.offset

    def arrays(self) -> list[mx.array]:
        return [*self.native.arrays(), *self.packed.arrays()]

    @property
    def nbytes(self) -> int:
        return self.native.nbytes + self.packed.nbytes

    # -- what the graph sees
    def begin(self, geometry: Geometry, capacity: int) -> None:
        self.geometry = geometry
        self.packed.begin(geometry, capacity)
        # A packed row's tokens go to columns just beyond the threshold of the native buffer, where nobody reads.
        below = geometry.clipped(self.boundary)
        self.native.begin(below, min(capacity, max(below.starts) + below.width))
        active = [s for s, n in zip(geometry.starts, geometry.group.num_tokens, strict=True) if n]
        packed = [start >= self.boundary for start in active]
        self._reads = (not all(packed) or not packed, any(packed))
        for slot, start in enumerate(geometry.starts, geometry.group.lo):
            if start >= self.boundary and not self._is_packed[slot]:
                self._pack_row(slot, start)

    def _pack_row(self, slot: int, num_tokens: int) -> None:
        rows = self.native.snapshot(slot, num_tokens)
        if rows:
            self.packed.restore(slot, self._packed(rows), num_tokens)
        self._is_packed[slot] = True

    def _packed(self, rows: Parts) -> Parts:
        keys, values = rows
        return (*self.packed.codec.keys.pack(keys), *self.packed.codec.values.pack(values))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        native, packed = self._reads
        found = self.native.update_and_fetch(keys, values) if native else None
        return self._chosen(found, self.packed.update_and_fetch(keys, values) if packed else None)

    def fetch(self) -> tuple[mx.array, mx.array]:
        native, packed = self._reads
        return self._chosen(self.native.fetch() if native else None, self.packed.fetch() if packed else None)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        native, packed = self._reads
        found = self.native.keys_and_values() if native else None
        return self._chosen(found, self.packed.keys_and_values() if packed else None)

    def _chosen(
        self, native: tuple[mx.array, mx.array] | None, packed: tuple[mx.array, mx.array] | None
    ) -> tuple[mx.array, mx.array]:
        if native is None:
            assert packed is not None
            return packed
        span = self.packed.span
        keys, values = (_wide(part, span) for part in native)
        if packed is None:
            return keys, values
        chosen = mx.array([start >= self.boundary for start in self.geometry.starts])[:, None, None, None]
        return mx.where(chosen, packed[0], keys), mx.where(chosen, packed[1], values)

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        return self.packed.make_mask(num_tokens, return_array, window_size)

    def lend(self, x: mx.array, mask: mx.array | str | None, kv_heads: int, head_dim: int) -> Loan | None:
        """The native buffers while every row is native."""
        alone = not self._reads[1] and self.native.geometry is self.geometry
        return self.native.lend(x, mask, kv_heads, head_dim) if alone else None

    # -- what the batch does
    def resize(self, num_slots: int) -> None:
        self.native.resize(num_slots)
        self.packed.resize(num_slots)
        self._is_packed = (self._is_packed + [False] * num_slots)[:num_slots]

    def clear(self, slot: int) -> None:
        self._is_packed[slot] = False

    def scrub(self, slot: int, num_columns: int) -> None:
        self.native.scrub(slot, num_columns)
        self.packed.scrub(slot, num_columns)

    def hold(self) -> None:
        """A length rewinds columns: there is nothing to hold."""

    def give_back(self, held: None) -> None:
        pass

    def rewind(self, geometry: Geometry, kept: Sequence[int]) -> bool:
        return True

    def move(self, source: int, target: int, num_tokens: int) -> None:
        native, packed = self._shares(source, num_tokens)
        self.native.move(source, target, native)
        self.packed.move(source, target, packed)
        self._is_packed[target] = self._is_packed[source]

    def swap(self, one: int, other: int, num_one: int, num_other: int) -> None:
        first, second = self._shares(one, num_one), self._shares(other, num_other)
        self.native.swap(one, other, first[0], second[0])
        self.packed.swap(one, other, first[1], second[1])
        self._is_packed[one], self._is_packed[other] = self._is_packed[other], self._is_packed[one]

    def _shares(self, slot: int, num_tokens: int) -> tuple[int, int]:
        """How many of a row's columns are native and packed."""
        if num_tokens > self.boundary and not self._is_packed[slot]:
            self._pack_row(
                slot, num_tokens
            )  # its last forward crossed the threshold: all of it is native still
        return min(num_tokens, self.boundary), num_tokens if self._is_packed[slot] else 0

    def snapshot(self, slot: int, num_tokens: int) -> Parts:
        num_native, num_packed = self._shares(slot, num_tokens)
        native = self.native.snapshot(slot, num_native)
        return (*native, *self.packed.snapshot(slot, num_packed)) if self._is_packed[slot] else native

    def restore(self, slot: int, parts: Parts, num_tokens: int) -> None:
        self.native.restore(slot, parts[:2], min(num_tokens, self.boundary))
        self._is_packed[slot] = len(parts) > 2
        self.packed.restore(slot, parts[2:], num_tokens)

    def state(self, slot: int) -> Parts:
        return ()

    # -- columns for a store
    def columns(self, slot: int, lo: int, hi: int) -> Parts:
        if not self.native.keys:
            return ()
        edge = min(max(self.boundary, lo), hi)
        if edge < hi and not self._is_packed[slot]:
            self._pack_row(slot, hi)
        native = self.native.columns(slot, lo, edge)
        packed = self.packed.columns(slot, edge, hi) if edge < hi else ()
        count = self.packed.codec.keys.num_parts
        found: list[mx.array] = []
        for below, beyond in zip(native, (packed[:count], packed[count:]), strict=True):
            found.append(mx.concatenate([below, _in_disguise(beyond, below)], axis=2) if beyond else below)
        return tuple(found)

    def host_columns(self, slot: int, lo: int, hi: int) -> HostParts:
        return tuple((view,) for view in host_views(self.columns(slot, lo, hi)))

    def reserve(self, capacity: int) -> Iterator[None]:
        yield from self.native.reserve(min(capacity, self.boundary))
        yield from self.packed.reserve(capacity)

    def fill(self, slot: int, columns: Parts, state: Parts, num_tokens: int) -> None:
        self._is_packed[slot] = num_tokens > self.boundary
        if not columns:
            return
        edge = min(num_tokens, self.boundary)
        native = tuple(part[:, :, :edge] for part in columns)
        self.native.fill(slot, native, (), edge)
        if num_tokens > self.boundary:
            like = self._packed(tuple(part[:, :, :1] for part in columns))
            count = self.packed.codec.keys.num_parts
            stored = [
                *_recognised(columns[0][:, :, edge:], like[:count]),
                *_recognised(columns[1][:, :, edge:], like[count:]),
            ]
            below = self._packed(native)
            rows = tuple(mx.concatenate([b, s], axis=2) for b, s in zip(below, stored, strict=True))
            self.packed.fill(slot, rows, (), num_tokens)


def _wide(part: mx.array, span: int) -> mx.array:
    """The first `span` columns; zeros where there are fewer."""
    have = part.shape[2]
    if have >= span:
        return part[:, :, :span]
    return mx.pad(part, [(0, 0), (0, 0), (0, span - have), (0, 0)])


def _in_disguise(parts: Parts, like: mx.array) -> mx.array:
    """The bytes of packed parts as values of another array's dtype and width."""
    width = like.shape[3] * like.dtype.size
    each = [mx.contiguous(part).view(mx.uint8) for part in parts]
    rest = width - sum(part.shape[3] for part in each)
    return mx.pad(mx.concatenate(each, axis=3), [(0, 0), (0, 0), (0, 0), (0, rest)]).view(like.dtype)


def _recognised(disguised: mx.array, like: Parts) -> list[mx.array]:
    """The packed parts again, each of the dtype and width of its sample."""
    data, at, found = mx.contiguous(disguised).view(mx.uint8), 0, list[mx.array]()
    for sample in like:
        width = sample.shape[3] * sample.dtype.size
        found.append(mx.contiguous(data[..., at : at + width]).view(sample.dtype))
        at += width
    return found
