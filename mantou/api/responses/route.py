"""/v1/responses and below: make a response, follow it, ask for it again, end it, forget it. Knows no fields."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from mantou.api.body import parse_object, read_body
from mantou.api.envelope import current
from mantou.api.faults import ClientGone, envelope, known_error
from mantou.api.generation import Generation
from mantou.api.patience import begun
from mantou.api.responses.compact import PATH, compacted, read_compaction, summary_ask
from mantou.api.responses.create import OpenAIResponses, ResponsesAsk
from mantou.api.responses.run import Run
from mantou.api.responses.runs import Runs
from mantou.api.responses.store import ResponseStore
from mantou.api.responses.wire import DeletedResponse, ItemList, ResponseBody, encode
from mantou.api.sse import DONE, HEADERS, ClientWatch, EventWriter
from mantou.errors import BadRequest

if TYPE_CHECKING:
    from mantou.api.service import Service

# Rendering and tokenising below this many characters takes about a millisecond; above, other streams would notice.
_INLINE_CHARACTERS = 16_384
_MOST_ITEMS, _SOME_ITEMS = 100, 20  # of one page
_DIGITS = 15
_STREAM = {name.decode(): value.decode() for name, value in HEADERS}


class ResponsesRoutes:
    """The routes of one service."""

    def __init__(self, service: Service, store: ResponseStore) -> None:
        self._service = service
        self.runs = Runs(store)

    def routes(self) -> list[BaseRoute]:
        one = f"{OpenAIResponses.path}/{{response_id}}"
        create = CreateResponse(self._service, self.runs)
        return [
            Route(OpenAIResponses.path, create, methods=["POST"]),
            Route(PATH, CompactResponse(create), methods=["POST"]),
            Route(one, RetrieveResponse(self._service, self.runs), methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/cancel", self.cancel, methods=["POST"]),
            Route(f"{one}/input_items", self.input_items, methods=["GET"]),
        ]

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        await self.runs.forget(response_id)
        return _json(DeletedResponse(response_id, deleted=True))

    async def cancel(self, request: Request) -> Response:
        """Ends a response that runs; one that has ended comes back as it is."""
        response_id = request.path_params["response_id"]
        run = self.runs.live(response_id)
        if run is not None:
            run.cancel()
            await run.end()
            return _json(run.body())
        kept = await self.runs.stored(response_id)
        return Response(kept.body, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        """A page of all items that led to a response, those of earlier turns included."""
        query = request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise BadRequest("order must be asc or desc.", param="order")
        limit = _number(query, "limit", 1, _MOST_ITEMS)
        items = await self._items(request.path_params["response_id"])
        if order == "desc":
            items.reverse()
        after = query.get("after")
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise BadRequest(f"after names no item of this response: {after!r}.", param="after")
            items = items[ids.index(after) + 1 :]
        page = items[: limit or _SOME_ITEMS]
        first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
        return _json(ItemList(page, first, last, has_more=len(page) < len(items)))

    async def _items(self, response_id: str) -> list[dict[str, Any]]:
        run = self.runs.live(response_id)
        if run is not None:
            return list(run.items)
        return msgspec.json.decode((await self.runs.stored(response_id)).input)


class CreateResponse:
    """POST: an ASGI app, for streams write as they go."""

    def __init__(self, service: Service, runs: Runs) -> None:
        self._service = service
        self._runs = runs
        self._dialect = OpenAIResponses()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.perf_counter()
        client: ClientWatch | None = None
        try:
            body = parse_object(await read_body(scope, receive))
            ask = await self.complete(self._dialect.parse(body, Headers(scope=scope)))
            client = ClientWatch(receive)
            if ask.generation.stream:
                await _streamed(
                    self._service, client, send, lambda writer: self._run(ask, arrived, client, writer), 0
                )
            else:
                await _json(await self.made(ask, arrived, client))(scope, receive, send)
        except ClientGone:
            return
        finally:
            if client is not None:
                client.stop()

    async def made(self, ask: ResponsesAsk, arrived: float, client: ClientWatch) -> ResponseBody:
        """The whole response. Raises ClientGone, and what kept the response from its end."""
        return await self._whole(await self._run(ask, arrived, client, None), client)

    async def complete(self, ask: ResponsesAsk) -> ResponsesAsk:
        """A checked body, behind the turns that it goes on from."""
        if not self._runs.store.keeps:
            if ask.store or ask.background:
                raise BadRequest(
                    "This server stores no responses (--response-store off); leave store and background out.",
                    param="background" if ask.background else "store",
                )
            ask = replace(ask, store=False)
        if ask.previous is not None:
            ask = ask.after(*await self._runs.history(ask.previous))
        return replace(ask, items=await self._runs.resolved(ask.items))

    async def _run(
        self, ask: ResponsesAsk, arrived: float, client: ClientWatch, writer: EventWriter | None
    ) -> Run:
        """The run, started. In the foreground it ends with its client. Raises ClientGone."""
        beginning = self._begin(ask, arrived)
        run = await begun(beginning, client, writer, self._service.heartbeat_s, Run.abandon)
        self._runs.start(run)
        if not ask.background:
            client.on_gone(run.cancel)
        return run

    async def _begin(self, ask: ResponsesAsk, arrived: float) -> Run:
        loaded = await self._service.ready()
        args = (ask, loaded, self._service.config, int(time.time()))
        if ask.num_characters > _INLINE_CHARACTERS or ask.compiles:
            job = await asyncio.to_thread(self._dialect.plan, *args)
        else:
            job = self._dialect.plan(*args)
        generation = Generation(self._service, loaded, (job.row,), arrived)
        generation.start()
        run = Run(
            generation,
            job.writer,
            ask.items,
            self._runs.store,
            events=ask.generation.stream,
            background=ask.background,
            owner=current().caller or "",
        )
        await run.open()
        return run

    async def _whole(self, run: Run, client: ClientWatch) -> ResponseBody:
        """The response; in the background as it is now. Raises ClientGone, and what kept the response from its end."""
        if run.background:
            return run.body()
        try:
            await run.end()
        except asyncio.CancelledError:
            run.cancel()
            raise
        if client.gone:
            raise ClientGone
        if run.error is not None:
            raise run.error
        return run.body()


class CompactResponse:
    """POST: a conversation, made shorter. Its summary is a response that nothing keeps."""

    def __init__(self, create: CreateResponse) -> None:
        self._create = create

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.perf_counter()
        client: ClientWatch | None = None
        try:
            body = parse_object(await read_body(scope, receive))
            conversation = await self._create.complete(read_compaction(body, Headers(scope=scope)))
            client = ClientWatch(receive)
            answer = await self._create.made(summary_ask(conversation), arrived, client)
            await _json(compacted(conversation, answer))(scope, receive, send)
        except ClientGone:
            return
        finally:
            if client is not None:
                client.stop()


class RetrieveResponse:
    """GET: the response, or with `stream` its events from number `starting_after` + 1 on."""

    def __init__(self, service: Service, runs: Runs) -> None:
        self._service = service
        self._runs = runs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response_id: str = scope["path_params"]["response_id"]
        query = QueryParams(scope["query_string"])
        run = self._runs.live(response_id)
        if query.get("stream", "false") not in ("true", "false"):
            raise BadRequest("stream must be true or false.", param="stream")
        if query.get("stream") != "true":
            body = encode(run.body()) if run else (await self._runs.stored(response_id)).body
            await Response(body, media_type="application/json")(scope, receive, send)
            return
        after = _number(query, "starting_after", 0, None)
        position = 0 if after is None else after + 1
        if run is None:
            events = _events((await self._runs.stored(response_id)).events)
            answer = Response(
                b"".join(events[position:]) + DONE,
                headers=_STREAM,
            )
            await answer(scope, receive, send)
            return
        if not run.background:
            raise _not_followed()
        await self._follow(run, position, receive, send)

    async def _follow(self, run: Run, position: int, receive: Receive, send: Send) -> None:
        client = ClientWatch(receive)

        async def found(writer: EventWriter) -> Run:
            return run

        try:
            await _streamed(self._service, client, send, found, position)
        except ClientGone:
            return
        finally:
            client.stop()


async def _streamed(
    service: Service,
    client: ClientWatch,
    send: Send,
    find: Callable[[EventWriter], Awaitable[Run]],
    position: int,
) -> None:
    """Sends a run's events from number `position` on. An error before the stream opens is raised."""
    writer = EventWriter(send, service.heartbeat_s, envelope().keep_alive)
    run: Run | None = None
    try:
        run = await find(writer)
        client.on_gone(run.nudge)
        writer.on_due = run.nudge
        await writer.open()
        while not run.over(position):
            events = await run.take(position)
            if client.gone:
                raise ClientGone
            position += len(events)
            if events:
                await writer.write(b"".join(events))
            elif writer.due:
                await writer.keep_alive()
        await writer.close(DONE)
    except ClientGone:
        raise
    # Whatever it is, even the end of the server's grace: a stream that is open already must end with the reason.
    except (Exception, asyncio.CancelledError) as error:
        if run is not None and not run.background:
            run.cancel()
        if not writer.opened:
            raise
        await writer.close(envelope().event(known_error(error)))
    finally:
        writer.stop()


def _events(stream: bytes) -> list[bytes]:
    """A stored stream's events. Raises BadRequest if there is none."""
    if not stream:
        raise _not_followed()
    return [event + b"\n\n" for event in stream.split(b"\n\n")[:-1]]


def _not_followed() -> BadRequest:
    return BadRequest(
        "Only responses made with background can be streamed again; ask for this one without stream.",
        param="stream",
    )


def _number(query: QueryParams, name: str, low: int, high: int | None) -> int | None:
    """A whole number of a query. Raises BadRequest."""
    text = query.get(name)
    if text is None:
        return None
    if not text.isdecimal() or len(text) > _DIGITS:
        raise BadRequest(f"{name} must be a whole number.", param=name)
    value = int(text)
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise BadRequest(f"{name} must be {bounds}.", param=name)
    return value


def _json(value: object) -> Response:
    return Response(encode(value), media_type="application/json")
