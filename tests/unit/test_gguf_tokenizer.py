from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from mantou.models.hub.gguf.metadata import Metadata
from mantou.models.hub.gguf.tokenizer import build, end_ids

SPACE = "\u2581"


def byte_level(pre: str, merges: tuple[str, ...] = (), **more: Any) -> Metadata:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet())]
    tokens += [rule.replace(" ", "") for rule in merges]
    pairs = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }
    return Metadata(pairs, "test.gguf")


def sentence_piece(pieces: dict[str, float], **more: Any) -> Metadata:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    pairs = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }
    return Metadata(pairs, "test.gguf")


def pieces_of(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text, add_special_tokens=False).tokens


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "default", "gpt-2"])
@given(text=st.text())
@settings(max_examples=50, deadline=None)
def test_byte_level_text_survives(pre: str, text: str) -> None:
    tokenizer = build(byte_level(pre))
    if pre == "qwen2":
        text = tokenizer.normalizer.normalize_str(text)  # NFC is part of this tokenizer
    assert (
        tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        == text
    )


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["1", "2", "3", "4"]),  # a digit a word, whatever the merges say
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),  # up to three digits a word
        ("default", ["1234"]),
    ],
)
def test_digits_are_cut_as_each_family_does(pre: str, expected: list[str]) -> None:
    tokenizer = build(byte_level(pre, ("1 2", "12 3", "123 4")))
    assert pieces_of(tokenizer, "1234") == expected


def test_words_in_the_vocabulary_need_no_merges_in_llama_bpe() -> None:
    metadata = byte_level("llama-bpe")
    tokens = [*metadata.texts("tokenizer.ggml.tokens"), "hello"]
    more = {"tokens": tokens, "token_type": [3, 3, 3] + [1] * (len(tokens) - 3)}
    assert pieces_of(build(byte_level("llama-bpe", **more)), "hello") == ["hello"]
    assert pieces_of(build(byte_level("smollm", **more)), "hello") == list("hello")


def test_special_tokens_are_found_in_text_and_bos_follows_the_file() -> None:
    plain = build(byte_level("smollm"))
    assert plain.encode("<|im_start|>a").ids[0] == 1
    assert len(plain.encode("a").ids) == 1
    assert build(byte_level("smollm", add_bos_token=True)).encode("a").ids[0] == 0
    assert build(byte_level("llama-bpe")).encode("a").ids[0] == 0
    assert build(byte_level("smollm", add_eos_token=True)).encode("a").ids[-1] == 2


def test_every_token_that_ends_a_turn_is_an_end() -> None:
    assert end_ids(byte_level("smollm")) == [2, 0]
    assert end_ids(byte_level("smollm", eot_token_id=1)) == [2, 1, 0]
    assert end_ids(sentence_piece({"a": 0.0})) == [2]


# ------------------------------------------------------------------ SentencePiece
PIECES = {SPACE: -9.0, "a": -9.0, "b": -9.0, "c": -9.0, "ab": -2.0, "bc": -1.0, f"{SPACE}a": -3.0}


def test_the_better_score_is_merged_first() -> None:
    assert pieces_of(build(sentence_piece(PIECES)), "abc") == [f"{SPACE}a", "bc"]


def test_unknown_characters_become_bytes_and_come_back() -> None:
    tokenizer = build(sentence_piece(PIECES))
    encoded = tokenizer.encode("a \u20ac")
    assert encoded.tokens[0] == "<s>"
    assert encoded.tokens[-3:] == ["<0xE2>", "<0x82>", "<0xAC>"]
    assert tokenizer.decode(encoded.ids) == "a \u20ac"


@given(text=st.text(st.characters(exclude_characters=SPACE, exclude_categories=["Cs"])))
@settings(max_examples=80, deadline=None)
def test_sentence_piece_text_survives(text: str) -> None:
    tokenizer = build(sentence_piece(PIECES, add_space_prefix=False))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text or "<" in text


def test_a_space_in_front_is_the_files_choice() -> None:
    assert pieces_of(build(sentence_piece(PIECES)), "a") == [f"{SPACE}a"]
    assert pieces_of(build(sentence_piece(PIECES, add_space_prefix=False)), "a") == ["a"]


def test_runs_of_spaces_that_the_file_defines_are_one_token() -> None:
    metadata = sentence_piece(PIECES, add_space_prefix=False)
    tokens = [*metadata.texts("tokenizer.ggml.tokens"), SPACE * 3]
    more = {
        "tokens": tokens,
        "token_type": [*metadata.integers("tokenizer.ggml.token_type"), 4],
        "scores": [*metadata.numbers("tokenizer.ggml.scores"), 0.0],
    }
    tokenizer = build(sentence_piece(PIECES, add_space_prefix=False, **more))
    assert pieces_of(tokenizer, "a   b") == ["a", SPACE * 3, "b"]
