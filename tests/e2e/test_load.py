"""Many clients at once, some of them bad ones: what one does must not reach another, and nothing may stay behind."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx2
import pytest

from tests.e2e.conftest import CONTEXT, ENDLESS, ROWS
from tests.e2e.planted_server import FAULT
from tests.real import DEADLINE_S, Server, events

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NUM_CLIENTS, NUM_DROPPED = 32, 8
LONG = {"prompt": "the fox", "temperature": 0, "stream": True, "max_tokens": ENDLESS}

POISON: list[tuple[str, bytes]] = [
    (CHAT, b"{"),
    (CHAT, b"\xff\xfe"),
    (CHAT, b"[" * 5000),
    (CHAT, b'{"messages": []}'),
    (CHAT, b'{"messages": "no list"}'),
    (CHAT, b'{"messages": [{"role": "nobody", "content": "x"}]}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": -1, "stream": true}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "n": 99}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "adapter": "unknown", "stream": true}'),
    (TEXT, b'{"prompt": "x", "max_tokens": 0}'),
    (TEXT, b'{"prompt": [99999999]}'),
    (TEXT, json.dumps({"prompt": [5] * (CONTEXT + 1)}).encode()),
    (TEXT, b'{"prompt": "x", "logit_bias": {"99999": 1}}'),
    ("/v1/nothing", b"{}"),
    ("/health", b"{}"),
]


def ask(number: int) -> dict[str, Any]:
    """The request of one client: every one another prompt, length and way of drawing."""
    words = " ".join(["the quick brown fox", "looks on"] * (1 + number % 7))
    draw = {"temperature": 0.0} if number % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": number}
    content = f"{number}: {words}"
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 20 + number, **draw}


def said(event: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


class Crowd:
    """The clients of one storm, on one event loop."""

    def __init__(self, url: str) -> None:
        limits = httpx2.Limits(max_connections=None)
        self.http = httpx2.AsyncClient(base_url=url, timeout=DEADLINE_S, limits=limits)

    async def storm(self) -> tuple[dict[int, str], list[int]]:
        """Texts of the clients that stay, by number, and the statuses of the poison."""
        async with self.http:
            staying = {n: self.text(n) for n in range(NUM_DROPPED, NUM_CLIENTS)}
            leaving = [self.leave(n) for n in range(NUM_DROPPED)]
            others = [self.fail_streamed(), self.fail_whole(), *leaving]
            texts, statuses, _ = await asyncio.gather(
                asyncio.gather(*staying.values()), self.poison(), asyncio.gather(*others)
            )
        return dict(zip(staying, texts, strict=True)), statuses

    async def text(self, number: int) -> str:
        parts: list[str] = []
        async with self.http.stream("POST", CHAT, json={**ask(number), "stream": True}) as answer:
            assert answer.status_code == 200
            lines = [line async for line in answer.aiter_lines()]
        for event in events(iter(lines)):
            assert "error" not in event, event
            parts.append(said(event))
        assert "data: [DONE]" in lines
        return "".join(parts)

    async def leave(self, number: int) -> None:
        """Drops the connection in the middle of an answer that would take long."""
        body = {**ask(number), "max_tokens": ENDLESS, "stream": True}
        async with self.http.stream("POST", CHAT, json=body) as answer:
            seen = 0
            async for line in answer.aiter_lines():
                seen += line.startswith("data:")
                if seen > 2 + number:
                    break

    async def fail_streamed(self) -> None:
        body = {**ask(0), "session_id": FAULT, "stream": True}
        async with self.http.stream("POST", CHAT, json=body) as answer:
            lines = [line async for line in answer.aiter_lines()]
        *_, last = events(iter(lines))
        assert last["error"]["message"]
        assert "data: [DONE]" not in lines

    async def fail_whole(self) -> None:
        answer = await self.http.post(CHAT, json={**ask(1), "session_id": FAULT})
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"

    async def poison(self) -> list[int]:
        statuses: list[int] = []
        for path, body in POISON:
            answer = await self.http.post(path, content=body)
            assert answer.json()["error"]["message"]
            statuses.append(answer.status_code)
        return statuses


def test_a_storm_of_clients(planted: Server) -> None:
    solo = {
        number: planted.post(ask(number)).json()["choices"][0]["message"]["content"]
        for number in range(NUM_DROPPED, NUM_CLIENTS)
    }
    assert len(set(solo.values())) == len(solo)

    def storm() -> None:
        texts, statuses = asyncio.run(Crowd(planted.url).storm())
        assert texts == solo
        assert all(400 <= status < 500 for status in statuses), statuses

    before = Counter(planted.idle()["engine"]["requests"])
    storm()
    planted.idle()
    warm = planted.rss_bytes()
    for _ in range(2):
        storm()
    engine = planted.idle()["engine"]
    assert (
        planted.rss_bytes() < warm + 64 * 2**20
    )  # some 70 requests more; an allocator's noise is far below this
    ended = Counter(engine["requests"]) - before
    assert ended == {"length": 3 * len(solo), "cancelled": 3 * NUM_DROPPED, "error": 3 * 2}
    assert engine["failed_forwards"] == 0
    assert planted.post(ask(9)).json()["choices"][0]["message"]["content"] == solo[9]
    assert planted.log.count("Traceback") == planted.log.count("RuntimeError: planted fault") == 3 * 2


def test_a_dropped_client_frees_its_row(planted: Server) -> None:
    before = Counter(planted.idle()["engine"]["requests"])["cancelled"]
    with planted.http.stream("POST", TEXT, json=LONG) as stays:
        lines = stays.iter_lines()
        next(lines)
        for number in range(1, ROWS):
            with planted.http.stream("POST", TEXT, json={**LONG, "prompt": f"{number}"}) as leaves:
                next(leaves.iter_lines())
            stats = planted.rows(running=1)
            assert stats["engine"]["requests"]["cancelled"] == before + number
            next(lines)
    assert planted.idle()["engine"]["requests"]["cancelled"] == before + ROWS


def test_a_full_queue_refuses_and_recovers(serve: Callable[..., Server]) -> None:
    server = serve("--batch", "1").ready()
    body = {**LONG, "prompt": [5, 6, 7]}
    with ExitStack() as stack:
        http = stack.enter_context(
            httpx2.Client(base_url=server.url, timeout=DEADLINE_S, limits=httpx2.Limits(max_connections=None))
        )
        stack.enter_context(http.stream("POST", TEXT, json=body))
        server.rows(running=1)
        for _ in range(64):
            stack.enter_context(http.stream("POST", TEXT, json=body))
        server.rows(running=1, waiting=64)
        for stream in (True, False):
            refused = server.post({**body, "stream": stream}, TEXT)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) > 0
            assert refused.json()["error"]["code"] == "queue_full"
        assert server.stats()["http"]["rejected"] == {"queue_full": 2}
    server.idle()
    assert server.post({"prompt": "the", "max_tokens": 3}, TEXT).status_code == 200


@pytest.mark.parametrize("flags", [("--kv-quant", "8"), ("--batch", "2", "--prefill-chunk", "8")])
def test_rows_share_a_batch_under_other_settings(
    serve: Callable[..., Server], flags: tuple[str, ...]
) -> None:
    server = serve(*flags).ready()
    numbers = range(9, 15)
    solo = [server.post(ask(n)).json()["choices"][0]["message"]["content"] for n in numbers]

    async def together() -> list[str]:
        crowd = Crowd(server.url)
        async with crowd.http:
            return await asyncio.gather(*(crowd.text(number) for number in numbers))

    assert asyncio.run(together()) == solo
    server.idle()
