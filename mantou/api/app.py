"""The ASGI app: routes, the shape of errors, start and stop. Knows no request and no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mantou.api.access import DrainGate, KeyGate
from mantou.api.admin import Admin
from mantou.api.anthropic.count import TokenCount
from mantou.api.anthropic.errors import AnthropicEnvelope
from mantou.api.anthropic.messages import AnthropicMessages
from mantou.api.cache_admin import CacheAdmin
from mantou.api.embeddings import embed as embeddings
from mantou.api.embeddings import rerank
from mantou.api.envelope import Envelope, Exchanges
from mantou.api.faults import NotFound, RequestFailed, WrongMethod, error_response, internal, known_error
from mantou.api.generation_route import Dialect, GenerationRoute
from mantou.api.guard import Guard
from mantou.api.keys import KeyRing
from mantou.api.ollama import admin as ollama_admin
from mantou.api.ollama import embed as ollama_embed
from mantou.api.ollama.admin import OllamaAdmin
from mantou.api.ollama.generate import OllamaChat, OllamaGenerate
from mantou.api.ollama.wire import OllamaEnvelope
from mantou.api.openai.chat import OpenAIChat
from mantou.api.openai.completions import OpenAICompletions
from mantou.api.openapi import document
from mantou.api.quotas import Quotas
from mantou.api.requests_admin import RequestsAdmin
from mantou.api.responses.errors import ResponsesEnvelope
from mantou.api.responses.route import ResponsesRoutes
from mantou.api.responses.runs import Runs
from mantou.api.service import Service
from mantou.errors import MantouError

DIALECTS: tuple[Dialect[Any], ...] = (
    OpenAIChat(),
    OpenAICompletions(),
    AnthropicMessages(),
    OllamaChat(),
    OllamaGenerate(),
)
# Path -> how errors are worded there and below; OpenAI's way elsewhere.
ENVELOPES: Mapping[str, Envelope] = {
    "/v1/messages": AnthropicEnvelope(),
    "/v1/responses": ResponsesEnvelope(),
    "/api/generate": OllamaEnvelope("generate"),
    **dict.fromkeys(("/api/chat", "/api/embed", "/api/embeddings", *ollama_admin.PATHS), OllamaEnvelope()),
}


def create_app(service: Service) -> Starlette:
    """The whole server for one service. It answers /health at once; the model may become ready later."""
    admin = Admin(service, describe=lambda: document(service.version, DIALECTS))
    routes: list[BaseRoute] = [
        Route(dialect.path, GenerationRoute(service, dialect), methods=["POST"]) for dialect in DIALECTS
    ]
    responses = ResponsesRoutes(service, service.responses)
    routes += responses.routes()
    service.num_background = lambda: responses.runs.num_running
    routes.append(Route(TokenCount.path, TokenCount(service), methods=["POST"]))
    texts = [embeddings.route(service), *rerank.routes(service), *ollama_embed.routes(service)]
    routes += [Route(route.path, route, methods=["POST"]) for route in texts]
    routes += RequestsAdmin(service.running).routes()
    routes += OllamaAdmin(service).routes()
    routes += [Route(path, answer, methods=["GET"]) for path, answer in admin.routes().items()]
    routes += [Route(path, act, methods=["POST"]) for path, act in CacheAdmin(service).routes().items()]
    return Starlette(
        routes=routes,
        middleware=_middleware(service),
        exception_handlers={MantouError: _mantou_error, HTTPException: _http_error},
        lifespan=_lifespan(service, responses.runs),
    )


def _middleware(service: Service) -> list[Middleware]:
    config = service.config
    stack = [
        Middleware(
            Exchanges,
            envelopes=ENVELOPES,
            running=service.running,
            observers=service.observers,
            max_body_bytes=config.max_body_bytes,
        ),
        Middleware(Guard, host=config.host, allow_origins=config.allow_origins),
        Middleware(DrainGate, draining=lambda: service.draining),
        Middleware(KeyGate, ring=KeyRing(config.api_key_file, config.api_key), quotas=Quotas()),
        Middleware(Boundary),
    ]
    if config.allow_origins:
        from starlette.middleware.cors import CORSMiddleware

        cors = Middleware(
            CORSMiddleware, allow_origins=config.allow_origins, allow_methods=["*"], allow_headers=["*"]
        )
        stack.insert(0, cors)
    return stack


def _lifespan(service: Service, runs: Runs) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        service.attach(asyncio.get_running_loop())
        await runs.open()
        if service.on_start is not None:
            service.on_start(service)
        yield
        await runs.close()
        if service.on_stop is not None:
            await asyncio.to_thread(service.on_stop)

    return lifespan


async def _mantou_error(request: Request, error: Exception) -> Response:
    return error_response(error if isinstance(error, MantouError) else internal(error))


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router raises: no such path, no such method."""
    if not isinstance(error, HTTPException):
        return error_response(internal(error))
    known: MantouError
    match error.status_code:
        case 404:
            known = NotFound("not found")
        case 405:
            known = WrongMethod(f"{request.method} is not allowed here; see GET /v1 for the routes.")
            return error_response(known, {"allow": ", ".join(_methods_of(request))})
        case _:
            known = RequestFailed(error.detail)
            known.status = error.status_code
    return error_response(known, error.headers)


def _methods_of(request: Request) -> list[str]:
    """Every method of a path; the router names those of its first route only.

    A route that spells the path out hides those that only fit it: `compact` is the id of no response.
    """
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    fitting = [route for route in routes if route.matches(request.scope)[0] != Match.NONE]
    exact = [route for route in fitting if route.path == request.url.path]
    return sorted({name for route in exact or fitting for name in route.methods or ()})


class Boundary:
    """Answers an unexpected error with a plain 500 and logs it under an id; nothing of the inside gets out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except (Exception, asyncio.CancelledError) as error:  # the last one who can answer, so it must
            known = known_error(error)
            if started:
                raise
            await error_response(known)(scope, receive, send)
