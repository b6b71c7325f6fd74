"""How learned heads draw their guesses and hand them over. Knows no graph from inside and no KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import mlx.core as mx

from mantou.data import Draft, DraftAsk
from mantou.protocols import CacheKey, PrefixStore
from mantou.spec.chained import ChainDraft, DraftSampler
from mantou.spec.cost import StepCosts

_LEAST_CHANCE = 0.05

Rows = Sequence[tuple[Any, DraftAsk] | None]  # by slot: a provider's own row and who asks; None = idle


class Guessing(Protocol):
    """What is drawn from: a graph's vocabulary."""

    kind: str
    vocab_size: int  # of the model that it helps
    ids: mx.array | None  # int32[N], the token of each logit; None = they are the tokens


Graph = TypeVar("Graph", bound=Guessing)
Row = TypeVar("Row")


class GraphDraft(ChainDraft, Generic[Graph, Row]):
    """A provider over a graph of its own, which keeps a Row of each request."""

    def __init__(
        self,
        graph: Graph,
        sampler: DraftSampler,
        store: PrefixStore,
        key: CacheKey,
        costs: StepCosts,
        *,
        num_tokens: int = 4,
    ) -> None:
        super().__init__(sampler, store, key, costs, num_tokens)
        self.graph = graph
        self._rows: dict[str, Row] = {}

    def _draw(self, logits: mx.array, by_slot: Rows, step: int) -> tuple[mx.array, mx.array | None]:
        """Greedy rows take the likeliest token. Where some row samples, all are drawn as the answer will be."""
        ids = self.graph.ids
        if not any(one[1].request.sampling.temperature for one in by_slot if one):
            best = mx.argmax(logits, axis=-1).astype(mx.int32)
            return (best if ids is None else ids[best]), None
        if ids is not None:  # the noise goes by tokens
            everything = mx.full((*logits.shape[:2], self.graph.vocab_size), -mx.inf, mx.float32)
            everything[..., ids] = logits.astype(mx.float32)
            logits = everything
        positions = [[len(one[1].tokens) + step] if one else [0] for one in by_slot]
        params = self._params([one and one[1] for one in by_slot])
        return self._sampler.propose(logits, params, positions)

    def _draft(
        self, ask: DraftAsk, guess: list[int], chances: list[float], sources: mx.array | None, index: int
    ) -> Draft:
        tokens = guess[: ask.paid]
        known = next((i for i, token in enumerate(tokens) if token >= self.graph.vocab_size), len(tokens))
        chance = sum(chances[:known]) / max(known, 1)
        return Draft(
            tokens[:known],
            self.graph.kind,
            max(chance, _LEAST_CHANCE),
            chances=None if sources is None else sources[index],
        )
