"""One forward of a group of rows over the KV batch. Knows token ids, slots and positions; no requests, no sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from mantou.kv.batch import KVBatch
from mantou.kv.geometry import WriteRows, no_write_rows
from mantou.kv.layouts import FullRows, Layout, WindowRing
from mantou.kv.recurrent import RecurrentState
from mantou.models.device import release_thread
from mantou.models.head import Selection, install
from mantou.models.load import LoadedModel, arrays_cache
from mantou.protocols import Group, KVCodec

# Columns of a ring beyond its window. The place of a position in the ring decides the order in which attention sums it,
# so the size is the same for every usual chunk: equal requests give equal bits on servers with different chunks.
RING_SLACK = 512

LayoutFactory = Callable[[Any, KVCodec, int, int], Layout]  # cache, codec, num_slots, slack


def _full(cache: Any, codec: KVCodec, num_slots: int, slack: int) -> Layout:
    return FullRows(codec, num_slots)


def _window(cache: Any, codec: KVCodec, num_slots: int, slack: int) -> Layout:
    return WindowRing(codec, num_slots, int(cache.max_size), slack)


@cache
def _recurrent_class() -> type[RecurrentState]:
    # mamba's graph stores its state only in instances of mlx-lm's own class.
    return type("RecurrentState", (RecurrentState, arrays_cache()), {})


def _recurrent(cache: Any, codec: KVCodec, num_slots: int, slack: int) -> Layout:
    return _recurrent_class()(len(cache.cache), num_slots)


# mlx-lm's cache class -> (name in tables, layout)
LAYOUTS: dict[str, tuple[str, LayoutFactory]] = {
    "KVCache": ("full", _full),
    "RotatingKVCache": ("window", _window),
    "ArraysCache": ("recurrent", _recurrent),
}


def layout_names(caches: Sequence[Any]) -> dict[str, int]:
    """How many layers have which layout, e.g. {"full": 4, "window": 20}."""
    counts: dict[str, int] = {}
    for kind in (type(layer_cache).__name__ for layer_cache in caches):
        name = LAYOUTS[kind][0] if kind in LAYOUTS else kind
        counts[name] = counts.get(name, 0) + 1
    return counts


class Runner:
    """Owns the graph and its KV batch.

    `max_width` bounds the tokens a row may feed in one forward; attention over ragged rows reads a multiple of
    `span_step` columns.
    """

    def __init__(
        self,
        model: LoadedModel,
        codec: KVCodec,
        *,
        max_width: int = 512,
        span_step: int = 1,
        ring_slack: int = RING_SLACK,
        write_rows: WriteRows = no_write_rows,
    ) -> None:
        family, caches = model.family, model.caches
        self.model = model
        self.max_width = max_width
        self.ragged_widths = family.ragged_widths
        self.ragged_offsets = family.ragged_offsets
        self.recurrent = "recurrent" in layout_names(model.caches)
        self.kv = KVBatch(
            lambda num_slots: [
                LAYOUTS[type(cache).__name__][1](cache, codec, num_slots, max(max_width, ring_slack))
                for cache in caches
            ],
            array_offsets=family.ragged_offsets,
            mask_axes=family.mask_axes,
            span_step=span_step,
            write_rows=write_rows,
        )
        self._selection: Selection | None = install(model.module)

    def forward(
        self, group: Group, tokens: Sequence[Sequence[int]] | mx.array, wanted: Sequence[int] | None
    ) -> tuple[mx.array, mx.array]:
        """Builds a forward. Returns (tokens int32[rows, width], logits [rows, K, V]).

        `tokens` are each row's tokens, or the device array int32[rows, 1] of the last draw. `wanted` names one position
        a row (K = 1); None wants all (K = width). The KV holds the new tokens once `kv.commit` was called.
        """
        if not isinstance(tokens, mx.array):
            padded = np.zeros((len(tokens), group.width), np.int32)
            for row, known in enumerate(tokens):
                padded[row, : len(known)] = known
            tokens = mx.array(padded)
        self.kv.begin(group)
        if wanted is None or group.width == 1:
            return tokens, self.model.module(tokens, cache=self.kv.layers)
        index = mx.array(list(wanted), dtype=mx.int32)[:, None]
        if self._selection is None:
            logits = self.model.module(tokens, cache=self.kv.layers)
            return tokens, mx.take_along_axis(logits, index[..., None], axis=1)
        self._selection.index = index
        try:
            return tokens, self.model.module(tokens, cache=self.kv.layers)
        finally:
            self._selection.index = None

    def launch(self, draw: Any | None) -> None:
        """Starts the device on the draw, if there is one, and on the KV. Does not wait."""
        mx.async_eval(draw.arrays() if draw is not None else [], self.kv.arrays())

    def wait(self) -> None:
        """Until the KV is computed."""
        mx.eval(self.kv.arrays())

    def replay(self, group: Group, tokens: mx.array, kept: Sequence[int]) -> None:
        """Runs a rejected verify forward again, so that recurrent layers hold `kept` tokens a row and no more."""
        width = group.width
        if (
            not self.ragged_widths
        ):  # such a group holds rows of one width, so the kept part is a group as well
            tokens, width = tokens[:, : max(kept)], max(kept)
        masked = Group(group.lo, width, tuple(kept))
        self.kv.begin(masked)
        self.model.module(tokens, cache=self.kv.layers)
        self.kv.commit(masked, kept)

    def abort(self) -> None:
        self.kv.abort()

    def close(self) -> None:
        """Frees graph and KV. The last thing on the thread that ran them."""
        self.kv.resize(0)
        del self.model
        release_thread()
