"""Token ids to text, a few tokens at a time. Knows byte tables and decode functions; no files, no stops."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Protocol


class Detokenizer(Protocol):
    """Turns the ids of one sequence into text. Pushes and flush add up to `Tokenizer.decode` of all ids."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that became certain with these ids; an incomplete character is withheld."""
        ...

    def flush(self) -> str:
        """What is still withheld, with U+FFFD for bytes that are no character. Pushing may go on after it."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies: a token is bytes whatever stands around it. O(bytes of the new ids).

    Python's decoder and the tokenizers library replace the same maximal invalid parts, so their texts are
    equal.
    """

    def __init__(self, token_bytes: Mapping[int, bytes]) -> None:
        """`token_bytes`: id -> its bytes, empty for tokens that are not shown."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        table = self._token_bytes
        return self._decoder.decode(b"".join([table[i] for i in ids]))

    def flush(self) -> str:
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text


class Kind(Enum):
    """What a token is to the `PieceDetokenizer`."""

    HIDDEN = 0  # special or not in the vocabulary
    BYTE = 1  # one byte of a character that has no piece of its own: <0x0A>
    TEXT = 2


class PieceDetokenizer:
    """For vocabularies of text pieces (SentencePiece style, WordPiece, Unigram).

    A piece depends on what stands before it only through one neighbour (the first piece loses its space), so
    the new ids are decoded behind the last shown piece and that piece's own text is cut off. The library
    decodes a run of byte tokens as a whole (one bad byte spoils the run), so a run is certain only when a
    text piece ends it.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], kinds: Mapping[int, Kind], after: Sequence[int] = ()
    ) -> None:
        """`after`: ids that the text continues; they are not shown."""
        self._decode = decode
        self._kinds = kinds
        last = next((token for token in reversed(after) if kinds[token] is Kind.TEXT), None)
        self._anchor = [] if last is None else [last]  # the last text piece
        self._anchor_length = len(decode(self._anchor))  # characters that it decodes to on its own
        self._run: list[int] = []  # byte tokens since the anchor

    def push(self, ids: Sequence[int]) -> str:
        kinds = self._kinds
        shown = [i for i in ids if kinds[i] is not Kind.HIDDEN]
        cut = len(shown)
        while cut and kinds[shown[cut - 1]] is Kind.BYTE:
            cut -= 1
        if not cut:
            self._run += shown
            return ""
        text = self._decode(self._anchor + self._run + shown[:cut])[self._anchor_length :]
        self._anchor = [shown[cut - 1]]
        self._anchor_length = len(self._decode(self._anchor))
        self._run = shown[cut:]
        return text

    def flush(self) -> str:
        text = self._decode(self._anchor + self._run)[self._anchor_length :]
        self._run = []
        return text


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet for bytes: printable Latin-1 stands for itself, the rest for U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()
