"""One POST from body to last byte, the same for every dialect. Knows no field and no shape of an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mantou.api.body import parse_object, read_body
from mantou.api.faults import ClientGone, envelope, known_error
from mantou.api.generation import Answer, Generation
from mantou.api.generation_fields import GenerationAsk
from mantou.api.patience import begun
from mantou.api.planning import Encoder, Job
from mantou.api.sse import ClientWatch, EventWriter

if TYPE_CHECKING:
    from mantou.api.service import Loaded, Service
    from mantou.config import Config

# Rendering and tokenising below this many characters takes about a millisecond; above, other streams would notice.
_INLINE_CHARACTERS = 16_384


class Ask(Protocol):
    """A checked body of any dialect."""

    @property
    def generation(self) -> GenerationAsk: ...
    @property
    def num_characters(self) -> int: ...
    @property
    def compiles(self) -> bool:
        """Whether a grammar may have to be compiled, which is not for the event loop."""
        ...


AskT = TypeVar("AskT", bound=Ask)


class Dialect(Protocol[AskT]):
    """One API for text generation. Adding one is one file with this shape."""

    path: str

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> AskT: ...
    def plan(self, ask: AskT, loaded: Loaded, config: Config, fingerprint: str, created: int) -> Job: ...
    def schema(self) -> dict[str, Any]: ...


class GenerationRoute:
    """An ASGI app for one dialect.

    An error before the first byte becomes a status code; after it, the last event of the stream. While the model
    loads, requests wait; a stream opens with its first heartbeat, so that errors until then keep their status.
    """

    def __init__(self, service: Service, dialect: Dialect[Any]) -> None:
        self._service = service
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.perf_counter()
        try:
            body = parse_object(await read_body(scope, receive))
        except ClientGone:
            return
        ask = self._dialect.parse(body, Headers(scope=scope))
        client = ClientWatch(receive)
        try:
            if ask.generation.stream:
                await self._stream(ask, arrived, client, send)
            else:
                await self._whole(ask, arrived, client, scope, receive, send)
        except ClientGone:
            return
        finally:
            client.stop()

    # ------------------------------------------------------------------ start
    async def _begin(self, ask: Ask, arrived: float) -> tuple[Job, Generation]:
        loaded = await self._service.ready()
        fingerprint = f"mantou-{self._service.version}-{loaded.info.kv_scheme}"
        args = (ask, loaded, self._service.config, fingerprint, int(time.time()))
        if ask.num_characters > _INLINE_CHARACTERS or ask.compiles:
            job = await asyncio.to_thread(self._dialect.plan, *args)
        else:
            job = self._dialect.plan(*args)
        generation = Generation(self._service, loaded, job.rows, arrived)
        generation.start()
        return job, generation

    async def _begun(
        self, ask: Ask, arrived: float, client: ClientWatch, writer: EventWriter | None
    ) -> tuple[Job, Generation]:
        """Waits for `_begin` with an eye on the client, and keeps a stream alive meanwhile. Raises ClientGone."""
        return await begun(self._begin(ask, arrived), client, writer, self._service.heartbeat_s, _abandon)

    # ------------------------------------------------------------------ not streamed
    async def _whole(
        self, ask: Ask, arrived: float, client: ClientWatch, scope: Scope, receive: Receive, send: Send
    ) -> None:
        job, generation = await self._begun(ask, arrived, client, None)
        try:
            client.on_gone(generation.close)
            answers = [Answer() for _ in job.rows]
            while not generation.finished:
                for index, event in await generation.next():
                    answers[index].add(event)
            if client.gone:
                raise ClientGone
            body = job.encoder.whole(answers, generation.usage())
        finally:
            generation.close()
        await Response(body, media_type="application/json")(scope, receive, send)

    # ------------------------------------------------------------------ streamed
    async def _stream(self, ask: Ask, arrived: float, client: ClientWatch, send: Send) -> None:
        wording = envelope()
        writer = EventWriter(send, self._service.heartbeat_s, wording.keep_alive, wording.content_type)
        try:
            job, generation = await self._begun(ask, arrived, client, writer)
            try:
                client.on_gone(generation.close)
                writer.on_due = generation.nudge
                await writer.open()
                await self._pump(job.encoder, generation, writer)
                if client.gone:
                    raise ClientGone
                await writer.close(job.encoder.done(generation.usage()))
            finally:
                generation.close()
        except ClientGone:
            raise
        # Whatever it is, even the end of the server's grace: a stream that is open already must end with the reason.
        except (Exception, asyncio.CancelledError) as error:
            if not writer.opened:
                raise
            await writer.close(envelope().event(known_error(error)))
        finally:
            writer.stop()

    async def _pump(self, encoder: Encoder, generation: Generation, writer: EventWriter) -> None:
        """Writes until every row has ended. All events that a wake-up brought go out in one write."""
        started: set[int] = set()
        ended = 0
        while not generation.finished:
            events = await generation.next()
            parts: list[bytes] = []
            for index, event in events:
                if index not in started:
                    started.add(index)
                    parts.append(encoder.start(index))
                parts.append(encoder.text(index, event))
                if event.finish is not None:
                    ended += 1
                    last = ended == generation.num_rows
                    parts.append(encoder.finish(index, event.finish, generation.usage() if last else None))
            written = b"".join(parts)
            if written:
                await writer.write(written)
            elif writer.due:
                await writer.keep_alive()


def _abandon(start: tuple[Job, Generation]) -> None:
    """Nobody waits for this start any more: no row may keep running."""
    start[1].close()
