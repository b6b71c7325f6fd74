"""A server's life: loading, answering, being told to stop."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.conftest import ENDLESS, PLANTED
from tests.real import DEADLINE_S, Server, events, eventually, serving, starter_folder

TEXT = "/v1/completions"
SHORT = {"prompt": "the fox", "temperature": 0, "max_tokens": 8}


class Asked:
    """A request that has been sent; its answer is read when the test wants it."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        payload = json.dumps(body).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(payload)}\r\n\r\n"
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S)
        self._socket.sendall(head.encode() + payload)

    def answer(self) -> tuple[int, str]:
        """Status and the rest, read until the server closes the connection."""
        with self._socket, self._socket.makefile("rb") as file:
            return int(file.readline().split()[1]), file.read().decode()


def test_requests_during_loading_are_answered_after_it(serve: Callable[..., Server]) -> None:
    server = serve("--hold", module=PLANTED).answering()
    asked = [Asked(server, {**SHORT, "stream": stream}) for stream in (True, False, False)]
    assert server.http.get("/health").status_code == 200
    assert server.stats()["server"]["state"] == "loading"
    assert server.http.get("/metrics").status_code == 200
    server.say("load now")
    answers = [ask.answer() for ask in asked]
    assert [status for status, _ in answers] == [200, 200, 200]
    assert "data: [DONE]" in answers[0][1]
    assert server.idle()["engine"]["requests"] == {"length": 3}


def test_sigterm_lets_a_stream_end(serve: Callable[..., Server]) -> None:
    server = serve().ready()
    with server.http.stream("POST", TEXT, json={**SHORT, "stream": True, "max_tokens": 100}) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    # All of it within the grace, or on a machine too slow for that the reason why not.
    assert rest[-2] == "data: [DONE]" or list(events(iter(rest)))[-1]["error"]["code"] == "shutting_down"
    assert server.wait() == -signal.SIGTERM
    assert "Traceback" not in server.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stream_beyond_the_grace_ends_with_the_reason(
    serve: Callable[..., Server], number: signal.Signals
) -> None:
    server = serve("--grace", "0", module=PLANTED).ready()
    body = {**SHORT, "stream": True, "max_tokens": ENDLESS, "n": 8}
    with server.http.stream("POST", TEXT, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(number)
        *_, last = events(lines)
    assert last["error"]["code"] == "shutting_down"
    assert server.wait() == (-signal.SIGTERM if number == signal.SIGTERM else 130)
    assert "Traceback" not in server.log


def test_sigterm_answers_those_who_wait(serve: Callable[..., Server]) -> None:
    server = serve("--hold", "--grace", "0", module=PLANTED).answering()
    asked = [Asked(server, {**SHORT, "stream": stream}) for stream in (True, False)]
    assert server.http.get("/health").status_code == 200  # what came before it has come in
    server.process.send_signal(signal.SIGTERM)
    for status, text in [ask.answer() for ask in asked]:
        assert status == 503
        assert "shutting_down" in text
    server.say("load now")  # what is being loaded is loaded to the end
    assert server.wait() == -signal.SIGTERM
    assert "Traceback" not in server.log


def test_the_starter_answers(tmp_path: Any) -> None:
    body: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is the capital of France?"},
        ],
        "temperature": 0,
        "max_tokens": 12,
    }
    with serving(tmp_path, starter_folder(), "--batch", "2") as server:
        server.ready()
        whole = server.post(body).json()
        with server.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
            deltas = [event["choices"][0]["delta"] for event in events(answer.iter_lines())]
        server.idle()
    text = whole["choices"][0]["message"]["content"]
    assert "Paris" in text
    assert "".join(delta.get("content") or "" for delta in deltas) == text


def test_sigterm_drains_new_requests_are_told_to_come_back(serve: Callable[..., Server]) -> None:
    server = serve("--drain-timeout", "120").ready()
    body = {**SHORT, "stream": True, "max_tokens": ENDLESS}
    with server.http.stream("POST", TEXT, json=body, headers={"x-request-id": "long"}) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.http.get("/ready").status_code == 503, "the server is not ready any more")
        assert server.http.get("/health").status_code == 200
        refused = server.http.post(TEXT, json=SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert int(refused.headers["retry-after"]) > 0
        assert next(lines) is not None, "what runs goes on"
        server.http.post("/v1/requests/long/cancel").raise_for_status()
        *_, last = events(lines)
    assert last["error"]["code"] == "request_cancelled"
    assert server.wait() == -signal.SIGTERM, "with nothing left to do it ends long before the timeout"
    assert "Traceback" not in server.log


def test_a_second_signal_ends_at_once(serve: Callable[..., Server]) -> None:
    server = serve("--drain-timeout", "3600").ready()
    body = {**SHORT, "stream": True, "max_tokens": ENDLESS}
    with server.http.stream("POST", TEXT, json=body) as answer:
        next(answer.iter_lines())
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.http.get("/ready").status_code == 503, "the first signal was heard")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == -signal.SIGTERM


def test_other_machines_need_a_key(serve: Callable[..., Server]) -> None:
    server = serve("--host", "0.0.0.0")
    assert server.wait() == 1
    assert "--insecure-no-auth" in server.log
