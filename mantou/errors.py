"""Errors a user can act on: one sentence that says what is wrong and what to do. Knows no HTTP library."""

from __future__ import annotations


class MantouError(Exception):
    """Base of every expected failure. The CLI prints it without a traceback and exits with 1."""

    status = 500
    type = "server_error"
    code: str | None = None
    retry_after_s: int | None = None  # when the same may be tried again, if it may

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadRequest(MantouError):
    """The caller sent something that cannot be served; `param` names the field."""

    status = 400
    type = "invalid_request_error"


class ContextOverflow(BadRequest):
    """The prompt leaves no room for one token in the context."""

    code = "context_length_exceeded"


class ModelNotFound(MantouError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class QueueFull(MantouError):
    """The waiting queue is at its bound; try again later."""

    status = 429
    type = "resource_admission"
    code = "queue_full"
    retry_after_s = 1


class ModelUnavailable(MantouError):
    """No model is loaded, or loading failed."""

    status = 503
    type = "server_error"
    code = "model_unavailable"


class ModelError(MantouError):
    """A model folder or file that cannot be loaded: unsupported, corrupt, truncated or in need of remote code."""


class DownloadError(MantouError):
    """A model could not be fetched or converted; nothing half-written is left behind."""


class ConfigError(MantouError):
    """A flag or setting that cannot be honoured."""


class EngineStopped(MantouError):
    """The engine is shutting down and takes no more requests."""

    status = 503
    code = "shutting_down"
    retry_after_s = 5
