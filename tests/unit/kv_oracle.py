"""What a batch of rows must hold, in plain Python, and what attention sees of the layouts. Knows no engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mantou.kv.delayed import Delayed
from mantou.kv.layouts import FullRows, WindowRing
from mantou.kv.paged import PagedRows
from mantou.kv.pages import Pages
from mantou.kv.pieces import Piece
from mantou.kv.plan import LayerCodec, alike
from mantou.kv.recurrent import RecurrentState
from mantou.protocols import KVCodec

WINDOW, SLACK = 5, 12
START = 9  # from which on delayed rows are packed
HEADS, DIM = 2, 32
PRIME = 1009  # of the recurrence: states stay exact in float32


def layouts(codec: KVCodec, num_slots: int) -> list[Any]:
    return [
        FullRows(alike(codec), num_slots),
        WindowRing(alike(codec), num_slots, WINDOW, SLACK),
        RecurrentState(1, num_slots),
        Delayed(lambda inner: FullRows(inner, num_slots), _delayed(codec)),
        Delayed(lambda inner: WindowRing(inner, num_slots, WINDOW, SLACK), _delayed(codec)),
    ]


def paged_layouts(codec: KVCodec, num_slots: int, pages: Pages) -> list[Any]:
    """The same, full rows in blocks."""
    below, delayed = pages.below(START), _delayed(codec)
    return [
        PagedRows(alike(codec), pages),
        *layouts(codec, num_slots)[1:3],
        Delayed(lambda inner: PagedRows(inner, below if inner is delayed.below else pages), delayed),
        layouts(codec, num_slots)[4],
    ]


def _delayed(codec: KVCodec) -> LayerCodec:
    """Stored as before beyond the threshold too, so that what attention sees stays exact."""
    return LayerCodec(codec, codec, start=START, below=alike(codec))


def recurrence(state: int, token: int) -> int:
    return (state * 3 + token) % PRIME


@dataclass
class Row:
    """What a slot holds, by the oracle: the tokens fed and kept."""

    tokens: list[int] = field(default_factory=list)
    pieces: tuple[Piece, ...] = ()  # copies of the first `num_copied` tokens' keys and values
    num_copied: int = 0

    def copy(self) -> Row:
        return Row(list(self.tokens), self.pieces, self.num_copied)

    @property
    def state(self) -> int:
        state = 0
        for token in self.tokens:
            state = recurrence(state, token)
        return state


def as_keys(tokens: np.ndarray) -> mx.array:
    """[rows, HEADS, width, DIM]; the heads differ, so that a mix-up of the axes is seen."""
    heads = np.arange(HEADS, dtype=np.float32)[None, :, None, None] * 0.5
    rows, width = tokens.shape
    return mx.array(np.broadcast_to(tokens[:, None, :, None] + heads, (rows, HEADS, width, DIM)))


def visible(mask: Any, row: int, t: int, width: int, span: int) -> np.ndarray:
    """bool[span]: the columns that query t of a row sees, by the meaning that graphs give to the mask."""
    if mask is None:
        return np.ones(span, np.bool_)
    if isinstance(mask, str):
        assert mask == "causal"
        return np.arange(span) <= span - width + t
    plane = np.array(mask)
    return plane[row if plane.shape[0] > 1 else 0, 0, t]


def attention_sees(layer: Any, tokens: np.ndarray) -> list[list[list[float]]]:
    """What each query of each row sees: the values in its visible columns, sorted. Checks the values as well."""
    mask = layer.make_mask(tokens.shape[1])
    keys, values = layer.update_and_fetch(as_keys(tokens), -as_keys(tokens))
    found_keys, found_values = np.array(keys), np.array(values)
    assert (found_keys == -found_values).all()
    assert (found_keys[:, 1] == found_keys[:, 0] + 0.5).all() or not found_keys[:, 0].all()
    again = layer.keys_and_values()
    assert (np.array(again[0]) == found_keys).all()
    rows, width = tokens.shape
    span = found_keys.shape[2]
    return [
        [sorted(found_keys[row, 0, visible(mask, row, t, width, span), 0].tolist()) for t in range(width)]
        for row in range(rows)
    ]


def advance(layer: RecurrentState, tokens: np.ndarray) -> None:
    """What a graph with a recurrence does."""
    rows, width = tokens.shape
    mask = layer.make_mask(width)
    if layer.lengths is not None:
        assert np.array(mask).sum(axis=1).tolist() == layer.lengths.tolist()
    state = layer[0]
    state = mx.zeros((rows, 1)) if state is None else state
    for t in range(width):
        new = (state * 3 + mx.array(tokens[:, t : t + 1])) % PRIME
        state = new if mask is None else mx.where(mask[:, t : t + 1], new, state)
    layer[0] = state
    layer.advance(width)
