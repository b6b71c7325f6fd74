"""Hidden states between a graph's layers, for drafters that read several. Knows structure, no requests.

Only the layers that are asked for are wrapped; a model without such a drafter is not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mantou.errors import ModelError


class Taps:
    """What the tapped layers of the last forward gave, by their places."""

    def __init__(self, places: Sequence[int]) -> None:
        self.places = tuple(places)
        self._seen: dict[int, mx.array] = {}

    def keep(self, place: int, output: Any) -> None:
        self._seen[place] = output[0] if isinstance(output, tuple) else output

    def take(self) -> mx.array | None:
        """[B, T, D * number of taps], lazily; None if a tapped layer did not run."""
        seen, self._seen = self._seen, {}
        if len(seen) < len(set(self.places)):
            return None
        return mx.concatenate([seen[place] for place in self.places], axis=-1)


class TappedLayer(nn.Module):
    """A layer whose output is kept. Attributes of the layer show through."""

    def __init__(self, inner: Any, taps: Taps, place: int) -> None:
        super().__init__()
        self.inner = inner
        self._taps = taps
        self._place = place

    def __call__(self, *args: Any, **more: Any) -> Any:
        output = self.inner(*args, **more)
        self._taps.keep(self._place, output)
        return output

    def __getattr__(self, name: str) -> Any:
        if name in self or "inner" not in self:
            return super().__getattr__(name)
        return getattr(self["inner"], name)


def install(module: Any, places: Sequence[int]) -> Taps:
    """Taps the outputs of some of a graph's layers, and of no others any more.

    Raises ModelError if they are not a list in it.
    """
    remove(module)
    layers = list(module.layers)
    taps = Taps(places)
    for place in sorted(set(places)):
        holder = _holder(module, layers[place]) if 0 <= place < len(layers) else None
        if holder is None:
            raise ModelError(
                f"This draft head reads layer {place} of its model, which has {len(layers)} layers that can be read; "
                "choose the head that was trained for this model."
            )
        container, index = holder
        if (link := getattr(layers[place], "link", None)) is not None:
            link(False)  # a fused layer that waits for the next one gives no array
        container[index] = TappedLayer(layers[place], taps, place)
    return taps


def remove(module: Any) -> None:
    """Takes out all taps, whoever installed them."""
    for _, parent in module.named_modules():
        for child in parent.values():
            if isinstance(child, list):
                child[:] = [_untapped(member) for member in child]


def _untapped(layer: Any) -> Any:
    while isinstance(layer, TappedLayer):
        layer = layer.inner
    return layer


def _holder(module: nn.Module, layer: Any) -> tuple[list[Any], int] | None:
    """The list in the graph that holds a layer, and where."""
    for _, parent in module.named_modules():
        for child in parent.values():
            if isinstance(child, list):
                for index, member in enumerate(child):
                    if member is layer:
                        return child, index
    return None
