"""Tool calls in a whole text stream (tokenizers, reasoning, stops, logprobs), and what templates are given of them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mantou.chat.habits import with_types
from mantou.chat.stream import TextStream
from mantou.chat.template import UNKNOWN_TOOLS_NOTE, ChatTemplate
from mantou.chat.tokenizer import Tokenizer
from mantou.chat.tools import ToolUse, named
from mantou.data import FinishReason, Message, TextEvent, ToolCall, Usage
from mantou.errors import BadRequest, ConfigError
from tests.unit.chat_folders import BACKENDS, CHATML_TOKENS
from tests.unit.chat_folders import tokenizer as plain_tokenizer
from tests.unit.test_chat_stream import events
from tests.unit.test_chat_tools import bound
from tests.unit.tool_cases import CASES, TOOLS, Case

THINK = "{% if tools %}{{ tools | tojson }}{% endif %}<think>{{ messages[0].content }}</think><tool_call>"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@cache
def special_tokenizer(kind: str, form: str) -> Tokenizer:
    """A tokenizer with the format's tags as special tokens."""
    backend = BACKENDS[kind]()
    backend.add_special_tokens(list(bound(form).marks))
    return Tokenizer(
        backend, CHATML_TOKENS if kind == "byte_level" else {"bos_token": "<s>", "eos_token": "</s>"}
    )


def said(stream: TextStream, ids: list[int], places: list[int], finish: FinishReason = "stop") -> TextEvent:
    results = [stream.feed(event) for event in events(ids, places, finish)]
    last = next(result for result in results if result.finish is not None)
    return TextEvent(
        text="".join(result.text for result in results),
        reasoning="".join(result.reasoning for result in results),
        tools=tuple(delta for result in results for delta in result.tools),
        logprobs=tuple(entry for result in results for entry in result.logprobs),
        finish=last.finish,
        stop_sequence=last.stop_sequence,
        usage=last.usage,
    )


def calls(event: TextEvent) -> list[tuple[str, Any]]:
    found: dict[int, list[str]] = {}
    for delta in event.tools:
        call = found.setdefault(delta.index, ["", ""])
        call[0] += delta.name
        call[1] += delta.arguments
    return [(name, json.loads(arguments)) for name, arguments in found.values()]


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from(CASES),
    st.sampled_from(["byte_level", "gemma_like"]),
    st.booleans(),
    st.lists(st.integers(0, 600), max_size=8),
)
def test_however_tokens_come(case: Case, kind: str, special: bool, places: list[int]) -> None:
    loaded = special_tokenizer(kind, case.form) if special else plain_tokenizer(kind)
    form = named(case.form, loaded)
    assert bool(form.marks) == (special and bool(bound(case.form).marks))
    ids = loaded.encode(case.text, add_special_tokens=False)
    assume(
        special or loaded.decode(ids) == case.text
    )  # SentencePiece cannot spell DeepSeek's tags: \u2581 is a space
    stream = TextStream(loaded, reasoning=form.reasoning, tools=ToolUse.of(form, TOOLS))
    result = said(stream, ids, places)
    assert (result.text, result.reasoning) == (case.content, case.reasoning)
    assert calls(result) == list(case.calls)
    assert result.finish == ("tool_calls" if case.calls else "stop")
    assert [entry.token for entry in result.logprobs] == ids, "the tokens of calls have logprobs too"


def answer(
    text: str,
    *,
    places: list[int] | None = None,
    finish: FinishReason = "stop",
    opened: bool = False,
    **more: Any,
) -> tuple[TextEvent, TextStream]:
    loaded = plain_tokenizer("byte_level")
    template = ChatTemplate({"default": THINK}, loaded)
    use = template.tool_use(TOOLS, parallel=more.pop("parallel", True))
    stream = TextStream(loaded, reasoning=template.reasoning, reasoning_open=opened, tools=use, **more)
    ids = loaded.encode(text, add_special_tokens=False)
    return said(stream, ids, list(range(len(ids))) if places is None else places, finish), stream


