"""A launched forward whose tokens the host has not read yet. Knows slots and sequences; no scheduling."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from math import isnan
from typing import Any

from mantou.data import Draft, TokenLogprobs
from mantou.engine.groups import Feed
from mantou.engine.sequence import Sequence
from mantou.errors import MantouError
from mantou.sampling.verify import agree


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    feed: Feed
    tokens: Any  # device int32[rows, width], what was fed
    draw: Any  # device draws of the wanted positions: tokens int32[rows, K], and their logits
    hidden: Any  # device [rows, width, D], None unless the draft provider reads it
    committed: bool  # False: the KV waits to hear which draft tokens stay

    def read(self) -> Drawn:
        """Waits for the device, once."""
        draw = self.draw
        return Drawn(
            tokens=draw.tokens.tolist(),
            scores=draw.scores.tolist(),
            logprobs=draw.logprobs.tolist() if draw.logprobs is not None else None,
            top_tokens=draw.top_tokens.tolist() if draw.top_tokens is not None else None,
            top_logprobs=draw.top_logprobs.tolist() if draw.top_logprobs is not None else None,
        )


@dataclass(frozen=True, slots=True)
class Drawn:
    """A flight's draws on the host, indexed [row][position]."""

    tokens: list[list[int]]
    scores: list[list[float]]
    logprobs: list[list[float]] | None
    top_tokens: list[list[list[int]]] | None
    top_logprobs: list[list[list[float]]] | None

    def taken(self, row: int, draft: Draft) -> list[int]:
        """What the row takes: the sure part of its draft, then its own draws while they agree with the rest."""
        sure, rest = draft.tokens[: draft.num_sure], draft.tokens[draft.num_sure :]
        return [*sure, *agree(rest, self.tokens[row][: len(rest) + 1])]

    def check(self, row: int, num_draws: int) -> None:
        """Raises MantouError if one of the row's first draws was made where the model gave no number."""
        if any(map(isnan, self.scores[row][:num_draws])):
            raise MantouError(
                "The model produced no number (NaN) for the next token, so this answer cannot go on. Its weights are "
                "damaged or overflow on this text; try another text, or download or convert the model again."
            )

    def logprobs_of(self, sequence: Sequence, row: int, emitted: Rows[int]) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the row's emitted tokens, () if it did not ask."""
        wish = sequence.request.sampling
        if self.logprobs is None or not (wish.logprobs or wish.top_logprobs):
            return ()
        found = []
        for position, token in enumerate(emitted):
            top: tuple[tuple[int, float], ...] = ()
            if wish.top_logprobs and self.top_tokens is not None and self.top_logprobs is not None:
                pairs = zip(self.top_tokens[row][position], self.top_logprobs[row][position], strict=True)
                top = tuple(pairs)[: wish.top_logprobs]
            found.append(TokenLogprobs(token, self.logprobs[row][position], top))
        return tuple(found)
