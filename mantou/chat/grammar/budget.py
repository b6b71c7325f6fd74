"""A budget of reasoning as the engine's Constraint: where it is used up, the closing tag is forced. Knows no grammar.

It goes around another constraint, which hears every token as if the model had closed the block by itself. What is
forced depends on the tokens so far alone, so drafts, seeds and neighbours change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from mantou.chat.grammar.masks import Mask, everything, only, without
from mantou.chat.tokenizer import Tokenizer
from mantou.data import ReasoningBudget
from mantou.protocols import Constraint

_SPACES = frozenset(b" \t\n\r\f\v")
_NUM_BYTES = 256  # signs from here on are special tokens
_NEWLINE = ord("\n")
_LONGEST_CHARACTER = 4  # bytes, so no more tokens than that


class _Phase(Enum):
    START = 0  # nothing but white space, or a part of the opening tag
    INSIDE = 1
    ANSWER = 2


class _Place(NamedTuple):
    """Where an answer stands after a token."""

    phase: _Phase
    num_spent: int
    tail: tuple[int, ...]  # the last signs
    forced: tuple[int, ...] = ()  # tokens that must follow


class _Tag(NamedTuple):
    """A text as its signs: the bytes of it, or a number for a special token, which no bytes can stand for."""

    signs: tuple[int, ...]
    texts: tuple[str, ...]  # of each sign

    def begun(self, tail: Sequence[int]) -> int:
        """How many of its first signs end the tail."""
        most = min(len(tail), len(self.signs) - 1)
        return next((n for n in range(most, 0, -1) if tuple(tail[-n:]) == self.signs[:n]), 0)


class BudgetConstraint:
    """Belongs to one sequence."""

    def __init__(self, tokenizer: Tokenizer, budget: ReasoningBudget, inner: Constraint | None) -> None:
        self._tokenizer = tokenizer
        self._budget = budget
        self._inner = inner
        self._open, self._close = _tag(tokenizer, budget.open), _tag(tokenizer, budget.close)
        self._num_kept = max(len(self._open.signs), len(self._close.signs), _LONGEST_CHARACTER)
        opening = tokenizer.encode(budget.open, add_special_tokens=False)
        # What would open another block: this token, behind that one if the tag has several.
        self._reopening = opening[-1:] if len(opening) == 1 else opening[:2]
        self._places = [self._checked(_Place(_Phase.INSIDE if budget.opened else _Phase.START, 0, ()))]

    def mask(self) -> Mask | None:
        place = self._places[-1]
        if place.forced:
            return only(place.forced[:1])
        found = self._inner.mask() if self._inner is not None else None
        banned = self._banned(place)
        if banned is None:
            return found
        return without(everything(self._tokenizer.num_ids) if found is None else found, banned)

    def advance(self, token: int) -> None:
        if self._inner is not None:
            self._inner.advance(token)
        self._places.append(self._checked(self._after(self._places[-1], token)))

    def rewind(self, num_tokens: int) -> None:
        if self._inner is not None:
            self._inner.rewind(num_tokens)
        if num_tokens:
            del self._places[-num_tokens:]

    def forced(self) -> Sequence[int]:
        place = self._places[-1]
        if place.forced or self._inner is None:
            return place.forced
        return self._inner.forced()

    def _after(self, place: _Place, token: int) -> _Place:
        phase, tail = place.phase, place.tail
        for sign in _signs(self._tokenizer, token):
            tail = (*tail, sign)[-self._num_kept :]
            phase, tail = self._step(phase, tail)
        num_spent = place.num_spent + (place.phase is _Phase.INSIDE)
        return _Place(phase, num_spent, tail, place.forced[1:])

    def _step(self, phase: _Phase, tail: tuple[int, ...]) -> tuple[_Phase, tuple[int, ...]]:
        """After one more sign. A tag that is whole is no part of the next one."""
        if phase is _Phase.INSIDE:
            return (_Phase.ANSWER, ()) if _ends(tail, self._close) else (phase, tail)
        if (phase is _Phase.START or self._budget.reopens) and _ends(tail, self._open):
            return _Phase.INSIDE, ()
        if phase is _Phase.START and not self._open.begun(tail) and not _SPACES.issuperset(tail):
            return _Phase.ANSWER, tail
        return phase, tail

    def _checked(self, place: _Place) -> _Place:
        """The place, with what is forced where the budget is used up."""
        used_up = place.num_spent >= self._budget.num_tokens
        if place.phase is not _Phase.INSIDE or place.forced or not used_up or self._waits(place):
            return place
        begun = self._close.begun(place.tail)
        before = "" if begun or place.tail[-1:] == (_NEWLINE,) else self._budget.before
        text = f"{before}{''.join(self._close.texts[begun:])}{self._budget.after}"
        return place._replace(forced=tuple(self._tokenizer.encode(text, add_special_tokens=False)))

    def _waits(self, place: _Place) -> bool:
        """Whether half a character comes first: a grammar takes whole ones only, free text may be cut in the end."""
        over = place.num_spent - self._budget.num_tokens
        return _is_cut(place.tail) and (self._inner is not None or over < _LONGEST_CHARACTER)

    def _banned(self, place: _Place) -> int | None:
        """The token that would open another block, once there is nothing left for it."""
        used_up = place.num_spent >= self._budget.num_tokens
        if not used_up or not self._budget.reopens or place.phase is not _Phase.ANSWER:
            return None
        *guard, token = self._reopening
        if guard and place.tail[-1:] != tuple(_signs(self._tokenizer, guard[0]))[-1:]:
            return None
        return token


def _ends(tail: tuple[int, ...], tag: _Tag) -> bool:
    return tail[-len(tag.signs) :] == tag.signs


def _is_cut(tail: tuple[int, ...]) -> bool:
    """Whether the bytes end inside a character of UTF-8."""
    for back, sign in enumerate(reversed(tail[-_LONGEST_CHARACTER:]), 1):
        if sign < 0x80 or sign >= _NUM_BYTES:
            return False
        if sign >= 0xC0:
            return back < (2 if sign < 0xE0 else 3 if sign < 0xF0 else 4)
    return False


def _signs(tokenizer: Tokenizer, token: int) -> Iterable[int]:
    if token in tokenizer.special_ids:
        return (_NUM_BYTES + token,)
    return tokenizer.token_bytes(token)


def _tag(tokenizer: Tokenizer, text: str) -> _Tag:
    signs: list[int] = []
    texts: list[str] = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        found = list(_signs(tokenizer, token))
        signs += found
        special = token in tokenizer.special_ids
        texts += [tokenizer.piece(token)] if special else [chr(sign) for sign in found]  # tags are ASCII
    if signs[0] in _SPACES and not text[0].isspace():  # SentencePiece's own, in front of every text
        del signs[0], texts[0]
    return _Tag(tuple(signs), tuple(texts))