def test_reasoning_comes_before_calls_and_may_speak_of_them() -> None:
    result, _ = answer(f"<think>\nI call {CALL} then.\n</think>\n\nLet me look.\n\n{CALL}")
    assert (result.reasoning, result.text) == (f"I call {CALL} then.", "Let me look.")
    assert calls(result) == [("get_weather", {"city": "Paris"})]
    result, _ = answer(f"why not\n</think>\n\n{CALL}", opened=True)
    assert (result.reasoning, result.text, len(calls(result))) == ("why not", "", 1)


def test_stop_strings_do_not_fire_in_a_call() -> None:
    result, _ = answer(f"Hi. {CALL}", stop=["Paris", "\n", "name", "<tool"])
    assert calls(result) == [("get_weather", {"city": "Paris"})]
    assert (result.text, result.finish, result.stop_sequence) == ("Hi.", "tool_calls", None)
    result, _ = answer(f"Hi. {CALL}\nBye Paris.", stop=["Paris"])
    assert (result.text, result.finish, result.stop_sequence) == ("Hi.Bye ", "tool_calls", "Paris")


def test_a_stop_string_before_a_call_ends_the_answer() -> None:
    result, stream = answer(f"Hi STOP {CALL}", stop=["STOP"])
    assert (result.text, result.finish, result.stop_sequence, result.tools) == ("Hi ", "stop", "STOP", ())
    assert stream.finished


def test_a_stop_string_in_what_was_no_call_fires() -> None:
    result, _ = answer('<tool_call>{"nope": STOP', stop=["STOP"])
    assert (result.text, result.stop_sequence) == ('<tool_call>{"nope": ', "STOP")


def test_a_stop_that_a_tag_interrupts_is_decided_there() -> None:
    result, _ = answer(f"ab{CALL}", stop=["ab<tool_call>"])
    assert (result.text, result.stop_sequence, len(calls(result))) == ("ab", None, 1)


def test_the_only_allowed_call_ends_the_answer() -> None:
    text = f"{CALL}\n{CALL}"
    result, stream = answer(text, parallel=False)
    assert calls(result) == [("get_weather", {"city": "Paris"})]
    assert (result.finish, stream.finished) == ("tool_calls", True)
    assert stream.num_tokens <= len(CALL)
    assert len(calls(answer(text, parallel=True)[0])) == 2
    assert len(calls(answer(text, parallel=False, places=[])[0])) == 1


def test_a_limit_leaves_a_call_as_it_is() -> None:
    result, _ = answer(CALL.partition("is")[0], finish="length")
    assert result.finish == "length"
    assert "".join(delta.arguments for delta in result.tools) == '{"city": "Par'
    result, _ = answer("<tool_call>{", finish="length")
    assert (result.text, result.finish) == ("<tool_call>{", "length")


def test_usage_after_an_early_end_counts_what_was_read() -> None:
    loaded = plain_tokenizer("byte_level")
    use = ToolUse.of(named("hermes", loaded), TOOLS, parallel=False)
    ids = loaded.encode(f"{CALL} and more", add_special_tokens=False)
    result = TextStream(loaded, tools=use).feed(events(ids, [], "length")[0])
    assert result.usage is not None
    assert isinstance(result.usage, Usage)
    assert result.usage.completion_tokens < len(ids)


def test_offered_tools_only() -> None:
    loaded = plain_tokenizer("byte_level")
    template = ChatTemplate({"default": THINK}, loaded)
    assert template.tool_use(()) is None
    assert ChatTemplate({"default": THINK}, loaded, "off").tool_use(TOOLS) is None
    use = ChatTemplate({"default": THINK}, loaded, "mistral").tool_use(TOOLS)
    assert use is not None and use.form.name == "mistral"
    with pytest.raises(ConfigError, match="no tool parser 'qwen'"):
        ChatTemplate({"default": THINK}, loaded, "qwen")


