"""Chat templates: rendering as transformers does it, boundaries, continuation, and bad templates."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mantou.chat.sandbox import MAX_CHARACTERS, Template
from mantou.chat.template import FALLBACK_NOTE, ChatTemplate
from mantou.data import Message, ToolCall
from mantou.errors import BadRequest, ModelError
from tests.unit.chat_folders import CHATML, byte_level, tokenizer, write_folder

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}"
)
TOOLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
)
USER = Message("user", "Hi 😀")
TALK = (Message("system", "Short."), USER, Message("assistant", "Hello"), Message("user", "Bye <|x|>"))
CALL = ToolCall("call_1", "add", '{"a": 1, "b": "é"}')
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def chat(source: str, kind: str = "byte_level", **variants: str) -> ChatTemplate:
    return ChatTemplate({"default": source, **variants}, tokenizer(kind))


def only(source: str) -> str:
    """The text of a template that ignores its messages."""
    return chat(source).render([USER]).text


# ------------------------------------------------------------------ rendering
def test_tokens_are_those_of_the_text() -> None:
    prompt = chat(CHATML).render(TALK)
    assert prompt.text == (
        "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\nHi 😀<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye <|x|><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert list(prompt.tokens) == tokenizer("byte_level").encode(prompt.text, add_special_tokens=False)
    assert prompt.boundaries == ()
    assert not prompt.reasoning_open
    assert "Be kind" in chat(CHATML).render([USER]).text  # the template's own default


def test_no_generation_prompt() -> None:
    assert chat(CHATML).render(TALK, add_generation_prompt=False).text.endswith("<|im_end|>\n")


def test_the_environment_of_transformers() -> None:
    assert only("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert only("a {% generation %}b{% endgeneration %} c") == "a b c"
    assert only("{{ {'b': '<é>', 'a': 1} | tojson }}") == '{"b": "<é>", "a": 1}'
    assert only("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert only("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"
    assert only("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert (
        only("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}{{ bos_token }}") == "2<|endoftext|>"
    )
    assert only("{{ documents is none }}{{ tools is none }}") == "TrueTrue"


def test_kwargs_reach_the_template_but_not_over_its_own_names() -> None:
    template = chat("{{ mood }}|{{ messages | length }}|{{ tools is none }}|{{ eos_token }}")
    prompt = template.render([USER], kwargs={"mood": "calm", "messages": [], "tools": 1, "eos_token": 2})
    assert prompt.text == "calm|1|True|<|im_end|>"


def test_tool_calls_and_results() -> None:
    call = Message("assistant", tool_calls=(CALL,), reasoning="sum")
    result = Message("tool", "3", name="add", tool_call_id="call_1")
    template = chat(TOOLS)
    lines = template.render([USER, call, result], tools=[TOOL]).text.split("\n")
    assert lines[0].startswith(json.dumps(TOOL))
    assert json.loads(lines[1]) == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "sum",
        "reasoning": "sum",
        "thinking": "sum",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}
        ],
    }
    assert json.loads(lines[2]) == {"role": "tool", "content": "3", "name": "add", "tool_call_id": "call_1"}
    assert template.supports_tools
    assert not chat(CHATML).supports_tools


@pytest.mark.parametrize("arguments", ["{", "[1]", "nul"])
def test_tool_arguments_that_are_no_object(arguments: str) -> None:
    call = Message("assistant", tool_calls=(ToolCall("c", "add", arguments),))
    with pytest.raises(BadRequest, match="'add' in message 1") as caught:
        chat(TOOLS).render([USER, call])
    assert caught.value.param == "messages.1.tool_calls"


def test_a_template_that_joins_argument_text_gets_text() -> None:
    source = (
        "{% for t in tools or [] %}T{% endfor %}"
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ '>' + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    call = Message("assistant", tool_calls=(CALL,))
    assert chat(source).render([USER, call], tools=[TOOL]).text == 'T>{"a": 1, "b": "é"}'


def test_the_variant_for_tools() -> None:
    template = chat("plain", tool_use="{{ tools | length }} tools")
    assert template.render([USER]).text == "plain"
    assert template.render([USER], tools=[TOOL]).text == "1 tools"
    assert template.supports_tools


# ------------------------------------------------------------------ BOS
@pytest.mark.parametrize(
    "source", ["<s>{{ messages[0].content }}", "{{ bos_token }}{{ messages[0].content }}", "a"]
)
def test_exactly_one_bos(source: str) -> None:
    loaded = tokenizer("sentencepiece")
    tokens = chat(source, "sentencepiece").render([USER]).tokens
    assert loaded.bos_prefix
    assert tokens[:1] == loaded.bos_prefix
    assert tokens[1:2] != loaded.bos_prefix


def test_a_tokenizer_that_adds_no_bos_gets_none() -> None:
    bos = tokenizer("byte_level").token_id("<|endoftext|>")
    assert bos not in chat(CHATML).render([USER]).tokens


# ------------------------------------------------------------------ boundaries
@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(["", "a", " b ", "\n", "é😀", "<|im_end|>", "stopping"]), min_size=1, max_size=3
    ),
    st.sampled_from(["byte_level", "sentencepiece"]),
)
def test_boundaries_are_where_prefixes_end(contents: list[str], kind: str) -> None:
    source = (
        CHATML
        if kind == "byte_level"
        else CHATML.replace("<|im_start|>", "<s>").replace("<|im_end|>", "</s>")
    )
    template = chat(source, kind)
    messages = [Message("user" if n % 2 == 0 else "assistant", text) for n, text in enumerate(contents)]
    prompt = template.render(messages, boundaries=True)
    expected = [
        template.render(messages[:count], add_generation_prompt=False).tokens
        for count in range(1, len(messages) + 1)
    ]
    assert prompt.boundaries == tuple(map(len, expected))
    for tokens in expected:
        assert prompt.tokens[: len(tokens)] == tokens


def test_only_the_first_and_the_last_boundaries_are_looked_for() -> None:
    prompt = chat(CHATML).render([USER] * 40, boundaries=True)
    assert len(prompt.boundaries) == 3


def test_a_template_that_rewrites_history_has_fewer_boundaries() -> None:
    source = "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    prompt = chat(source).render(TALK, add_generation_prompt=False, boundaries=True)
    assert prompt.boundaries == (len(prompt.tokens),)
    refusing = "{% if messages | length < 3 %}{{ raise_exception('few') }}{% endif %}" + CHATML
    assert len(chat(refusing).render(TALK, boundaries=True).boundaries) == 2


# ------------------------------------------------------------------ continuation and reasoning
@pytest.mark.parametrize("text", ["Once ", "", "two\nlines\n"])
def test_continue_the_last_message(text: str) -> None:
    prompt = chat(CHATML).render([USER, Message("assistant", text)], continue_final=True)
    assert prompt.text.endswith(f"<|im_end|>\n<|im_start|>assistant\n{text}")


def test_continuation_of_what_the_template_does_not_show() -> None:
    with pytest.raises(BadRequest, match="cannot be continued"):
        chat("nothing").render([USER], continue_final=True)


@pytest.mark.parametrize(
    ("messages", "kwargs", "is_open"),
    [
        ([USER], {}, True),
        ([USER], {"enable_thinking": True}, True),
        ([USER], {"enable_thinking": False}, False),
        ([Message("user", "What is <think>?")], {"enable_thinking": False}, False),
        ([Message("user", "What is </think>?")], {}, True),
    ],
)
def test_reasoning_that_the_template_opens(
    messages: list[Message], kwargs: dict[str, Any], is_open: bool
) -> None:
    template = chat(THINKING)
    assert template.supports_thinking
    assert template.render(messages, kwargs=kwargs).reasoning_open is is_open
    assert not template.render(messages, kwargs=kwargs, add_generation_prompt=False).reasoning_open


@pytest.mark.parametrize(
    ("question", "answer", "is_open"),
    [
        ("Hi", "<think>Let me", True),
        ("Hi", "<think>Let me</think>So", False),
        ("What is <think>?", "So", False),
        ("Hi", "So", False),
    ],
)
def test_reasoning_that_a_continued_message_opens(question: str, answer: str, is_open: bool) -> None:
    messages = [Message("user", question), Message("assistant", answer)]
    assert chat(THINKING).render(messages, continue_final=True).reasoning_open is is_open
    assert chat(THINKING).render(messages[1:], continue_final=True).reasoning_open is is_open


def test_a_user_who_writes_the_tag_opens_nothing() -> None:
    plain = "{{ '</think>' if false }}" + CHATML  # the model reasons, but the template opens nothing
    assert not chat(plain).render([Message("user", "Explain <think>")]).reasoning_open


def test_the_switch_may_have_another_name() -> None:
    template = chat("{{ 'on' if thinking else 'off' }}")
    assert template.supports_thinking
    assert template.render([USER], kwargs={"enable_thinking": True}).text == "on"
    assert not chat(CHATML).supports_thinking


# ------------------------------------------------------------------ where templates are found
def test_load_order(tmp_path: Path) -> None:
    loaded = tokenizer("byte_level")
    write_folder(tmp_path, byte_level(), tokenizer_config={"chat_template": "from config"})
    assert ChatTemplate.load(tmp_path, loaded).render([USER]).text == "from config"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert ChatTemplate.load(tmp_path, loaded).render([USER]).text == "from json"
    (tmp_path / "chat_template.jinja").write_text("from file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    template = ChatTemplate.load(tmp_path, loaded)
    assert template.render([USER]).text == "from file"
    assert template.render([USER], tools=[TOOL]).text == "with tools"
    assert template.notes == ()


def test_a_list_of_named_templates(tmp_path: Path) -> None:
    entries = [{"name": "tool_use", "template": "with tools"}, {"name": "default", "template": "plain"}]
    write_folder(tmp_path, byte_level(), tokenizer_config={"chat_template": entries})
    template = ChatTemplate.load(tmp_path, tokenizer("byte_level"))
    assert template.render([USER]).text == "plain"
    assert template.render([USER], tools=[TOOL]).text == "with tools"


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([{"name": "rag", "template": "x"}], "named rag but no 'default'"),
        ([{"name": "default"}], "without name or text"),
    ],
)
def test_a_list_that_cannot_be_used(tmp_path: Path, entries: list[Any], words: str) -> None:
    write_folder(tmp_path, byte_level(), tokenizer_config={"chat_template": entries})
    with pytest.raises(ModelError, match=words):
        ChatTemplate.load(tmp_path, tokenizer("byte_level"))


def test_no_template_is_announced(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level())
    template = ChatTemplate.load(tmp_path, tokenizer("byte_level"))
    assert template.notes == (FALLBACK_NOTE,)
    assert (
        template.render(TALK).text
        == "SYSTEM: Short.\nUSER: Hi 😀\nASSISTANT: Hello\nUSER: Bye <|x|>\nASSISTANT:"
    )


# ------------------------------------------------------------------ bad templates and messages
def test_a_refusal_has_the_templates_own_words() -> None:
    with pytest.raises(BadRequest) as caught:
        only("{{ raise_exception('Roles must alternate') }}")
    assert (caught.value.message, caught.value.param) == ("Roles must alternate", "messages")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ raise_exception.__globals__['json'] }}", "unsafe"),
        ("{{ missing.name }}", "'missing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' + 1 }}", "concatenate"),
        ("{{ messages['a']['b'] }}", "has no element|no attribute"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'ab' * 100000000 }}", "repeats a value"),
        ("{{ [1] * 100000000 }}", "repeats a value"),
        ("{{ 9 ** 9 ** 9 }}", "operator"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "loops run more"),
        ("{% for i in range(99999999) %}{% endfor %}", "loops run more"),
        ("{% set s = 'a' * 9999999 %}{{ s }}{{ s }}", f"longer than {MAX_CHARACTERS}"),
        ("{{ range(1, 2, 0) }}", "must not be zero"),
    ],
)
def test_a_failing_template_is_a_bad_request(source: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        only(source)


def test_a_template_that_is_not_jinja() -> None:
    with pytest.raises(ModelError, match="not valid Jinja"):
        Template("{% for %}")


def test_a_template_that_is_not_text(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level())
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=re.escape("chat_template.jinja")):
        ChatTemplate.load(tmp_path, tokenizer("byte_level"))


def test_no_messages() -> None:
    with pytest.raises(BadRequest, match="no messages"):
        chat(CHATML).render([])
