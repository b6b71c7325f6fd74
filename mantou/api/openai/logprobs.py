"""Log-probabilities in OpenAI's two shapes: chat's list of entries and completions' parallel lists. Knows no routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mantou.api.openai.wire import ChatLogprobs, TextLogprobs, TokenLogprob, TopLogprob
from mantou.data import TokenLogprobs

# JSON has no infinity; this is what OpenAI sends for a token that cannot come.
_NEVER = -9999.0


class TokenBytes(Protocol):
    """The one thing that is asked of a tokenizer here."""

    def token_bytes(self, token: int) -> bytes: ...


def token_text(raw: bytes) -> str:
    """The token as text; bytes of an incomplete character are shown escaped, as OpenAI does."""
    return raw.decode("utf-8", errors="backslashreplace")


def _finite(logprob: float) -> float:
    return max(_NEVER, logprob)  # NaN fails every comparison and ends here, too


def chat_logprobs(tokenizer: TokenBytes, rows: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """One entry for each token, each with its own list of alternatives."""
    return ChatLogprobs(content=[_entry(tokenizer, row) for row in rows])


def _entry(tokenizer: TokenBytes, row: TokenLogprobs) -> TokenLogprob:
    raw = tokenizer.token_bytes(row.token)
    return TokenLogprob(
        token_text(raw), _finite(row.logprob), list(raw), [_top(tokenizer, *pair) for pair in row.top]
    )


def _top(tokenizer: TokenBytes, token: int, logprob: float) -> TopLogprob:
    raw = tokenizer.token_bytes(token)
    return TopLogprob(token_text(raw), _finite(logprob), list(raw))


def text_logprobs(
    tokenizer: TokenBytes, rows: Sequence[TokenLogprobs], num_top: int, offset: int
) -> tuple[TextLogprobs, int]:
    """The parallel lists, and the offset after the last token.

    `offset` is where the first token starts in the returned text, in characters; a token adds its own length.
    """
    found = TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[] if num_top else None, text_offset=[])
    for row in rows:
        text = token_text(tokenizer.token_bytes(row.token))
        found.tokens.append(text)
        found.token_logprobs.append(_finite(row.logprob))
        found.text_offset.append(offset)
        if found.top_logprobs is not None:
            found.top_logprobs.append(
                {token_text(tokenizer.token_bytes(token)): _finite(logprob) for token, logprob in row.top}
            )
        offset += len(text)
    return found, offset
