"""The tool formats there are, and which one a model uses. Knows no parsing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mantou.chat.reasoning import Vocabulary
from mantou.chat.tools import (
    arg_pairs,
    deepseek,
    function_xml,
    gemma,
    harmony,
    invoke,
    json_calls,
    kimi_k2,
    kimi_k3,
    mistral,
    pythonic,
)
from mantou.chat.tools.reader import FIRST_MARK, LAST_MARK
from mantou.chat.tools.splitter import ToolFormat
from mantou.errors import ConfigError

# Format -> what its models' templates contain, all of it. The first that fits is the model's.
_SIGNS: tuple[tuple[ToolFormat, tuple[str, ...]], ...] = (
    (harmony.HARMONY, ("<|channel|>", "<|message|>", "<|call|>")),
    (kimi_k3.KIMI_K3, ("<|open|>", "<|close|>", "<|sep|>")),
    (invoke.MINIMAX, ("<minimax:tool_call>",)),
    (gemma.GEMMA4, ("<|tool_call>", "<tool_call|>")),
    (gemma.FUNCTION_GEMMA, ("<start_function_call>",)),
    (arg_pairs.LONGCAT, ("<longcat_tool_call>",)),
    (arg_pairs.GLM, ("<arg_key>",)),
    (pythonic.PYTHONIC, ("<|tool_list_start|>",)),
    (pythonic.PYTHONIC, ("<|tool_call_start|>",)),
    (function_xml.SEED, ("<seed:tool_call>",)),
    (function_xml.QWEN3_CODER, ("<tool_call>", "<function=")),
    (kimi_k2.KIMI_K2, ("<|tool_calls_section_begin|>",)),
    (invoke.DSML, ("\uff5cDSML\uff5c",)),
    (deepseek.DEEPSEEK, ("<\uff5ctool\u2581calls\u2581begin\uff5c>",)),
    (invoke.MINICPM5, ('<function name="', '<param name="')),
    (mistral.MISTRAL, ("[TOOL_CALLS]",)),
    (invoke.MUSE_SPARK, ("<atem:function_calls>",)),
    (json_calls.COMMAND, ("<|START_ACTION|>",)),
    (json_calls.NEMOTRON, ("<TOOLCALL>",)),
    (json_calls.GRANITE, ("<|tool_call|>",)),
    (json_calls.HERMES, ("<tool_call>",)),
    (json_calls.LLAMA3, ("<|python_tag|>",)),
    (json_calls.LLAMA3, ("<|start_header_id|>", '"parameters"')),
)
# Format -> tokens that tell it where the template does not.
_TOKENS: tuple[tuple[ToolFormat, tuple[str, ...]], ...] = (
    (harmony.HARMONY, ("<|channel|>", "<|message|>", "<|call|>", "<|constrain|>")),
    (kimi_k3.KIMI_K3, ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")),
    (pythonic.PYTHONIC, ("<|tool_call_start|>", "<|tool_call_end|>")),
    (json_calls.HERMES, ("<tool_call>", "</tool_call>")),
    (json_calls.LLAMA3, ("<|python_tag|>",)),
)
_FORMATS: Mapping[str, ToolFormat] = {
    **{form.name: form for form, _ in _SIGNS},
    "laguna": arg_pairs.LAGUNA,
    "json_tools": replace(json_calls.HERMES, name="json_tools"),
}
NAMES = tuple(sorted(_FORMATS))


def detect(template: str, vocabulary: Vocabulary) -> ToolFormat | None:
    """The format that a template shows, else the one that the vocabulary was made for, else None."""
    for form, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return _bind(form, vocabulary)
    for form, tokens in _TOKENS:
        if all(vocabulary.token_id(token) is not None for token in tokens):
            return _bind(form, vocabulary)
    return None


def check_name(name: str) -> None:
    """Raises ConfigError for what is neither a format's name nor "off"."""
    if name != "off" and name not in _FORMATS:
        raise ConfigError(f"There is no tool parser {name!r}; take one of {', '.join(NAMES)}, or off.")


def named(name: str, vocabulary: Vocabulary) -> ToolFormat:
    """The format of that name. Raises ConfigError."""
    check_name(name)
    return _bind(_FORMATS[name], vocabulary)


def _bind(form: ToolFormat, vocabulary: Vocabulary) -> ToolFormat:
    """The format with its tags known by id where the vocabulary has them as special tokens."""
    marks: dict[str, str] = {}
    ids: dict[int, str] = {}
    for tag in dict.fromkeys((*form.openers, *form.closers, *form.tags)):
        token = vocabulary.token_id(tag)
        if token is not None and token in vocabulary.special_ids:
            marks[tag] = ids[token] = chr(ord(FIRST_MARK) + len(marks))
    assert len(marks) <= ord(LAST_MARK) - ord(FIRST_MARK)
    return replace(form, marks=marks, ids=ids)
