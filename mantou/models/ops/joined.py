"""Linear layers that read one input, as one matrix product: their calls share it. Knows names of children, no graph.

On CUDA a product costs the host 17 to 30 us from two rows on, whatever its size, and a decode step of few rows waits
for the host. The layers stay in the graph: the first to be called multiplies for all of them, the others take their
share, known by the input being the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_PARTS = ("weight", "scales", "biases", "bias")


class Joined:
    """The weights of some layers as one layer's, and the product that is being handed out.

    The layers' own weights become views of it. A layer that was given other weights since multiplies on its own, and
    so do all where a graph does not call every one of them with each input: a joint product would be work for nothing.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._whole: Any = copy(layers[0])
        self._ends = list(accumulate(layer["weight"].shape[0] for layer in layers))
        for name in _PARTS:
            if name not in layers[0] or layers[0][name] is None:
                continue
            whole = mx.concatenate([layer[name] for layer in layers])
            views = mx.split(whole, self._ends[:-1])
            mx.eval(whole, views)
            self._whole[name] = whole
            for layer, view in zip(layers, views, strict=True):
                layer[name] = view
        self._weights = [layer["weight"] for layer in layers]
        self._x: mx.array | None = None
        self._shares: list[mx.array | None] = []
        self._useless = 0  # products of which not every layer took its share, in a row

    def share(self, index: int, layer: nn.Module, x: mx.array) -> mx.array | None:
        """What layer `index` makes of x; None if it has to multiply on its own."""
        if self._useless > 1 or layer["weight"] is not self._weights[index]:
            return None
        if self._x is not x or self._shares[index] is None:
            self._useless = self._useless + 1 if self._x is not None else 0
            self._x = x
            self._shares = list(mx.split(self._whole(x), self._ends[:-1], axis=-1))
        mine, self._shares[index] = self._shares[index], None
        if not any(share is not None for share in self._shares):
            self._x, self._useless = None, 0
        return mine


def join(model: nn.Module, kinds: Sequence[type], retype: Callable[[Any, Joined, int], None]) -> None:
    """Joins all siblings that are alike and of one of `kinds`; `retype` makes a layer ask for its share."""
    for _, parent in model.named_modules():
        for names in SIBLINGS:
            layers = [parent[name] for name in names if name in parent]
            if len(layers) == len(names) and type(layers[0]) in kinds and _alike(layers):
                joined = Joined(layers)
                for index, layer in enumerate(layers):
                    retype(layer, joined, index)


def _alike(layers: Sequence[Any]) -> bool:
    def form(layer: Any) -> tuple[Any, ...]:
        parts = [(n, layer[n].dtype, layer[n].shape[1:]) for n in _PARTS if layer.get(n) is not None]
        return type(layer), *parts, *(getattr(layer, name, None) for name in ("group_size", "bits", "mode"))

    distinct = len({id(layer) for layer in layers}) == len(layers)
    return distinct and all(form(layer) == form(layers[0]) for layer in layers)
