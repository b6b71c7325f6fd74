"""The one owner of all running rows' KV: slots, lengths, buffers. Knows no requests, no text, no sampling."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from mantou.kv.columns import Columns, scrubbed_columns
from mantou.kv.geometry import Geometry, TracedGeometry, WriteRows, no_write_rows
from mantou.kv.layouts import Layout
from mantou.kv.lending import Readable, Seen
from mantou.kv.paged import forget_fetched
from mantou.kv.pages import Pages, Unpaged
from mantou.kv.pieces import (
    Packing,
    Parts,
    Piece,
    State,
    Unpacking,
    finished,
    host_is_device,
    states,
    to_host,
)
from mantou.kv.tape import make_current
from mantou.kv.writing import Writing
from mantou.protocols import Group, Hit

# Columns that buffers grow by at first: a short answer neither zeroes nor copies more than it needs.
_CAPACITY_STEP = 64

LayoutMaker = Callable[[int], Sequence[Layout]]  # num_slots -> one layout a cache
Arrange = Callable[[Sequence[Layout]], Sequence[Any]]  # the layouts as the graph's list of caches


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


def no_masks(group: Group, start: int) -> bool:
    """Rows that begin at one position go without masks."""
    return False


class KVBatch:
    """`num_slots` rows of KV. Only the model thread touches it.

    A forward is `begin(group)`, the model graph over `caches`, then `commit(group, kept)`.
    """

    def __init__(
        self,
        make_layouts: LayoutMaker,
        *,
        array_offsets: bool = True,
        mask_axes: int = 4,
        span_step: int = 1,
        arrange: Arrange = lambda layouts: layouts,
        write_rows: WriteRows = no_write_rows,
        pages: Pages | Unpaged | None = None,
        masked: Callable[[Group, int], bool] = no_masks,
    ) -> None:
        self._write_rows = write_rows
        self._writing = Writing()
        self.pages = pages or Unpaged()  # of the layers that share pools
        self._make_layouts = make_layouts
        self._arrange = arrange
        self._array_offsets = array_offsets
        self._mask_axes = mask_axes
        self._span_step = span_step
        self._masked = masked  # whether a group whose longest row begins there goes by masks in any case
        self.layers: Sequence[Layout] = make_layouts(0)
        self.caches = arrange(self.layers)
        self._boundaries = sorted({layer.boundary for layer in self.layers} - {0})
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

    def room(self, num_tokens: int) -> int:
        """Most tokens that a row of `num_tokens` should take in one forward, so that none is stored in two ways."""
        return next((at - num_tokens for at in self._boundaries if at > num_tokens), sys.maxsize)

    def resize(self, num_slots: int) -> None:
        """Rows beyond `num_slots` are dropped, new ones are empty. At 0 all buffers are freed."""
        if num_slots == self.num_slots:
            return
        self.pages.resize(num_slots)
        if num_slots == 0:
            self.layers = self._make_layouts(0)
            self.caches = self._arrange(self.layers)
            self.lengths, self._first_columns = [], []
            return
        for layer in self.layers:
            layer.resize(num_slots)
        self.lengths = (self.lengths + [0] * num_slots)[:num_slots]
        self._first_columns = (self._first_columns + [0] * num_slots)[:num_slots]

    def begin(self, group: Group, *, rewindable: bool = False) -> Geometry:
        """Sets where the next forward writes and what it sees. Positions are checked here: the writes are not.

        `rewindable`: some rows may keep less than they feed, so that it pays to keep what a rewind needs.
        """
        starts = self.lengths[group.lo : group.hi]
        if len(starts) != len(group.num_tokens) or max(group.num_tokens) > group.width:
            raise ValueError(f"group {group} does not fit {self.num_slots} slots")
        self._writing.settle()
        geometry = Geometry(
            group,
            starts,
            array_offsets=self._array_offsets,
            mask_axes=self._mask_axes,
            span_step=self._span_step,
            rewindable=rewindable,
            write_rows=self._write_rows,
            writing=self._writing,
            masked=self._masked(group, max(starts)),
        )
        capacity = self._capacity(max(starts) + group.width)
        for slot, (start, num_tokens) in enumerate(zip(starts, group.num_tokens, strict=True), group.lo):
            self.pages.hold(slot, start, start + num_tokens)
        for layer in self.layers:
            layer.begin(geometry, capacity)
        for slot, start in enumerate(starts, group.lo):
            self._lose_columns(slot, start + group.width)
        self.geometry = geometry
        return geometry

    def look(self, group: Group, layers: Sequence[int]) -> list[Seen]:
        """See `KVLender`. A row's query stands where its last token does, so that a mask shows all that it holds."""
        assert self.geometry is None, "a forward is in progress"
        geometry = Geometry(
            group,
            [max(length - 1, 0) for length in self.lengths[group.lo : group.hi]],
            array_offsets=self._array_offsets,
            span_step=self._span_step,
        )
        seen: list[Seen] = []
        for place in layers:
            layer = cast(Readable, self.layers[place])
            layer.begin(geometry, 0)
            seen.append(Seen(*layer.fetch(), layer.make_mask(1)))
        self._forget()
        return seen

    def commit(self, group: Group, kept: Sequence[int]) -> bool:
        """Row i keeps kept[i] <= num_tokens[i] of the forward. False: run it again, masked to `kept`, and commit."""
        assert self.geometry is not None
        make_current(None)
        self._forget()
        if not all(0 <= k <= n for k, n in zip(kept, group.num_tokens, strict=True)):
            raise ValueError(f"a forward of {group.num_tokens} tokens cannot keep {kept}")
        if tuple(kept) != group.num_tokens:
            if not all(layer.can_rewind for layer in self.layers):
                for layer in self.layers:
                    layer.rewind(self.geometry, [0] * len(kept))
                return False
            for layer in self.layers:
                layer.rewind(self.geometry, kept)
        for i, num_tokens in enumerate(kept):
            self.lengths[group.lo + i] += num_tokens
        self.geometry = None
        return True

    def shorten(self, slot: int, num_tokens: int) -> None:
        """Forgets all but the row's first tokens. Not for models with recurrent layers: they `hold` and `give_back`."""
        assert 0 <= num_tokens <= self.lengths[slot], (slot, num_tokens)
        self.lengths[slot] = num_tokens

    def hold(self) -> Any:
        """What `give_back` returns to, by reference: no copy. Only while slots stay what they are."""
        return list(self.lengths), [layer.hold() for layer in self.layers]

    def give_back(self, held: Any) -> None:
        """Every row is again what it was at `hold`."""
        lengths, states = held
        self.lengths = list(lengths)
        for layer, state in zip(self.layers, states, strict=True):
            layer.give_back(state)

    def abort(self) -> None:
        """Drops a forward that raised: recurrent layers get their state back, the rest was never visible."""
        make_current(None)
        self._forget()
        self._writing.drop()
        if self.geometry is not None:
            for layer in self.layers:
                layer.rewind(self.geometry, [0] * self.geometry.num_rows)
            self.geometry = None

    def _forget(self) -> None:
        """A forward is over: nothing of it is needed but the buffers."""
        forget_fetched()
        self.pages.forget()

    def release(self, slot: int) -> None:
        """The row is gone; what it held is invisible from now on."""
        self.lengths[slot] = 0
        self.pages.release(slot)

    def scrub(self, slot: int) -> None:
        """`release` for a row whose KV may be no numbers: hidden columns count 0 times what they hold, which is NaN."""
        for layer in self.layers:
            layer.scrub(slot, scrubbed_columns(self.lengths[slot]))
        self.release(slot)

    def clear(self, slot: int) -> None:
        """An empty row, for a sequence that starts from nothing."""
        self.lengths[slot] = self._first_columns[slot] = 0
        self.pages.release(slot)
        for layer in self.layers:
            layer.clear(slot)

    def move(self, source: int, target: int) -> None:
        """Copies one row over another; `source` is empty afterwards."""
        for layer in self.layers:
            layer.move(source, target, self.lengths[source])
        self.pages.move(source, target)
        self.lengths[target], self._first_columns[target] = self.lengths[source], self._first_columns[source]
        self.lengths[source] = 0

    def swap(self, one: int, other: int) -> None:
        for layer in self.layers:
            layer.swap(one, other, self.lengths[one], self.lengths[other])
        self.pages.swap(one, other)
        for each in (self.lengths, self._first_columns):
            each[one], each[other] = each[other], each[one]

    def snapshot(self, slot: int) -> RowSnapshot:
        num_tokens = self.lengths[slot]
        layers = tuple(layer.snapshot(slot, num_tokens) for layer in self.layers)
        return RowSnapshot(num_tokens, layers, self._first_columns[slot])

    def restore(self, slot: int, snapshot: RowSnapshot) -> None:
        self.pages.hold(slot, snapshot.num_tokens, snapshot.num_tokens)
        for layer, parts in zip(self.layers, snapshot.layers, strict=True):
            layer.restore(slot, parts, snapshot.num_tokens)
        self.lengths[slot], self._first_columns[slot] = snapshot.num_tokens, snapshot.first_column

    def columns(self, slot: int, lo: int, hi: int) -> Piece:
        """A copy of the row's keys and values at positions [lo, hi), in host memory.

        From a later `lo` on if a ring has overwritten some of them; the caller has to look at the piece's own.
        """
        return finished(self.copying(lambda: slot, lo, hi))

    def reaches_back(self, slot: int, position: int) -> bool:
        """Whether the row's columns from `position` on are all there, and none is overwritten in a ring."""
        return self._first_columns[slot] <= position

    def copying(self, slot: Callable[[], int], lo: int, hi: int) -> Generator[None, None, Piece]:
        """`columns` in small parts of work, with a pause after each. Between two of them other rows may run and the row
        may go on and move, as long as a ring keeps its columns; `slot` is where it is by now."""
        lo = min(max(lo, self._first_columns[slot()]), hi)
        if lo == hi:
            return Piece(hi, hi, ())
        if not host_is_device():
            return Piece(lo, hi, to_host([layer.columns(slot(), lo, hi) for layer in self.layers]))
        packing = Packing([layer.columns(slot(), lo, hi) for layer in self.layers])
        for index, layer in enumerate(self.layers):
            packing.take(index, layer.host_columns(slot(), lo, hi))
            yield
        return Piece(lo, hi, packing.stacks)

    def state(self, slot: int) -> State | None:
        """A copy of the row's recurrent state after its last token; None if the model has none."""
        stacks = to_host([layer.state(slot) for layer in self.layers])
        return State(self.lengths[slot], stacks) if stacks else None

    def fill(self, slot: int, hit: Hit) -> None:
        """Makes the row what it was when the hit's pieces were copied."""
        for _ in self.filling(lambda: slot, hit):
            pass

    def filling(self, slot: Callable[[], int], hit: Hit) -> Iterator[None]:
        """`fill` in small parts of work. Between two of them other rows may run, and the row may move: `slot` is where
        it is by now. It has its length from the start and may run after the last part."""
        self.lengths[slot()], self._first_columns[slot()] = hit.num_tokens, 0
        self._lose_columns(slot(), hit.num_tokens)
        self.pages.hold(slot(), hit.num_tokens, hit.num_tokens)
        return self._fill_layers(slot, hit)

    def _fill_layers(self, slot: Callable[[], int], hit: Hit) -> Iterator[None]:
        pieces, capacity = Unpacking(hit.pieces), self._capacity(hit.num_tokens + 1)
        for index, state in enumerate(states(hit.state, len(self.layers))):
            layer = self.layers[index]
            for _ in layer.reserve(capacity):
                yield
            layer.fill(slot(), pieces.columns(index, capacity), state, hit.num_tokens)
            # On a CPU what was joined for this layer is given back before the next one needs as much.
            if host_is_device():
                mx.eval(layer.arrays())
            yield

    def _lose_columns(self, slot: int, num_written: int) -> None:
        """Columns up to `num_written` were written, padding and rejected drafts included."""
        self._first_columns[slot] = max(self._first_columns[slot], num_written - self.num_kept_columns)

    def arrays(self) -> list[mx.array]:
        """Every buffer and what writes them, to be evaluated together with the step's outputs."""
        return [*(array for layer in self.layers for array in layer.arrays()), *self._writing.arrays()]

    def form(self) -> Hashable | None:
        """What a forward like the one that began can be compiled for, beside shapes of arrays; None if it cannot."""
        g = self.geometry
        if g is None or not g.array_offsets:
            return None
        forms: list[Hashable] = []
        for layer in self.layers:
            form = layer.form() if isinstance(layer, Columns) else None
            if form is None:
                return None
            forms.append(form)
        return g.group.lo, g.num_rows, self.num_slots, g.bucketed_span, tuple(forms)

    def put(self, arrays: Sequence[mx.array]) -> None:
        """Gives every layer its buffers, in the order of `arrays()`. Only where the forward has a form."""
        left = list(arrays)
        for layer in cast("Sequence[Columns]", self.layers):
            count = len(layer.arrays())
            layer.put(left[:count])
            del left[:count]

    @contextmanager
    def traced(self, offsets: mx.array, buffers: Sequence[mx.array]) -> Generator[None]:
        """The forward that began, while it is compiled: positions and buffers are inputs. What the layers hold is as
        before afterwards."""
        real, held = self.geometry, self.arrays()
        assert real is not None
        layers, geometry = cast("Sequence[Columns]", self.layers), TracedGeometry(real, offsets)
        self.put(buffers)
        for layer in layers:
            layer.geometry = geometry
        try:
            yield
        finally:
            self.put(held)
            for layer in layers:
                layer.geometry = real
            self._forget()

    def check_integrity(self) -> None:
        """Raises AssertionError if a buffer does not fit the slots. Called when idle in debug and in tests."""
        assert all(length >= 0 for length in self.lengths), self.lengths
        self.pages.check_integrity()
        for array in [array for layer in self.layers if not layer.paged for array in layer.arrays()]:
            assert array.shape[0] == self.num_slots, (array.shape, self.num_slots)


@dataclass(frozen=True, slots=True)
class RowView:
    """One row of a batch as a prefix store sees it (`RowKV`)."""

    batch: KVBatch
    slot: int
    since: int | None = None

    def columns(self, lo: int, hi: int) -> Piece:
        return self.batch.columns(self.slot, lo, hi)

    def state(self) -> State | None:
        return self.batch.state(self.slot)
