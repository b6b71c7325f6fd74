"""Small real tokenizers and model folders for the tests of mantou.chat. Knows no engine and no arrays."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from mantou.chat.tokenizer import Tokenizer

CORPUS = (
    "The quick brown fox jumps over the lazy dog. A naïve café, a déjà vu.",
    "user assistant system tool think stop STOP stopping topping",
    "日本語 のテキスト 日本",
    "smile 😀😃 and 👩‍👩‍👧 family",
    "ab abc abcd bcd cd aab abab",
)
CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message.role != 'system' %}<|im_start|>system\nBe kind<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}


def byte_level() -> tokenizers.Tokenizer:
    """GPT-2 style: bytes as printable characters. Its added tokens try the alphabet of bytes."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|channel>", "<channel|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=360, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens(["<think>", "</think>", AddedToken("two words", normalized=False), "ÿ"])
    return made


def _pieces(specials: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a SentencePiece-like BPE with one piece a byte."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    trained.train_from_iterator(
        [line for line in CORPUS if line.isascii()], trainers.BpeTrainer(vocab_size=120, show_progress=False)
    )
    model: dict[str, Any] = json.loads(trained.to_str())["model"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    names = [*specials, *bytes_, *sorted(model["vocab"], key=model["vocab"].__getitem__), "é", "\ufffd"]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return vocabulary, [(first, second) for first, second in model["merges"]]


def sentencepiece(*, strip: bool = True) -> tokenizers.Tokenizer:
    """Llama 2 style (strip: the first space goes) or Gemma style; characters without a piece become bytes."""
    specials = ["<unk>", "<s>", "</s>", "<|channel>", "<channel|>"]
    vocabulary, merges = _pieces(specials)
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    replace = normalizers.Replace(" ", "\u2581")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if strip else replace
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    made.add_special_tokens(specials)
    made.add_tokens(["<think>", "</think>"])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return made


def metaspace() -> tokenizers.Tokenizer:
    """T5 style: Unigram with a Metaspace decoder, no bytes."""
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=150, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
        ),
    )
    return made


def word_piece() -> tokenizers.Tokenizer:
    """BERT style."""
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=150, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


BACKENDS = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "gemma_like": lambda: sentencepiece(strip=False),
    "metaspace": metaspace,
    "word_piece": word_piece,
}


@cache
def tokenizer(name: str) -> Tokenizer:
    """A loaded tokenizer by the name of its kind."""
    specials = CHATML_TOKENS if name == "byte_level" else {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(BACKENDS[name](), specials)


def write_folder(folder: Path, backend: tokenizers.Tokenizer, **files: Any) -> Path:
    """A model folder with tokenizer.json and the given JSON files (name without suffix -> content)."""
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
