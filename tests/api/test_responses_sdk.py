"""/v1/responses with OpenAI's own client: what is said, in whole and in streams, every event valid for two schemas."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.api.conftest import Running
from tests.api.responses_checks import check_response, check_stream, events_of, text_of
from tests.fakes_api import INFO, byte_tokenizer

URL = "/v1/responses"
REPLY = "Hello, wörld! 👋 How are you?"
ARGUMENTS = '{"city": "Pârís 👋", "days": 3}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
PATCH = '*** "Begin"\n+ä 👋\\n\t*** End'
PATCHED = f"<tool_call>\n{json.dumps({'name': 'apply', 'arguments': {'input': PATCH}})}\n</tool_call>"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True, "description": "W."},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
CUSTOM: Any = {"type": "custom", "name": "apply", "description": "Changes files."}


def post(http: httpx2.Client, **body: Any) -> dict[str, Any]:
    """Not streamed."""
    custom = any(tool["type"] != "function" for tool in body.get("tools", []))
    return check_response(http.post(URL, json=body).raise_for_status().json(), open_responses=not custom)


def stream(http: httpx2.Client, **body: Any) -> dict[str, Any]:
    custom = any(tool["type"] != "function" for tool in body.get("tools", []))
    answer = http.post(URL, json={**body, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream"
    return check_stream(events_of(answer.content), open_responses=not custom)


def prompt(server: Running) -> str:
    assert server.engine is not None
    return byte_tokenizer().decode(server.engine.requests[-1].prompt)


def kinds(body: dict[str, Any]) -> list[str]:
    return [item["type"] for item in body["output"]]


# ---------------------------------------------------------------------- what is said
def test_text(client: openai.OpenAI, http: httpx2.Client) -> None:
    answer = client.responses.create(model="any", input="Hi", temperature=0, metadata={"a": "b"}, user="me")
    check_response(json.loads(answer.to_json(exclude_unset=True)))
    assert answer.output_text == REPLY
    assert answer.id.startswith("resp_") and answer.model == INFO.id
    assert (answer.status, answer.metadata, answer.user, answer.temperature) == (
        "completed",
        {"a": "b"},
        "me",
        0,
    )
    usage = answer.usage
    assert usage is not None
    assert usage.output_tokens == len(REPLY.encode()) + 1
    assert usage.input_tokens_details.cached_tokens == 3
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_the_order_of_a_streams_events(http: httpx2.Client) -> None:
    events = events_of(http.post(URL, json={"input": "Hi", "stream": True}).content)
    check_stream(events)
    names = [event["type"].removeprefix("response.") for event in events]
    deltas = names.count("output_text.delta")
    assert deltas > 20, "text comes while it is written"
    assert names == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"


def test_the_streaming_helper(client: openai.OpenAI, server: Running) -> None:
    server.script.reply = lambda request: f"Let me look.{CALL}"
    with client.responses.stream(model="m", input="Weather?", tools=TOOLS) as events:
        snapshots = [event.snapshot for event in events if event.type == "response.output_text.delta"]
        final = events.get_final_response()
    assert snapshots[-1] == "Let me look."
    assert final.output_text == "Let me look."
    assert final.output[1].type == "function_call"
    assert final.output[1].parsed_arguments == {"city": "Pârís 👋", "days": 3}


def test_calls(http: httpx2.Client, server: Running) -> None:
    server.script.reply = lambda request: f"{CALL}\n\n{NOW}"
    body = stream(http, input="Weather?", tools=TOOLS)
    assert kinds(body) == ["function_call", "function_call"]
    first, second = body["output"]
    assert (first["name"], first["arguments"], second["name"]) == ("get_weather", ARGUMENTS, "now")
    assert first["call_id"] != second["call_id"] and first["call_id"].startswith("call_")
    assert [item["id"][:3] for item in body["output"]] == ["fc_", "fc_"]
    assert body["tools"] == [
        {"type": "function", "description": None, "parameters": None, **tool} for tool in TOOLS
    ]
    assert '"name": "get_weather"' in prompt(server)


@pytest.mark.parametrize(("more", "left"), [({"parallel_tool_calls": False}, 1), ({"max_tool_calls": 1}, 1)])
def test_fewer_calls(http: httpx2.Client, server: Running, more: dict[str, Any], left: int) -> None:
    server.script.reply = lambda request: f"{CALL}\n{NOW}"
    assert len(post(http, input="Hi", tools=TOOLS, **more)["output"]) == left
    assert len(stream(http, input="Hi", tools=TOOLS, max_tool_calls=2)["output"]) == 2


def test_a_custom_tool_gets_its_text(http: httpx2.Client, server: Running, client: openai.OpenAI) -> None:
    server.script.reply = lambda request: PATCHED
    body = stream(http, input="Change it.", tools=[CUSTOM, *TOOLS])
    (item,) = body["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply", PATCH)
    assert body["tools"][0] == {**CUSTOM, "format": {"type": "text"}}
    server.script.reply = lambda request: "Done."
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "applied"}
    answer = client.responses.create(model="m", input=["Change it.", item, result][1:], tools=[CUSTOM])
    assert answer.output_text == "Done."
    assert "tool\napplied" in prompt(server)


@pytest.mark.parametrize("arguments", ['{"patch": "x"}', '{"input": 3}', "{}"])
def test_a_custom_tool_gets_whatever_the_model_wrote(
    http: httpx2.Client, server: Running, arguments: str
) -> None:
    server.script.reply = lambda request: (
        f'<tool_call>\n{{"name": "apply", "arguments": {arguments}}}\n</tool_call>'
    )
    (item,) = stream(http, input="Hi", tools=[CUSTOM])["output"]
    assert json.loads(item["input"]) == json.loads(arguments)


def test_functions_of_a_namespace(http: httpx2.Client, server: Running) -> None:
    server.script.reply = lambda request: '<tool_call>\n{"name": "mcp__now", "arguments": {}}\n</tool_call>'
    space = {"type": "namespace", "name": "mcp", "description": "d", "tools": [TOOLS[1]]}
    body = post(http, input="Hi", tools=[space, {"type": "web_search"}])
    (item,) = body["output"]
    assert (item["namespace"], item["name"]) == ("mcp", "now")
    assert body["tools"] == [space], "what the server cannot run is not echoed"


def test_reasoning(http: httpx2.Client, server: Running) -> None:
    server.script.reply = lambda request: f"I need it.</think>{CALL}"
    ask = {"input": "Hi", "tools": TOOLS, "reasoning": {"effort": "high", "summary": "auto"}}
    body = stream(http, **ask, include=["reasoning.encrypted_content"])
    thought, call = body["output"]
    assert (text_of(thought), thought["status"], call["type"]) == ("I need it.", "completed", "function_call")
    assert body["reasoning"] == {"effort": "high", "summary": "auto"}
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == len("I need it.</think>")
    assert "encrypted_content" not in post(http, **ask)["output"][0]
    # What a caller that keeps the conversation sends back: without its summary it still carries the reasoning.
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    items = [{"role": "user", "content": "Hi"}, {**thought, "summary": []}, call, result]
    post(http, input=items, tools=TOOLS)
    broken = {**thought, "summary": [], "encrypted_content": thought["encrypted_content"][:-8] + "AAAAAAA="}
    answer = http.post(URL, json={"input": [items[0], broken, *items[2:]], "tools": TOOLS})
    assert answer.status_code == 400 and "input[1].encrypted_content" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", [post, stream])
def test_the_limit_leaves_it_incomplete(http: httpx2.Client, kind: Any) -> None:
    body = kind(http, input="Hi", max_output_tokens=5)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    (item,) = body["output"]
    assert (item["status"], text_of(item)) == ("incomplete", "Hello")


def test_an_empty_answer_is_a_message(http: httpx2.Client, server: Running) -> None:
    server.script.reply = lambda request: ""
    body = stream(http, input="Hi")
    assert [text_of(item) for item in body["output"]] == [""]


def test_logprobs(http: httpx2.Client) -> None:
    ask = {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (item,) = stream(http, **ask)["output"]
    (part,) = item["content"]
    assert len(part["logprobs"]) == len(REPLY.encode())
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    assert bytes(byte for entry in part["logprobs"] for byte in entry["bytes"]).decode() == REPLY
    assert post(http, **ask)["output"][0]["content"][0]["logprobs"] == part["logprobs"]


# ---------------------------------------------------------------------- what is read
def test_two_turns_of_codex(http: httpx2.Client, server: Running) -> None:
    """The shape of its requests: nothing stored, tools of every kind, reasoning that it carries itself."""
    shell = {
        "type": "function",
        "name": "exec_command",
        "description": "Runs a command.",
        "strict": False,
        "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
    }
    patch = {**CUSTOM, "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}
    space = {"type": "namespace", "name": "mcp__docs__", "description": "", "tools": [TOOLS[1]]}
    hosted = [{"type": "web_search", "external_web_access": False}, {"type": "image_generation"}]
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List files."}]},
    ]
    ask = {
        "model": "local",
        "instructions": "You are Codex.",
        "tools": [shell, patch, space, *hosted],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-abc",
        "text": {"verbosity": "low"},
        "client_metadata": {"x": "y"},
    }
    server.script.reply = lambda request: (
        'Look.</think><tool_call>\n{"name": "exec_command", "arguments": {"cmd": "ls"}}\n</tool_call>'
    )
    thought, call = stream(http, **ask, input=items)["output"]
    assert server.engine is not None
    assert server.engine.requests[-1].session == "0199-abc"
    assert all(name in prompt(server) for name in ("exec_command", "apply", "mcp__docs__now", "start: /.+/"))
    assert "web_search" not in prompt(server)
    sent = {**thought, "content": None}
    del sent["id"], sent["status"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a.txt"}
    server.script.reply = lambda request: "Done.</think>a.txt is all."
    body = stream(http, **ask, input=[*items, sent, {**call, "id": None}, result])
    assert [text_of(item) for item in body["output"]] == ["Done.", "a.txt is all."]
    assert "system\nYou are Codex.\n\nSandboxed.\nuser\nList files.\nassistant\n\ntool\na.txt\n" in prompt(
        server
    )


def test_everything_that_instructs_comes_first_as_one(http: httpx2.Client, server: Running) -> None:
    items = [
        {"role": "developer", "content": "B"},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Hi"}, {"type": "input_text", "text": "!"}],
        },
        {"type": "message", "role": "system", "content": "C"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hello", "annotations": []}]},
        {"role": "user", "content": "Go on."},
    ]
    post(http, input=items, instructions="A")
    assert prompt(server).startswith("system\nA\n\nB\n\nC\nuser\nHi!\nassistant\nHello\nuser\nGo on.\n")


def test_files_of_text(http: httpx2.Client, server: Running) -> None:
    data = base64.b64encode("tür = 1".encode()).decode()
    file = {"type": "input_file", "filename": "a.py", "file_data": f"data:text/x-python;base64,{data}"}
    post(http, input=[{"role": "user", "content": [{"type": "input_text", "text": "Read "}, file]}])
    assert "user\nRead a.py:\ntür = 1" in prompt(server)


def test_old_turns_make_room(http: httpx2.Client, server: Running) -> None:
    turns = [
        {"role": role, "content": f"{number} {role} " + "x" * 300}
        for number in range(10)
        for role in ("user", "assistant")
    ]
    ask = {"input": [*turns, {"role": "user", "content": "Last."}], "instructions": "Rules."}
    answer = http.post(URL, json=ask)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    body = post(http, **ask, truncation="auto", max_output_tokens=100)
    seen = prompt(server)
    assert body["usage"]["input_tokens"] <= INFO.context_length - 100
    assert seen.startswith("system\nRules.\nuser\n")
    assert "9 assistant" in seen and "0 user" not in seen and "user\nLast." in seen
    dropped = next(number for number in range(10) if f"{number} user" in seen)
    assert len(seen) + 660 > INFO.context_length - 100, (
        f"{dropped} turns were dropped, and one fewer would do"
    )


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"input": None}, "input is missing"),
        ({"input": []}, "input is empty"),
        ({"input": 1}, "input must be a string or a list of items, got a number."),
        ({"input": [{"role": "critic", "content": "a"}]}, "input[0].role must be one of"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]: this model has no",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input[0].content[0]: files",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "//79"}]}]},
            "input[0].content[0].file_data must be the base64 of a text file",
        ),
        (
            {"input": [{"type": "web_search_call", "id": "a"}]},
            "input[0]: items of type 'web_search_call' cannot",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]},
            "input[0].call_id 'a' names no call of an earlier item",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "Item with id 'msg_1' not found"),
        ({"tools": [{"type": "web_search"}]}, "This server does not run tools such as web_search"),
        ({"tools": [{"type": "magic"}]}, "tools[0].type 'magic' is not known"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools names 'now' twice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "name": "rm"}},
            "tool_choice names the tool 'rm'",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "web_search"}},
            "tool_choice of type 'web_search' cannot be served",
        ),
        ({"tool_choice": "required"}, "tool_choice required needs at least one tool"),
        ({"include": ["everything"]}, "include may hold"),
        ({"metadata": {"a": 1}}, "metadata must hold strings, got a number."),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata may hold at most 16 pairs, got 17."),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort must be one of"),
        ({"truncation": "some"}, "truncation must be one of auto, disabled."),
        ({"max_output_tokens": 0}, "max_output_tokens must be at least 1, got 0."),
        ({"background": True, "store": False}, "background needs a response that is stored"),
        ({"conversation": "conv_1"}, "conversation is kept at OpenAI"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt is kept at OpenAI"),
        ({"text": {"format": {"type": "csv"}}}, "text.format"),
        ({"previous_response_id": 3}, "previous_response_id must be a string"),
        ({"stop": ["a"] * 9}, "stop may hold at most"),
    ],
)
def test_wrong_bodies(http: httpx2.Client, more: dict[str, Any], sentence: str) -> None:
    for streamed in (False, True):
        answer = http.post(URL, json={"input": "Hi", **more, "stream": streamed})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"].startswith(sentence)


def test_errors_are_openais(client: openai.OpenAI, server: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="resp_none") as found:
        client.responses.create(model="m", input="Hi", previous_response_id="resp_none")
    assert (found.value.code, found.value.param) == ("previous_response_not_found", "previous_response_id")
    server.script.fail_after = 3
    with pytest.raises(openai.InternalServerError, match="told to fail"):
        client.responses.create(model="m", input="Hi")


def test_a_stream_that_fails_says_why(http: httpx2.Client, server: Running) -> None:
    server.script.fail_after = 3
    body = stream(http, input="Hi")
    assert (body["status"], body["usage"]) == ("failed", None)
    assert body["error"] == {"code": "server_error", "message": "This row was told to fail."}
    assert "Hel".startswith("".join(text_of(item) for item in body["output"]))


# ---------------------------------------------------------------------- streamed = not streamed
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    reply=st.lists(
        st.sampled_from([CALL, NOW, PATCHED, "Hi ", "\n", "<tool_call>", PATCHED[:70], "</think>"]),
        max_size=4,
    ),
    cuts=st.lists(st.integers(1, 40), max_size=40),
    thinks=st.booleans(),
    cap=st.none() | st.integers(1, 120),
)
def test_streamed_equals_not_streamed(
    http: httpx2.Client, server: Running, reply: list[str], cuts: list[int], thinks: bool, cap: int | None
) -> None:
    def cut(tokens: Sequence[int]) -> list[tuple[int, ...]]:
        bursts, start = [], 0
        for size in [*cuts, *[7] * len(tokens)]:
            if start < len(tokens):
                bursts.append(tuple(tokens[start : start + size]))
                start += size
        return bursts

    def plain(body: dict[str, Any]) -> tuple[Any, ...]:
        items = [(item["type"], item["status"], text_of(item), item.get("name")) for item in body["output"]]
        return items, body["status"], body["usage"]

    server.script.reply, server.script.cut = lambda request: "".join(reply), cut
    ask: dict[str, Any] = {"input": "Hi", "tools": [CUSTOM, *TOOLS], "max_output_tokens": cap}
    ask["reasoning"] = {"effort": "high" if thinks else "none"}
    assert plain(stream(http, **ask)) == plain(post(http, **ask))
