"""The loads that are measured: cold start, first token, throughput, soak. Knows one running server, no tables."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mantou.cli.bench import OPENINGS
from tests.bench import client
from tests.bench.process import Server

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# Common words, about a token each in every vocabulary: the length of a prompt is read from the server's usage.
WORDS = (
    "river",
    "stone",
    "light",
    "garden",
    "window",
    "paper",
    "winter",
    "music",
    "table",
    "forest",
    "bread",
    "road",
)

_serial = itertools.count(1)


def question(max_tokens: int, text: str = "Tell me about yourself.") -> dict[str, Any]:
    """A chat request that no prefix cache has seen: its first words are a number of its own."""
    message = {"role": "user", "content": f"{next(_serial)}. {text}"}
    return {"messages": [message], "max_tokens": max_tokens, "temperature": 0.0}


def opening(max_tokens: int, seed: int | None = None) -> dict[str, Any]:
    """A plain completion with a prompt of some ten tokens, so that its time is spent on decoding."""
    number = next(_serial)
    body = {"prompt": f"{number}. {OPENINGS[number % len(OPENINGS)]}", "max_tokens": max_tokens}
    return body | ({"temperature": 0.0} if seed is None else {"temperature": 0.8, "seed": seed})


def long_text(num_words: int) -> str:
    return " ".join(itertools.islice(itertools.cycle(WORDS), num_words))


async def cold_first_token(server: Server) -> float:
    """Seconds from the start of the process to the first streamed token, asking again until it is accepted."""
    while True:
        with contextlib.suppress(OSError, client.Refused, asyncio.IncompleteReadError):
            reply = await client.stream(server.port, CHAT, question(4))
            return reply.first - server.started
        server.check_alive()
        await asyncio.sleep(0.02)


async def start(server: Server) -> dict[str, float]:
    ready, cold = await asyncio.gather(server.ready(), cold_first_token(server))
    return {"ready_s": ready, "cold_first_token_s": cold}


async def first_tokens(server: Server, num_short: int, num_long: int, long_words: int) -> dict[str, Any]:
    """Times to first token, one request at a time."""
    short = [await client.stream(server.port, CHAT, question(2)) for _ in range(num_short)]
    text = long_text(long_words)
    long = [await client.stream(server.port, CHAT, question(2, text)) for _ in range(num_long)]
    return {
        "ttft_short_s": [reply.ttft_s for reply in short],
        "ttft_long_s": [reply.ttft_s for reply in long],
        "prompt_tokens_short": short[-1].prompt_tokens if short else 0,
        "prompt_tokens_long": long[-1].prompt_tokens if long else 0,
    }


async def throughput(
    server: Server, num_clients: int, max_tokens: int, *, seeded: bool
) -> Mapping[str, float]:
    """All requests at once, to the end of the last. tok_s = tokens generated / wall clock, prefill included."""
    bodies = [opening(max_tokens, 1000 + index if seeded else None) for index in range(num_clients)]
    before = time.perf_counter()
    replies = await asyncio.gather(*(client.stream(server.port, COMPLETIONS, body) for body in bodies))
    wall_s = time.perf_counter() - before
    tokens = sum(reply.completion_tokens for reply in replies)
    return {"tok_s": tokens / wall_s, "tokens": tokens, "wall_s": wall_s}


async def soak(server: Server, marks: Sequence[int], num_clients: int = 8) -> dict[str, int]:
    """Short completions until the last mark; resident bytes when each mark is reached and the server is idle."""
    found: dict[str, int] = {}
    done = 0
    for mark in sorted(marks):
        while done < mark:
            wave = min(num_clients, mark - done)
            bodies = [
                {"prompt": f"{next(_serial)} and", "max_tokens": 3, "temperature": 0.0} for _ in range(wave)
            ]
            await asyncio.gather(*(client.stream(server.port, COMPLETIONS, body) for body in bodies))
            done += wave
        found[str(mark)] = server.rss_bytes()
    return found
