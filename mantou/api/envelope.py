"""What the API of a request says instead of an answer, and the request's id. Knows no fields and no routes.

A context variable, because an error may arise anywhere between the guard and the last event of a stream.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mantou.errors import MantouError


class Envelope(Protocol):
    """How one API words errors and silence, and what its streams are made of."""

    @property
    def content_type(self) -> bytes: ...
    @property
    def keep_alive(self) -> bytes:
        """An event or a comment that means nothing, for a stream that has nothing to say yet."""
        ...

    def status(self, error: MantouError) -> int: ...
    def body(self, error: MantouError) -> bytes:
        """The JSON of an error that happened before anything was sent."""
        ...

    def event(self, error: MantouError) -> bytes:
        """The last event of a stream that failed."""
        ...


# What may be taken over from a client's own x-request-id: nothing that could disturb a log or a path.
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(slots=True)
class Work:
    """What generation did for a request so far. Tokens are counted as they are used, also if it is never finished."""

    model: str = ""
    rows: set[str] = field(default_factory=set[str])  # ids of sequences, `{response id}-{number}`
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None  # after the request's arrival
    finishes: list[str] = field(default_factory=list[str])

    @property
    def response_id(self) -> str | None:
        """The id in the answer's body."""
        return next((row.rpartition("-")[0] for row in self.rows), None)


@dataclass(slots=True)
class Exchange:
    """One request and its response, as far as they have come; belongs to the event loop.

    `envelope` is None where the path belongs to no API with its own wording.
    """

    request_id: str
    envelope: Envelope | None = None
    method: str = ""
    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    started_at: float = field(default_factory=time.time)  # Unix seconds
    arrived: float = field(default_factory=time.perf_counter)
    max_body_bytes: int | None = None  # None = the server's default
    caller: str | None = None  # name of the API key; None = no key was asked for
    sees_all: bool = True  # whether it may see and end the requests of others
    charge: Callable[[int], None] = lambda num_tokens: None  # the key's token quota
    task: asyncio.Task[object] | None = None
    cancelled: bool = False  # by POST /v1/requests/{id}/cancel
    status: int | None = None  # None = nothing was sent yet
    error: str | None = None  # code or type of the error that ended it
    work: Work = field(default_factory=Work)

    @property
    def seconds(self) -> float:
        """Since it arrived."""
        return time.perf_counter() - self.arrived

    def cancel(self) -> None:
        """Ends it wherever it is, like the end of the server's grace; its rows are freed on the way out."""
        if self.task is not None and not self.cancelled:
            self.cancelled = True
            self.task.cancel()


class Running:
    """The exchanges that are under way. Belongs to the event loop."""

    def __init__(self) -> None:
        self._exchanges: dict[int, Exchange] = {}

    def __len__(self) -> int:
        return len(self._exchanges)

    def add(self, exchange: Exchange) -> None:
        self._exchanges[id(exchange)] = exchange

    def remove(self, exchange: Exchange) -> None:
        del self._exchanges[id(exchange)]

    def all(self) -> Sequence[Exchange]:
        """In the order of arrival."""
        return tuple(self._exchanges.values())

    def named(self, name: str) -> Sequence[Exchange]:
        """Those with this request id or response id; a client may have used its own id more than once."""
        return tuple(one for one in self.all() if name in (one.request_id, one.work.response_id))


_EXCHANGE: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


def current() -> Exchange:
    """The request that is being answered; outside of any, one that nobody looks at."""
    return _EXCHANGE.get() or Exchange(_new_id())


def spoken(otherwise: Envelope) -> Envelope:
    """The envelope of the request that is being answered."""
    return current().envelope or otherwise


def request_id() -> str:
    """The id of the request that is being answered: the client's own, or `req_` and 24 hex digits."""
    return current().request_id


def _new_id() -> str:
    return f"req_{secrets.token_hex(12)}"


class Exchanges:
    """ASGI middleware: gives each request its id, in the headers that the SDKs read, and its API's envelope.

    `envelopes`: path -> the envelope of this path and of all below it. `running` has what is under way; `observers`
    see every exchange once it is over. A client's own x-request-id becomes the id if it is a plain word.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        envelopes: Mapping[str, Envelope],
        running: Running,
        observers: Sequence[Callable[[Exchange], None]] = (),
        max_body_bytes: int | None = None,
    ) -> None:
        self._app = app
        self._envelopes = envelopes
        self._running = running
        self._observers = observers
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = self._begin(scope)
        named = exchange.request_id.encode()
        headers = [(b"request-id", named), (b"x-request-id", named)]  # Anthropic's name, OpenAI's name

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        self._running.add(exchange)
        token = _EXCHANGE.set(exchange)
        try:
            await self._app(scope, receive, send_named)
        finally:
            for observe in self._observers:
                observe(exchange)
            _EXCHANGE.reset(token)
            self._running.remove(exchange)

    def _begin(self, scope: Scope) -> Exchange:
        headers, path = Headers(scope=scope), scope["path"]
        asked = headers.get("x-request-id", "")
        return Exchange(
            asked if _CLIENT_ID.fullmatch(asked) else _new_id(),
            self._envelope(path),
            method=scope["method"],
            path=path,
            headers=headers,
            max_body_bytes=self._max_body_bytes,
            task=asyncio.current_task(),
        )

    def _envelope(self, path: str) -> Envelope | None:
        return next(
            (found for base, found in self._envelopes.items() if path == base or path.startswith(f"{base}/")),
            None,
        )
