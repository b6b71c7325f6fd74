"""Decoder layers in a row as few primitives. Knows layers that borrow row buffers, no weights and no graphs.

A graph hands the hidden state from one layer to the next, and each primitive of a step costs 10 us on a CPU. So a fused
layer may return a `Chain` instead of an array: the layers that are still to run. The last one runs them all. That is
only done where a trial run of the graph showed that nothing looks at what passes between them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from mantou.models.ops.extension import kernels

# Each result of a node keeps all its inputs, so that the cost of a node grows with the square of its layers: a stack of
# 30 would spend more on that than the nodes it saves.
_LAYERS_A_NODE = 6


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
        try:
            for one in waiting:
                loan = _loan(self._x, one)
                if loan is None:
                    group = _Group(one.layer.as_block(group.run(), one.mask, one.cache))
                    continue
                if not group.takes(loan):
                    group = _Group(group.run())
                group.add(one, loan)
            return group.run()
        except Exception:  # whatever it is: the buffers on loan go back, and it goes on to whoever asked
            group.abandon()
            raise


def _loan(x: mx.array, one: _Waiting) -> Any:
    lend = getattr(one.cache, "lend", None)  # a cache of mlx-lm's own lends nothing
    if lend is None or x.dtype != one.layer.dtype:
        return None
    return lend(x, one.mask, one.layer.kv_heads, one.layer.head_dim)


class _Group:
    """Layers of one primitive, whose buffers are on loan, and the hidden state that they are applied to."""

    def __init__(self, x: mx.array) -> None:
        self._x = x
        self._members: list[tuple[_Waiting, Any]] = []  # with their loans

    def takes(self, loan: Any) -> bool:
        if not self._members:
            return True
        return len(self._members) < _LAYERS_A_NODE and loan.terms is self._members[0][1].terms

    def add(self, one: _Waiting, loan: Any) -> None:
        self._members.append((one, loan))

    def run(self) -> mx.array:
        """Afterwards nothing here holds the buffers that went in: the primitive writes in place."""
        if not self._members:
            return self._x
        first = self._members[0][1]
        terms = first.terms
        y, *results = kernels.layers(
            self._x,
            [one.layer.layer for one, _ in self._members],
            [
                [*loan.keys[:1], *loan.values[:1], *loan.keys[1:], *loan.values[1:]]
                for _, loan in self._members
            ],
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
        members, self._members = self._members, []
        half = len(first.keys) - 1  # parts beside the integers: scales and biases
        each = 2 + 2 * half
        for i, (one, _) in enumerate(members):
            key, value, *rest = results[i * each : (i + 1) * each]
            one.cache.take_back((key, *rest[:half]), (value, *rest[half:]), one.layer.dtype)
        return y

    def abandon(self) -> None:
        """The buffers go back as they were."""
        for one, loan in self._members:
            one.cache.take_back(loan.keys, loan.values, one.layer.dtype)
        self._members = []
