"""Tokenizer and detokenizer: every way to feed ids gives the text of the tokenizers library."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mantou.chat.tokenizer import Tokenizer
from mantou.errors import ModelError
from tests.unit.chat_folders import BACKENDS, byte_level, sentencepiece, tokenizer, write_folder

KINDS = st.sampled_from(sorted(BACKENDS))


@st.composite
def pushes(draw: st.DrawFn) -> tuple[Tokenizer, list[list[int]]]:
    """A tokenizer and ids (some outside its vocabulary) in groups: any ids in any split."""
    loaded = tokenizer(draw(KINDS))
    some_ids = st.lists(st.integers(0, loaded.vocab_size + 3), max_size=6)
    byte_like = st.lists(st.integers(0, min(270, loaded.vocab_size)), max_size=6)  # mostly byte tokens
    return loaded, draw(st.lists(some_ids | byte_like, max_size=12))


@settings(deadline=None)
@given(pushes())
def test_pushes_and_flush_give_the_decoded_text(case: tuple[Tokenizer, list[list[int]]]) -> None:
    loaded, groups = case
    detokenizer = loaded.detokenizer()
    text = "".join([detokenizer.push(group) for group in groups]) + detokenizer.flush()
    assert text == loaded.decode([token for group in groups for token in group])


@settings(deadline=None)
@given(KINDS, st.text(max_size=40), st.integers(1, 5))
def test_text_with_any_characters(kind: str, text: str, size: int) -> None:
    loaded = tokenizer(kind)
    ids = loaded.encode(text, add_special_tokens=True)
    detokenizer = loaded.detokenizer()
    parts = [detokenizer.push(ids[start : start + size]) for start in range(0, len(ids), size)]
    assert "".join(parts) + detokenizer.flush() == loaded.decode(ids)


@pytest.mark.parametrize("kind", sorted(BACKENDS))
def test_text_that_continues_other_text_keeps_its_space(kind: str) -> None:
    loaded = tokenizer(kind)
    ids = loaded.encode("a dog aab", add_special_tokens=False)
    for cut in range(1, len(ids)):
        detokenizer = loaded.detokenizer(after=ids[:cut])
        text = detokenizer.push(ids[cut:]) + detokenizer.flush()
        assert loaded.decode(ids[:cut]) + text == loaded.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "gemma_like"])
def test_no_character_is_shown_in_parts(kind: str) -> None:
    loaded = tokenizer(kind)
    text = "a naïve 😀😃 日本 🦊 fox"
    detokenizer = loaded.detokenizer()
    parts = [detokenizer.push([token]) for token in loaded.encode(text, add_special_tokens=False)]
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) + detokenizer.flush() == text


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_flush_shows_an_incomplete_character_and_pushing_goes_on(kind: str) -> None:
    loaded = tokenizer(kind)
    ids = loaded.encode("𠀀 aab", add_special_tokens=False)
    start = next(n for n, token in enumerate(ids) if loaded.token_bytes(token) == b"\xf0")
    detokenizer = loaded.detokenizer()
    assert detokenizer.push([ids[start]]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    assert (detokenizer.push(ids[start + 4 :]) + detokenizer.flush()).strip() == "aab"


@settings(deadline=None)
@given(
    st.sampled_from(["byte_level", "gemma_like"]), st.text(max_size=30).filter(lambda text: "ÿ" not in text)
)
def test_bytes_of_tokens_are_the_bytes_of_the_text(kind: str, text: str) -> None:
    loaded = tokenizer(kind)
    ids = loaded.encode(text, add_special_tokens=False)  # (the library itself misreads the added token ÿ)
    assert b"".join([loaded.token_bytes(token) for token in ids]) == text.encode()


def test_pieces_bytes_and_ids() -> None:
    loaded = tokenizer("sentencepiece")
    byte = loaded.token_id("<0xF0>")
    assert byte is not None
    assert loaded.piece(byte) == "<0xF0>"
    assert loaded.token_bytes(byte) == b"\xf0"
    end = loaded.token_id("</s>")
    assert end is not None
    assert loaded.token_bytes(end) == b"</s>"
    assert loaded.piece(loaded.vocab_size + 1) == ""
    assert loaded.token_id("") is None
    assert loaded.bos_prefix == (loaded.token_id("<s>"),)
    assert tokenizer("byte_level").bos_prefix == ()


def test_newline_ids_are_those_of_a_newline() -> None:
    loaded = tokenizer("byte_level")
    assert [loaded.decode([token]) for token in loaded.newline_ids] == ["\n"]


def test_load_unites_every_eos(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    folder = write_folder(
        tmp_path,
        backend,
        config={"eos_token_id": 7, "text_config": {"eos_token_id": [8, 9]}},
        generation_config={"eos_token_id": [7, 10]},
        special_tokens_map={"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
        tokenizer_config={"eos_token": {"content": "<|im_end|>"}, "bos_token": None, "add_bos_token": True},
    )
    loaded = Tokenizer.load(folder)
    assert loaded.eos == {7, 8, 9, 10, loaded.token_id("<|im_end|>")}
    assert loaded.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert (loaded.bos_token, loaded.eos_token) == ("", "<|im_end|>")
    assert len(loaded.encode("a long text, not cut", add_special_tokens=True)) > 4


def test_load_of_a_bare_folder(tmp_path: Path) -> None:
    loaded = Tokenizer.load(write_folder(tmp_path, sentencepiece()))
    assert loaded.eos == frozenset()
    assert loaded.bos_prefix == ()
    assert loaded.decode(loaded.encode("a fox", add_special_tokens=True)) == "a fox"


def test_without_tokenizer_json_transformers_converts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake of transformers: the real one takes seconds to import."""

    class AutoTokenizer:
        @staticmethod
        def from_pretrained(folder: str, *, local_files_only: bool, trust_remote_code: bool) -> object:
            assert (folder, local_files_only, trust_remote_code) == (str(tmp_path), True, False)
            return found

    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=AutoTokenizer))
    found: object = SimpleNamespace(backend_tokenizer=byte_level())
    assert Tokenizer.load(tmp_path).decode([300]) == tokenizer("byte_level").decode([300])
    found = SimpleNamespace()
    with pytest.raises(ModelError, match="SimpleNamespace has no fast form"):
        Tokenizer.load(tmp_path)


def test_a_folder_without_any_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise ValueError("Unrecognized model\nlong help")

    fake = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=refuse))
    monkeypatch.setitem(sys.modules, "transformers", fake)
    with pytest.raises(ModelError, match=r"no tokenizer.json.*\(Unrecognized model\); use a folder"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", '{"version": "1.0", "mod', "tokenizer.json cannot be loaded"),
        ("config.json", "{", "config.json cannot be read as JSON"),
        ("tokenizer_config.json", "[]", "does not hold a JSON object"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str, words: str) -> None:
    write_folder(tmp_path, byte_level())
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=words):
        Tokenizer.load(tmp_path)
