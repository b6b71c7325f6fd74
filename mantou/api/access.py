"""Who may use which route: keys, their scopes and quotas, and the end of service while the server drains.

Knows paths by their beginning only; what a route does with a request is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mantou.api.envelope import current
from mantou.api.faults import Refused, Unauthorized, error_response
from mantou.api.keys import Key, KeyRing
from mantou.api.quotas import Quotas, RateLimited
from mantou.errors import EngineStopped, MantouError

# The first beginning that fits decides; "" = no key at all. Anything else that only reads needs any key, and anything
# else that changes something needs admin: a new route is closed until it is listed here.
_SCOPES: tuple[tuple[str, str], ...] = (
    ("/health", ""),
    ("/ready", ""),
    ("/v1/requests", "any"),  # each key sees and ends its own
    ("/v1/embeddings", "embed"),
    ("/v1/rerank", "embed"),
    ("/v1/score", "embed"),
    ("/api/embed", "embed"),
    ("/api/embeddings", "embed"),
    ("/v1/chat/", "generate"),
    ("/v1/completions", "generate"),
    ("/v1/messages", "generate"),
    ("/v1/responses", "generate"),
    ("/api/chat", "generate"),
    ("/api/generate", "generate"),
    ("/api/show", "any"),
    ("/v1/audio/", "audio"),
    ("/stats", "read"),
    ("/metrics", "read"),
    ("/library", "read"),
    ("/downloads", "read"),
    ("/admin/", "admin"),
)
_METERED = ("generate", "embed", "audio")
_READS = ("GET", "HEAD", "OPTIONS")


def scope_of(method: str, path: str) -> str:
    """The scope a key needs there; "" = none is asked for, "any" = any key will do."""
    if path == "/":  # the status page holds no state of its own
        return ""
    for beginning, scope in _SCOPES:
        if path == beginning or path.startswith(beginning if beginning.endswith("/") else f"{beginning}/"):
            return scope
    return "any" if method in _READS else "admin"


def presented_key(headers: Mapping[str, str]) -> str | None:
    """The key of `Authorization: Bearer` or `x-api-key`."""
    kind, _, text = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and text.strip():
        return text.strip()
    return headers.get("x-api-key") or None


class DrainGate:
    """ASGI middleware. While the server drains it takes nothing new to do; looking and cancelling go on."""

    def __init__(self, app: ASGIApp, *, draining: Callable[[], bool]) -> None:
        self._app = app
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._draining() and not self._goes_on(scope):
            error = EngineStopped("The server is shutting down and takes nothing new; send this again later.")
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    @staticmethod
    def _goes_on(scope: Scope) -> bool:
        return scope["method"] in _READS or scope["path"].endswith("/cancel")


class KeyGate:
    """ASGI middleware: lets a request through whose key may use the route and has something left of its quotas."""

    def __init__(self, app: ASGIApp, *, ring: KeyRing, quotas: Quotas) -> None:
        self._app = app
        self._ring = ring
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not self._ring.wanted:
            await self._app(scope, receive, send)
            return
        needed = scope_of(scope.get("method", "GET"), scope["path"])
        if not needed:
            await self._app(scope, receive, send)
            return
        try:
            key = self._opened(Headers(scope=scope), needed)
        except (Unauthorized, Refused) as error:
            await self._refuse(error, scope, receive, send)
            return
        if needed in _METERED and scope.get("method") == "POST" and not scope["path"].endswith("/cancel"):
            await self._meter(key, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _meter(self, key: Key, scope: Scope, receive: Receive, send: Send) -> None:
        """Takes from the key's quotas, and says in the response what is left of them."""
        anthropic = scope["path"].startswith("/v1/messages")  # its SDKs look for names of their own
        send = self._with_quotas(key, send, anthropic=anthropic)
        try:
            self._quotas.admit(key)
        except RateLimited as error:
            await self._refuse(error, scope, receive, send)
            return
        current().charge = lambda num_tokens: self._quotas.charge(key, num_tokens)
        await self._app(scope, receive, send)

    def _opened(self, headers: Headers, needed: str) -> Key:
        text = presented_key(headers)
        if text is None:
            raise Unauthorized(
                "This server asks for an API key; send it as `Authorization: Bearer` or `x-api-key`."
            )
        key = self._ring.find(text)
        if key is None:
            raise Unauthorized(
                "This API key is not known here; check it, or have one made with `mantou keys add`."
            )
        exchange = current()
        exchange.caller, exchange.sees_all = key.name, key.may("admin")
        if not key.may(needed):
            scope = "a scope" if needed == "any" else f"the scope {needed}"
            raise Refused(f"The key {key.name} lacks {scope} for this route; have one made with --scope.")
        return key

    @staticmethod
    async def _refuse(error: MantouError, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": error.message})
            return
        headers = {"www-authenticate": "Bearer"} if isinstance(error, Unauthorized) else {}
        await error_response(error, headers)(scope, receive, send)

    def _with_quotas(self, key: Key, send: Send, *, anthropic: bool) -> Send:
        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                left = self._quotas.headers(key) | (self._quotas.anthropic_headers(key) if anthropic else {})
                quotas = [(name.encode(), value.encode()) for name, value in left.items()]
                message = {**message, "headers": [*message.get("headers", ()), *quotas]}
            await send(message)

        return send_with
