"""What providers share that draft by a chain of their own forwards: wishes, draws and costs. Knows no graph, no KV."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import mlx.core as mx

from mantou.data import DraftAsk, Request, Sampling
from mantou.protocols import CacheKey, PrefixStore
from mantou.spec.cost import StepCosts
from mantou.spec.none import NoDraft

_RATE = 0.2  # how fast the measured cost of a draft follows


class DraftSampler(Protocol):
    """How a draft draws; the target's own sampler is one, because it knows how its drafts are verified."""

    def prepare(self, rows: Sequence[Sampling | None]) -> Any: ...
    def propose(
        self, logits: mx.array, params: Any, positions: Sequence[Sequence[int]]
    ) -> tuple[mx.array, mx.array | None]:
        """Tokens int32[B, T], and what they were drawn from [B, T, V] if whoever verifies them asks for it."""
        ...


class ChainDraft(NoDraft):
    """A first forward of what is true, then one of each guess. `key` names the numbers in its KV, which it keeps in the
    same prefix store as the target's."""

    def __init__(
        self, sampler: DraftSampler, store: PrefixStore, key: CacheKey, costs: StepCosts, num_tokens: int
    ) -> None:
        self._sampler = sampler
        self._store = store
        self._key = key
        self._costs = costs
        self._num_tokens = num_tokens
        self._prepared: tuple[tuple[str, ...], Any] = ((), None)
        self._scale = 1.0  # measured time of a draft / what the costs say

    def width(self, request: Request, tokens: Sequence[int]) -> int:
        asked = request.speculation.num_draft_tokens
        return self._num_tokens if asked is None else asked

    def cost_s(self, request: Request, num_rows: int, width: int) -> float:
        return self._scale * self._plain_cost(num_rows, width)

    def _plain_cost(self, num_rows: int, width: int) -> float:
        if not width:
            return 0.0
        first = self._costs.seconds(num_rows, 2)  # what was taken last, and the draw after it
        return first + (width - 1) * self._costs.seconds(num_rows, 1)

    def _learn_cost(self, asks: Sequence[DraftAsk], started: float) -> None:
        """`asks` were drafted for since `started`, of time.perf_counter."""
        expected = self._plain_cost(len(asks), max(ask.paid for ask in asks))
        seen = (time.perf_counter() - started) / expected
        self._scale += _RATE * (min(max(seen, self._scale / 4), self._scale * 4) - self._scale)

    def _params(self, asks: Sequence[DraftAsk | None]) -> Any:
        """The rows' wishes for the sampler (None = idle), prepared once per composition."""
        ids = tuple(ask.request.id if ask else "" for ask in asks)
        if self._prepared[0] != ids:
            wishes = [_plain(ask.request.sampling) if ask else None for ask in asks]
            self._prepared = (ids, self._sampler.prepare(wishes))
        return self._prepared[1]


def _plain(sampling: Sampling) -> Sampling:
    """Without what needs the host between two draws, and without log-probabilities."""
    return replace(
        sampling,
        repetition_penalty=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logit_bias=(),
        logprobs=False,
        top_logprobs=0,
    )
