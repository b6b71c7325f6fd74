"""Rebuilds tokenizer files from GGUF metadata. Knows no tensors.

Two kinds: byte-level BPE (`tokenizer.ggml.model` = gpt2: vocabulary and merges as in tokenizer.json) and
SentencePiece BPE (llama: pieces with scores, unknown characters as bytes), whose merges follow from the scores.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mantou.models.hub.gguf.metadata import Metadata

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "\u2581"  # SentencePiece's visible space

# Tokens that end a turn in the known chat formats: a model may say any of them, whatever its `eos_token_id` is.
_END_OF_TURN = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "</s>",
    }
)

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def write_tokenizer(metadata: Metadata, folder: Path, vocab_size: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and, if there is one, chat_template.jinja into `folder`.

    Raises ModelError for a tokenizer that is not known or does not fit `vocab_size`.
    """
    tokens = metadata.texts("tokenizer.ggml.tokens")
    if not 0 < len(tokens) <= vocab_size:
        raise metadata.error(f"it has {len(tokens)} tokens for {vocab_size} embeddings")
    tokenizer = build(metadata)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.integer(f"{metadata.text('general.architecture')}.context_length"),
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = special_id(metadata, key)
        if token is not None:
            config[f"{role}_token"] = tokens[token]
    if "tokenizer.chat_template" in metadata:
        template = metadata.text("tokenizer.chat_template")
        config["chat_template"] = template
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def build(metadata: Metadata) -> Tokenizer:
    """The tokenizer of the file, with its special tokens and its BOS rule."""
    kind = metadata.text("tokenizer.ggml.model")
    builders: dict[str, Callable[[Metadata], Tokenizer]] = {"gpt2": _byte_level, "llama": _sentence_piece}
    if kind not in builders:
        raise metadata.error(f"its tokenizer is of kind {kind}, and only {', '.join(builders)} are rebuilt")
    tokenizer = builders[kind](metadata)
    _add_tokens(tokenizer, metadata, kind)
    _add_template(tokenizer, metadata, kind)
    return tokenizer


def special_id(metadata: Metadata, role: str) -> int | None:
    """The id of `tokenizer.ggml.<role>_token_id`, or None if the file has none."""
    key = f"tokenizer.ggml.{role}_token_id"
    if key not in metadata:
        return None
    token = metadata.integer(key)
    if not 0 <= token < len(metadata.texts("tokenizer.ggml.tokens")):
        raise metadata.error(f"{key} is {token}, which is not a token")
    return token


def end_ids(metadata: Metadata) -> list[int]:
    """Tokens that end a generation, the file's own `eos_token_id` first."""
    named = [special_id(metadata, role) for role in ("eos", "eot", "eom")]
    tokens, types = _vocabulary(metadata)
    by_text = [
        token
        for token, text in enumerate(tokens)
        if text in _END_OF_TURN and types[token] in (_CONTROL, _USER_DEFINED)
    ]
    return list(dict.fromkeys(token for token in (*named, *by_text) if token is not None))


def _vocabulary(metadata: Metadata) -> tuple[list[str], list[int]]:
    tokens, types = metadata.texts("tokenizer.ggml.tokens"), metadata.integers("tokenizer.ggml.token_type")
    if len(tokens) != len(types):
        raise metadata.error(f"it has {len(tokens)} tokens and {len(types)} token types")
    return tokens, types


# ------------------------------------------------------------------ byte-level BPE
def _byte_level(metadata: Metadata) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens, _ = _vocabulary(metadata)
    vocabulary = {text: token for token, text in enumerate(tokens)}
    merges = [_merge(rule, vocabulary, metadata) for rule in metadata.texts("tokenizer.ggml.merges")]
    split = _split_name(metadata)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=split == "llama-bpe")
    )
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_SPLITS[split]())
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merge(rule: str, vocabulary: dict[str, int], metadata: Metadata) -> tuple[str, str]:
    left, _, right = rule.partition(" ")
    if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
        raise metadata.error(f"the merge rule {rule!r} names tokens that do not exist")
    return left, right


