"""GET /v1/requests, POST /v1/requests/{id}/cancel: what is under way, and its end. Knows no dialect and no engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from mantou.api.envelope import Exchange, current
from mantou.api.faults import NotFound

if TYPE_CHECKING:
    from mantou.api.envelope import Running


class RequestsAdmin:
    """A key sees and ends its own requests, one with the scope admin those of all."""

    def __init__(self, running: Running) -> None:
        self._running = running

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/v1/requests", self.list, methods=["GET"]),
            Route("/v1/requests/{request_id}/cancel", self.cancel, methods=["POST"]),
        ]

    async def list(self, request: Request) -> Response:
        """The requests that are under way, oldest first; this one is left out."""
        found = [_shown(one) for one in self._visible(self._running.all())]
        return _json({"object": "list", "data": found})

    async def cancel(self, request: Request) -> Response:
        """Ends a request by its x-request-id or by the id of its answer; its rows are freed before the next step."""
        name = request.path_params["request_id"]
        found = self._visible(self._running.named(name))
        if not found:
            raise NotFound("No request with this id is under way; it has ended, or belongs to another key.")
        for exchange in found:
            exchange.cancel()
        return _json({"id": name, "object": "request", "cancelled": True})

    @staticmethod
    def _visible(exchanges: Sequence[Exchange]) -> Sequence[Exchange]:
        own = current()
        return [one for one in exchanges if one is not own and (own.sees_all or one.caller == own.caller)]


def _shown(exchange: Exchange) -> dict[str, Any]:
    work = exchange.work
    return {
        "id": exchange.request_id,
        "object": "request",
        "response_id": work.response_id,
        "method": exchange.method,
        "path": exchange.path,
        "key": exchange.caller,
        "started_at": exchange.started_at,
        "seconds": round(exchange.seconds, 3),
        "num_answers": len(work.rows),
        "prompt_tokens": work.prompt_tokens,
        "completion_tokens": work.completion_tokens,
    }


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
