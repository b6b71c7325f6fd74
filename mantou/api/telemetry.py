"""OpenTelemetry spans of generation requests, after the GenAI conventions. Knows no text of a prompt or an answer.

Needs the extra `otel`; nothing of it is imported unless an endpoint is set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mantou.api.envelope import Exchange
from mantou.config import Config
from mantou.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
# Path -> gen_ai.operation.name
_OPERATIONS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/api/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
}


def wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the standard variables name a collector."""
    off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return not off and any(environment.get(name) for name in _ENDPOINTS)


def from_environment(version: str, config: Config) -> Telemetry | None:
    """An observer if the environment names a collector. Raises ConfigError without the extra `otel`."""
    return Telemetry(version, config.host, config.port) if wanted() else None


class Telemetry:
    """An observer of exchanges: each becomes one span, a child of the caller's if it sent a `traceparent`.

    `processor` is where spans go; None = in batches to the OTLP endpoint of the environment. Raises ConfigError if the
    packages are missing.
    """

    def __init__(self, version: str, host: str, port: int, processor: SpanProcessor | None = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            self._provider = TracerProvider(
                resource=Resource.create({"service.name": "mantou", "service.version": version}),
                shutdown_on_exit=False,
            )
            self._provider.add_span_processor(processor or _exporting())
        except ImportError as error:
            raise ConfigError(
                f"{_ENDPOINTS[0]} is set, but {error.name or 'opentelemetry'} is not installed; install mantou[otel], "
                "or unset it."
            ) from None
        self._tracer = self._provider.get_tracer("mantou", version)
        self._propagator = TraceContextTextMapPropagator()
        self._server = {"server.address": host, "server.port": port}

    def __call__(self, exchange: Exchange) -> None:
        operation = _OPERATIONS.get(exchange.path)
        if operation is None or exchange.method != "POST":
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

        work = exchange.work
        start_ns = int(exchange.started_at * 1e9)
        span = self._tracer.start_span(
            f"{operation} {work.model}".strip(),
            context=self._propagator.extract(dict(exchange.headers)),
            kind=SpanKind.SERVER,
            attributes=self._attributes(exchange, operation),
            start_time=start_ns,
        )
        if work.first_token_s is not None:
            span.add_event("gen_ai.first_token", timestamp=start_ns + int(work.first_token_s * 1e9))
        if exchange.error is not None:
            span.set_attribute("error.type", exchange.error)
            span.set_status(Status(StatusCode.ERROR, exchange.error))
        span.end(start_ns + int(exchange.seconds * 1e9))

    def close(self) -> None:
        """Sends what is left. May block as long as the exporter's timeout."""
        self._provider.shutdown()

    def _attributes(self, exchange: Exchange, operation: str) -> dict[str, Any]:
        work = exchange.work
        found: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "mantou",
            "http.request.method": exchange.method,
            "http.route": exchange.path,
            "mantou.request.id": exchange.request_id,
            **self._server,
        }
        if exchange.status is not None:
            found["http.response.status_code"] = exchange.status
        if exchange.caller is not None:
            found["mantou.key"] = exchange.caller
        if work.model:
            found |= {"gen_ai.request.model": work.model, "gen_ai.response.model": work.model}
        if work.rows:
            found |= {
                "gen_ai.response.id": work.response_id or "",
                "gen_ai.request.choice.count": len(work.rows),
                "gen_ai.usage.input_tokens": work.prompt_tokens,
                "gen_ai.usage.output_tokens": work.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": work.cached_tokens,
                "gen_ai.response.finish_reasons": list(work.finishes),
            }
        return found


def _exporting() -> SpanProcessor:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(OTLPSpanExporter())
