"""Ollama's API: lines, options, tools, thinking, errors in its own shape."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import msgspec
import pytest

from mantou.api.ollama.wire import OllamaChatLine, OllamaError, OllamaGenerateLine, whole_calls
from mantou.data import ToolCall
from tests.api.conftest import Running
from tests.fakes_api import INFO

CHAT, GENERATE = "/api/chat", "/api/generate"
USER = {"role": "user", "content": "Hi"}
ASK: dict[str, Any] = {"model": "any:latest", "messages": [USER]}
REPLY = "Hello, wörld! 👋 How are you?"
STYLES = {CHAT: OllamaChatLine, GENERATE: OllamaGenerateLine}


def lines(http: httpx2.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """The parts of a streamed answer, each checked against the declared type."""
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [msgspec.json.decode(line, type=STYLES[path]) for line in answer.text.splitlines()]


def sent(server: Running) -> Any:
    assert server.engine is not None
    return server.engine.requests[-1]


def prompt_of(server: Running) -> str:
    loaded = server.service.model
    assert loaded is not None
    return loaded.tokenizer.decode(sent(server).prompt)


# ---------------------------------------------------------------------- answers
def test_chat_streams_lines_unless_told_otherwise(http: httpx2.Client) -> None:
    *parts, last = lines(http, CHAT, ASK)
    assert "".join(part.message.content for part in parts) == REPLY
    assert not any(part.done for part in parts)
    assert (last.done, last.done_reason, last.model) == (True, "stop", INFO.id)
    whole = msgspec.json.decode(http.post(CHAT, json={**ASK, "stream": False}).content, type=OllamaChatLine)
    assert whole.message.content == REPLY
    assert (whole.eval_count, whole.prompt_eval_count) == (last.eval_count, last.prompt_eval_count)
    for end in (last, whole):
        spans = end.load_duration + end.prompt_eval_duration + end.eval_duration
        assert end.prompt_eval_duration > 0
        assert abs(end.total_duration - spans) <= 3, "the durations are measured, and add up"


def test_generate_renders_the_template_or_takes_the_prompt_raw(http: httpx2.Client, server: Running) -> None:
    parts = lines(http, GENERATE, {"prompt": "Hi", "system": "Be brief."})
    assert "".join(part.response for part in parts) == REPLY
    assert prompt_of(server).startswith("system\nBe brief.")
    http.post(GENERATE, json={"prompt": "Hi", "raw": True, "stream": False})
    assert prompt_of(server) == "Hi"


@pytest.mark.parametrize(("path", "body"), [(CHAT, {}), (CHAT, {"messages": []}), (GENERATE, {"model": "m"})])
def test_an_empty_request_only_loads_the_model(
    http: httpx2.Client, server: Running, path: str, body: dict[str, Any]
) -> None:
    (only,) = lines(http, path, {**body, "keep_alive": "5m"})
    assert (only.done, only.done_reason) == (True, "load")
    assert http.post(path, json={**body, "stream": False}).json()["done_reason"] == "load"
    assert server.engine is not None
    assert server.engine.requests == []


def test_length_is_a_reason(http: httpx2.Client) -> None:
    *_, last = lines(http, CHAT, {**ASK, "options": {"num_predict": 3}})
    assert (last.done_reason, last.eval_count) == ("length", 3)


def test_thinking_is_apart(http: httpx2.Client, server: Running) -> None:
    server.script.reply = lambda request: "Hmm.</think>Yes."
    parts = lines(http, CHAT, {**ASK, "think": True})
    assert "".join(part.message.thinking or "" for part in parts) == "Hmm."
    assert "".join(part.message.content for part in parts) == "Yes."
    http.post(CHAT, json={**ASK, "think": False, "stream": False})
    assert "<think>" not in prompt_of(server)


def test_images_are_refused_and_no_images_are_fine(http: httpx2.Client) -> None:
    assert http.post(CHAT, json={"messages": [{**USER, "images": []}], "stream": False}).status_code == 200
    for path, body in (
        (CHAT, {"messages": [{**USER, "images": ["aGk="]}]}),
        (GENERATE, {"prompt": "x", "images": ["aGk="]}),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 400
        assert "no vision" in msgspec.json.decode(answer.content, type=OllamaError).error


# ---------------------------------------------------------------------- options
def test_options_become_ours(http: httpx2.Client, server: Running) -> None:
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 42,
        "num_predict": 5,
        "stop": ["ZZ"],
        "repeat_penalty": 1.2,
        "repeat_last_n": 33,
        "num_ctx": 8192,
        "num_gpu": 1,
    }
    http.post(CHAT, json={**ASK, "stream": False, "options": options})
    request = sent(server)
    drawn = request.sampling
    assert (drawn.temperature, drawn.top_k, drawn.top_p, drawn.min_p) == (0.5, 7, 0.9, 0.1)
    assert (drawn.seed, request.max_tokens, request.stop) == (42, 5, ("ZZ",))
    assert (drawn.repetition_penalty, drawn.repetition_context_size) == (1.2, 33)


@pytest.mark.parametrize(("last_n", "penalty", "context"), [(0, 0.0, 0), (-1, 1.2, 0)])
def test_repeat_last_n_of_zero_is_off_and_minus_one_is_all(
    http: httpx2.Client, server: Running, last_n: int, penalty: float, context: int
) -> None:
    options = {"repeat_penalty": 1.2, "repeat_last_n": last_n}
    http.post(CHAT, json={**ASK, "stream": False, "options": options})
    drawn = sent(server).sampling
    assert drawn.repetition_penalty == penalty
    if penalty:
        assert drawn.repetition_context_size == context


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("options", {"temperature": "hot"}, "options.temperature must be a number, got a string."),
        ("options", {"num_predict": 0}, "options.num_predict must be at least 1"),
        ("options", {"num_predict": -3}, "options.num_predict must be between"),
        ("options", {"mirostat": 1}, "options.mirostat must be between 0 and 0"),
        ("options", {"stop": list("abcde")}, "options.stop may hold at most 4"),
        ("options", 3, "options must be an object"),
        ("format", "xml", "format must be json or a JSON schema."),
        ("format", 3, "format must be json or a JSON schema, got a number."),
        ("think", "deeply", "think must be true, false, low"),
        ("keep_alive", [], "keep_alive must be a duration"),
        ("stream", "no", "stream must be true or false"),
        ("messages", "Hi", "messages must be a list of messages"),
        ("messages", [{}], "messages[0].role is missing"),
        ("messages", ["x"], "messages[0] must be an object"),
        ("messages", [{"role": "king"}], "messages[0].role must be one of"),
        (
            "messages",
            [{"role": "user", "content": "", "thinking": "", "reasoning": {}}],
            "messages[0].reasoning must be a string",
        ),
        ("tools", [{"type": "magic"}], "tools[0].type must be function."),
    ],
)
def test_wrong_fields_are_named_in_ollamas_shape(
    http: httpx2.Client, field: str, value: Any, sentence: str
) -> None:
    answer = http.post(CHAT, json={**ASK, field: value})
    assert answer.status_code == 400
    assert sentence in msgspec.json.decode(answer.content, type=OllamaError).error


@pytest.mark.parametrize(
    ("field", "value"), [("suffix", "x"), ("template", "{{ .Prompt }}"), ("context", [1, 2])]
)
def test_what_is_not_supported_is_refused_and_its_empty_value_taken(
    http: httpx2.Client, field: str, value: Any
) -> None:
    assert f"{field} is not supported" in http.post(GENERATE, json={"prompt": "x", field: value}).text
    empty = {"prompt": "x", "stream": False, field: type(value)()}
    assert http.post(GENERATE, json=empty).status_code == 200


# ---------------------------------------------------------------------- format and tools
def test_format_is_the_shared_grammar(http: httpx2.Client, server: Running) -> None:
    http.post(CHAT, json={**ASK, "stream": False, "format": "json"})
    assert sent(server).grammar
    http.post(CHAT, json={**ASK, "stream": False, "format": {"type": "object", "properties": {}}})
    assert sent(server).grammar
    http.post(CHAT, json={**ASK, "stream": False, "format": ""})
    assert not sent(server).grammar


def test_tools_and_their_answers_reach_the_prompt(http: httpx2.Client, server: Running) -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "f", "content": "42"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert http.post(CHAT, json={"messages": messages, "tools": tools, "stream": False}).status_code == 200
    assert prompt_of(server).startswith("<tools>")
    assert "42" in prompt_of(server)


def test_a_call_that_the_end_cut_off_is_text() -> None:
    calls = (ToolCall("1", "f", '{"x": 1}'), ToolCall("2", "g", '{"y": '), ToolCall("3", "h", ""))
    good, rest = whole_calls(calls)
    assert [call.name for call in good] == ["f", "h"]
    assert rest == 'g({"y": '


# ---------------------------------------------------------------------- errors in a stream
def test_a_stream_that_fails_ends_with_an_error_line(http: httpx2.Client, server: Running) -> None:
    server.script.fail_after = 2
    answer = http.post(CHAT, json=ASK)
    last = json.loads(answer.text.splitlines()[-1])
    assert last == {"error": "This row was told to fail."}


def test_silence_is_a_line_that_every_client_can_parse(serving: Any) -> None:
    with serving(heartbeat_s=0.05) as running, httpx2.Client(base_url=running.url, timeout=10) as http:
        running.script.hold_after = 2
        with http.stream("POST", CHAT, json=ASK) as answer:
            for line in answer.iter_lines():
                part = msgspec.json.decode(line, type=OllamaChatLine)
                if not part.model:
                    break
            assert (part.message.content, part.done) == ("", False)


# ---------------------------------------------------------------------- describing routes
def test_describing_routes(http: httpx2.Client) -> None:
    (model,) = http.get("/api/tags").json()["models"]
    assert (model["name"], model["details"]["family"]) == (INFO.id, INFO.model_type)
    (running,) = http.get("/api/ps").json()["models"]
    assert running["context_length"] == INFO.context_length
    version = http.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4), "some clients ask for at least this one"
    shown = http.post("/api/show", json={"model": "x"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["fake.context_length"] == INFO.context_length
    assert "model must be a string" in http.post("/api/show", json={"model": 1}).json()["error"]


def test_embeddings_need_an_embedding_model(http: httpx2.Client) -> None:
    for path, body in (("/api/embed", {"input": "x"}), ("/api/embeddings", {"prompt": "x"})):
        answer = http.post(path, json=body)
        assert answer.status_code == 400
        assert "--embedding-model" in msgspec.json.decode(answer.content, type=OllamaError).error
        assert "is missing" in http.post(path, json={}).json()["error"]
