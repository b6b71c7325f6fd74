"""From a graph's caches to layouts: what each place of its list holds. Knows mlx-lm's cache classes by name only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from mantou.kv.blocks import PAGEABLE
from mantou.kv.chunked import ChunkedRing, DelayedChunks, Member
from mantou.kv.delayed import Delayed
from mantou.kv.layouts import FullRows, Layout, Rows, WindowRing
from mantou.kv.paged import PagedRows
from mantou.kv.pages import Pages
from mantou.kv.plan import KVPlan, LayerCodec
from mantou.kv.recurrent import RecurrentState
from mantou.kv.shapes import ALL, LayerShape

# mlx-lm's cache class -> our name of the layout
KINDS = {
    "KVCache": "full",
    "RotatingKVCache": "window",
    "ChunkedKVCache": "chunked",
    "ArraysCache": "recurrent",
}

Recurrent = type[RecurrentState]


# ------------------------------------------------------------------ what a graph asks for
def measure(module: Any, caches: Sequence[Any]) -> tuple[LayerShape, ...]:
    """Runs one token through the graph without computing it, and reads what its fresh caches were given.

    A cache of an unknown class has its class name as layout. The graph is not run then.
    """
    places = list(_places(caches))
    kinds = [KINDS.get(type(cache).__name__) for _, cache, _ in places]
    if None in kinds:
        return tuple(
            LayerShape(layer, type(cache).__name__, listed=listed) for layer, cache, listed in places
        )
    seen = [_Seen(cache) for _, cache, _ in places]
    module(mx.array([[0]], dtype=mx.int32), cache=list(caches))
    found = zip(places, kinds, seen, strict=True)
    return tuple(use.shape(layer, kind or "", listed) for (layer, _, listed), kind, use in found)


def _places(caches: Sequence[Any]) -> Iterator[tuple[int, Any, bool]]:
    """(place in the list, cache, whether it shares the place) of every single cache."""
    for layer, cache in enumerate(caches):
        listed = type(cache).__name__ == "CacheList"
        for member in cache.caches if listed else (cache,):
            yield layer, member, listed


class _Seen:
    """What one of mlx-lm's caches is given."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        update = getattr(cache, "update_and_fetch", None)

        def watch(keys: mx.array, values: mx.array) -> Any:
            # An index stores its keys twice, or beside values of no width: nobody reads those.
            self.keys, self.values = keys, None if values is keys or not values.shape[-1] else values
            return update(keys, values) if update else None

        if update is not None:
            cache.update_and_fetch = watch

    def shape(self, layer: int, kind: str, listed: bool) -> LayerShape:
        if kind == "recurrent":
            state = [array for array in self.cache.cache if array is not None]
            return LayerShape(
                layer,
                kind,
                state_bytes=sum(array.nbytes for array in state),
                num_arrays=len(self.cache.cache),
                listed=listed,
            )
        return LayerShape(
            layer,
            "keys" if self.keys is not None and self.values is None else kind,
            keys=_heads(self.keys),
            values=_heads(self.values),
            itemsize=4 if self.keys is None else self.keys.dtype.size,
            num_columns=getattr(self.cache, "max_size", None)
            or getattr(self.cache, "chunk_size", None)
            or ALL,
            listed=listed,
        )


def _heads(array: mx.array | None) -> tuple[int, int]:
    return (0, 0) if array is None else (array.shape[1], array.shape[3])


def layout_names(shapes: Sequence[LayerShape]) -> dict[str, int]:
    """How many caches have which layout, e.g. {"full": 4, "window": 20}."""
    counts: dict[str, int] = {}
    for shape in shapes:
        counts[shape.layout] = counts.get(shape.layout, 0) + 1
    return counts


# ------------------------------------------------------------------ what it gets
LayoutFactory = Callable[[LayerShape, LayerCodec, int, int], Rows]  # shape, codec, num_slots, slack


def _full(shape: LayerShape, codec: LayerCodec, num_slots: int, slack: int) -> Rows:
    return FullRows(codec, num_slots)


def _window(shape: LayerShape, codec: LayerCodec, num_slots: int, slack: int) -> Rows:
    return WindowRing(codec, num_slots, shape.num_columns, slack)


def _chunked(shape: LayerShape, codec: LayerCodec, num_slots: int, slack: int) -> Rows:
    return ChunkedRing(codec, num_slots, shape.num_columns, slack)


LAYOUTS: dict[str, LayoutFactory] = {"full": _full, "keys": _full, "window": _window, "chunked": _chunked}


def make_layouts(
    plan: KVPlan, num_slots: int, slack: int, recurrent: Recurrent, pages: Pages | None = None
) -> list[Layout]:
    """One layout for each shape of the plan; `recurrent` is the class that the graph takes for a state. With `pages`
    layers that keep the whole context share a pool each."""

    def make(shape: LayerShape, codec: LayerCodec) -> Layout:
        if shape.layout == "recurrent":
            return recurrent(shape.num_arrays, num_slots)
        factory = LAYOUTS[shape.layout]
        if pages is not None and shape.layout in PAGEABLE:
            if not codec.start:
                return PagedRows(codec, pages)
            whole, below = pages, pages.below(codec.start)
            return Delayed(lambda inner: PagedRows(inner, below if inner is codec.below else whole), codec)
        if not codec.start:
            return factory(shape, codec, num_slots, slack)
        delayed = DelayedChunks if shape.layout == "chunked" else Delayed
        return delayed(lambda inner: factory(shape, inner, num_slots, slack), codec)

    return [make(shape, codec) for shape, codec in zip(plan.shapes, plan.codecs, strict=True)]


def arrange(shapes: Sequence[LayerShape], layouts: Sequence[Layout]) -> list[Any]:
    """The layouts as the graph's list of caches: those that share a place as a tuple."""
    caches: list[Any] = []
    for shape, layout in zip(shapes, layouts, strict=True):
        if not shape.listed:
            caches.append(layout)
            continue
        if shape.layer == len(caches):
            caches.append(())
        caches[shape.layer] += (Member(layout) if isinstance(layout, Rows | Delayed) else layout,)
    return caches
