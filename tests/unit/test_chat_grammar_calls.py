"""Enforced calls: whatever the grammar of a format allows, the parser of that format reads as calls of these tools."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mantou.chat.grammar.calls import STYLES
from mantou.chat.grammar.grammars import Grammars, Setting
from mantou.chat.reasoning import ReasoningFormat
from mantou.chat.stream import TextStream
from mantou.chat.tokenizer import Tokenizer
from mantou.chat.tools import ToolUse, named
from mantou.data import Grammar, TokenEvent, ToolCall
from mantou.errors import BadRequest
from tests.unit.grammar_walk import allowed, constraint, walk

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
            "exact": {"type": "boolean"},
        },
        "required": ["city", "days"],
    },
    "note": {
        "type": "object",
        "properties": {"text": {"type": "string"}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}}},
        "required": ["tags"],
    },
    "now": {"type": "object", "properties": {}},
}


# How a text that is an argument ends, where that is not one token.
ENDINGS = (
    *(
        "\n</parameter>\n",
        "</arg_value>\n",
        "</longcat_arg_value>\n",
        "</parameter>\n",
        "</atem:parameter>\n",
    ),
    *("</param>\n", "</\uff5cDSML\uff5cparameter>\n", '<|"|>', "<escape>", "<|close|>think<|sep|>"),
)


def tokenizer(special: bool, form_name: str) -> Tokenizer:
    """Bytes, and the format's tags as single tokens, special ones or added text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: rank for rank, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>"])
    plain = Tokenizer(backend, {"eos_token": "<|im_end|>"})
    if special:
        form = named(form_name, plain)
        found = (*form.openers, *form.closers, *form.tags) if form_name != "kimi_k3" else form.tags
        tags = [tag for tag in found if tag[0] in "<[" and tag[-1] in ">]"]
        backend.add_special_tokens(list(dict.fromkeys(tags)))
        plain = Tokenizer(backend, {"eos_token": "<|im_end|>"})
    return plain


def use(form_name: str, made: Tokenizer, *, parallel: bool = True) -> ToolUse:
    return ToolUse(named(form_name, made), TOOLS, parallel)


def read(made: Tokenizer, how: ToolUse, tokens: list[int]) -> tuple[list[ToolCall], str]:
    stream = TextStream(made, tools=how, reasoning=how.form.reasoning)
    events = [stream.feed(TokenEvent("r", (token,))) for token in tokens]
    events.append(stream.feed(TokenEvent("r", finish="stop")))
    found: dict[int, list[Any]] = {}
    for delta in (delta for event in events for delta in event.tools):
        found.setdefault(delta.index, []).append(delta)
    calls = [ToolCall(d[0].id, d[0].name, "".join(one.arguments for one in d)) for d in found.values()]
    return calls, "".join(event.text for event in events)


@pytest.mark.parametrize("special", [True, False], ids=["tags-are-tokens", "tags-are-text"])
@pytest.mark.parametrize("form_name", STYLES)
def test_what_the_grammar_allows_is_read_as_valid_calls(form_name: str, special: bool) -> None:
    if form_name == "harmony" and not special:
        special = True  # its tags are always tokens
    made = tokenizer(special, form_name)
    grammars, how, dice = Grammars(made), use(form_name, made), random.Random(form_name)
    for choice, name in (("required", None), ("required", None), ("named", "get_weather"), ("named", "now")):
        setting = Setting(tools=how, choice=choice, tool_name=name)
        found = constraint(grammars, None, setting)
        tokens, written = walk(made, found, dice, hints=ENDINGS)
        calls, text = read(made, how, tokens)
        assert calls, written
        assert not text.strip(), written
        assert name is None or [call.name for call in calls] == [name], written
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), TOOLS[call.name])


@pytest.mark.parametrize("form_name", ["hermes", "qwen3_coder", "glm47", "mistral", "kimi_k2"])
def test_strict_tools_hold_inside_a_call_that_the_model_chose(form_name: str) -> None:
    made = tokenizer(True, form_name)
    grammars, how, dice = Grammars(made), use(form_name, made), random.Random(1)
    setting = Setting(tools=how, strict=frozenset(TOOLS))
    found = constraint(grammars, None, setting)
    for token in made.encode("Let me look. ", add_special_tokens=False):
        assert allowed(found)[token], "text stays free"
        found.advance(token)
    opener = next(made.token_id(tag) for tag in how.form.openers if made.token_id(tag) is not None)
    assert allowed(found)[opener]
    assert allowed(found)[list(made.eos)].all()
    before = made.encode("Let me look. ", add_special_tokens=False)
    found.advance(opener)
    assert not allowed(found)[list(made.eos)].any(), "a call must be finished"
    tokens, _ = walk(made, found, dice)
    calls, text = read(made, how, [*before, opener, *tokens])
    assert text.startswith("Let me look.")
    assert calls
    jsonschema.validate(json.loads(calls[0].arguments), TOOLS[calls[0].name])


def test_strict_tools_where_only_the_first_character_tells_a_call() -> None:
    made = tokenizer(True, "llama3")
    how = use("llama3", made)
    setting = Setting(tools=how, strict=frozenset(TOOLS))
    text = constraint(Grammars(made), None, setting)
    for token in made.encode("Let me {look}.", add_special_tokens=False):
        assert allowed(text)[token]
        text.advance(token)
    assert allowed(text)[list(made.eos)].all()
    call = constraint(Grammars(made), None, setting)
    call.advance(ord("{") - ord("!"))
    assert not allowed(call)[list(made.eos)].any(), "a call must be finished"


