"""A grammar as the engine's Constraint: masks, forced tokens and rewinding over a matcher. Knows no schema and no text.

Text that is certain is written in the tokenizer's own way: where the grammar leaves no choice of characters, the mask
holds the one token that the tokenizer would take. So an answer is the same whether forced tokens are appended, drafted
or drawn one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from mantou.chat.grammar.masks import Mask, only
from mantou.errors import BadRequest

Certain = tuple[Sequence[int], int]  # tokens, and how many of them are behind us
_NOTHING: Certain = ((), 0)
_MAX_FORCED = 64  # tokens of one answer of forced(); what follows them is told when it is asked again


class GrammarConstraint:
    """Belongs to one sequence. Tokens outside the tokenizer's vocabulary are never allowed."""

    def __init__(self, matcher: LLMatcher, eos: Sequence[int]) -> None:
        """`matcher` is this constraint's own."""
        self._matcher = matcher
        self._eos = frozenset(eos)
        self._num_ends = 0  # EOS tokens behind the end of the grammar
        self._certain: list[Certain] = []  # before each token that was taken, and perhaps before the next
        self._taken: list[int] = []

    def mask(self) -> Mask:
        """See the seam. Raises BadRequest where the grammar is too complex to go on."""
        if self._num_ends:
            return only(self._eos)
        tokens, place = self._next()
        if place < len(tokens):
            return only(tokens[place : place + 1])
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise BadRequest(
                "The grammar of this request became too complex while it was followed; make it simpler."
            )
        return bits

    def advance(self, token: int) -> None:
        if token in self._eos or self._num_ends:
            self._num_ends += 1
            return
        tokens, place = self._next()
        self._taken.append(token)
        if not self._matcher.consume_token(token):
            if place < len(tokens) and token == tokens[place]:  # the matcher gave up on all that would follow
                raise BadRequest(
                    "The grammar of this request requires text without end; add a way out of it."
                )
            raise BadRequest("The grammar of this request does not go on with the token that was drawn.")

    def rewind(self, num_tokens: int) -> None:
        ends = min(num_tokens, self._num_ends)
        self._num_ends -= ends
        rest = num_tokens - ends
        if rest:
            self._matcher.rollback(rest)
            del self._taken[-rest:]
        del self._certain[len(self._taken) + 1 :]

    def forced(self) -> Sequence[int]:
        if self._num_ends:
            return ()
        tokens, place = self._next()
        return tokens[place : place + _MAX_FORCED]

    def _next(self) -> Certain:
        """What is certain at this place: it depends on the tokens so far, not on how often it was asked."""
        if len(self._certain) == len(self._taken):
            self._certain.append(self._found())
        return self._certain[len(self._taken)]

    def _found(self) -> Certain:
        if self._certain:
            tokens, place = self._certain[-1]
            if place + 1 < len(tokens) and tokens[place] == self._taken[-1]:
                return tokens, place + 1
        tokens = self._matcher.compute_ff_tokens()
        if not tokens:
            return _NOTHING
        return tokens[: self._matcher.validate_tokens(tokens)], 0
