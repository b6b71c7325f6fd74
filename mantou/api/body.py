"""Reads a request body and says what is wrong with it. Knows no field."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from mantou.api.envelope import current
from mantou.api.faults import ClientGone, TooLarge
from mantou.errors import BadRequest

MAX_BODY_BYTES = 64 * 2**20


async def read_body(scope: Scope, receive: Receive, limit: int | None = None) -> bytes:
    """The whole body. Raises TooLarge beyond `limit` bytes (None = the server's), ClientGone if the client leaves half
    way."""
    if limit is None:
        limit = current().max_body_bytes or MAX_BODY_BYTES
    announced = Headers(scope=scope).get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return b"".join(parts)


def parse_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises BadRequest that says where it stops being one."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        _explain(body)
    if not isinstance(value, dict):
        raise BadRequest("The body must be a JSON object such as {...}.")
    return value


def _too_large(limit: int) -> TooLarge:
    shown = f"{limit / 2**20:.0f} MiB" if limit >= 2**20 else f"{limit} bytes"
    return TooLarge(f"The body is larger than {shown}; send less at once, or raise the server's --max-body.")


def _refuse_constant(name: str) -> NoReturn:
    raise BadRequest(f"The body is not valid JSON: {name} is not a JSON number.")


def _explain(body: bytes) -> NoReturn:
    """Reads a body that was refused once more, with the parser whose errors say line and column."""
    try:
        json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise BadRequest(f"The body is not valid JSON: byte {error.start} is not UTF-8.") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise BadRequest(f"The body is not valid JSON: {error.msg} at {where}.") from None
    except RecursionError:
        raise BadRequest("The body is nested too deeply; flatten it.") from None
    except ValueError:  # more digits than Python converts
        raise BadRequest("The body holds a number that is too large.") from None
    # Only two things pass here and fail there: a number beyond a double, and half of a surrogate pair.
    raise BadRequest("The body holds a number that is too large, or an unpaired surrogate such as \\ud800.")
