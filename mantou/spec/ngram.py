"""Prompt lookup: a row goes on as it did when its last tokens stood there before. Knows token ids, no model.

    ... a b c d e ... a b c |        the last three tokens stood earlier, so d e ... is the guess

Each row has an index of the text so far: the last place of every run of `shortest` tokens, and for each place the one
before it, as in LZ77. A new token costs one entry; a lookup compares a bounded number of places, so both are O(1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mantou.data import Draft, DraftAsk, Request
from mantou.spec.none import NoDraft

NUM_PLACES = 8  # earlier places that a lookup compares
INDEX_STEP = 4096  # most tokens indexed in one step, so that a long prompt does not hold up its neighbours
LONGEST_SEEN = 32  # from here on a longer match says nothing more
# How often a token is right after a match of so many tokens, until this server knows better.
_PRIORS = ((16, 0.97), (8, 0.9), (5, 0.8), (4, 0.65), (3, 0.5), (1, 0.3))
_SAMPLED = 0.8  # of that where the row samples: what it copies is one of several ways to go on
_PRIOR_WEIGHT = 8.0
_MEMORY = 64.0  # judgements that the learned chance looks back on


@dataclass(slots=True)
class Lookup:
    """One row's text and its index. Positions count from the prediction's first token."""

    shortest: int
    longest: int
    text: list[int]
    num_predicted: int  # tokens of `text` that are only expected
    num_indexed: int = 0  # runs that end before this position are in the index
    last: dict[tuple[int, ...], int] = field(default_factory=dict)  # run -> position after its last place
    before: dict[int, int] = field(default_factory=dict)  # position after a run -> after its place before
    source: int = 0  # where the last guess was copied from, moved along with the row
    match: tuple[int, int, int] = (-1, 0, 0)  # len(text), position that goes on, tokens that agree

    def extend(self, tokens: Sequence[int]) -> bool:
        """Takes in a row's new tokens; True once all are indexed."""
        known = len(self.text) - self.num_predicted
        fresh = tokens[known:]
        if fresh:
            self.text.extend(fresh)
            self.source += len(fresh) if self.source else 0
        n, text = self.shortest, self.text
        # The last run is what is looked up: it has no continuation yet.
        end = min(len(text), self.num_indexed + INDEX_STEP)
        for position in range(max(self.num_indexed, n), end):
            run = tuple(text[position - n : position])
            earlier = self.last.get(run)
            if earlier is not None:
                self.before[position] = earlier
            self.last[run] = position
        self.num_indexed = max(self.num_indexed, end)
        return self.num_indexed >= len(text)

    def find(self) -> tuple[int, int]:
        """(position whose tokens may come next, how many tokens before it agree); (0, 0) if nothing is long enough."""
        if self.match[0] != len(self.text):
            self.match = (len(self.text), *self._search())
        return self.match[1], self.match[2]

    def _search(self) -> tuple[int, int]:
        text = self.text
        place = self.last.get(tuple(text[len(text) - self.shortest :]))
        best, length = 0, 0
        if 0 < self.source < len(text):
            best, length = self.source, self._agreeing(self.source)
        for _ in range(NUM_PLACES):
            if place is None or length >= self.longest:
                break
            agreeing = self._agreeing(place)
            if agreeing > length:
                best, length = place, agreeing
            place = self.before.get(place)
        return (best, length) if length >= self.shortest else (0, 0)

    def _agreeing(self, place: int) -> int:
        text, end = self.text, len(self.text)
        most = min(place, LONGEST_SEEN)
        for n in range(most):
            if text[place - 1 - n] != text[end - 1 - n]:
                return n
        return most

    def copy(self, width: int) -> list[int]:
        """The tokens after the match; where it reaches the end, the copy goes on in what it has copied."""
        place, _ = self.find()
        self.source = place
        period = len(self.text) - place
        return [self.text[place + t % period] for t in range(width)]


def _bucket(length: int) -> int:
    return next(i for i, (least, _) in enumerate(_PRIORS) if length >= least)


class NGram(NoDraft):
    """Copies of earlier text, of the prompt, the output and what the request predicts.

    A match counts from `shortest` tokens on; from `longest` on, the latest place wins over a longer match.
    """

    def __init__(
        self, shortest: int = 2, longest: int = 8, num_tokens: int = 10, kind: str = "ngram"
    ) -> None:
        self._shortest, self._longest, self._num_tokens = shortest, max(longest, shortest), num_tokens
        self._kind = kind
        self._rows: dict[str, Lookup] = {}
        # Right and all, by length of match; rows that sample are a matter of their own.
        self._judged = {
            sampled: [[prior * share * _PRIOR_WEIGHT, _PRIOR_WEIGHT] for _, prior in _PRIORS]
            for sampled, share in ((False, 1.0), (True, _SAMPLED))
        }

    def _lookup(self, request: Request, tokens: Sequence[int]) -> Lookup | None:
        """The row's index, None while it is still being built."""
        row = self._rows.get(request.id)
        if row is None or len(row.text) - row.num_predicted > len(tokens):  # the row was taken back
            row = Lookup(self._shortest, self._longest, list(request.prediction), len(request.prediction))
            self._rows[request.id] = row
        return row if row.extend(tokens) else None

    def width(self, request: Request, tokens: Sequence[int]) -> int:
        row = self._lookup(request, tokens)
        if row is None or not row.find()[1]:
            return 0
        asked = request.speculation.num_draft_tokens
        return self._num_tokens if asked is None else asked

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Draft]:
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: DraftAsk) -> Draft:
        row = self._lookup(ask.request, ask.tokens)
        if row is None or not row.find()[1]:
            return Draft()
        right, judged = self._counts(ask.request, row.find()[1])
        return Draft(row.copy(ask.width), self._kind, right / judged, free=True)

    def observe(self, request: Request, draft: Draft, taken: Sequence[int]) -> None:
        row = self._rows.get(request.id)
        if row is None or not draft or draft.kind != self._kind:
            return
        right, wrong = draft.judge(taken)
        counts = self._counts(request, max(row.match[2], 1))
        fade = 1 - min((right + wrong) / _MEMORY, 0.5)
        counts[0] = counts[0] * fade + right
        counts[1] = counts[1] * fade + right + wrong
        if wrong:
            row.source = 0

    def _counts(self, request: Request, length: int) -> list[float]:
        return self._judged[request.sampling.temperature > 0][_bucket(length)]

    def release(self, request: Request) -> None:
        self._rows.pop(request.id, None)
