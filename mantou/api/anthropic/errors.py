"""Errors in Anthropic's shape, with its types and status codes. Knows no routes."""

from __future__ import annotations

from mantou.api.anthropic.wire import PING, ErrorDetails, ErrorEnvelope, ErrorObject, encode
from mantou.api.envelope import request_id
from mantou.api.sse import EVENT_STREAM, named_event
from mantou.errors import BadRequest, EngineStopped, MantouError, QueueFull

OVERLOADED = 529
# What the whole server lacks is an overload; 429 is for a caller who uses up a quota of its own.
_OVERLOADS = (QueueFull, EngineStopped)
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


class NoThreads(BadRequest):
    """A request that counts on conversations which the server holds. Its code makes the SDK send them whole."""

    code = "thread_unsupported_request"


class AnthropicEnvelope:
    """Anthropic's wording."""

    content_type = EVENT_STREAM
    keep_alive = PING

    def status(self, error: MantouError) -> int:
        return OVERLOADED if isinstance(error, _OVERLOADS) else error.status

    def body(self, error: MantouError) -> bytes:
        status = self.status(error)
        kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        details = ErrorDetails(error.code) if isinstance(error, NoThreads) and error.code else None
        return encode(ErrorEnvelope(ErrorObject(kind, error.message, details), request_id()))

    def event(self, error: MantouError) -> bytes:
        return named_event(b"error", self.body(error))
