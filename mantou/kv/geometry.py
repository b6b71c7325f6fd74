"""Where the tokens of one forward go: positions, masks, how much of each buffer is read. Host lengths only.

All layers share the `Geometry` of the forward in progress, so every mask is built once per step and kind.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from mantou.kv.writing import Writing
from mantou.protocols import Group


class WriteRows(Protocol):
    def __call__(
        self,
        buffer: mx.array,
        rows: mx.array,
        start: mx.array,
        count: mx.array | None,
        first_slot: int,
        ring: int,
        table: mx.array | None = None,
        block: int = 0,
        /,
    ) -> mx.array | None: ...


def no_write_rows(
    buffer: mx.array,
    rows: mx.array,
    start: mx.array,
    count: mx.array | None,
    first_slot: int,
    ring: int,
    table: mx.array | None = None,
    block: int = 0,
) -> None:
    """See DeviceOps.write_rows."""


class HostLengthError(RuntimeError):
    """A graph that is being compiled asked for a length that is another in every step."""


class Geometry:
    """Positions of one group: row i holds absolute positions starts[i] .. starts[i] + width - 1.

    `masked`: by arrays and masks even where rows begin at one position, so that steps have few shapes.
    """

    def __init__(
        self,
        group: Group,
        starts: Sequence[int],
        *,
        array_offsets: bool = True,
        mask_axes: int = 4,
        span_step: int = 1,
        rewindable: bool = False,
        write_rows: WriteRows = no_write_rows,
        masked: bool = False,
        writing: Writing | None = None,
    ) -> None:
        self.write_rows = write_rows
        self.writing = writing or Writing()
        self.group = group
        self.rewindable = rewindable
        self.starts = tuple(starts)
        self.width = group.width
        self.num_rows = len(group.num_tokens)
        active = [s for s, n in zip(starts, group.num_tokens, strict=True) if n]
        self.longest = max(active) if active else 0
        # One start for every active row, and no idle row reaches past it: slice writes and no mask array.
        self.uniform = not masked and all(s == self.longest for s in active) and max(starts) <= self.longest
        self.full = all(n == group.width for n in group.num_tokens)
        self.end = self.longest + self.width  # one past the newest position
        # Columns that attention reads. Where a mask hides the rest anyway, buckets keep the shapes of a step few.
        self.bucketed_span = -(-self.end // span_step) * span_step
        self.span = self.end if self.uniform else self.bucketed_span
        self.array_offsets = array_offsets
        self.mask_axes = mask_axes
        self._span_step = span_step
        self._clipped: dict[int, Geometry] = {}
        self._offsets: mx.array | None = None
        self._positions: mx.array | None = None
        self._columns: dict[int, mx.array] = {}
        self._lengths: mx.array | None = None
        self._masks: dict[tuple[str, int, int], mx.array] = {}
        self.places: dict[tuple[int, int], Any] = {}  # see mantou.kv.records
        self.terms: dict[Hashable, Any] = {}  # see mantou.kv.lending

    def clipped(self, limit: int) -> Geometry:
        """The same forward with no row beginning beyond `limit`; itself if none does."""
        if max(self.starts) <= limit:
            return self
        if limit not in self._clipped:
            starts = [min(start, limit) for start in self.starts]
            self._clipped[limit] = Geometry(
                self.group,
                starts,
                array_offsets=self.array_offsets,
                mask_axes=self.mask_axes,
                span_step=self._span_step,
                writing=self.writing,
            )
        return self._clipped[limit]

    @property
    def offset(self) -> mx.array | int:
        """What a graph reads as `cache.offset`: int32[rows], or an int for graphs that need one."""
        if not self.array_offsets or (self.uniform and self.num_rows == 1):
            return self.longest
        return self.offsets

    @property
    def offsets(self) -> mx.array:
        if self._offsets is None:
            self._offsets = mx.array(self.starts, dtype=mx.int32)
        return self._offsets

    @property
    def positions(self) -> mx.array:
        """int32[rows, width], absolute."""
        if self._positions is None:
            self._positions = self.offsets[:, None] + mx.arange(self.width, dtype=mx.int32)[None]
        return self._positions

    def columns(self, ring: int) -> mx.array:
        """int32[rows, 1, width, 1], the column of each position: in a ring of that size, or in full rows for 0."""
        if ring not in self._columns:
            columns = self.positions % ring if ring else self.positions
            self._columns[ring] = columns[:, None, :, None]
        return self._columns[ring]

    @property
    def lengths(self) -> mx.array | None:
        """int32[rows] valid positions of this forward, or None if every row fills the width."""
        if self.full:
            return None
        if self._lengths is None:
            self._lengths = mx.array(self.group.num_tokens, dtype=mx.int32)
        return self._lengths

    def causal_mask(self, span: int, window: int) -> mx.array:
        """bool[rows, 1, width, span] over columns that hold positions 0 .. span - 1; window 0 = unlimited."""
        key = ("causal", span, window)
        if key not in self._masks:
            columns = mx.arange(span, dtype=mx.int32)[None, None, None]
            queries = self.positions[:, None, :, None]
            mask = columns <= queries
            if window:
                mask = mask & (columns > queries - window)
            self._masks[key] = self._spread(mask)
        return self._masks[key]

    def ring_mask(self, size: int, window: int) -> mx.array:
        """bool[rows, 1, width, size] over ring slots, where position p lives in slot p % size."""
        key = ("ring", size, window)
        if key not in self._masks:
            newest = self.positions[:, -1:][:, None, None]
            slots = mx.arange(size, dtype=mx.int32)[None, None, None]
            held = newest - ((newest - slots) % size)  # the absolute position each slot holds now
            queries = self.positions[:, None, :, None]
            self._masks[key] = self._spread((held >= 0) & (held <= queries) & (held > queries - window))
        return self._masks[key]

    def window_of(self, mask: mx.array, *, ring: bool) -> int | None:
        """The window of a mask of this forward, over ring slots or over positions; None for any other array."""
        kind = "ring" if ring else "causal"
        return next((key[2] for key, own in self._masks.items() if own is mask and key[0] == kind), None)

    def _spread(self, mask: mx.array) -> mx.array:
        """One plane a row in front of as many unit axes as the graph's scores have."""
        if self.mask_axes == mask.ndim:
            return mask
        return mask.reshape(mask.shape[0], *[1] * (self.mask_axes - 3), *mask.shape[2:])


class TracedGeometry(Geometry):
    """Positions of a forward that is being compiled for all rows with as many columns to read: `offsets` int32[rows] is
    an input, and host lengths are not to be had."""

    def __init__(self, real: Geometry, offsets: mx.array) -> None:
        self._real = real
        self.write_rows = real.write_rows
        self.writing = real.writing
        self.group = real.group
        self.rewindable = real.rewindable
        self.width, self.num_rows = real.width, real.num_rows
        self.uniform, self.full = False, True
        self.span = real.bucketed_span
        self.places, self.terms = {}, {}
        self.array_offsets, self.mask_axes = True, real.mask_axes
        self._offsets, self._positions, self._lengths = offsets, None, None
        self._columns, self._masks = {}, {}

    def __getattr__(self, name: str) -> Any:
        raise HostLengthError(f"it asks for the {name} of its rows")
