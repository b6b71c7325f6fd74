"""The bench itself: frames are read right however they are cut, and verdicts follow from the figures."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.bench import cache_report, client, report

EVENTS = (
    b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
    b": keepalive 1/2\n\n"
    b'data: {"choices": [{"delta": {"content": "Hi"}}]}\r\n\r\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}\n\n'
    b"data: [DONE]\n\n"
)


def read(body: bytes, *, chunked: bool) -> client.Reply:
    async def run() -> client.Reply:
        reader = asyncio.StreamReader()
        reader.feed_data(body)
        reader.feed_eof()
        pieces = client._chunks(reader) if chunked else client._raw(reader)
        return await client._read_events(0.0, pieces)

    return asyncio.run(run())


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_chunks_may_be_cut_anywhere(size: int) -> None:
    parts = [EVENTS[i : i + size] for i in range(0, len(EVENTS), size)]
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    reply = read(body, chunked=True)
    assert (reply.prompt_tokens, reply.completion_tokens) == (5, 7)
    assert 0.0 < reply.first <= reply.ended


def test_a_plain_body_is_the_same() -> None:
    assert read(EVENTS, chunked=False).completion_tokens == 7


@pytest.mark.parametrize("body", [b"data: [DONE]\n\n", b'data: {"error": {"message": "no"}}\n\n'])
def test_a_stream_without_an_answer_is_refused(body: bytes) -> None:
    with pytest.raises(client.Refused):
        read(body, chunked=False)


def round_of(system: str, ready_s: float, tok_s: float) -> dict[str, Any]:
    return {
        "system": system,
        "ready_s": ready_s,
        "cold_first_token_s": 2.0,
        "ttft_short_s": [0.1, 0.3],
        "ttft_long_s": [1.0],
        "prompt_tokens_long": 512,
        "throughput": {"8": {"tok_s": tok_s}},
        "rss_ready_bytes": 2**30,
        "peak_rss_bytes": 2**31,
    }


def result(rounds: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    names = ("system", "cores", "memory_gib", "python", "mlx", "mlx_lm", "mantou", "load_average_before")
    shape = {"date": "2026-01-02T03:04:05+00:00", "machine": dict.fromkeys(names, "x"), "model": "m"}
    settings = {"rounds": 1, "clients": [8], "tokens": 4}
    whole = {**shape, "settings": settings, "rounds": rounds, "engine": [], "soak": {}, **more}
    return dict(json.loads(json.dumps(whole)))


def test_verdicts_compare_medians() -> None:
    mantou = [round_of("mantou", ready, tok_s) for ready, tok_s in ((0.5, 10.0), (0.7, 30.0), (9.0, 20.0))]
    table = report.table(result([*mantou, round_of("mlx_lm.server", 1.0, 16.0)]))
    assert "| start to ready | 0.7 s | 1 s | 0.70x | <= 0.6x **no** |" in table
    assert "| 8 clients | 20 tok/s | 16 tok/s | 1.25x | >= 1x yes |" in table


def test_one_system_alone_has_no_verdict() -> None:
    table = report.table(result([round_of("mantou", 0.5, 10.0)]))
    assert "| 8 clients | 10 tok/s | - | - | >= 1x |" in table


def test_overhead_and_memory() -> None:
    more = {
        "engine": [{"clients": 8, "tok_s": 20.0}],
        "soak": {"mantou": {"1000": 2**20 * 210, "100": 2**20 * 200}},
    }
    table = report.table(result([round_of("mantou", 0.5, 19.0)], **more))
    assert "Server overhead at 8 clients: 5.0% of the bare engine's throughput (<= 3 % **no**)." in table
    assert "200 MiB after 100 requests, 210 MiB after 1000 requests (+5.0%; <= 3 % **no**)" in table


# ------------------------------------------------------------------ the prompt cache
def cache_result(**changes: Any) -> dict[str, Any]:
    turns = [
        {"prompt_tokens": 100, "cached_tokens": 0, "completion_tokens": 10},
        {"prompt_tokens": 150, "cached_tokens": 105, "completion_tokens": 10},
    ]
    phases = [{"name": "rows decode", "median_s": 0.010, "store_max_s": 0.004}]
    found = {
        "first_token": {"prompt_tokens": 8000, "cold_s": 20.0, "memory_s": [0.3, 0.1], "disk_s": [3.0]},
        "conversation": {"turns": turns},
        "sharing": {"prompt_tokens": 4000, "one_bytes": 100 << 20, "eight_bytes": 110 << 20},
        "spilling": {"tok_s": {"memory": [100.0], "disk": [90.0]}, "written_bytes": 1 << 20},
        "steps": {"phases": phases},
    }
    return {**result([]), "cache": {**found, **changes}}


def test_the_cache_s_verdicts_follow_from_its_figures() -> None:
    table = cache_report.table(cache_result())
    assert "| 0.2 s of 20 s cold | 1.0% | <= 2% yes |" in table
    assert "on SSD after a restart | 3 s | 15.0% | <= 10% **no** |" in table
    assert "| 145 of 140 new | 1.04x | <= 1.1x yes |" in table, "10 of 150 tokens were the first answer"
    assert "| 110 MiB, one 100 MiB | 1.10x | <= 1.2x yes |" in table
    assert "| 90 tok/s, without 100 | 90.0% | >= 95% **no** |" in table
    assert "median 10.0 ms, cache at most 4.0 ms | 1.40x | <= 2x yes |" in table


def test_an_agent_that_computes_its_history_again_is_noticed() -> None:
    turns = [{"prompt_tokens": n, "cached_tokens": 0, "completion_tokens": 0} for n in (100, 200)]
    assert "| 300 of 200 new | 1.50x | <= 1.1x **no** |" in cache_report.table(
        cache_result(conversation={"turns": turns})
    )
