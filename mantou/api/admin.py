"""GET routes that describe the server: index, models, health, stats, downloads, library, metrics. Changes nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from mantou.api.openai.wire import Model, ModelList, encode
from mantou.api.status_page import PAGE
from mantou.errors import ModelNotFound

if TYPE_CHECKING:
    from mantou.api.service import Loaded, Service
    from mantou.data import ModelInfo

Handler = Callable[[Request], Awaitable[Response]]

_HEALTH = b'{"status": "ok"}'  # byte for byte what mlx_lm.server says
_LIBRARY_TTL_S = 30.0
_OWNER = "mantou"

ENDPOINTS = (
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/responses",
    "GET /v1/responses/{id}",
    "DELETE /v1/responses/{id}",
    "POST /v1/responses/{id}/cancel",
    "GET /v1/responses/{id}/input_items",
    "POST /v1/embeddings",
    "POST /v1/rerank",
    "POST /v1/score",
    "POST /admin/cache/session/close",
    "POST /admin/cache/flush",
    "GET /v1",
    "GET /v1/models",
    "GET /v1/models/{id}",
    "POST /api/chat",
    "POST /api/generate",
    "POST /api/embed",
    "POST /api/embeddings",
    "POST /api/show",
    "GET /api/tags",
    "GET /api/ps",
    "GET /api/version",
    "GET /v1/requests",
    "POST /v1/requests/{id}/cancel",
    "GET /health",
    "GET /ready",
    "GET /stats",
    "GET /downloads",
    "GET /library",
    "GET /metrics",
    "GET /openapi.json",
)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


class Admin:
    """The describing routes of one service. `describe` makes the OpenAPI document."""

    def __init__(self, service: Service, *, describe: Callable[[], Mapping[str, Any]]) -> None:
        self._service = service
        self._describe = describe
        self._library: tuple[float, Sequence[Mapping[str, Any]]] | None = None
        self._scanning = asyncio.Lock()

    def routes(self) -> dict[str, Handler]:
        return {
            "/": self.page,
            "/v1": self.index,
            "/v1/models": self.models,
            "/v1/models/{model_id:path}": self.model,
            "/health": self.health,
            "/ready": self.readiness,
            "/stats": self.stats,
            "/downloads": self.downloads,
            "/library": self.library,
            "/metrics": self.metrics,
            "/openapi.json": self.openapi,
        }

    async def health(self, request: Request) -> Response:
        """Alive, whatever the model does."""
        return Response(_HEALTH, media_type="application/json")

    async def readiness(self, request: Request) -> Response:
        """200 while new requests are welcome: a model is loaded, and nobody told the server to stop."""
        state = "draining" if self._service.draining else self._service.state
        status = 200 if state == "ready" else 503
        return Response(msgspec.json.encode({"status": state}), status, media_type="application/json")

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE)

    async def index(self, request: Request) -> Response:
        model = self._service.model
        return _json(
            {
                "name": "mantou",
                "version": self._service.version,
                "model": None if model is None else model.info.id,
                "endpoints": ENDPOINTS,
            }
        )

    async def models(self, request: Request) -> Response:
        """The served model first, then what else could be served."""
        loaded = await self._service.ready()
        served = self._served(loaded)
        others = [
            Model(id=str(row["repo_id"]), object="model", created=int(row.get("created", 0)), owned_by=_OWNER)
            for row in await self._scan(loaded)
            if row.get("supported")
            and not row.get("serving")
            and row["repo_id"] not in {served.id, *(model.id for model in self._beside(loaded))}
        ]
        return Response(
            encode(ModelList(object="list", data=[served, *self._beside(loaded), *others])),
            media_type="application/json",
        )

    async def model(self, request: Request) -> Response:
        """OpenAI's single object; only the served model has one, since only it can answer."""
        loaded = await self._service.ready()
        asked = request.path_params["model_id"]
        if beside := [model for model in self._beside(loaded) if model.id == asked]:
            return Response(encode(beside[0]), media_type="application/json")
        if asked != loaded.info.id:
            raise ModelNotFound(
                f"This server serves {loaded.info.id}, not the model that was asked for.", param="model"
            )
        return Response(encode(self._served(loaded)), media_type="application/json")

    async def stats(self, request: Request) -> Response:
        return _json(self._stats())

    async def downloads(self, request: Request) -> Response:
        return _json({"downloads": self._service.board.snapshot()})

    async def library(self, request: Request) -> Response:
        loaded = await self._service.ready()
        return _json({"models": await self._scan(loaded)})

    async def metrics(self, request: Request) -> Response:
        from mantou.api.prometheus import CONTENT_TYPE, Facts, render

        loaded = self._service.model
        facts = Facts(
            metrics=self._service.metrics,
            engine={} if loaded is None else self._service.engine.stats(),
            model=self._service.config.model if loaded is None else loaded.info.id,
            started_at=self._service.started_at,
            cache={} if loaded is None else {**loaded.store.stats(), **loaded.checkpoints.stats()},
        )
        # The exposition library takes 0.15 s to import once; running streams must not notice.
        text = await asyncio.to_thread(render, facts)
        return Response(text, media_type=CONTENT_TYPE)

    async def openapi(self, request: Request) -> Response:
        return _json(self._describe())

    def _served(self, loaded: Loaded) -> Model:
        return Model(
            id=loaded.info.id,
            object="model",
            created=loaded.created,
            owned_by=_OWNER,
            context_window=loaded.info.context_length,
            reasoning=loaded.info.reasoning,
            vision=loaded.info.vision,
        )

    def _beside(self, loaded: Loaded) -> list[Model]:
        """The embedding model next to the served one."""
        if loaded.embeddings is None or loaded.embeddings.info.id == loaded.info.id:
            return []
        info = loaded.embeddings.info
        return [Model(info.id, "model", loaded.created, _OWNER, context_window=info.max_tokens)]

    async def _scan(self, loaded: Loaded) -> Sequence[Mapping[str, Any]]:
        """Rows with at least `repo_id` and `supported`, at most 30 s old. One scan at a time, off the loop."""
        async with self._scanning:
            now = time.monotonic()
            if self._library is None or now - self._library[0] > _LIBRARY_TTL_S:
                self._library = (now, await asyncio.to_thread(loaded.library))
            return self._library[1]

    def _stats(self) -> dict[str, Any]:
        service, config, loaded = self._service, self._service.config, self._service.model
        server: dict[str, Any] = {
            "owner": config.owner,
            "model": config.model if loaded is None else loaded.info.id,
            "state": service.state,
            "version": service.version,
            "started_at": service.started_at,
        }
        found: dict[str, Any] = {"server": server, "http": self._http_stats()}
        if loaded is None:
            return found
        info, engine = loaded.info, service.engine.stats()
        kv = engine.get("kv", {})
        capped = config.context_length is not None or "context_reason" in info.extra
        return found | {
            "model": info,
            "batch": {
                "configured": engine.get("rows"),
                "batched": True,
                "active_rows": engine.get("running"),
                "waiting": engine.get("waiting"),
                "max_waiting": config.max_waiting,
            },
            "kv_quant": {
                "mode": _kv_mode(config.kv_quant, info),
                "scheme": info.kv_scheme,
                "start": config.kv_quant_start,
                "layers": info.extra.get("kv_codecs", {}),
                "attention": {
                    "global": info.num_layers.get("full", 0),
                    "sliding_window": info.num_layers.get("window", 0) + info.num_layers.get("chunked", 0),
                },
                "recurrent_layers": info.num_layers.get("recurrent", 0),
            },
            "paged_kv": {"mode": config.paged_kv, **info.extra.get("kv_paging", {})},
            "admission": {
                "max_safe_context": kv.get("capacity_tokens"),
                "enforced_context_tokens": info.context_length if capped else None,
                "kv_budget_bytes": config.kv_budget_bytes,
                "memory_budget_bytes": config.memory_budget_bytes,
                "kv_bytes_per_token": info.extra.get("kv_bytes_per_token"),
                "draft_weights_bytes": info.extra.get("draft_weights_bytes"),
                "draft_kv_bytes_per_token": info.extra.get("draft_kv_bytes_per_token"),
                "weights_bytes": info.weights_bytes,
            },
            **loaded.store.stats(),
            **loaded.checkpoints.stats(),
            **({} if loaded.embeddings is None else {"embeddings": loaded.embeddings.stats()}),
            "engine": engine,
        }

    def _http_stats(self) -> dict[str, Any]:
        metrics = self._service.metrics
        first = metrics.first_token_s
        return {
            "finished": metrics.finished,
            "rejected": metrics.rejected,
            "mean_first_token_s": first.sum / first.count if first.count else None,
        }


def _kv_mode(kv_quant: str, info: ModelInfo) -> str:
    """The reference's name for the scheme that was configured."""
    if kv_quant == "off":
        return info.dtype
    return f"uniform-kv{kv_quant}" if kv_quant.isdigit() else info.kv_scheme
