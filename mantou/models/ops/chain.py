"""Decoder layers in a row as few primitives. Knows layers that borrow row buffers, no weights and no graphs.

A graph hands the hidden state from one layer to the next, and each primitive of a step costs 10 us on a CPU. So a fused
layer may return a `Chain` instead of an array: the layers that are still to run. The last one runs them all. That is
only done where a trial run of the graph showed that nothing looks at what passes between them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from mantou.models.ops.extension import kernels


class ChainedLayer(Protocol):
    """A layer that is one primitive where its cache lends its buffers, and a block elsewhere."""

    @property
    def layer(self) -> Any:
        """Of kernels.make_layer."""
        ...

    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> mx.Dtype: ...
    def as_block(self, x: mx.array, mask: Any, cache: Any) -> mx.array: ...


class _Waiting(NamedTuple):
    layer: ChainedLayer
    mask: Any
    cache: Any


class Chain:
    """A hidden state, and layers that wait to be applied to it."""

    def __init__(self, x: mx.array) -> None:
        self._x = x
        self._waiting: list[_Waiting] = []

    def add(self, layer: ChainedLayer, mask: Any, cache: Any) -> None:
        self._waiting.append(_Waiting(layer, mask, cache))

    def run(self) -> mx.array:
        waiting, self._waiting = self._waiting, []
        group = _Group(self._x)
        for one in waiting:
            loan = _loan(self._x, one)
            if loan is None:
                group = _Group(one.layer.as_block(group.run(), one.mask, one.cache))
                continue
            if not group.takes(loan):
                group = _Group(group.run())
            group.add(one.layer, loan)
        return group.run()


def _loan(x: mx.array, one: _Waiting) -> Any:
    lend = getattr(one.cache, "lend", None)  # a cache of mlx-lm's own lends nothing
    if lend is None or x.dtype != one.layer.dtype:
        return None
    return lend(x, one.mask, one.layer.kv_heads, one.layer.head_dim)


class _Group:
    """Layers of one primitive, with the buffers lent to it, and the hidden state that they are applied to."""

    def __init__(self, x: mx.array) -> None:
        self._x = x
        self._layers: list[Any] = []
        self._loans: list[Any] = []

    def takes(self, loan: Any) -> bool:
        return not self._loans or loan.terms is self._loans[0].terms

    def add(self, layer: ChainedLayer, loan: Any) -> None:
        self._layers.append(layer.layer)
        self._loans.append(loan)

    def run(self) -> mx.array:
        if not self._loans:
            return self._x
        terms = self._loans[0].terms
        y = kernels.layers(
            self._x,
            self._layers,
            [[*k[:1], *v[:1], *k[1:], *v[1:]] for k, v, _ in self._loans],
            terms.start,
            count=terms.count,
            mask=terms.mask,
            first_slot=terms.first_slot,
            window=terms.window,
            ring=terms.ring,
            bits=terms.groups.bits,
            group=terms.groups.group_size,
            table=terms.table,
            block=terms.block,
        )
        terms.writing.begin(y)
        return y