def _split_name(metadata: Metadata) -> str:
    """The rule that cuts text into words; files of before 2024 do not state one and mean GPT-2's."""
    name = metadata.text("tokenizer.ggml.pre", "default")
    known = _SPLIT_ALIASES.get(name, name)
    if known not in _SPLITS:
        raise metadata.error(f"its pre-tokenizer {name!r} is not known (only {', '.join(_SPLITS)})")
    return known


def _gpt2_split() -> list[Any]:
    from tokenizers import pre_tokenizers

    return [pre_tokenizers.ByteLevel(add_prefix_space=False)]


def _smollm_split() -> list[Any]:
    from tokenizers import pre_tokenizers

    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2_split()]


def _regex_split(pattern: str) -> Callable[[], list[Any]]:
    def make() -> list[Any]:
        from tokenizers import Regex, pre_tokenizers

        return [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]

    return make


_SPLITS: dict[str, Callable[[], list[Any]]] = {
    "gpt-2": _gpt2_split,
    "smollm": _smollm_split,
    "llama-bpe": _regex_split(_LLAMA3_SPLIT),
    "qwen2": _regex_split(_QWEN2_SPLIT),
}
_SPLIT_ALIASES = {
    "default": "gpt-2",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
}


# ------------------------------------------------------------------ SentencePiece BPE
def _sentence_piece(metadata: Metadata) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, types = _vocabulary(metadata)
    scores = metadata.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise metadata.error(f"it has {len(tokens)} tokens and {len(scores)} scores")
    vocabulary = {text: token for token, text in enumerate(tokens)}
    unknown = special_id(metadata, "unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges_of_scores(vocabulary, types, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.flag("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
        )
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_of_scores(
    vocabulary: dict[str, int], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best score first: what SentencePiece does greedily."""
    rules: list[tuple[float, int, int, int, tuple[str, str]]] = []
    for text, token in vocabulary.items():
        if types[token] != _NORMAL:
            continue
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocabulary and right in vocabulary:
                rules.append((-scores[token], token, vocabulary[left], vocabulary[right], (left, right)))
    rules.sort()
    return [pair for *_, pair in rules]


# ------------------------------------------------------------------ special tokens
def _add_tokens(tokenizer: Tokenizer, metadata: Metadata, kind: str) -> None:
    from tokenizers import AddedToken

    tokens, types = _vocabulary(metadata)
    special = [
        AddedToken(text, special=True, normalized=False)
        for text, t in zip(tokens, types, strict=True)
        if t == 3
    ]
    # A user-defined run of spaces is written with visible spaces, so it matches the text after normalisation only.
    in_normalized = kind == "llama" and not metadata.flag("tokenizer.ggml.add_space_prefix", True)
    user_defined = [
        AddedToken(text, special=False, normalized=in_normalized and _SPACE in text)
        for text, t in zip(tokens, types, strict=True)
        if t == _USER_DEFINED
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(user_defined)


def _add_template(tokenizer: Tokenizer, metadata: Metadata, kind: str) -> None:
    from tokenizers import processors

    tokens, _ = _vocabulary(metadata)
    bos_by_default = kind == "llama" or _split_name(metadata) == "llama-bpe"
    add_bos = metadata.flag("tokenizer.ggml.add_bos_token", bos_by_default)
    add_eos = metadata.flag("tokenizer.ggml.add_eos_token", False)
    bos = special_id(metadata, "bos") if add_bos else None
    eos = special_id(metadata, "eos") if add_eos else None
    if bos is None and eos is None:
        return
    if any(mark in tokens[token] for token in (bos, eos) if token is not None for mark in ":$"):
        raise metadata.error("its BOS or EOS token has a name that tokenizers' templates cannot hold")
    head = [] if bos is None else [tokens[bos]]
    tail = [] if eos is None else [tokens[eos]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*head, "$A", *tail],
        pair=[*head, "$A", *tail, *(f"{text}:1" for text in head), "$B:1", *(f"{text}:1" for text in tail)],
        special_tokens=[(tokens[token], token) for token in (bos, eos) if token is not None],
    )
