"""Server-sent events on one ASGI connection, and the watch for a client that leaves. Knows no dialect, no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Send

EVENT_STREAM = b"text/event-stream"
HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"connection", b"keep-alive"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise collect the stream
]
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"  # every client ignores it


def data_event(payload: bytes) -> bytes:
    """A nameless event. `payload` is one line of JSON."""
    return b"data: " + payload + b"\n\n"


def named_event(name: bytes, payload: bytes) -> bytes:
    """An event with a name. `payload` is one line of JSON."""
    return b"event: " + name + b"\ndata: " + payload + b"\n\n"


def event_schema(payload: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of an event whose data is JSON of the schema `payload`, or an end mark."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": payload}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": data}}


class EventWriter:
    """Writes a stream; `due` says that nothing was written for `heartbeat_s`, and `on_due` wakes the one who waits.

    The timer is re-armed once an interval, not once an event, so a token costs no timer.
    """

    def __init__(
        self, send: Send, heartbeat_s: float, keep_alive: bytes = COMMENT, content_type: bytes = EVENT_STREAM
    ) -> None:
        self._send = send
        self._headers = [(b"content-type", content_type), *HEADERS]
        self._keep_alive = keep_alive
        self._heartbeat_s = heartbeat_s
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self.on_due: Callable[[], None] | None = None
        self.opened = False
        self.due = False

    async def open(self) -> None:
        """Sends the headers, once. From now on an error can only be an event."""
        if self.opened:
            return
        self.opened = True
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        self._last = self._loop.time()
        self._timer = self._loop.call_later(self._heartbeat_s, self._tick)

    async def write(self, events: bytes) -> None:
        """Sends whole events; several at once cost one write."""
        self._last = self._loop.time()
        self.due = False
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def keep_alive(self) -> None:
        """Sends what every client ignores, so that nobody on the way gives the connection up."""
        await self.write(self._keep_alive)

    async def close(self, last: bytes = b"") -> None:
        """Sends the last events and ends the response."""
        self.stop()
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    def stop(self) -> None:
        """Stops the timer; nothing is sent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        left = self._last + self._heartbeat_s - self._loop.time()
        if left <= 0:
            self.due = True
            if self.on_due is not None:
                self.on_due()
            left = self._heartbeat_s
        self._timer = self._loop.call_later(left, self._tick)


class ClientWatch:
    """Notices that the client closed its connection. Start it once the body has been read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.task = asyncio.get_running_loop().create_task(self._wait())

    @property
    def gone(self) -> bool:
        return self.task.done()

    def on_gone(self, act: Callable[[], None]) -> None:
        """Calls `act` as soon as the client is gone, also if it already is."""
        self.task.add_done_callback(lambda task: None if task.cancelled() else act())

    def stop(self) -> None:
        self.task.cancel()

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
