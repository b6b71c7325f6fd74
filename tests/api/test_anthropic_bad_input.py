"""What a caller of /v1/messages can get wrong: Anthropic's types and codes, and a field that is named."""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import ErrorResponse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mantou.api.anthropic.signature import sign
from mantou.api.anthropic.stream import BlockWriter, whole_blocks
from mantou.api.body import MAX_BODY_BYTES
from mantou.data import TextEvent, ToolDelta
from tests.api.conftest import Running

PATH = "/v1/messages"
USER = {"role": "user", "content": "Hi"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1"}


def error_of(answer: httpx2.Response, status: int, kind: str) -> str:
    """The message, once the rest of the error is what Anthropic's would be."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"] == answer.headers["request-id"]
    return body["error"]["message"]


def block(value: Any, role: str = "user") -> Any:
    return [{"role": role, "content": [value]}]


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def image(source: Any) -> Any:
    return {"type": "image", "source": source}


CASES: list[tuple[str, Any, str]] = [
    ("max_tokens", None, "max_tokens is missing; it must be a whole number."),
    ("max_tokens", -1, "max_tokens must be at least 0, got -1."),
    ("max_tokens", "9", "max_tokens must be a whole number, got a string."),
    ("messages", None, "messages is missing; send a list with at least one message."),
    ("messages", {}, "messages must be a list of messages, got an object."),
    ("messages", [], "messages is empty; send at least one message of the user."),
    ("messages", [{"role": "assistant", "content": ""}], "messages is empty"),
    ("messages", ["Hi"], "messages[0] must be an object, got a string."),
    ("messages", [{"content": "Hi"}], "messages[0].role is missing; it must be a string."),
    (
        "messages",
        [{"role": "tool", "content": "Hi"}],
        "messages[0].role must be one of user, assistant, system.",
    ),
    (
        "messages",
        [USER, {"role": "user"}],
        "messages[1].content must be a string or a list of blocks, got null.",
    ),
    ("messages", block("Hi"), "messages[0].content[0] must be an object, got a string."),
    ("messages", block({}), "messages[0].content[0].type is missing; it must be a string."),
    ("messages", block({"type": "text"}), "messages[0].content[0].text is missing; it must be a string."),
    ("messages", block({"type": "smell"}), "messages[0].content[0].type is not a known kind of block."),
    (
        "messages",
        block(image({"type": "url", "url": "http://a/b"})),
        "messages[0].content[0]: this model has no vision",
    ),
    (
        "messages",
        block({"type": "document", "source": {"type": "base64"}}),
        "messages[0].content[0].source: only",
    ),
    (
        "messages",
        block(CALL),
        "messages[0].content[0]: a block of type tool_use cannot be in a message of the user.",
    ),
    (
        "messages",
        [USER, *block(RESULT, "assistant")],
        "messages[1].content[0]: a block of type tool_result cannot",
    ),
    (
        "messages",
        block(RESULT),
        "messages[0].content[0].tool_use_id names no tool_use of an earlier message.",
    ),
    ("messages", [USER, *block(CALL, "assistant")], "messages ends with a tool call of the assistant"),
    (
        "messages",
        [USER, *block({**CALL, "input": "{}"}, "assistant")],
        "messages[1].content[0].input must be an object",
    ),
    (
        "messages",
        [USER, *block({**CALL, "input": nested(80)}, "assistant")],
        "messages[1].content[0].input is nested",
    ),
    (
        "messages",
        [USER, *block(CALL, "assistant"), *block({**RESULT, "content": [image({})]})],
        "messages[2].content[0].content[0]: this model has no vision",
    ),
    (
        "messages",
        [USER, *block(CALL, "assistant"), *block({**RESULT, "content": [CALL]})],
        "messages[2].content[0].content[0].type must be one of text, ",
    ),
    (
        "messages",
        [USER, *block(CALL, "assistant"), *block({**RESULT, "is_error": 1})],
        ".is_error must be true or false",
    ),
    (
        "messages",
        [USER, *block({"type": "thinking", "thinking": "", "signature": "mantou1c.AAAA"}, "assistant"), USER],
        "messages[1].content[0].signature was changed on its way",
    ),
    ("system", 1, "system must be a string or a list of text blocks, got a number."),
    ("system", [{"type": "image"}], "system[0].type must be text."),
    ("stop_sequences", "a", "stop_sequences must be a list of strings, got a string."),
    ("stop_sequences", [1], "stop_sequences[0] must be a string, got a number."),
    ("stop_sequences", ["a"] * 65, "stop_sequences may hold at most 64 sequences, got 65."),
    ("metadata", {"user_id": 1}, "metadata.user_id must be a string, got a number."),
    ("thinking", True, "thinking must be an object, got a boolean."),
    (
        "thinking",
        {"type": "deep"},
        "thinking.type must be one of enabled, adaptive, between_tools, disabled.",
    ),
    ("thinking", {"type": "enabled"}, "thinking.budget_tokens must be a whole number, got null."),
    (
        "thinking",
        {"type": "enabled", "budget_tokens": 9},
        "thinking.budget_tokens must be at least 1024, got 9.",
    ),
    (
        "thinking",
        {"type": "enabled", "budget_tokens": 1024},
        "thinking.budget_tokens must be less than max_tokens, which is 16.",
    ),
    (
        "thinking",
        {"type": "adaptive", "display": "loud"},
        "thinking.display must be one of summarized, omitted.",
    ),
    (
        "output_config",
        {"effort": "most"},
        "output_config.effort must be one of low, medium, high, xhigh, max.",
    ),
    ("tools", {}, "tools must be a list of tools, got an object."),
    ("tools", [{"input_schema": {}}], "tools[0].name is missing; it must be a string."),
    ("tools", [{"name": "f"}], "tools[0].input_schema is missing; it must be a JSON schema."),
    ("tools", [{**TOOL, "input_schema": nested(80)}], "tools is nested more than 64 levels deep"),
    ("tools", [{**TOOL, "strict": 1}], "tools[0].strict must be true or false, got a number."),
    ("tool_choice", "any", "tool_choice must be an object, got a string."),
    ("tool_choice", {"type": "some"}, "tool_choice.type must be one of auto, any, tool, none."),
    ("tool_choice", {"type": "any"}, "tool_choice any needs at least one tool of your own in tools."),
    ("tool_choice", {"type": "tool", "name": "g"}, "tool_choice names the tool 'g', which is not in tools."),
    (
        "tool_choice",
        {"type": "auto", "disable_parallel_tool_use": 1},
        "disable_parallel_tool_use must be true or",
    ),
    ("top_p", 2, "top_p must be between 0 and 1, got 2."),
    ("min_p", "x", "min_p must be a number, got a string."),
    ("stream", 1, "stream must be true or false, got a number."),
]


@pytest.mark.parametrize(("field", "value", "message"), CASES)
def test_a_wrong_field_is_named(http: httpx2.Client, field: str, value: Any, message: str) -> None:
    body = {"max_tokens": 16, "messages": [USER], field: value}
    assert message in error_of(http.post(PATH, json=body), 400, "invalid_request_error")
    if field in ("messages", "system", "tools", "thinking") and "max_tokens" not in message:
        body.pop("max_tokens")
        counted = http.post(f"{PATH}/count_tokens", json=body)
        assert message in error_of(counted, 400, "invalid_request_error")


def test_every_error_has_anthropics_shape(http: httpx2.Client) -> None:
    error_of(http.get(f"{PATH}/batches"), 404, "not_found_error")
    error_of(http.get(PATH), 405, "invalid_request_error")
    error_of(http.post(PATH, content=b"{"), 400, "invalid_request_error")
    error_of(http.post(PATH, json={}, headers={"Origin": "http://evil.example"}), 403, "permission_error")
    assert set(http.get("/v1/other").json()["error"]) == {"message", "type", "param", "code"}, (
        "only its own routes"
    )
    assert http.get("/v1/messagesx").json()["error"]["code"] == "not_found"


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(server: Running) -> None:
    wire = server.wire()
    wire.send(f"POST {PATH} HTTP/1.1", f"Content-Length: {MAX_BODY_BYTES + 1}")
    assert b" 413 " in wire.read_until(b'"type":"request_too_large"')


def test_the_context_bounds_a_prompt(http: httpx2.Client) -> None:
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "x" * 5000}]}
    assert "the context holds 4096" in error_of(http.post(PATH, json=body), 400, "invalid_request_error")


def test_a_full_queue_is_an_overload(serving: Any) -> None:
    with serving(max_waiting=0) as running:
        answer = httpx2.post(f"{running.url}{PATH}", json={"max_tokens": 5, "messages": [USER]})
        error_of(answer, 529, "overloaded_error")
        assert answer.headers["retry-after"] == "1"
        client = anthropic.Anthropic(base_url=running.url, api_key="x", max_retries=0)
        with client, pytest.raises(anthropic._exceptions.OverloadedError):
            client.messages.create(model="any", max_tokens=5, messages=[USER])


def test_a_stream_that_fails_ends_with_an_error_event(server: Running) -> None:
    server.script.fail_after = 3
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        stream = client.messages.create(model="any", max_tokens=50, messages=[USER], stream=True)
        seen: list[str] = []
        with pytest.raises(anthropic.APIStatusError) as caught:
            deque(map(seen.append, (event.type for event in stream)))
    assert "message_delta" not in seen, "nobody takes what was said for an answer"
    body = caught.value.body
    ErrorResponse.model_validate(body, strict=True)
    assert isinstance(body, dict)
    assert body["error"] == {"type": "api_error", "message": "This row was told to fail."}
    assert body["request_id"] == stream.response.headers["request-id"]


def test_a_silent_stream_is_kept_alive_by_pings(serving: Any) -> None:
    with serving(heartbeat_s=0.02) as running:
        running.script.hold_after = 2
        wire = running.wire()
        body = json.dumps({"max_tokens": 50, "messages": [USER], "stream": True}).encode()
        wire.post(PATH, body)
        seen = wire.read_until(b'"text":"e"')
        before = seen.count(b"event: ping")
        while wire.seen.count(b"event: ping") < before + 2:
            wire.read()
        assert b"\n: keep-alive" not in wire.seen


def test_threads_are_refused_with_the_code_that_makes_the_sdk_send_all(http: httpx2.Client) -> None:
    body = {
        "max_tokens": 5,
        "messages": [USER],
        "thread": {"type": "continue", "previous_message_id": "msg_1"},
    }
    answer = http.post(PATH, json=body)
    error_of(answer, 400, "invalid_request_error")
    assert answer.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_tools_need_a_template_that_describes_them(serving: Any) -> None:
    with serving(template="{{ messages[0].content }}") as running:
        body = {"max_tokens": 5, "messages": [USER], "tools": [TOOL]}
        answer = httpx2.post(f"{running.url}{PATH}", json=body)
        assert "cannot describe tools" in error_of(answer, 400, "invalid_request_error")


# ------------------------------------------------------------------ anything at all
_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
_kinds = st.sampled_from(
    ["text", "image", "document", "tool_use", "tool_result", "thinking", "search_result", "x"]
)
_keys = st.sampled_from(
    ["text", "source", "id", "tool_use_id", "name", "input", "content", "thinking", "signature"]
)
_blocks = st.builds(
    lambda kind, rest: {**rest, "type": kind}, _kinds, st.dictionaries(_keys, _json, max_size=4)
)
_messages = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant", "system", "x"]),
    st.text(max_size=5) | st.lists(_blocks | _json, max_size=3),
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    messages=st.lists(_messages, max_size=4),
    rest=st.dictionaries(
        st.sampled_from(
            ["system", "tools", "tool_choice", "thinking", "stop_sequences", "metadata", "output_config"]
        ),
        _json,
        max_size=3,
    ),
)
def test_any_body_is_counted_or_refused(http: httpx2.Client, messages: Any, rest: dict[str, Any]) -> None:
    body = {"messages": messages, **rest}
    answer = http.post(f"{PATH}/count_tokens", json=body)
    if answer.status_code == 200:
        assert answer.json()["input_tokens"] > 0
    else:
        error_of(answer, 400, "invalid_request_error")


# ------------------------------------------------------------------ blocks
@st.composite
def _answers(draw: st.DrawFn) -> list[TextEvent]:
    """What a model may say, in any order and cut anywhere; calls are numbered in the order they begin."""
    events: list[TextEvent] = []
    calls = 0
    for _ in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from(["text", "reasoning", "tool"]))
        if kind == "tool":
            events.append(TextEvent(tools=(ToolDelta(calls, f"call_{calls}", "f"),)))
            events += [TextEvent(tools=(ToolDelta(calls, arguments=piece),)) for piece in ('{"a"', ": 1}")]
            calls += 1
        else:
            events.append(TextEvent(**{kind: draw(st.sampled_from(["a", " ", "\n", " b ", "c\n"]))}))
    return events


@settings(deadline=None)
@given(events=_answers(), shown=st.booleans(), seed=st.integers(0, 99))
def test_blocks_do_not_depend_on_how_events_are_cut(events: list[TextEvent], shown: bool, seed: int) -> None:
    def blocks(cut: list[TextEvent]) -> Any:
        writer = BlockWriter(show_thinking=shown)
        written = [step for event in cut for step in writer.feed(event)]
        written += writer.end()
        open_at = -1
        for step in written:  # one block at a time, numbered from 0, each closed before the next begins
            if type(step).__name__ == "BlockStart":
                assert step.index == open_at + 1
                open_at = step.index
            assert step.index == open_at
        return whole_blocks(written)

    random.seed(seed)
    pieces: list[TextEvent] = []
    for event in events:
        for kind in ("reasoning", "text"):
            value = getattr(event, kind)
            at = random.randint(0, len(value))
            pieces += [TextEvent(**{kind: part}) for part in (value[:at], value[at:]) if part]
        if event.tools:
            pieces.append(event)
    whole = blocks(events)
    assert blocks(pieces) == whole
    said = "".join(event.text for event in events)
    shown_text = "".join(found.text for found in whole if hasattr(found, "text"))
    assert "".join(shown_text.split()) == "".join(said.split()), (
        "white space between blocks is layout, no more"
    )


def test_signatures_differ_where_the_reasoning_does() -> None:
    assert sign("a", shown=True) != sign("b", shown=True)
    assert len(sign("a" * 10_000, shown=True)) < 100


def test_closing_the_client_stops_the_row(server: Running) -> None:
    async def leave() -> None:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="x", max_retries=0) as client:
            stream = await client.messages.create(model="any", max_tokens=50, messages=[USER], stream=True)
            async for event in stream:
                if event.type == "content_block_delta":
                    break
            await stream.close()

    server.script.hold_after = 3
    asyncio.run(leave())
    assert server.engine is not None
    server.engine.wait_for(lambda engine: bool(engine.cancelled))
