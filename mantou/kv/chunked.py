"""Layers that attend within fixed chunks of the context, and caches that share a place. Knows no requests."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mantou.kv.delayed import Delayed
from mantou.kv.layouts import Rows, WindowRing
from mantou.kv.plan import LayerCodec


class ChunkedRing(WindowRing):
    """A ring for graphs that make their own mask over the positions from `start_position` on, in order.

    Chunks end at fixed positions, so what a query needs of the past is less than one chunk: a ring of chunk + slack
    columns holds it. Once it has wrapped, a fetch puts the columns back in order.
    """

    def __init__(self, codec: LayerCodec, num_slots: int, chunk: int, slack: int) -> None:
        super().__init__(codec, num_slots, chunk, slack)

    @property
    def start_position(self) -> int:
        """The first position that the next `update_and_fetch` gives."""
        return max(self.geometry.end - self.size, 0) if self._wrapped else 0

    def maybe_trim_front(self) -> None:
        pass  # the ring overwrites what is out of reach

    def form(self) -> None:
        """The graph asks for positions on the host."""

    def _fetch(self, span: int) -> tuple[mx.array, mx.array]:
        keys, values = super()._fetch(span)
        if not self._wrapped:
            return keys, values
        end = self.geometry.end
        order = mx.arange(max(end - self.size, 0), end) % self.size
        return mx.take(keys, order, axis=2), mx.take(values, order, axis=2)


class DelayedChunks(Delayed):
    """The same, native below a threshold. Rows of such graphs run at equal lengths, so one of the two is read."""

    @property
    def start_position(self) -> int:
        assert isinstance(self.packed, ChunkedRing)
        return self.packed.start_position

    def maybe_trim_front(self) -> None:
        pass


class Member:
    """One of several caches in one place of the graph's list.

    Some graphs hang dependencies on `keys` and `values`, so that an unread buffer is evaluated. Here every step
    evaluates all buffers, so what they hang is dropped.
    """

    def __init__(self, layout: Rows | Delayed) -> None:
        self._layout = layout
        self._nothing = mx.zeros(())

    @property
    def offset(self) -> mx.array | int:
        return self._layout.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self._layout.update_and_fetch(keys, values)

    def make_mask(self, *args: Any, **options: Any) -> mx.array | str | None:
        return self._layout.make_mask(*args, **options)

    @property
    def keys(self) -> mx.array:
        return self._nothing

    @keys.setter
    def keys(self, hung: mx.array) -> None:
        pass

    @property
    def values(self) -> mx.array:
        return self._nothing

    @values.setter
    def values(self, hung: mx.array) -> None:
        pass