def test_channels_are_told_apart_without_tools_too() -> None:
    loaded = plain_tokenizer("byte_level")
    source = "{{ tools }}<|start|>assistant<|channel|>final<|message|>{{ messages[0].content }}<|call|>"
    for parser in (None, "off"):
        template = ChatTemplate({"default": source}, loaded, parser)
        use = template.tool_use(TOOLS if parser else ())
        assert use is not None and not use.tools
        stream = TextStream(loaded, reasoning=template.reasoning, tools=use)
        text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
        result = said(stream, loaded.encode(text, add_special_tokens=False), [3, 9, 40])
        assert (result.reasoning, result.text, result.finish) == ("Hm.", "Yes.", "stop")


def test_a_template_that_shows_no_format_is_noted() -> None:
    template = ChatTemplate({"default": "{{ tools }}{{ messages }}"}, plain_tokenizer("byte_level"))
    assert template.notes == (UNKNOWN_TOOLS_NOTE,)
    use = template.tool_use(TOOLS)
    assert use is not None and use.form.name == "hermes"


# ------------------------------------------------------------------ what templates can digest
BODY = "{% for t in tools or [] %}T{% endfor %}{% for m in messages %}"
TALK = (
    Message("user", "a"),
    Message(
        "assistant",
        "b",
        reasoning="r",
        tool_calls=(ToolCall("call_0123456789abcdef01234567", "f", '{"x": [1]}'),),
    ),
    Message("tool", "c", tool_call_id="call_0123456789abcdef01234567"),
)


def rendered(body: str) -> str:
    template = ChatTemplate({"default": f"{BODY}{body}{{% endfor %}}"}, plain_tokenizer("byte_level"))
    return template.render(TALK).text


def test_arguments_that_would_come_out_as_python_are_text() -> None:
    body = "{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}"
    assert rendered(body) == '{"x": [1]}'
    assert rendered(body.replace("arguments }}", "arguments | tojson }}")) == '{"x": [1]}'


def test_ids_are_short_where_a_template_asks_for_it() -> None:
    check = "{% if m.ID | length != 9 %}{{ raise_exception('9 letters!') }}{% endif %}{{ m.ID }},"
    body = (
        "{% for c in m.tool_calls or [] %}{% set m2 = {'ID': c.id} %}"
        + check.replace("m.ID", "m2.ID")
        + "{% endfor %}{% if m.role == 'tool' %}"
        + check.replace("m.ID", "m.tool_call_id")
        + "{% endif %}"
    )
    first, second, _ = rendered(body).split(",")
    assert first == second
    assert first.isalnum() and len(first) == 9


def test_reasoning_gives_way_to_text_where_a_template_takes_one() -> None:
    body = (
        "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}"
        "{{ m.content }}{{ m.thinking }}"
    )
    assert rendered(body) == "abc"
    assert rendered("{{ m.content }}{{ m.thinking }}") == "abrc"


def test_deep_arguments_are_refused() -> None:
    deep = Message("assistant", tool_calls=(ToolCall("c", "f", '{"a":' * 100_000),))
    template = ChatTemplate({"default": THINK}, plain_tokenizer("byte_level"))
    with pytest.raises(BadRequest, match="not a JSON object"):
        template.render([Message("user", "a"), deep])


def test_schemas_get_the_types_that_can_be_told() -> None:
    schema = {
        "properties": {
            "a": {"enum": ["x", "y"]},
            "b": {"anyOf": [{"type": "null"}, {"type": "integer"}]},
            "c": {"const": True},
            "d": {"items": {"const": 1.5}},
            "e": {},
            "type": {"type": "string"},
            "f": {"$ref": "#/$defs/F"},
        }
    }
    made = with_types(schema)
    assert made["type"] == "object"
    assert {key: node.get("type") for key, node in made["properties"].items()} == {
        "a": "string",
        "b": "integer",
        "c": "boolean",
        "d": "array",
        "e": None,
        "type": "string",
        "f": None,
    }
    assert made["properties"]["d"]["items"]["type"] == "number"
    assert "type" not in schema, "the caller's schema stays as it is"
