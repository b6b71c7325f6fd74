"""What SDKs hide: bytes on the wire, clients that hang up, silence, a full queue, a model that is still loading."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import httpx2
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mantou.api.mailbox import AsyncMailbox
from mantou.api.openai.wire import ChatChunk, Completion, encode
from mantou.data import TokenEvent, Usage
from mantou.errors import ModelError
from tests.api.conftest import Running, Wire

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hi"}]}


def body(**fields: Any) -> bytes:
    return json.dumps({**ASK, **fields}).encode()


def data_lines(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]


def test_stream_framing(http: httpx2.Client) -> None:
    answer = http.post(CHAT, content=body(stream=True))
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["connection"] == "keep-alive"
    assert answer.text.endswith("\n\ndata: [DONE]\n\n"), "bare, as every client expects it"
    events = answer.text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    for event in events[:-1]:
        chunk = json.loads(event.removeprefix("data: "))
        assert set(chunk["choices"][0]) == {"index", "delta", "logprobs", "finish_reason"}


@pytest.mark.parametrize(
    ("path", "kind", "ask"), [(CHAT, ChatChunk, ASK), ("/v1/completions", Completion, {"prompt": "x"})]
)
@pytest.mark.parametrize("usage", [None, True])
def test_chunks_are_what_openapi_says(
    http: httpx2.Client, path: str, kind: type, ask: Any, usage: bool | None
) -> None:
    """Chunks are written by hand, for speed; the types are what /openapi.json shows."""
    options = {"stream_options": {"include_usage": usage}} if usage else {}
    answer = http.post(
        path, json={**ask, "stream": True, "logprobs": True, "top_logprobs": 2, "n": 2, **options}
    )
    for line in data_lines(answer.text)[:-1]:
        again = encode(msgspec.json.decode(line, type=kind))
        assert json.loads(again) == json.loads(line)


def test_error_after_headers_is_the_last_event(http: httpx2.Client, server: Running) -> None:
    server.script.fail_after = 3
    lines = data_lines(http.post(CHAT, content=body(stream=True)).text)
    error = json.loads(lines[-1])["error"]
    assert error["message"] == "This row was told to fail."
    assert set(error) == {"message", "type", "param", "code"}
    assert "[DONE]" not in lines


def test_one_failed_answer_frees_its_siblings(http: httpx2.Client, server: Running) -> None:
    server.script.cut = lambda tokens: [tuple(tokens)] * 3
    server.script.fail_after, server.script.hold_after = 1, 1

    def reply(request: Any) -> str:
        server.script.hold_after = None if request.id.endswith("-1") else 1
        return "x"

    server.script.reply = reply
    assert http.post(CHAT, content=body(n=2)).status_code == 500
    assert server.engine is not None
    server.engine.wait_for(lambda engine: engine.num_rows == 0)
    assert [name[-2:] for name in server.engine.cancelled] == ["-0"]


# ---------------------------------------------------------------------- clients that leave
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prefill", [True, False])
def test_dropped_client_frees_its_rows(server: Running, stream: bool, prefill: bool) -> None:
    assert server.engine is not None
    if prefill:
        server.engine.pause()
    server.script.hold_after = 5
    wire = server.wire()
    wire.post(CHAT, body(stream=stream, n=2))
    server.engine.wait_for(lambda engine: engine.num_rows == 2)
    if stream and not prefill:
        wire.read_until(b'"content":"o"')
    wire.hang_up()
    server.engine.wait_for(lambda engine: len(engine.cancelled) == 2)
    assert server.engine.num_rows == 0


def test_client_that_leaves_while_the_model_loads_starts_nothing(serving: Callable[..., Any]) -> None:
    with serving(load=False, heartbeat_s=0.02) as running:
        leaver, stayer = running.wire(), running.wire()
        leaver.post(CHAT, body(stream=True, seed=1))
        leaver.read_until(b": keep-alive")
        leaver.hang_up()
        stayer.post(CHAT, body(stream=True, seed=2))
        stayer.read_until(b": keep-alive")
        running.load()
        stayer.read_until(b"[DONE]")
        assert [request.sampling.seed for request in running.engine.requests] == [2]


# ---------------------------------------------------------------------- silence
def test_heartbeats_during_a_long_prefill(serving: Callable[..., Any]) -> None:
    with serving(heartbeat_s=0.02) as running:
        running.engine.pause()
        wire = running.wire()
        wire.post(CHAT, body(stream=True))
        while wire.seen.count(b": keep-alive\n\n") < 3:
            wire.read()
        assert b"data:" not in wire.seen
        running.engine.pause(False)
        assert b'"content":"H"' in wire.read_until(b"data: [DONE]\n\n")


def test_request_waits_while_the_model_loads(serving: Callable[..., Any]) -> None:
    with (
        serving(load=False, heartbeat_s=0.02) as running,
        httpx2.Client(base_url=running.url, timeout=10) as http,
    ):
        assert http.get("/health").content == b'{"status": "ok"}'
        assert http.get("/stats").json()["server"]["state"] == "loading"
        wire = running.wire()
        wire.post(CHAT, body(stream=True))
        wire.read_until(b"200 OK", b": keep-alive")
        plain = running.wire()
        plain.post(CHAT, body())
        assert http.post(CHAT, content=body(temperature="hot")).status_code == 400, "known without a model"
        running.load()
        wire.read_until(b"[DONE]")
        plain.read_until(b'"finish_reason":"stop"')
        assert http.get("/stats").json()["server"]["state"] == "ready"


def test_failed_load_reaches_waiting_and_later_requests(serving: Callable[..., Any]) -> None:
    with (
        serving(load=False, heartbeat_s=0.02) as running,
        httpx2.Client(base_url=running.url, timeout=10) as http,
    ):
        wire = running.wire()
        wire.post(CHAT, body(stream=True))
        wire.read_until(b": keep-alive")
        running.service.failed(ModelError("weights.safetensors is cut short; download it again."))
        wire.read_until(b'data: {"error":{"message":"No model is loaded: weights.safetensors is cut short')
        answer = http.post(CHAT, content=body(stream=True))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_unavailable")
        assert http.get("/v1/models").status_code == 503
        assert http.get("/health").status_code == 200
        assert http.get("/stats").json()["server"]["state"] == "failed"
        assert http.get("/metrics").status_code == 200


# ---------------------------------------------------------------------- a full queue
@pytest.mark.parametrize("stream", [True, False])
def test_full_queue(http: httpx2.Client, server: Running, stream: bool) -> None:
    assert server.engine is not None
    server.engine.pause()
    wires = [server.wire() for _ in range(4)]
    for wire in wires:
        wire.post(CHAT, body(n=16))
    server.engine.wait_for(lambda engine: engine.num_rows == 64)
    refused = http.post(CHAT, content=body(stream=stream))
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("resource_admission", "queue_full")
    server.engine.pause(False)
    for wire in wires:
        wire.read_until(b'"total_tokens"')


def test_answers_that_do_not_all_fit_leave_none_behind(serving: Callable[..., Any]) -> None:
    with serving(max_waiting=3) as running, httpx2.Client(base_url=running.url, timeout=10) as http:
        running.engine.pause()
        assert http.post(CHAT, content=body(n=4)).status_code == 429
        assert running.engine.num_rows == 0
        assert running.service.mailbox.num_open == 0
        assert running.service.metrics.rejected == {"queue_full": 1}


# ---------------------------------------------------------------------- streamed = not streamed
def folded(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {"content": "", "reasoning": "", "finish": None, "usage": None, "logprobs": []}
    for line in data_lines(text)[:-1]:
        chunk = json.loads(line)
        found["usage"] = chunk.get("usage")
        (choice,) = chunk["choices"]
        found["content"] += choice["delta"].get("content", "")
        found["reasoning"] += choice["delta"].get("reasoning", "")
        found["finish"] = choice["finish_reason"]
        found["logprobs"] += (choice["logprobs"] or {}).get("content", [])
    return found


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    reply=st.text(st.sampled_from("ab <think>/é👋\n"), max_size=40),
    cuts=st.lists(st.integers(1, 5), max_size=80),
    stop=st.lists(st.sampled_from(["a", "ab", "é", "b a", "</think>b"]), max_size=2),
    thinking=st.booleans(),
    cap=st.none() | st.integers(1, 30),
)
def test_streamed_equals_not_streamed(
    http: httpx2.Client,
    server: Running,
    reply: str,
    cuts: list[int],
    stop: list[str],
    thinking: bool,
    cap: int | None,
) -> None:
    """Whatever the bursts in which tokens come: the same text, reasoning, logprobs, finish and usage."""

    def cut(tokens: Sequence[int]) -> list[tuple[int, ...]]:
        bursts, start = [], 0
        for size in [*cuts, *[1] * len(tokens)]:
            if start < len(tokens):
                bursts.append(tuple(tokens[start : start + size]))
                start += size
        return bursts

    server.script.reply, server.script.cut = lambda request: reply, cut
    ask = {
        "stop": stop,
        "max_tokens": cap,
        "logprobs": True,
        "chat_template_kwargs": {"enable_thinking": thinking},
    }
    streamed = folded(http.post(CHAT, content=body(**ask, stream=True)).text)
    whole = http.post(CHAT, content=body(**ask)).json()
    (choice,) = whole["choices"]
    assert streamed["content"] == choice["message"]["content"]
    assert streamed["reasoning"] == choice["message"].get("reasoning", "")
    assert streamed["finish"] == choice["finish_reason"]
    assert streamed["logprobs"] == choice["logprobs"]["content"]
    assert streamed["usage"] == whole["usage"]


# ---------------------------------------------------------------------- the mailbox alone
def test_mailbox_wakes_the_loop_once_a_step() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        mailbox = AsyncMailbox(loop)
        both, alone = mailbox.open("a", "b"), mailbox.open("c")
        step = [TokenEvent(name, (1,)) for name in ("a", "b", "c", "unknown")]
        thread = threading.Thread(target=mailbox.put, args=(step,))
        thread.start()
        assert [event.request_id for event in await both.take()] == ["a", "b"]
        assert [event.request_id for event in await alone.take()] == ["c"]
        thread.join()
        mailbox.put([TokenEvent(name, finish="stop", usage=Usage(1, 1)) for name in ("a", "b")])
        assert [event.finish async for event in both] == ["stop", "stop"]
        assert both.over
        assert not alone.over
        alone.nudge()
        assert await alone.take() == []
        mailbox.discard("c")
        assert alone.over
        assert await alone.take() == []
        assert mailbox.num_open == 0

    asyncio.run(scenario())


def test_mailbox_of_a_closed_loop_drops_events() -> None:
    loop = asyncio.new_event_loop()
    mailbox = AsyncMailbox(loop)
    loop.close()
    mailbox.put([TokenEvent("a", (1,))])


def test_pipelined_requests_are_answered_in_order(server: Running) -> None:
    wire: Wire = server.wire()
    wire.post(CHAT, body(max_tokens=1))
    wire.post(CHAT, body(max_tokens=2))
    seen = wire.read_until(b'"content":"H"', b'"content":"He"')
    assert seen.index(b'"content":"H"') < seen.index(b'"content":"He"')
