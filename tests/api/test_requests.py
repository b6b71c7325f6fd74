"""Requests under way: their ids, their end on demand, the server's end, and what the log and the spans say of them."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from mantou.api import logs
from mantou.api.envelope import Exchange
from mantou.api.telemetry import Telemetry, wanted
from tests.api.conftest import Running, serve

CHAT = "/v1/chat/completions"
SECRET = "my private prompt"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": SECRET}]}
MESSAGE: dict[str, Any] = {**ASK, "model": "x", "max_tokens": 50}


def held(server: Running, after: int = 2) -> None:
    """Rows say so many tokens and then nothing more."""
    server.script.hold_after = after


# ---------------------------------------------------------------------- ids
def test_a_plain_id_of_the_client_is_kept_and_another_is_not(http: httpx2.Client) -> None:
    assert http.get("/health", headers={"x-request-id": "trace-1:a"}).headers["x-request-id"] == "trace-1:a"
    for odd in ("a b", "a/b", "x" * 129, 'a"b'):
        answer = http.get("/health", headers={"x-request-id": odd})
        assert answer.headers["x-request-id"].startswith("req_")
        assert answer.headers["request-id"] == answer.headers["x-request-id"]


# ---------------------------------------------------------------------- cancelling
def test_cancel_ends_a_stream_with_the_reason_and_frees_its_rows(
    http: httpx2.Client, server: Running
) -> None:
    held(server)
    with http.stream("POST", CHAT, json={**ASK, "stream": True, "n": 2}) as answer:
        lines = answer.iter_lines()
        response_id = json.loads(next(lines).removeprefix("data: "))["id"]
        (shown,) = http.get("/v1/requests").json()["data"]
        assert (shown["response_id"], shown["path"], shown["num_answers"]) == (response_id, CHAT, 2)
        done = http.post(f"/v1/requests/{response_id}/cancel")
        assert done.json() == {"id": response_id, "object": "request", "cancelled": True}
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_cancelled"
    assert server.engine is not None
    server.engine.wait_for(lambda engine: engine.num_rows == 0)
    assert http.post(f"/v1/requests/{response_id}/cancel").status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, ASK),
        ("/v1/messages", MESSAGE),
        ("/v1/responses", {"input": SECRET}),
        ("/api/chat", {**ASK, "stream": False}),
    ],
)
def test_cancel_answers_who_waits_for_a_whole_answer(
    http: httpx2.Client, server: Running, path: str, body: dict[str, Any]
) -> None:
    held(server)
    answers: list[httpx2.Response] = []

    def ask() -> None:
        answers.append(
            httpx2.post(server.url + path, json=body, headers={"x-request-id": "mine"}, timeout=10)
        )

    asking = threading.Thread(target=ask)
    asking.start()
    assert server.engine is not None
    server.engine.wait_for(lambda engine: engine.num_rows == 1)
    assert http.post("/v1/requests/mine/cancel").status_code == 200
    asking.join(10)
    assert answers[0].status_code == 499
    assert "cancelled" in answers[0].text
    server.engine.wait_for(lambda engine: engine.num_rows == 0)


def test_a_request_that_waits_for_the_model_can_be_cancelled(serving: Any) -> None:
    with serving(load=False) as running, httpx2.Client(base_url=running.url, timeout=10) as http:
        wire = running.wire()
        body = json.dumps(ASK).encode()
        wire.send(f"POST {CHAT} HTTP/1.1", f"Content-Length: {len(body)}", "X-Request-Id: early", body=body)
        while not http.get("/v1/requests").json()["data"]:
            pass
        assert http.post("/v1/requests/early/cancel").status_code == 200
        wire.read_until(b"499 ", b"request_cancelled")
        running.load()
        assert http.post(CHAT, json=ASK).status_code == 200, "the server goes on"


def test_a_key_sees_and_ends_its_own_requests_only(serving: Any, tmp_path: Any) -> None:
    from mantou.api.keys import KeyFile

    keys = KeyFile(tmp_path / "keys.json")
    mine, other, admin = keys.add("mine"), keys.add("other"), keys.add("admin", ["admin"])
    with serving(api_key_file=keys.path) as running, httpx2.Client(base_url=running.url, timeout=10) as http:
        held(running)

        def as_key(text: str) -> dict[str, str]:
            return {"authorization": f"Bearer {text}", "x-request-id": "same"}

        with http.stream("POST", CHAT, json={**ASK, "stream": True}, headers=as_key(mine)) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert http.get("/v1/requests", headers=as_key(other)).json()["data"] == []
            assert http.post("/v1/requests/same/cancel", headers=as_key(other)).status_code == 404
            for text in (mine, admin):
                (seen,) = http.get("/v1/requests", headers=as_key(text)).json()["data"]
                assert seen["key"] == "mine"
            assert http.post("/v1/requests/same/cancel", headers=as_key(mine)).status_code == 200
            assert "request_cancelled" in "".join(lines)


# ---------------------------------------------------------------------- body size
def test_max_body_is_a_setting(serving: Any) -> None:
    with serving(max_body_bytes=1000) as running:
        answer = httpx2.post(running.url + CHAT, json={**ASK, "pad": "x" * 1000}, timeout=10)
    assert answer.status_code == 413
    assert "--max-body" in answer.json()["error"]["message"]


# ---------------------------------------------------------------------- draining
def test_a_draining_server_finishes_and_takes_nothing_new(serving: Any) -> None:
    with serving() as running, httpx2.Client(base_url=running.url, timeout=10) as http:
        running.script.hold_after = 2
        assert http.get("/ready").json() == {"status": "ready"}
        with http.stream("POST", CHAT, json={**ASK, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.service.draining = True
            ready = http.get("/ready")
            assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
            assert http.get("/health").status_code == 200
            for path, body, status in ((CHAT, ASK, 503), ("/v1/messages", MESSAGE, 529)):
                refused = http.post(path, json=body)
                assert (refused.status_code, refused.headers["retry-after"]) == (status, "5")
            assert http.get("/v1/requests").json()["data"], "looking goes on"
            response_id = http.get("/v1/requests").json()["data"][0]["id"]
            assert http.post(f"/v1/requests/{response_id}/cancel").status_code == 200
            assert "request_cancelled" in "".join(lines)


def test_readiness_while_loading(serving: Any) -> None:
    with serving(load=False) as running:
        answer = httpx2.get(running.url + "/ready", timeout=10)
    assert (answer.status_code, answer.json()) == (503, {"status": "loading"})


# ---------------------------------------------------------------------- logs
@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], io.StringIO]]:
    """`log("json")`: what the server writes from level info on."""
    kept = {name: logging.getLogger(name) for name in ("mantou", "uvicorn")}
    before = {name: (one.handlers, one.level, one.propagate) for name, one in kept.items()}

    def start(style: str) -> io.StringIO:
        stream = io.StringIO()
        logs.configure(style, "info", stream)
        return stream

    yield start
    for name, logger in kept.items():
        logger.handlers, logger.level, logger.propagate = before[name]


def test_a_request_is_one_json_line_without_its_text(log: Any, serving: Any) -> None:
    stream = log("json")
    with serving(observers=(logs.log_request,)) as running:
        sent = {"x-request-id": "seen"}
        usage = httpx2.post(running.url + CHAT, json=ASK, headers=sent, timeout=10).json()["usage"]
        httpx2.post(running.url + CHAT, json={"messages": 3}, timeout=10)
    first, second, *_ = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert first["request_id"] == "seen"
    assert (first["path"], first["status"], first["level"]) == (CHAT, 200, "info")
    assert first["prompt_tokens"] == usage["prompt_tokens"]
    assert first["finish"] == "stop"
    assert 0 < first["first_token_s"] <= first["seconds"]
    assert (second["status"], second["error"]) == (400, "invalid_request_error")
    assert SECRET not in stream.getvalue()
    assert "Hello" not in stream.getvalue()


def test_text_lines_carry_the_same_and_a_traceback(log: Any) -> None:
    stream = log("text")
    logs.log_request(Exchange("one", method="GET", path="/x", status=500, error="e"))
    try:
        raise ZeroDivisionError("deep")
    except ZeroDivisionError:
        logging.getLogger("mantou.api").exception("it failed")
    lines = stream.getvalue()
    assert "WARNING mantou.request: request request_id=one method=GET path=/x status=500 error=e" in lines
    assert "ZeroDivisionError: deep" in lines


# ---------------------------------------------------------------------- spans
@pytest.fixture(scope="module")
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced(spans: InMemorySpanExporter) -> Iterator[Running]:
    telemetry = Telemetry("1.0", "127.0.0.1", 8080, SimpleSpanProcessor(spans))
    with serve(observers=(telemetry,)) as running:
        yield running
    telemetry.close()


def test_a_request_is_a_genai_span_below_the_callers(traced: Running, spans: InMemorySpanExporter) -> None:
    spans.clear()
    trace = "0af7651916cd43dd8448eb211c80319c"
    sent = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    usage = httpx2.post(traced.url + CHAT, json=ASK, headers=sent, timeout=10).json()["usage"]
    httpx2.get(traced.url + "/health", timeout=10)
    (span,) = spans.get_finished_spans()
    found = dict(span.attributes or {})
    assert (span.name, span.kind) == ("chat fake/bytes-1B", SpanKind.SERVER)
    assert span.context.trace_id == int(trace, 16)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] in (usage["completion_tokens"], usage["completion_tokens"] - 1)
    assert found["gen_ai.response.finish_reasons"] == ("stop",)
    assert [event.name for event in span.events] == ["gen_ai.first_token"]
    assert span.end_time is not None
    assert span.start_time is not None
    assert span.end_time > span.events[0].timestamp > span.start_time
    assert SECRET not in span.to_json()


def test_a_failed_request_is_a_span_with_its_error(traced: Running, spans: InMemorySpanExporter) -> None:
    spans.clear()
    httpx2.post(traced.url + "/v1/completions", json={"prompt": 3}, timeout=10)
    (span,) = spans.get_finished_spans()
    assert span.name == "text_completion"
    assert span.status.status_code == StatusCode.ERROR
    assert dict(span.attributes or {})["error.type"] == "invalid_request_error"


def test_spans_are_off_unless_an_endpoint_is_set() -> None:
    assert not wanted({})
    assert wanted({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"})
    assert not wanted({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_SDK_DISABLED": "true"})
