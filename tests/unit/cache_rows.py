"""Rows whose KV is a function of their tokens, so that any hit can be checked without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mantou.cache.blocks import BLOCK
from mantou.kv.pieces import Piece, Stack, State
from mantou.protocols import CacheKey, Hit

KEY = CacheKey("model", (), "off", "none")
OTHER = CacheKey("model", ("adapter@1",), "off", "none")


def fingerprints(tokens: Sequence[int], key: CacheKey = KEY) -> np.ndarray:
    """uint32[n]: entry p depends on the key and on all tokens up to p."""
    value, found = sum(repr(key).encode()), []
    for token in tokens:
        value = (value * 1_000_003 + int(token) + 1) % (1 << 32)
        found.append(value)
    return np.array(found, np.uint32)


@dataclass
class Row:
    """`RowKV` of a computed prompt. `first_column`: a sliding window has overwritten what comes before."""

    tokens: Sequence[int]
    key: CacheKey = KEY
    recurrent: bool = False
    has_columns: bool = True
    first_column: int = 0
    width: int = 1
    since: int | None = None
    state_width: int = 1
    copied: list[tuple[int, int]] = field(default_factory=list)

    def columns(self, lo: int, hi: int) -> Piece:
        lo = min(max(lo, self.first_column), hi)
        self.copied.append((lo, hi))
        if not self.has_columns:
            return Piece(lo, hi, ())
        marks = fingerprints(self.tokens, self.key)[lo:hi]
        data = np.broadcast_to(marks[None, None, None, :, None], (2, 1, 1, hi - lo, self.width)).copy()
        half = np.broadcast_to(marks.astype(np.uint16)[:, None], (1, 1, 1, hi - lo, 2)).copy()
        return Piece(lo, hi, (Stack(data, "uint32", ((0, 0), (0, 1))), Stack(half, "bfloat16", ((1, 0),))))

    def state(self) -> State | None:
        if not self.recurrent:
            return None
        mark = fingerprints(self.tokens, self.key)[-1:]
        data = np.repeat(mark, self.state_width).reshape(1, 1, -1)
        return State(len(self.tokens), (Stack(data, "uint32", ((2, 0),)),))


def check(hit: Hit, tokens: Sequence[int], key: CacheKey = KEY, *, recurrent: bool = False) -> None:
    """The hit is what computing its tokens gives: every column, the state, and contiguous pieces within blocks."""
    assert 0 < hit.num_tokens < len(tokens)
    marks = fingerprints(tokens[: hit.num_tokens], key)
    position = 0
    for piece in hit.pieces:
        assert piece.lo == position and piece.lo // BLOCK == (piece.hi - 1) // BLOCK
        for stack in piece.stacks:
            expected = marks[piece.lo : piece.hi].astype(stack.data.dtype)
            assert stack.data.shape[-2] == len(expected)
            assert (stack.data == expected[:, None]).all()
        position = piece.hi
    assert position == hit.num_tokens
    if recurrent:
        assert hit.state is not None and hit.state.num_tokens == hit.num_tokens
        assert hit.state.stacks[0].data.item() == marks[-1]
