"""Answers that a grammar allows, drawn by chance: what a model of no sense at all would write."""

from __future__ import annotations

import random

import numpy as np

from mantou.chat.grammar import Grammars, Setting
from mantou.chat.tokenizer import Tokenizer
from mantou.data import Grammar, Request, Sampling

_CLOSERS = ('"', "]", "}")


def constraint(grammars: Grammars, wish: Grammar | None, setting: Setting | None = None):
    text = grammars.write(wish, setting or Setting())
    return grammars.make(Request("r", (1,), Sampling(), grammar=text))


def walk(tokenizer: Tokenizer, found, dice: random.Random, most: int = 3000) -> tuple[list[int], str]:
    """Tokens until the end of sequence, and their text with markup. Closes strings and lists often, so that it ends."""
    closers = [tokenizer.encode(char, add_special_tokens=False)[0] for char in _CLOSERS]
    tokens: list[int] = []
    while len(tokens) < most:
        mask = found.mask()
        allowed = np.flatnonzero(mask)
        assert len(allowed), "a state without a way on"
        ends = [token for token in allowed if token in tokenizer.eos]
        closing = [token for token in closers if mask[token]]
        if ends and (len(ends) == len(allowed) or dice.random() < 0.5):
            return tokens, text_of(tokenizer, tokens)
        token = int(
            dice.choice(closing if closing and dice.random() < 0.3 else [t for t in allowed if t not in ends])
        )
        tokens.append(token)
        found.advance(token)
    raise AssertionError(f"no end: {text_of(tokenizer, tokens)[:200]}")


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return b"".join(tokenizer.token_bytes(token) for token in tokens).decode()
