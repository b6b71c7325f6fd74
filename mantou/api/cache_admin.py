"""POST /admin/cache/...: end a session's retention, store what is queued. Knows the prefix store by its seam only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mantou.api.body import parse_object, read_body
from mantou.errors import BadRequest

if TYPE_CHECKING:
    from mantou.api.service import Service
    from mantou.protocols import CheckpointStore, PrefixStore

# Longer than a healthy disk needs for a full queue; then the report says what is still pending.
_FLUSH_S = 60.0


class CacheAdmin:
    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> dict[str, Callable[[Request], Awaitable[Response]]]:
        return {"/admin/cache/session/close": self.close_session, "/admin/cache/flush": self.flush}

    async def close_session(self, request: Request) -> Response:
        """Drops a session's association and retention; what is stored stays until its turn comes."""
        session = parse_object(await read_body(request.scope, request.receive)).get("session_id")
        if session is not None and not isinstance(session, str):
            raise BadRequest("session_id must be a string.", param="session_id")
        loaded = await self._service.ready()
        if session:
            closing = self._service.engine.call(lambda: loaded.store.close_session(session))
            await asyncio.wrap_future(closing)
        return _json({"closed": bool(session)})

    async def flush(self, request: Request) -> Response:
        """Waits until everything queued for the SSD is stored: prompts, and answers in progress."""
        if body := await read_body(request.scope, request.receive):
            parse_object(body)
        loaded = await self._service.ready()
        report = await asyncio.to_thread(_flush, (loaded.store, loaded.checkpoints))
        return _json(report)


def _flush(queues: Sequence[PrefixStore | CheckpointStore]) -> dict[str, object]:
    """The reports of all, in which `flushed` and `elapsed_ms` are the whole's."""
    started = time.perf_counter()
    report: dict[str, object] = {}
    flushed = True
    for queue in queues:
        left_s = max(started + _FLUSH_S - time.perf_counter(), 0.0)
        found = queue.flush(left_s)
        flushed &= bool(found.get("flushed", True))
        report |= found
    return {**report, "flushed": flushed, "elapsed_ms": (time.perf_counter() - started) * 1000}


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
