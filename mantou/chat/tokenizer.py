"""The tokenizer of one model folder: text <-> token ids. Knows no chat roles, no arrays, no HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import tokenizers

from mantou.chat.detokenizer import BYTE_OF_CHARACTER, ByteDetokenizer, Detokenizer, Kind, PieceDetokenizer
from mantou.chat.token_bytes import TokenBytes, token_bytes
from mantou.errors import ModelError

_Value = TypeVar("_Value")

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_SPACE_MARK = "\u2581"  # how SentencePiece writes a space inside a piece


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model folder; {} if there is no such file. Raises ModelError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}); download the model again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object; download the model again.")
    return cast("dict[str, Any]", value)


class Tokenizer:
    """Text <-> ids. Immutable after loading and safe to share between threads.

    Attributes
        eos: ids that end a sequence (config, generation config and tokenizer, united)
        special_tokens: name -> piece, e.g. {"bos_token": "<s>"}; chat templates see them as variables
        special_ids: ids that `decode` and the detokenizer do not show
        added_ids: ids of all added tokens; text is split at them before anything else
        bos_prefix: () or (bos id,), what the tokenizer itself puts in front of a text
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        eos: frozenset[int] = frozenset(),
    ) -> None:
        backend.no_truncation()  # some files carry the limits of a training run
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self.special_tokens = dict(special_tokens)
        self.bos_token = self.special_tokens.get("bos_token", "")
        self.eos_token = self.special_tokens.get("eos_token", "")
        own_eos = self.token_id(self.eos_token)
        self.eos = eos if own_eos is None else eos | {own_eos}
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.newline_ids = frozenset(self.encode("\n", add_special_tokens=False))
        bos, wrapped = self.token_id(self.bos_token), self.encode("", add_special_tokens=True)
        self.bos_prefix: tuple[int, ...] = (bos,) if bos is not None and wrapped[:1] == [bos] else ()

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads tokenizer.json, or lets transformers convert what else is there. Raises ModelError."""
        path = folder / "tokenizer.json"
        backend = _from_file(path) if path.is_file() else _from_transformers(folder)
        return cls(backend, _special_tokens(folder), frozenset(_eos_ids(folder)))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; `add_special_tokens` lets the tokenizer add its BOS and the like."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_pair(self, one: str, other: str) -> tuple[list[int], int | None]:
        """Ids of two texts with the special tokens of a pair, and where the tokens of the second type begin."""
        encoding = self._backend.encode(one, other, add_special_tokens=True)
        kinds = encoding.type_ids
        return encoding.ids, kinds.index(1) if 1 in kinds else None

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids without added specials, and the characters [start, end) of `text` that each stands for."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids without special tokens; ids outside the vocabulary are left out."""
        return self._backend.decode(ids, skip_special_tokens=True)

    def vocabulary(self) -> Mapping[str, int]:
        """Every entry and its id, added tokens included."""
        return self._backend.get_vocab(with_added_tokens=True)

    def piece(self, token: int) -> str:
        """The raw vocabulary entry ("" for an id outside the vocabulary)."""
        return self._backend.id_to_token(token) or ""

    def token_id(self, piece: str) -> int | None:
        """The id of a vocabulary entry, or None."""
        return self._backend.token_to_id(piece) if piece else None

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, special tokens included; maybe a part of a character only."""
        piece = self.piece(token)
        if self._byte_level:
            return _byte_level_bytes(piece)
        if match := self._has_byte_pieces and _BYTE_PIECE.match(piece):
            return bytes([int(match[1], 16)])
        return piece.replace(_SPACE_MARK, " ").encode() if self._marks_spaces else piece.encode()

    def detokenizer(self, after: Sequence[int] = ()) -> Detokenizer:
        """A fresh incremental decoder for one sequence.

        after: ids that its text continues, so that a space at its start is kept; without, it stands alone.
        """
        if self._byte_level:
            return ByteDetokenizer(self._shown_bytes)
        return PieceDetokenizer(self.decode, self._kinds, after)

    @cached_property
    def num_ids(self) -> int:
        """One more than the largest id; some vocabularies have gaps."""
        return max(self.vocabulary().values(), default=-1) + 1

    def least_tokens(self, text: str) -> int:
        """A number of tokens that `text` surely has, without tokenising it; 0 where nothing is sure."""
        found = self._bounds
        return 0 if found is None else found.least_tokens(text.encode("utf-8", "replace"))

    @cached_property
    def _bounds(self) -> TokenBytes | None:
        return token_bytes(self._backend)

    @cached_property
    def _decoder(self) -> str:
        """The decoder's own JSON, "" if the file has none."""
        decoder = self._backend.decoder
        return bytes(decoder.__getstate__()).decode() if decoder is not None else ""

    @cached_property
    def _byte_level(self) -> bool:
        return '"ByteLevel"' in self._decoder

    @cached_property
    def _has_byte_pieces(self) -> bool:
        return '"ByteFallback"' in self._decoder

    @cached_property
    def _marks_spaces(self) -> bool:
        return _SPACE_MARK in self._decoder or "\\u2581" in self._decoder

    @cached_property
    def _shown_bytes(self) -> Mapping[int, bytes]:
        return _Table(lambda token: b"" if token in self.special_ids else self.token_bytes(token))

    @cached_property
    def _kinds(self) -> Mapping[int, Kind]:
        return _Table(self._kind)

    def _kind(self, token: int) -> Kind:
        piece = self.piece(token)
        if not piece or token in self.special_ids:
            return Kind.HIDDEN
        return Kind.BYTE if self._has_byte_pieces and _BYTE_PIECE.match(piece) else Kind.TEXT


class _Table(dict[int, _Value]):
    """Filled as ids are met: a table of 262k entries at load would cost more than most answers."""

    def __init__(self, entry: Callable[[int], _Value]) -> None:
        super().__init__()
        self._entry = entry

    def __missing__(self, token: int) -> _Value:
        self[token] = value = self._entry(token)
        return value


def _byte_level_bytes(piece: str) -> bytes:
    """Bytes of a byte-level piece. An added token with characters outside the alphabet stands for itself."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in piece])
    except KeyError:
        return piece.encode()


def _from_file(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for every fault of a file
        raise ModelError(f"{path} cannot be loaded ({error}); download the model again.") from error


def _from_transformers(folder: Path) -> tokenizers.Tokenizer:
    """For folders without tokenizer.json. The import takes seconds, so it happens only here."""
    message = f"{folder} has no tokenizer.json, and its tokenizer files cannot be converted"
    try:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (ImportError, OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{message} ({reason}); use a folder with a tokenizer.json.") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(
            f"{message} ({type(loaded).__name__} has no fast form); use one with a tokenizer.json."
        )
    return backend


def _special_tokens(folder: Path) -> dict[str, str]:
    """Entries like bos_token of special_tokens_map.json and tokenizer_config.json (which wins)."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in read_json(folder / name).items():
            piece = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(piece, str):
                found[key] = piece
    return found


def _eos_ids(folder: Path) -> Iterator[int]:
    config = read_json(folder / "config.json")
    text_config = config.get("text_config")  # where multimodal configs keep it
    nested = cast("dict[str, Any]", text_config) if isinstance(text_config, dict) else {}
    for source in (config, nested, read_json(folder / "generation_config.json")):
        value = source.get("eos_token_id")
        ids = cast("list[Any]", value) if isinstance(value, list) else [value]
        yield from (token for token in ids if isinstance(token, int) and not isinstance(token, bool))
