"""What the API of a request says instead of an answer, and the request's id. Knows no fields and no routes.

A context variable, because an error may arise anywhere between the guard and the last event of a stream.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mantou.errors import MantouError


class Envelope(Protocol):
    """How one API words errors and silence."""

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


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its response; `envelope` is None where the path belongs to no API with its own wording."""

    request_id: str
    envelope: Envelope | None = None


_EXCHANGE: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


def spoken(otherwise: Envelope) -> Envelope:
    """The envelope of the request that is being answered."""
    exchange = _EXCHANGE.get()
    return otherwise if exchange is None or exchange.envelope is None else exchange.envelope


def request_id() -> str:
    """The id of the request that is being answered, `req_` and 24 hex digits; a new one outside of any."""
    exchange = _EXCHANGE.get()
    return _new_id() if exchange is None else exchange.request_id


def _new_id() -> str:
    return f"req_{secrets.token_hex(12)}"


class Exchanges:
    """ASGI middleware: gives each request its id, in the headers that the SDKs read, and its API's envelope.

    `envelopes`: path -> the envelope of this path and of all below it.
    """

    def __init__(self, app: ASGIApp, *, envelopes: Mapping[str, Envelope]) -> None:
        self._app = app
        self._envelopes = envelopes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(_new_id(), self._envelope(scope["path"]))
        named = exchange.request_id.encode()
        headers = [(b"request-id", named), (b"x-request-id", named)]  # Anthropic's name, OpenAI's name

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        token = _EXCHANGE.set(exchange)
        try:
            await self._app(scope, receive, send_named)
        finally:
            _EXCHANGE.reset(token)

    def _envelope(self, path: str) -> Envelope | None:
        return next(
            (found for base, found in self._envelopes.items() if path == base or path.startswith(f"{base}/")),
            None,
        )
