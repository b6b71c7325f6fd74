"""What a recurrent layer computed in a forward, so that it can stop earlier without running it again. Knows no graph.

    forward over T tokens          state before --[ t0 t1 t2 t3 ]--> state after
    row keeps two of them          state before --[ t0 t1 ]--> the recurrence alone runs again; no projection does

`models/tape.py` writes convolution inputs and recurrences of the forward in progress into the tape of the layer that
runs; the layer's layout says which of its arrays came from which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx

Rerun = Callable[[mx.array], mx.array]  # int32[rows] kept tokens -> the state after them


@dataclass(slots=True)
class Tape:
    """Of one layer and one forward of `width` tokens. `sources[i]` makes array i of the layer's state again."""

    width: int
    # Inputs [rows, tail + width, channels].
    convolutions: list[mx.array] = field(default_factory=list[mx.array])
    recurrences: list[tuple[mx.array, Rerun]] = field(default_factory=list[tuple[mx.array, Rerun]])
    arrays: dict[int, mx.array] = field(default_factory=dict[int, mx.array])  # what the graph stored

    def rewound(self, kept: mx.array) -> dict[int, mx.array] | None:
        """The layer's arrays after kept[row] tokens; None if one of them came from something else."""
        sources = {index: self._source(index, array) for index, array in self.arrays.items()}
        if not sources or None in sources.values():
            return None
        return {index: source(kept) for index, source in sources.items() if source is not None}

    @property
    def complete(self) -> bool:
        return bool(self.arrays) and all(self._source(i, a) is not None for i, a in self.arrays.items())

    def _source(self, index: int, array: mx.array) -> Rerun | None:
        for state, rerun in self.recurrences:
            if state is array:
                return rerun
        # The tails of several convolutions are stored in the order in which they run.
        tails = [i for i, a in sorted(self.arrays.items()) if not any(s is a for s, _ in self.recurrences)]
        place = tails.index(index)
        if len(tails) != len(self.convolutions):
            return None
        inputs = self.convolutions[place]
        if array.ndim != 3 or (inputs.shape[0], inputs.shape[2]) != (array.shape[0], array.shape[2]):
            return None
        num_tail = array.shape[1]
        if inputs.shape[1] != num_tail + self.width:
            return None
        return lambda kept: mx.take_along_axis(inputs, _columns(kept, num_tail), axis=1)


def _columns(kept: mx.array, num_tail: int) -> mx.array:
    """int32[rows, num_tail, 1]: where the tail after `kept` tokens lies in a convolution's input."""
    return (kept[:, None] + mx.arange(num_tail, dtype=mx.int32)[None])[..., None]


@dataclass(frozen=True, slots=True)
class Running:
    """The layer whose cache the graph touched last."""

    tape: Tape | None  # None: nothing of it need be kept
    lengths: mx.array | None  # int32[rows] real tokens of the forward, None = all


_running: list[Running | None] = [None]


def current() -> Running | None:
    return _running[0]


def make_current(running: Running | None) -> None:
    _running[0] = running
