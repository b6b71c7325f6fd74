"""How the Responses API words errors in a stream; everything else is OpenAI's usual way. Knows no routes."""

from __future__ import annotations

from mantou.api.faults import OpenAIEnvelope
from mantou.api.responses.wire import ErrorEvent, StreamError, as_event
from mantou.errors import MantouError


class ResponsesEnvelope(OpenAIEnvelope):
    def event(self, error: MantouError) -> bytes:
        """For errors before a response's first event, and for the end of the server; others fail the response."""
        detail = StreamError(error.message, error.type, error.code, error.param)
        return as_event(ErrorEvent(0, error.message, error.code, error.param, detail))
