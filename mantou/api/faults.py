"""Errors as bytes on the wire: in OpenAI's shape, unless the request speaks another API. Knows no routes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from mantou.api.envelope import Envelope, current, request_id, spoken
from mantou.api.sse import COMMENT, EVENT_STREAM, data_event
from mantou.errors import EngineStopped, MantouError

_log = logging.getLogger("mantou.api")


class ClientGone(Exception):
    """The client closed its connection, so there is nobody to answer."""


class RequestFailed(MantouError):
    """A request that the server accepted and could not finish."""


class TooLarge(MantouError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class Refused(MantouError):
    """A request that came from where it may not come from."""

    status = 403
    type = "invalid_request_error"
    code = "forbidden"


class Unauthorized(MantouError):
    """No API key, or one that this server does not know."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class Cancelled(MantouError):
    """Somebody ended the request through the API."""

    status = 499
    type = "invalid_request_error"
    code = "request_cancelled"


class NotFound(MantouError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class WrongMethod(MantouError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


def internal(error: BaseException) -> RequestFailed:
    """Logs an unexpected error under the request's id and returns what the client may know: that id and no more.

    The log gets the traceback (file, line, message) and never the body of the request.
    """
    name = request_id()
    _log.error("request %s failed inside the server", name, exc_info=error)
    return RequestFailed(f"The server failed on this request; its log has the details under {name}.")


def known_error(error: BaseException) -> MantouError:
    """What the client may know of any error. A cancelled task means that somebody asked for it, or that the server's
    grace is over."""
    exchange = current()
    known = _known(error, cancelled=exchange.cancelled)
    exchange.error = known.code or known.type
    return known


def _known(error: BaseException, *, cancelled: bool) -> MantouError:
    if isinstance(error, asyncio.CancelledError):
        if cancelled:
            return Cancelled("This request was cancelled through POST /v1/requests/{id}/cancel.")
        return EngineStopped("The server is shutting down and stopped this request; send it again later.")
    return error if isinstance(error, MantouError) else internal(error)


def error_json(error: MantouError) -> bytes:
    """`{"error": {message, type, param, code}}`."""
    body = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": body})


class OpenAIEnvelope:
    """OpenAI's wording, and that of every route that has none of its own."""

    content_type = EVENT_STREAM
    keep_alive = COMMENT

    def status(self, error: MantouError) -> int:
        return error.status

    def body(self, error: MantouError) -> bytes:
        return error_json(error)

    def event(self, error: MantouError) -> bytes:
        return data_event(error_json(error))


_OPENAI = OpenAIEnvelope()


def envelope() -> Envelope:
    """How the request that is being answered wants errors worded."""
    return spoken(_OPENAI)


def error_response(error: MantouError, headers: Mapping[str, str] | None = None) -> Response:
    """The whole response for an error that happened before anything was sent."""
    extra = dict(headers or {})
    if error.retry_after_s is not None:
        extra["retry-after"] = str(error.retry_after_s)
    current().error = error.code or error.type
    wording = envelope()
    return Response(wording.body(error), wording.status(error), extra, "application/json")
