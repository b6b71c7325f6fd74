"""A tokenizer as llguidance wants it: the bytes of every token, and which tokens are markup. Knows no grammar."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from llguidance import LLTokenizer, TokenizerWrapper

from mantou.chat.tokenizer import Tokenizer
from mantou.errors import BadRequest

# An added token that looks like this is markup, whatever the file says; others (runs of spaces) are text.
_MARKUP = re.compile(r"[<\[].*[>\]]\Z", re.DOTALL)
# What a grammar forces, the names of an object's members say, is tokenised again at every place where it is asked for.
_NUM_REMEMBERED, _MOST_REMEMBERED = 1024, 128  # texts, and characters of one


class _Source:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, size: int, specials: Sequence[int]) -> None:
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)]
        self.special_token_ids = list(specials)
        self.eos_token_id = min(tokenizer.eos)
        self.bos_token_id = None
        self._tokenizer = tokenizer
        self._encode_again = lru_cache(_NUM_REMEMBERED)(self._encode)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(self._encode_again(text) if len(text) <= _MOST_REMEMBERED else self._encode(text))

    def _encode(self, text: str | bytes) -> Sequence[int]:
        said = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(said, add_special_tokens=False)


def vocabulary(tokenizer: Tokenizer) -> tuple[Mapping[str, int], LLTokenizer]:
    """(markup -> token, the tokenizer). Raises BadRequest for a model that cannot end an answer."""
    if not tokenizer.eos:
        raise BadRequest("This model has no end-of-sequence token, so a structured answer could not end.")
    pieces = tokenizer.vocabulary()
    size = max((*pieces.values(), *tokenizer.eos)) + 1
    markup = {token for token in tokenizer.added_ids if _MARKUP.match(tokenizer.piece(token))}
    specials = sorted(tokenizer.special_ids | markup | tokenizer.eos)
    wrapped = TokenizerWrapper(_Source(tokenizer, size, specials))
    found = LLTokenizer(wrapped, n_vocab=size, eos_token=sorted(tokenizer.eos))
    return {tokenizer.piece(token): token for token in specials if tokenizer.piece(token)}, found
