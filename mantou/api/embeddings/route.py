"""What the routes of an embedding model share: read, queue, wait with an eye on the client, answer. Knows no fields."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mantou.api.body import parse_object, read_body
from mantou.api.embeddings.service import EmbeddingService, Pending
from mantou.api.envelope import current
from mantou.api.faults import ClientGone
from mantou.api.fields import Schema
from mantou.api.sse import ClientWatch
from mantou.errors import BadRequest

if TYPE_CHECKING:
    from mantou.api.service import Loaded, Service


class Asked(Protocol):
    """A request that was read. Its methods run off the event loop."""

    def start(self, embeddings: EmbeddingService) -> Pending: ...
    def answer(self, result: Any, model: str) -> bytes: ...


class EmbeddingRoute:
    """POST `path`. `parse` makes a body into what is asked and raises BadRequest."""

    def __init__(
        self,
        service: Service,
        path: str,
        parse: Callable[[Mapping[str, Any]], Asked],
        schema: Callable[[], Schema],
    ) -> None:
        self.path = path
        self.schema = schema
        self._service = service
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            asked = self._parse(parse_object(await read_body(scope, receive)))
            client = ClientWatch(receive)
            try:
                body = await self._answer(asked, client)
            finally:
                client.stop()
        except ClientGone:
            return
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _answer(self, asked: Asked, client: ClientWatch) -> bytes:
        embeddings = _embeddings(await self._service.ready())
        # Tokenising and writing thousands of numbers takes long enough for running streams to notice.
        pending = await asyncio.to_thread(asked.start, embeddings)
        done = asyncio.wrap_future(pending.future)
        try:
            await asyncio.wait({done, client.task}, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise ClientGone
            found = done.result()
        finally:
            done.cancel()  # what nobody waits for leaves the queue
        result = await asyncio.to_thread(pending.finish, found)
        current().charge(result.num_tokens)
        return await asyncio.to_thread(asked.answer, result, embeddings.info.id)


def _embeddings(loaded: Loaded) -> EmbeddingService:
    if loaded.embeddings is None:
        raise BadRequest(
            f"{loaded.info.id} generates text and is no embedding model; serve one beside it (--embedding-model) or "
            "instead of it.",
            param="model",
        )
    return loaded.embeddings
