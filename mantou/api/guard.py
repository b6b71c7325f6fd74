"""Keeps web pages of other sites away from a server on this machine: Host and Origin checks. Knows no routes.

A page can reach a local server in two ways: by a cross-origin POST (it carries an Origin), and by DNS rebinding (its
own host name resolves to this machine, so the Host header carries that name).
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mantou.api.faults import Refused, error_response
from mantou.config import Config
from mantou.errors import ConfigError

_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 compared with, not bound
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


def host_name(netloc: str) -> str:
    """Host of `host`, `host:port` or `[v6]:port`, in lower case; empty if there is none."""
    try:
        return urlsplit(f"//{netloc}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_bind(config: Config) -> None:
    """Raises ConfigError for a server that every machine around could use without a key, and nobody meant it."""
    closed = config.api_key is not None or config.api_key_file is not None
    if not (closed or config.insecure_no_auth or is_loopback(config.host)):
        raise ConfigError(
            f"--host {config.host} opens the server to other machines, and no key is asked for; give --api-key or "
            "--api-key-file, or --insecure-no-auth if everybody there may use it."
        )


def _is_private_name(host: str) -> bool:
    """Names that no outsider can make a page for: addresses, dotless names, and names of the local link."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "." not in host or host.endswith(".local")
    return True


class Guard:
    """ASGI middleware. `host` is the address the server is bound to.

    Bound to one address, it answers to that name and to the names of this machine only. Bound to all addresses, it
    also answers to every address and name that cannot be rebound. Hosts of `allow_origins` are always welcome.
    """

    def __init__(self, app: ASGIApp, *, host: str, allow_origins: tuple[str, ...]) -> None:
        self._app = app
        self._open_bind = host in _WILDCARDS
        self._any_origin = "*" in allow_origins
        self._origins = frozenset(origin.rstrip("/").lower() for origin in allow_origins)
        self._hosts = (
            _LOCAL | {host.lower()} | {host_name(urlsplit(origin).netloc) for origin in allow_origins} - {""}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            refused = self._refusal(scope)
            if refused is not None:
                await error_response(refused)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refused | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._knows(host_name(host)):
            return Refused(
                "This server does not answer to that Host; use localhost, or start it with --host or --allow-origin."
            )
        origin = headers.get("origin")
        if origin is None or scope.get("method") in _SAFE_METHODS:
            return None
        if (
            self._any_origin
            or origin.lower() in self._origins
            or urlsplit(origin).netloc.lower() == host.lower()
        ):
            return None
        return Refused("Pages of that origin may not use this server; start it with --allow-origin for it.")

    def _knows(self, host: str) -> bool:
        if not host:
            return False
        return self._any_origin or host in self._hosts or (self._open_bind and _is_private_name(host))
