"""Blocks of a prompt: their addresses, and joining their host bytes. Knows no tiers and no eviction.

A prompt is cut at multiples of BLOCK. The address of a prefix is a chain of SHA-256 over (address of the whole blocks
before, tokens of the last block); the chain starts at the CacheKey. Equal addresses mean equal tokens under equal
keys, whoever computed them, so conversations share blocks and a block can be found again after a restart.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from mantou.kv.pieces import Piece, Stack, State
from mantou.protocols import CacheKey, Hit

BLOCK = 256

Tokens = npt.NDArray[np.int32]


def as_tokens(tokens: Sequence[int] | Tokens) -> Tokens:
    """int32[n]; the same array if it is one already."""
    return np.asarray(tokens, dtype=np.int32)


def common_length(a: Tokens, b: Tokens) -> int:
    """How many tokens two sequences share at their start."""
    size = min(len(a), len(b))
    differing = np.flatnonzero(a[:size] != b[:size])
    return int(differing[0]) if differing.size else size


def key_text(key: CacheKey) -> str:
    """One text for each key, the same in every process."""
    return json.dumps(asdict(key), sort_keys=True)


def root_address(key: CacheKey) -> bytes:
    return hashlib.sha256(b"mantou prefix 1\0" + key_text(key).encode()).digest()


def address(parent: bytes, tokens: Tokens) -> bytes:
    """Of the prefix that ends with `tokens`, the last block; `parent` is the address of the whole blocks before it."""
    return hashlib.sha256(parent + tokens.astype("<i4", copy=False).tobytes()).digest()


@dataclass(frozen=True, slots=True)
class Span:
    """One block of a prompt, or the part of it that the prompt reaches: positions [lo, lo + len(tokens))."""

    parent: bytes
    address: bytes
    lo: int
    tokens: Tokens

    @property
    def hi(self) -> int:
        return self.lo + len(self.tokens)


def spans(key: CacheKey, tokens: Tokens) -> Iterator[Span]:
    """The blocks of `tokens` in order; only the last one may be shorter than BLOCK."""
    parent = root_address(key)
    for lo in range(0, len(tokens), BLOCK):
        part = tokens[lo : lo + BLOCK]
        span = Span(parent, address(parent, part), lo, part)
        yield span
        parent = span.address


def join(pieces: Sequence[Piece]) -> Piece:
    """Contiguous pieces as one; a single one is returned as it is."""
    if len(pieces) == 1:
        return pieces[0]
    return Piece(pieces[0].lo, pieces[-1].hi, join_stacks([piece.stacks for piece in pieces]))


def join_stacks(parts: Sequence[tuple[Stack, ...]]) -> tuple[Stack, ...]:
    """The same of their stacks."""
    if len(parts) == 1:
        return parts[0]
    return tuple(
        Stack(np.concatenate([stack.data for stack in same], axis=-2), same[0].dtype, same[0].members)
        for same in zip(*parts, strict=True)
    )


@dataclass(frozen=True, slots=True)
class HeldRow:
    """A hit seen as a row (`RowKV`), so that moving KV between tiers is `put` like everything else."""

    hit: Hit
    since: int | None = None  # a state that memory kept is of use

    def pieces(self, lo: int, hi: int) -> list[Piece]:
        """Positions [lo, hi), from a later `lo` where the hit does not reach back so far; without a copy."""
        return [
            piece.cut(max(lo, piece.lo), min(hi, piece.hi))
            for piece in self.hit.pieces
            if piece.lo < hi and piece.hi > lo
        ]

    def columns(self, lo: int, hi: int) -> Piece:
        """The same as one piece; copies only to join."""
        found = self.pieces(lo, hi)
        return join(found) if found else Piece(hi, hi, ())

    def state(self) -> State | None:
        return self.hit.state
