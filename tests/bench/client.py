"""A small HTTP client for streamed completions. Knows sockets and frames; no servers, no statistics.

It parses as little as it can (only the first frame with text, the usage and errors), so that the client's share of two
shared cores stays small and is the same for every server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

HOST = "127.0.0.1"


class Refused(Exception):
    """The server answered, but not with a stream."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One streamed answer. Times are seconds of time.perf_counter; token counts come from the server's usage."""

    started: float
    first: float  # the first frame with text
    ended: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first - self.started


async def get_status(port: int, path: str) -> int:
    """The status code of a GET. Raises OSError while nothing listens."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {HOST}:{port}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        return _status(await reader.readline())
    finally:
        writer.close()


async def stream(port: int, path: str, body: Mapping[str, Any]) -> Reply:
    """Posts `body` with stream and usage switched on and reads to the end.

    Raises Refused with the server's words if there was no complete stream, OSError if the connection failed.
    """
    payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 20)
    try:
        writer.write(head.encode() + payload)
        await writer.drain()
        status = _status(await reader.readline())
        headers = await _headers(reader)
        pieces = _chunks(reader) if headers.get("transfer-encoding") == "chunked" else _raw(reader)
        if status != 200:
            text = b"".join([piece async for piece in pieces])
            raise Refused(f"{status}: {text.decode(errors='replace')[:300]}")
        return await _read_events(started, pieces)
    finally:
        writer.close()


def _status(line: bytes) -> int:
    parts = line.split()
    if len(parts) < 2:
        raise ConnectionError("the server closed the connection without an answer")
    return int(parts[1])


async def _headers(reader: asyncio.StreamReader) -> dict[str, str]:
    headers: dict[str, str] = {}
    while (line := await reader.readline()) not in (b"\r\n", b"\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip().lower()
    return headers


async def _raw(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(1 << 16):
        yield piece


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The payloads of `data:` lines."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


async def _read_events(started: float, pieces: AsyncIterator[bytes]) -> Reply:
    first: float | None = None
    usage: Mapping[str, Any] | None = None
    async for data in _events(pieces):
        if data == b"[DONE]":
            break
        if b'"error"' in data and "error" in (frame := json.loads(data)):
            raise Refused(json.dumps(frame["error"]))
        if first is None and _has_text(json.loads(data)):
            first = time.perf_counter()
        if b'"usage"' in data:
            usage = json.loads(data).get("usage") or usage
    if first is None or usage is None:
        raise Refused("the stream ended without a token or without usage")
    details = usage.get("prompt_tokens_details") or {}
    return Reply(
        started=started,
        first=first,
        ended=time.perf_counter(),
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=details.get("cached_tokens") or 0,
    )


def _has_text(frame: Mapping[str, Any]) -> bool:
    for choice in frame.get("choices") or ():
        delta = choice.get("delta") or {}
        if (
            choice.get("text")
            or delta.get("content")
            or delta.get("reasoning_content")
            or delta.get("reasoning")
        ):
            return True
    return False
