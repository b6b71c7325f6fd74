"""How many bytes of a text one token can stand for at most. Knows no prompt.

So the length of a text proves that it has more than so many tokens, in a moment: to tokenise ten megabytes of one
character takes minutes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tokenizers

from mantou.chat.detokenizer import BYTE_OF_CHARACTER

# NFC makes at most so many bytes into one: three Hangul letters of 9 bytes are a syllable of 3, and Greek is near it.
_COMPOSED = 4
_UTF8 = [byte for byte in range(0xF5) if byte not in (0xC0, 0xC1)]  # that occur in a text
_LETTERS = {byte: letter for letter, byte in BYTE_OF_CHARACTER.items()}
_LOSSLESS_SPLITS = ("ByteLevel", "Digits", "Metaspace", "Split", "Punctuation")


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """No token stands for more than `most` bytes of a text, those in `vanishing` not counted: they may have none."""

    most: int
    vanishing: bytes = b""

    def least_tokens(self, text: bytes) -> int:
        return -(-len(text.translate(None, self.vanishing)) // self.most)


def token_bytes(backend: tokenizers.Tokenizer) -> TokenBytes | None:
    """None where a token, or none at all, may stand for a text of any length."""
    state: dict[str, Any] = json.loads(backend.to_str())
    model = state["model"]
    normalizers = list(_steps(state["normalizer"], "normalizers"))
    splits = list(_steps(state["pre_tokenizer"], "pretokenizers"))
    if model.get("type") != "BPE" or any(
        token["lstrip"] or token["rstrip"] for token in state["added_tokens"]
    ):
        return None
    if not all(map(_keeps_length, normalizers)) or not all(map(_drops_nothing, splits)):
        return None
    composes = any(step["type"] == "NFC" for step in normalizers)
    vanishing = _vanishing(model, splits)
    if vanishing and (composes or not any(split["type"] == "ByteLevel" for split in splits)):
        return None
    pieces = (*model["vocab"], *(token["content"] for token in state["added_tokens"]))
    longest = max(len(piece.encode()) for piece in pieces)  # spelled in at least as many bytes as its text
    return TokenBytes(longest * (_COMPOSED if composes else 1), vanishing)


def _steps(step: dict[str, Any] | None, inside: str) -> Iterator[dict[str, Any]]:
    if step is None:
        return
    if step["type"] == "Sequence":
        for part in step[inside]:
            yield from _steps(part, inside)
    else:
        yield step


def _keeps_length(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] == "Replace":
        return normalizer["pattern"] == {"String": " "} and bool(normalizer["content"])
    return normalizer["type"] in ("NFC", "Prepend")


def _drops_nothing(split: dict[str, Any]) -> bool:
    return split["type"] in _LOSSLESS_SPLITS and split.get("behavior") != "Removed"


def _vanishing(model: dict[str, Any], splits: list[dict[str, Any]]) -> bytes:
    """The bytes of UTF-8 that have no token. Without a byte-level alphabet, characters fall back to bytes or vanish."""
    vocabulary = model["vocab"]
    if any(split["type"] == "ByteLevel" for split in splits):
        return bytes(byte for byte in _UTF8 if _LETTERS[byte] not in vocabulary)
    known = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in _UTF8)
    return b"" if known else bytes(_UTF8)
