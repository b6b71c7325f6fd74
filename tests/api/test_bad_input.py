"""Everything a caller can get wrong: a 4xx in one shape that names the field, and a server that goes on."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mantou.api.body import MAX_BODY_BYTES
from mantou.api.openai.chat import OpenAIChat
from mantou.api.openai.completions import OpenAICompletions
from tests.api.conftest import Running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def error_of(answer: httpx2.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


SHARED = [
    ("model", 1, "model must be a string, got a number."),
    ("stream", "yes", "stream must be true or false, got a string."),
    ("stream_options", [], "stream_options must be an object, got a list."),
    (
        "stream_options",
        {"include_usage": 1},
        "stream_options.include_usage must be true or false, got a number.",
    ),
    ("n", 0, "n must be between 1 and 16, got 0."),
    ("n", 17, "n must be between 1 and 16, got 17."),
    ("n", 1.5, "n must be a whole number, got 1.5."),
    ("stop", 5, "stop must be a string or a list of strings, got a number."),
    ("stop", ["a", 1], "stop[1] must be a string, got a number."),
    ("stop", list("abcde"), "stop may hold at most 4 sequences, got 5."),
    ("stop", [""] * 5, "stop may hold at most 4 sequences, got 5."),
    ("max_tokens", 0, "max_tokens must be at least 1, got 0."),
    ("max_tokens", "10", "max_tokens must be a whole number, got a string."),
    ("max_completion_tokens", True, "max_completion_tokens must be a whole number, got a boolean."),
    ("seed", "x", "seed must be a whole number, got a string."),
    ("temperature", "hot", "temperature must be a number, got a string."),
    ("temperature", True, "temperature must be a number, got a boolean."),
    ("temperature", -0.5, "temperature must be between 0 and 1e+09, got -0.5."),
    ("temperature", 10**40, "temperature must be between 0 and 1e+09, got a far larger number."),
    ("top_p", 1.5, "top_p must be between 0 and 1, got 1.5."),
    ("top_k", -1, "top_k must be at least 0, got -1."),
    ("min_p", [], "min_p must be a number, got a list."),
    ("xtc_probability", 2, "xtc_probability must be between 0 and 1, got 2."),
    ("xtc_threshold", 0.6, "xtc_threshold must be between 0 and 0.5, got 0.6."),
    ("repetition_penalty", -1, "repetition_penalty must be between 0 and 1e+09, got -1."),
    ("repetition_context_size", -1, "repetition_context_size must be between 0 and 1e+09, got -1."),
    ("presence_penalty", {}, "presence_penalty must be a number, got an object."),
    ("presence_context_size", 0.5, "presence_context_size must be a whole number, got 0.5."),
    ("frequency_penalty", "1", "frequency_penalty must be a number, got a string."),
    ("frequency_context_size", "1", "frequency_context_size must be a whole number, got a string."),
    ("logit_bias", [1], "logit_bias must be an object of token id to number, got a list."),
    ("logit_bias", {"x": 1}, "logit_bias needs token ids as keys, and one of them is not a whole number."),
    ("logit_bias", {"1": "x"}, "logit_bias[1] must be a number, got a string."),
    ("logit_bias", {"1": 1e12}, "logit_bias[1] must be between -1e+09 and 1e+09."),
    ("logit_bias", {"258": 1}, "logit_bias names token 258, but the vocabulary ends at 257."),
    ("hlg", 1, "hlg must be an object, got a number."),
    ("hlg", {"width": "wide"}, "hlg.width must be a number, got a string."),
    ("adapter", 1, "adapter must be a string, got a number."),
    ("thinking_budget", -1, "thinking_budget must be at least 0, got -1."),
    ("thinking_token_budget", "all", "thinking_token_budget must be a whole number, got a string."),
    ("speculation", True, "speculation must be an object or false, got a boolean."),
    ("speculation", {"kind": 1}, "speculation.kind must be a string, got a number."),
    (
        "speculation",
        {"num_draft_tokens": 65},
        "speculation.num_draft_tokens must be between 1 and 64, got 65.",
    ),
    ("session_id", 1, "session_id must be a string, got a number."),
    ("prompt_cache_key", 1, "prompt_cache_key must be a string, got a number."),
    ("top_logprobs", 21, "top_logprobs must be between -1 and 20, got 21."),
]
CHAT_ONLY = [
    ("reasoning", "high", "reasoning must be an object, got a string."),
    ("reasoning", {"max_tokens": 1.5}, "reasoning.max_tokens must be a whole number, got 1.5."),
    ("prediction", "text", "prediction must be an object, got a string."),
    ("prediction", {"content": [3]}, "prediction must be of type content, its content a string or a list"),
    ("messages", None, "messages is missing; send a list with at least one message."),
    ("messages", [], "messages is empty; send at least one message."),
    ("messages", "Hi", "messages must be a list of messages, got a string."),
    ("messages", ["Hi"], "messages[0] must be an object, got a string."),
    ("messages", [{}], "messages[0].role is missing; it must be a string."),
    ("messages", [{"role": "king", "content": "x"}], "messages[0].role must be one of"),
    ("messages", [USER, {"role": "user"}], "messages[1].content is missing"),
    ("messages", [{"role": "user", "content": 1}], "messages[0].content must be a string or a list of parts"),
    (
        "messages",
        [{"role": "user", "content": [1]}],
        "messages[0].content[0] must be an object, got a number.",
    ),
    ("messages", [{"role": "user", "content": [{}]}], "messages[0].content[0].type is missing"),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text is missing"),
    ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "this model has no vision"),
    ("messages", [{"role": "user", "content": [{"type": "input_audio"}]}], "this model has no audio input"),
    ("messages", [{"role": "user", "content": [{"type": "smell"}]}], "content[0].type is not a known kind"),
    ("messages", [{**USER, "name": 1}], "messages[0].name must be a string, got a number."),
    (
        "messages",
        [{"role": "assistant", "tool_calls": {}}],
        "messages[0].tool_calls must be a list, got an object.",
    ),
    (
        "messages",
        [{"role": "assistant", "tool_calls": [{}]}],
        "messages[0].tool_calls[0].function must be an object",
    ),
    (
        "messages",
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}],
        "messages[0].tool_calls[0].function.arguments must be a string of JSON, got a number.",
    ),
    ("tools", {}, "tools must be a list of tools, got an object."),
    ("tools", [{"type": "magic"}], "tools[0].type must be function."),
    (
        "messages",
        [{"role": "user", "content": "Hi", "tool_calls": {}}],
        "messages[0].tool_calls must be a list, got an object.",
    ),
    ("tools", [{"type": "function", "function": {}}], "tools[0].function.name is missing"),
    (
        "tools",
        [{"type": "function", "function": {"name": "f", "strict": {}}}],
        "tools[0].function.strict must be true or false, got an object.",
    ),
    ("tools", [{"type": "function", "function": nested(100)}], "tools is nested more than 64 levels deep"),
    ("parallel_tool_calls", "no", "parallel_tool_calls must be true or false, got a string."),
    ("tool_choice", 1, "tool_choice must be a string or an object, got a number."),
    ("tool_choice", "maybe", "tool_choice must be none, auto, required or a named function."),
    ("chat_template_kwargs", "x", "chat_template_kwargs must be an object, got a string."),
    ("chat_template_kwargs", nested(100), "chat_template_kwargs is nested more than 64 levels deep"),
    ("reasoning_effort", "ultra", "reasoning_effort must be one of none, minimal, low, medium, high, xhigh."),
    ("response_format", "json", "response_format must be an object with a type"),
    (
        "response_format",
        {"type": "yaml"},
        "response_format.type must be one of text, json_object, json_schema",
    ),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {}},
        "response_format.json_schema.schema is missing",
    ),
    ("response_format", {"type": "json_schema", "schema": 1}, "response_format.schema must be a JSON schema"),
    ("response_format", {"type": "regex"}, "response_format.regex must be a string, got null."),
    (
        "response_format",
        {"type": "regex", "regex": "(?=a)b"},
        "response_format.regex cannot be used: invalid regex",
    ),
    (
        "response_format",
        {"type": "choice", "choice": []},
        "response_format.choice must hold 1 to 1000 strings",
    ),
    (
        "response_format",
        {"type": "json_schema", "schema": {"type": "string", "minLenght": 1}},
        "response_format.schema has the keyword 'minLenght', which is not supported",
    ),
    ("guided_json", "{", "guided_json is a string that is not JSON"),
    ("guided_regex", 1, "guided_regex must be a string, got a number."),
    ("guided_grammar", "", "guided_grammar is empty"),
    ("guided_choice", ["a", 1], "guided_choice may hold strings only"),
    ("structured_outputs", {"json": {}, "regex": "a"}, "both say what the answer must be"),
    ("structured_outputs", {"structural_tag": {}}, "structured_outputs.structural_tag is not supported"),
    ("logprobs", 1, "logprobs must be true or false, got a number."),
]
TEXT_ONLY = [
    ("prompt", None, "prompt is missing; send a text."),
    ("prompt", "", "prompt is empty; send some text."),
    ("prompt", 5, "prompt must be a string or a list of token ids, got a number."),
    ("prompt", [], "prompt must be a list of token ids with at least one of them."),
    ("prompt", [1, "a"], "prompt must be a list of token ids with at least one of them."),
    ("prompt", ["a", 1], "prompt[1] must be a string or a list of token ids, got a number."),
    ("prompt", [258], "prompt holds a token id outside the vocabulary of 258."),
    ("prompt", [-1], "prompt holds a token id outside the vocabulary of 258."),
    ("prompt", ["a"] * 65, "65 prompts x n = 1 is more than 64 answers; send fewer."),
    ("suffix", "end", "suffix is not supported"),
    ("echo", 1, "echo must be true or false, got a number."),
    ("best_of", 17, "best_of must be between 1 and 16, got 17."),
    ("logprobs", "yes", "logprobs must be a whole number, got a string."),
    ("logprobs", 21, "logprobs must be between 0 and 20."),
]


@pytest.mark.parametrize(("field", "value", "message"), SHARED + CHAT_ONLY)
def test_chat_field(http: httpx2.Client, server: Running, field: str, value: Any, message: str) -> None:
    error = error_of(http.post(CHAT, json={"messages": [USER], field: value}))
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(field)
    assert server.engine is not None
    assert server.engine.requests == []


@pytest.mark.parametrize(("field", "value", "message"), SHARED + TEXT_ONLY)
def test_completions_field(http: httpx2.Client, field: str, value: Any, message: str) -> None:
    error = error_of(http.post(TEXT, json={"prompt": "Hi", field: value}))
    assert message in error["message"]


def test_every_field_of_the_tables_is_in_the_bad_input_tables() -> None:
    covered = {field for field, _, _ in SHARED + CHAT_ONLY + TEXT_ONLY}
    documented = {*OpenAIChat().schema()["properties"], *OpenAICompletions().schema()["properties"]}
    assert documented - covered == set()


def test_the_best_of_fewer_than_asked_for_or_in_a_stream_is_refused(http: httpx2.Client) -> None:
    few = error_of(http.post(TEXT, json={"prompt": "a", "n": 3, "best_of": 2}))
    assert few["message"] == "best_of must be at least n, which is 3, got 2."
    streamed = error_of(http.post(TEXT, json={"prompt": "a", "best_of": 2, "stream": True}))
    assert streamed["message"].startswith("best_of cannot be streamed")


def test_null_is_the_same_as_absent(http: httpx2.Client) -> None:
    fields = {field: None for field, _, _ in SHARED + CHAT_ONLY if field != "messages"}
    assert http.post(CHAT, json={"messages": [USER], **fields}).status_code == 200


def test_unknown_fields_are_ignored(http: httpx2.Client) -> None:
    answer = http.post(CHAT, json={"messages": [USER], "user": 1, "metadata": [], "made_up": {"x": 1}})
    assert answer.status_code == 200


def test_streaming_request_with_a_wrong_field_gets_a_status(http: httpx2.Client) -> None:
    assert (
        error_of(http.post(CHAT, json={"messages": [USER], "stream": True, "top_p": 7}))["param"] == "top_p"
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "line 1, column 1"),
        (b'{"messages": [', "not valid JSON"),
        (b'{"messages":\n [}', "line 2, column 3"),
        (b'{"a": 1} x', "line 1, column 10"),
        (b'{"temperature": NaN}', "NaN is not a JSON number"),
        (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "too large"),
        (b'{"temperature": 1e999}', "too large"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "unpaired surrogate"),
        (b"[1]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
    ],
)
def test_body_that_is_no_json_object(http: httpx2.Client, body: bytes, message: str) -> None:
    for path in (CHAT, TEXT):
        assert message in error_of(http.post(path, content=body))["message"]


def test_body_over_the_limit(http: httpx2.Client, server: Running) -> None:
    pieces = (b" " * 2**20 for _ in range(MAX_BODY_BYTES // 2**20 + 1))
    error = error_of(http.post(CHAT, content=pieces), 413)
    assert "64 MiB" in error["message"]
    wire = server.wire()
    wire.send(f"POST {CHAT} HTTP/1.1", f"Content-Length: {MAX_BODY_BYTES + 1}")
    wire.read_until(b"413 ", b"request_too_large")


def test_prompt_beyond_the_context_names_both_numbers(http: httpx2.Client) -> None:
    for path, ask in (
        (CHAT, {"messages": [{"role": "user", "content": "x" * 20_000}]}),
        (TEXT, {"prompt": "x" * 4096}),
    ):
        error = error_of(http.post(path, json=ask))
        assert error["code"] == "context_length_exceeded"
        assert "4096" in error["message"]
    assert "4096 tokens" in error["message"]


def test_max_tokens_is_clamped_to_the_room(http: httpx2.Client, server: Running) -> None:
    assert (
        http.post(TEXT, json={"prompt": "x" * 4090, "max_tokens": 10**30}).json()["usage"][
            "completion_tokens"
        ]
        == 6
    )
    assert server.engine is not None
    assert server.engine.requests[0].max_tokens == 6


def test_operator_cap_bounds_the_context(serving: Any) -> None:
    with serving(context_length=4096) as running:
        object.__setattr__(running.service.config, "context_length", 100)
        with httpx2.Client(base_url=running.url, timeout=10) as http:
            assert "holds 100" in error_of(http.post(TEXT, json={"prompt": "x" * 100}))["message"]


def test_tools_for_a_model_without_them(serving: Any) -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with serving(template=plain) as running, httpx2.Client(base_url=running.url, timeout=10) as http:
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert error_of(http.post(CHAT, json={"messages": [USER], "tools": tools}))["param"] == "tools"
        assert (
            http.post(CHAT, json={"messages": [USER], "tools": tools, "tool_choice": "none"}).status_code
            == 200
        )
        assert http.post(CHAT, json={"messages": [USER], "tools": []}).status_code == 200


def test_template_that_refuses(serving: Any) -> None:
    source = "{{ raise_exception('Roles must alternate') }}"
    with serving(template=source) as running, httpx2.Client(base_url=running.url, timeout=10) as http:
        assert "Roles must alternate" in error_of(http.post(CHAT, json={"messages": [USER]}))["message"]


def test_unknown_path_and_method(http: httpx2.Client) -> None:
    assert error_of(http.get("/v2/nothing"), 404)["message"] == "not found"
    error_of(http.post("/v1/nothing", json={}), 404)
    wrong = http.get(CHAT)
    error_of(wrong, 405)
    assert wrong.headers["allow"] == "POST"


def test_internal_error_says_nothing_of_the_inside(
    http: httpx2.Client, server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(request: Any) -> str:
        raise ZeroDivisionError("deep inside")

    server.script.reply = explode
    assert server.engine is not None
    engine, original = server.engine, server.engine.submit
    secret = "my private prompt"
    ask = {"messages": [{"role": "user", "content": secret}]}

    def submit(request: Any) -> None:
        explode(request)

    engine.submit = submit
    try:
        plain = error_of(http.post(CHAT, json=ask), 500)
        streamed = error_of(http.post(CHAT, json={**ask, "stream": True}), 500)
    finally:
        engine.submit = original
    for error in (plain, streamed):
        assert "deep inside" not in error["message"]
        assert error["message"].split()[-1].rstrip(".") in caplog.text, "the id leads to the log"
    assert "ZeroDivisionError" in caplog.text
    assert secret not in caplog.text


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted(
    {*OpenAIChat().schema()["properties"], *OpenAICompletions().schema()["properties"]} - {"stream"}
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from([CHAT, TEXT]), fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3))
def test_no_body_makes_a_500(http: httpx2.Client, path: str, fields: dict[str, Any]) -> None:
    body = {"messages": [USER], "prompt": "Hi", **fields}
    assert http.post(path, content=json.dumps(body).encode()).status_code in (200, 400)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(message=st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name", "reasoning"]), JSON))
def test_no_message_makes_a_500(http: httpx2.Client, message: dict[str, Any]) -> None:
    for extra in ({}, {"role": "assistant"}, {"role": "user"}):
        answer = http.post(CHAT, content=json.dumps({"messages": [{**message, **extra}, USER]}).encode())
        assert answer.status_code in (200, 400), answer.text
