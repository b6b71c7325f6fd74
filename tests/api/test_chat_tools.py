"""Tool calls over the wire: OpenAI's own client and its streaming helper against the real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.api.conftest import Running
from tests.fakes_api import byte_tokenizer

CHAT = "/v1/chat/completions"
ASK: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {
            "name": "now",
            "strict": True,
            "parameters": {**SCHEMA, "properties": {}, "required": []},
        },
    },
]
ARGUMENTS = '{"city": "Pârís 👋", "days": 3}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def strict(value: Any, kind: Any) -> None:
    kind.model_validate(value.model_dump(), strict=True)


def test_whole(client: openai.OpenAI, server: Running) -> None:
    server.script.reply = lambda request: f"{CALL}\n{NOW}"
    answer = client.chat.completions.create(model="m", messages=ASK, tools=TOOLS)
    strict(answer, ChatCompletion)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    first, second = choice.message.tool_calls
    assert first.type == "function" and second.type == "function"
    assert (first.function.name, first.function.arguments) == ("get_weather", ARGUMENTS)
    assert (second.function.name, second.function.arguments) == ("now", "{}")
    assert first.id != second.id
    assert first.id.startswith("call_") and len(first.id) == 29


def test_the_streaming_helper_puts_the_calls_together(client: openai.OpenAI, server: Running) -> None:
    server.script.reply = lambda request: f"Let me look.\n\n{CALL}\n{NOW}"
    pieces: list[str] = []
    done: list[tuple[str, int, object]] = []
    with client.chat.completions.stream(model="m", messages=ASK, tools=TOOLS) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta" and event.index == 0:
                pieces.append(event.arguments_delta)
            if event.type == "tool_calls.function.arguments.done":
                done.append((event.name, event.index, event.parsed_arguments))
        final = stream.get_final_completion()
    assert "".join(pieces) == ARGUMENTS
    assert len(pieces) > 10, "arguments come while they are written"
    assert done == [("get_weather", 0, {"city": "Pârís 👋", "days": 3}), ("now", 1, {})]
    message = final.choices[0].message
    assert (message.content, final.choices[0].finish_reason) == ("Let me look.", "tool_calls")
    assert message.tool_calls is not None
    assert [call.function.parsed_arguments for call in message.tool_calls] == [
        {"city": "Pârís 👋", "days": 3},
        {},
    ]


def test_the_shape_of_the_deltas(client: openai.OpenAI, server: Running) -> None:
    server.script.reply = lambda request: CALL
    chunks = list(client.chat.completions.create(model="m", messages=ASK, tools=TOOLS, stream=True))
    for chunk in chunks:
        strict(chunk, ChatCompletionChunk)
    deltas = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or []]
    first, *others = deltas
    assert (first.index, first.type, first.function and first.function.name) == (0, "function", "get_weather")
    assert first.function is not None and first.function.arguments is not None
    assert all(
        (delta.id, delta.type, delta.function and delta.function.name) == (None, None, None)
        for delta in others
    )
    assert [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content] == []
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_one_call_where_one_is_asked_for(client: openai.OpenAI, server: Running) -> None:
    server.script.reply = lambda request: f"{CALL}\n{NOW}" + "x" * 500
    server.script.hold_after = len(CALL.encode()) + 20  # only a cancel can end the row
    answer = client.chat.completions.create(model="m", messages=ASK, tools=TOOLS, parallel_tool_calls=False)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.tool_calls is not None
    assert len(answer.choices[0].message.tool_calls) == 1
    assert answer.usage is not None
    assert answer.usage.completion_tokens < len(CALL.encode())
    assert server.engine is not None
    server.engine.wait_for(lambda engine: len(engine.cancelled) == 1)


def test_a_call_that_the_limit_cuts_ends_with_length(client: openai.OpenAI, server: Running) -> None:
    server.script.reply = lambda request: CALL
    answer = client.chat.completions.create(model="m", messages=ASK, tools=TOOLS, max_tokens=62)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.tool_calls is not None
    call = answer.choices[0].message.tool_calls[0]
    assert call.type == "function"
    assert ARGUMENTS.startswith(call.function.arguments)


def test_without_tools_markup_is_text(client: openai.OpenAI, server: Running) -> None:
    server.script.reply = lambda request: CALL
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = client.chat.completions.create(model="m", messages=ASK, **more).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (
            CALL,
            None,
            "stop",
        )


def test_only_allowed_tools_are_called(client: openai.OpenAI, server: Running) -> None:
    server.script.reply = lambda request: f"{NOW}{CALL}"
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice = client.chat.completions.create(
        model="m", messages=ASK, tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}
    ).choices[0]
    assert choice.message.tool_calls is not None
    assert [call.function.name for call in choice.message.tool_calls if call.type == "function"] == ["now"]
    assert choice.message.content == CALL


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"tool_choice": "required"}, "tool_choice required needs at least one tool in tools."),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rm"}}},
            "tool_choice names the tool 'rm', which is not in tools.",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice of type 'custom' is not known"),
        ({"tools": TOOLS, "tool_choice": {"type": 1}}, "tool_choice.type must be a string, got a number."),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [1]}}},
            "tool_choice.allowed_tools.tools may hold functions with a name only.",
        ),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls must be true or false"),
        ({"reasoning_effort": "ultra"}, "reasoning_effort must be one of"),
    ],
)
def test_wrong_choices(http: httpx2.Client, more: dict[str, Any], sentence: str) -> None:
    answer = http.post(CHAT, json={"messages": ASK, **more})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(sentence)


def test_every_effort_there_is(client: openai.OpenAI, server: Running) -> None:
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh"):
        client.chat.completions.create(model="m", messages=ASK, reasoning_effort=effort)


def test_reasoning_has_both_names(client: openai.OpenAI, server: Running) -> None:
    server.script.reply = lambda request: f"I need it.</think>{CALL}"
    more: dict[str, Any] = {"tools": TOOLS, "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    message = client.chat.completions.create(model="m", messages=ASK, **more).choices[0].message
    assert message.model_extra == {"reasoning": "I need it.", "reasoning_content": "I need it."}
    assert message.tool_calls is not None
    chunks = list(client.chat.completions.create(model="m", messages=ASK, stream=True, **more))
    for name in ("reasoning", "reasoning_content"):
        parts = [(chunk.choices[0].delta.model_extra or {}).get(name, "") for chunk in chunks]
        assert "".join(parts) == "I need it."


def test_channels(serving: Callable[..., Any]) -> None:
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}{{ m.thinking }}<|end|>{% endfor %}"
        "{{ tools and tools | length }}<|start|>assistant{# <|channel|> <|call|> #}"
    )
    call = "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    thought = "<|channel|>analysis<|message|>They want weather.<|end|>"
    with serving(template=template) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0, timeout=10)
        running.script.reply = lambda request: f"{thought}{call}{ARGUMENTS}<|call|>"
        choice = client.chat.completions.create(model="m", messages=ASK, tools=TOOLS).choices[0]
        assert choice.message.tool_calls is not None
        assert [one.function.arguments for one in choice.message.tool_calls if one.type == "function"] == [
            ARGUMENTS
        ]
        assert (choice.message.model_extra or {})["reasoning"] == "They want weather."
        running.script.reply = lambda request: f"{thought}<|start|>assistant<|channel|>final<|message|>Sunny."
        choice = client.chat.completions.create(model="m", messages=ASK).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Sunny.", "stop")
        text = client.completions.create(model="m", prompt="a").choices[0].text
        assert text.startswith("<|channel|>analysis"), "raw text has no channels"
        client.close()


def test_a_conversation_with_results(client: openai.OpenAI, server: Running) -> None:
    server.script.reply = lambda request: CALL
    first = client.chat.completions.create(model="m", messages=ASK, tools=TOOLS).choices[0].message
    assert first.tool_calls is not None
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"}
    server.script.reply = lambda request: "It is sunny."
    talk = [*ASK, first.model_dump(exclude_none=True), result]
    second = client.chat.completions.create(model="m", messages=talk, tools=TOOLS).choices[0]
    assert (second.message.content, second.finish_reason) == ("It is sunny.", "stop")
    assert server.engine is not None
    assert "tool\nsunny" in byte_tokenizer().decode(server.engine.requests[-1].prompt)


# ---------------------------------------------------------------------- streamed = not streamed
def folded(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {"content": "", "calls": [], "finish": None, "logprobs": []}
    for line in text.split("\n\n"):
        if not line.startswith("data: {"):
            continue
        (choice,) = json.loads(line[6:])["choices"]
        found["content"] += choice["delta"].get("content", "")
        found["finish"] = choice["finish_reason"]
        found["logprobs"] += (choice["logprobs"] or {}).get("content", [])
        for delta in choice["delta"].get("tool_calls", []):
            if "id" in delta:
                found["calls"].append([delta["function"]["name"], ""])
            found["calls"][delta["index"]][1] += delta["function"]["arguments"]
    return found


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    reply=st.lists(
        st.sampled_from([CALL, NOW, "Hi ", "\n", "<tool_call>", CALL[:50], "</tool_call>"]), max_size=4
    ),
    cuts=st.lists(st.integers(1, 40), max_size=40),
    stop=st.lists(st.sampled_from(["Hi", "P", "</tool_call>"]), max_size=1),
    parallel=st.booleans(),
    cap=st.none() | st.integers(1, 120),
)
def test_streamed_equals_not_streamed(
    http: httpx2.Client,
    server: Running,
    reply: list[str],
    cuts: list[int],
    stop: list[str],
    parallel: bool,
    cap: int | None,
) -> None:
    def cut(tokens: Sequence[int]) -> list[tuple[int, ...]]:
        bursts, start = [], 0
        for size in [*cuts, *[7] * len(tokens)]:
            if start < len(tokens):
                bursts.append(tuple(tokens[start : start + size]))
                start += size
        return bursts

    server.script.reply, server.script.cut = lambda request: "".join(reply), cut
    ask = {
        "messages": ASK,
        "tools": TOOLS,
        "stop": stop,
        "parallel_tool_calls": parallel,
        "max_tokens": cap,
        "logprobs": True,
    }
    streamed = folded(http.post(CHAT, json={**ask, "stream": True}).text)
    (choice,) = http.post(CHAT, json=ask).json()["choices"]
    calls = choice["message"].get("tool_calls", [])
    assert streamed["calls"] == [[one["function"]["name"], one["function"]["arguments"]] for one in calls]
    assert streamed["content"] == (choice["message"]["content"] or "")
    assert streamed["finish"] == choice["finish_reason"]
    assert streamed["logprobs"] == choice["logprobs"]["content"]