def test_gpt_oss_may_answer_or_call_where_its_tools_are_strict() -> None:
    made = tokenizer(True, "harmony")
    how = use("harmony", made)
    setting = Setting(reasoning=how.form.reasoning, tools=how, strict=frozenset(TOOLS))
    for said in (
        "<|channel|>final<|message|>Hello.",
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi",
    ):
        found = constraint(Grammars(made), None, setting)
        for token in made.encode(said, add_special_tokens=False):
            assert allowed(found)[token], said
            found.advance(token)
        assert allowed(found)[list(made.eos)].all()


def test_one_call_only_where_calls_may_not_be_parallel() -> None:
    made = tokenizer(True, "hermes")
    how = use("hermes", made, parallel=False)
    for seed in range(8):
        found = constraint(Grammars(made), None, Setting(tools=how, choice="required"))
        tokens, _ = walk(made, found, random.Random(seed))
        assert len(read(made, replace(how, parallel=True), tokens)[0]) == 1


def test_an_answer_with_a_format_may_call_a_tool_instead() -> None:
    made = tokenizer(True, "hermes")
    how, dice = use("hermes", made), random.Random(2)
    wish = Grammar("json_schema", '{"type": "integer"}')
    seen = set()
    for _ in range(12):
        tokens, written = walk(
            made, constraint(Grammars(made), wish, Setting(tools=how)), dice, hints=["<tool_call>"]
        )
        calls, text = read(made, how, tokens)
        seen.add(bool(calls))
        assert calls or isinstance(json.loads(text), int), written
    assert seen == {True, False}


def test_gpt_oss_thinks_on_its_channel_and_answers_on_the_final_one() -> None:
    made = tokenizer(True, "harmony")
    how = use("harmony", made)
    wish = Grammar(
        "json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    )
    setting = Setting(reasoning=how.form.reasoning, tools=replace(how, tools={}))
    said = '<|channel|>analysis<|message|>hm {<|end|><|start|>assistant<|channel|>final<|message|>{"a": 1}'
    found = constraint(Grammars(made), wish, setting)
    for token in made.encode(said, add_special_tokens=False):
        assert allowed(found)[token]
        found.advance(token)
    assert allowed(found)[list(made.eos)].all()


def test_a_tool_that_is_not_strict_is_called_even_if_its_schema_cannot_be_enforced() -> None:
    made = tokenizer(True, "hermes")
    odd = {"odd": {"type": "object", "properties": {"a": {"not": {"type": "null"}}}, "required": ["a"]}}
    how = ToolUse(named("hermes", made), odd)
    tokens, _ = walk(
        made, constraint(Grammars(made), None, Setting(tools=how, choice="required")), random.Random(4)
    )
    assert read(made, how, tokens)[0][0].name == "odd"
    strict = Setting(tools=how, choice="required", strict=frozenset({"odd"}))
    with pytest.raises(BadRequest, match="'not'"):
        Grammars(made).write(None, strict)


def test_a_call_that_cannot_be_enforced_is_refused() -> None:
    with pytest.raises(BadRequest, match="reads no tool calls"):
        Grammars(tokenizer(True, "hermes")).write(None, Setting(choice="required"))


def test_kimi_k3_frames_reasoning_text_and_calls() -> None:
    made = tokenizer(True, "kimi_k3")
    how = use("kimi_k3", made)
    wish = Grammar("json_schema", '{"type": "integer"}')
    think = "<|open|>think<|sep|>hm {<|close|>think<|sep|>"
    call = (
        '<|open|>tools<|sep|><|open|>call tool="now" index="1"<|sep|><|open|>json type="object"<|sep|>{}'
        "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
    )
    text = "<|open|>response<|sep|>{}<|close|>response<|sep|>"
    for setting, grammar, said in (
        (Setting(tools=how, strict=frozenset(TOOLS)), None, f"{think}{text.format('Hi')}{call}"),
        (Setting(tools=how, choice="required"), None, f"{think}{call}<|close|>message<|sep|>"),
        (Setting(tools=replace(how, tools={})), wish, f"{think}{text.format(3)}<|close|>message<|sep|>"),
        (Setting(tools=how, reasoning_open=True), wish, f"hm<|close|>think<|sep|>{text.format(3)}"),
    ):
        found = constraint(Grammars(made), grammar, setting)
        for token in made.encode(said, add_special_tokens=False):
            assert allowed(found)[token], said
            found.advance(token)
        assert allowed(found)[list(made.eos)].all(), said
    forced = constraint(Grammars(made), wish, Setting(tools=replace(how, tools={})))
    for token in made.encode("<|open|>response<|sep|>", add_special_tokens=False):
        forced.advance(token)
    assert not allowed(forced)[made.encode("x", add_special_tokens=False)[0]]


def test_reasoning_comes_before_an_enforced_call() -> None:
    made = tokenizer(True, "hermes")
    form = ReasoningFormat("think-tag", "<think>", "</think>")
    found = constraint(
        Grammars(made),
        None,
        Setting(reasoning=form, reasoning_open=True, tools=use("hermes", made), choice="required"),
    )
    for token in made.encode("which?</think>\n\n", add_special_tokens=False):
        assert allowed(found)[token]
        found.advance(token)
    assert not allowed(found)[ord("a")], "only a call may follow"
