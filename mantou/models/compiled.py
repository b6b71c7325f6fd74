"""Forwards of few tokens as compiled functions, one a shape: the graph is built once and not in every step. Knows the
KV batch, no requests.

Building a step costs the host 2 to 5 us an operation, and a GPU waits for it where rows are few (docs/adr/016). What
changes from step to step is an input: tokens, positions, buffers. A graph that asks for a host length while it is
traced gets an error, and is built step by step as before.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mantou.kv.batch import KVBatch
from mantou.protocols import Group

log = logging.getLogger(__name__)

MAX_WIDTH = 16  # tokens a row: decoding and drafts. A prompt's chunk has enough to compute
WORTH_IT = 8  # steps of a shape before it is compiled, which takes as long as some ten steps
MOST_SHAPES = 32
# Columns of a single row up to which attention with a mask costs less than building the step.
MAX_LONE_SPAN = 1024

# tokens int32[rows, width], and int32[rows, K] of which positions' logits are wanted -> logits, and what else is kept
Forward = Callable[[mx.array, mx.array | None], Sequence[mx.array]]


def in_one_form(group: Group, start: int) -> bool:
    """Whether a step's rows go by masks wherever they begin. Rows of one length need none, but have a new shape in
    every step, which an H200 pays for with 7 ms a step of 8 rows. A single row without a mask has kernels of its own,
    four times as fast at 8k columns."""
    return group.width <= MAX_WIDTH and (len(group.num_tokens) > 1 or start + group.width <= MAX_LONE_SPAN)


@dataclass(slots=True)
class _Shape:
    seen: int = 0
    run: Callable[..., Sequence[mx.array]] | None = None


class CompiledSteps:
    """Runs `forward` over a KV batch between its `begin` and `commit`, compiled where a shape comes again and again."""

    def __init__(self, forward: Forward, kv: KVBatch) -> None:
        self._forward = forward
        self._kv = kv
        self._shapes: OrderedDict[Hashable, _Shape] = OrderedDict()
        self.off: str | None = None  # why nothing is compiled any more

    @property
    def num_compiled(self) -> int:
        return sum(shape.run is not None for shape in self._shapes.values())

    def __call__(self, tokens: mx.array, wanted: mx.array | None) -> Sequence[mx.array]:
        """What `forward` gives. The layers hold their new buffers."""
        shape = self._shape(tokens, wanted)
        if shape is None:
            return self._forward(tokens, wanted)
        try:
            if shape.run is None:
                shape.run = mx.compile(self._traced)
            return self._run(shape.run, tokens, wanted)
        except (RuntimeError, ValueError) as error:  # MLX's own, or a HostLengthError
            self.off = f"the graph cannot be compiled ({str(error).strip().splitlines()[0][:160]})"
            log.warning("steps are built one by one: %s", self.off)
            self._shapes.clear()
            return self._forward(tokens, wanted)

    def forget(self) -> None:
        """The graph is another from now on."""
        self._shapes.clear()

    def _shape(self, tokens: mx.array, wanted: mx.array | None) -> _Shape | None:
        """Its entry, if this step is to run compiled."""
        if self.off is not None or tokens.shape[1] > MAX_WIDTH:
            return None
        key = self._kv.form()
        if key is None:
            return None
        key = tokens.shape[1], 0 if wanted is None else wanted.shape[1], key
        shape = self._shapes.setdefault(key, _Shape())
        self._shapes.move_to_end(key)
        while len(self._shapes) > MOST_SHAPES:
            self._shapes.popitem(last=False)
        shape.seen += 1
        return shape if shape.seen > WORTH_IT else None

    def _run(
        self, run: Callable[..., Sequence[mx.array]], tokens: mx.array, wanted: mx.array | None
    ) -> Sequence[mx.array]:
        geometry = self._kv.geometry
        assert geometry is not None
        buffers = self._kv.arrays()
        results = run(tokens, wanted, geometry.offsets, *buffers)
        num_results = len(results) - len(buffers)
        self._kv.put(results[num_results:])
        return results[:num_results]

    def _traced(
        self, tokens: mx.array, wanted: mx.array | None, offsets: mx.array, *buffers: mx.array
    ) -> Sequence[mx.array]:
        with self._kv.traced(offsets, buffers):
            results = self._forward(tokens, wanted)
            return [*results, *self._kv.arrays()]
