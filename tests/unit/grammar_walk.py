"""Answers that a grammar allows, drawn by chance: what a model of no sense at all would write."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from mantou.chat.grammar.constraint import GrammarConstraint
from mantou.chat.grammar.grammars import Grammars, Setting
from mantou.chat.tokenizer import Tokenizer
from mantou.data import Grammar, Request, Sampling
from mantou.protocols import Constraint
from tests.fakes import unpacked

_MOST_TOKENS = 4096  # more than any tokenizer here has
_CLOSERS = ('"', "]", "}")


def constraint(grammars: Grammars, wish: Grammar | None, setting: Setting | None = None) -> GrammarConstraint:
    text = grammars.write(wish, setting or Setting())
    found = grammars.make(Request("r", (1,), Sampling(), grammar=text))
    assert found is not None
    return found


def allowed(found: Constraint) -> np.ndarray:
    """bool[_MOST_TOKENS] of what may come next."""
    mask = found.mask()
    assert mask is not None
    return unpacked(mask, _MOST_TOKENS)


def walk(
    tokenizer: Tokenizer,
    found: GrammarConstraint,
    dice: random.Random,
    *,
    most: int = 3000,
    hints: Sequence[str] = (),
) -> tuple[list[int], str]:
    """Tokens until the end of sequence, and their text with markup. Closes strings and lists often, so that it ends.

    hints: longer texts that it tries to write now and then, because chance would not find them.
    """
    closers = [tokenizer.encode(char, add_special_tokens=False)[0] for char in _CLOSERS]
    longer = [tokenizer.encode(hint, add_special_tokens=False) for hint in hints]
    tokens: list[int] = []
    planned: list[int] = []
    while len(tokens) < most:
        mask = allowed(found)
        able = np.flatnonzero(mask)
        assert len(able), "a state without a way on"
        ends = [token for token in able if token in tokenizer.eos]
        closing = [token for token in closers if mask[token]]
        if ends and (len(ends) == len(able) or dice.random() < 0.5):
            return tokens, text_of(tokenizer, tokens)
        if not planned and longer and dice.random() < 0.2:
            planned = list(dice.choice(longer))
        if planned and mask[planned[0]]:
            token = planned.pop(0)
        else:
            others = [token for token in able if token not in ends]
            token, planned = int(dice.choice(closing if closing and dice.random() < 0.3 else others)), []
        tokens.append(token)
        found.advance(token)
    raise AssertionError(f"no end: {text_of(tokenizer, tokens)[:200]}")


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return b"".join(tokenizer.token_bytes(token) for token in tokens).decode()
