"""Drafts that come as a block: one forward guesses all places, and the head says how many are worth checking.

A row's places in the KV hold its true hidden states, as for any head; the block stands behind them and is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import mlx.core as mx

from mantou.data import Draft, DraftAsk, Request
from mantou.protocols import Group
from mantou.spec.heads.provider import HeadDraft, HeadGraph

_LEAST = 0.4  # a guess that is less likely right ends the draft before it


class BlockGraph(HeadGraph, Protocol):
    """A head whose `__call__` only takes hidden states in."""

    block_size: int

    @property
    def most(self) -> int:
        """Guesses in a block."""
        ...

    def block(self, last: mx.array) -> mx.array: ...
    def scores(self, features: mx.array, before: mx.array) -> mx.array: ...
    def confidence(self, features: mx.array, before: mx.array) -> mx.array | None: ...


class BlockDraft(HeadDraft[BlockGraph]):
    """The provider over a `BlockGraph`."""

    @classmethod
    def _linked(cls, graph: BlockGraph, features: mx.array, rows: int) -> mx.array:
        """A block comes after what is true, whatever the width of the draft."""
        mx.eval(features)
        graph.kv.abort()
        graph.kv.begin(Group(0, graph.block_size, (graph.block_size,) * rows))
        return graph.block(mx.zeros((rows, 1), mx.int32))

    def width(self, request: Request, tokens: Sequence[int]) -> int:
        return min(super().width(request, tokens), self.graph.most)

    def _plain_cost(self, num_rows: int, width: int) -> float:
        return self._costs.seconds(num_rows, 2) if width else 0.0

    def _guess(
        self, by_slot: Sequence[Any], lo: int, features: mx.array
    ) -> tuple[list[list[int]], list[list[float]], mx.array | None]:
        graph = self.graph
        group = Group(lo, graph.block_size, tuple(graph.block_size if one else 0 for one in by_slot))
        before = mx.array([[one[1].tokens[-1] if one else 0] for one in by_slot], mx.int32)
        graph.kv.begin(group)
        features = graph.block(before)
        drawn: list[mx.array] = []
        sure: list[mx.array] = []
        sources: list[mx.array] = []
        for step in range(max(one[1].paid for one in by_slot if one)):
            own = features[:, step : step + 1]
            logits = graph.scores(own, before)
            likely = graph.confidence(own, before)
            if likely is None:
                likely = mx.exp(mx.max(logits, axis=-1) - mx.logsumexp(logits, axis=-1))
            before, source = self._draw(logits, by_slot, step)
            drawn.append(before)
            sure.append(likely.astype(mx.float32))
            sources += [] if source is None else [source]
        tokens, chances = mx.concatenate(drawn, axis=1), mx.concatenate(sure, axis=1)
        mx.eval(tokens, chances, graph.kv.arrays())
        graph.kv.abort()
        guesses: Any = tokens.tolist()
        return guesses, cast(Any, chances.tolist()), mx.concatenate(sources, axis=1) if sources else None

    def _draft(
        self, ask: DraftAsk, guess: list[int], chances: list[float], sources: mx.array | None, index: int
    ) -> Draft:
        worth = next((i for i, chance in enumerate(chances) if chance < _LEAST), len(chances))
        return super()._draft(ask, guess[: max(worth, 1)], chances, sources, index)
