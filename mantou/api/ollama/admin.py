"""Ollama's describing routes: tags, show, ps, version. Knows no generation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from mantou.api.body import parse_object, read_body
from mantou.api.fields import Text

if TYPE_CHECKING:
    from mantou.api.service import Loaded, Service

# Clients compare this with what they need: it is the version whose API is spoken here, not mantou's own.
API_VERSION = "0.12.6"
# The model stays loaded as long as the server runs.
_NEVER = "9999-12-31T23:59:59Z"
_NAMES = (Text("model", "Ignored: there is one model."), Text("name", "The same, as older clients call it."))
PATHS: Mapping[str, tuple[str, str]] = {
    "/api/tags": ("GET", "The served model, as Ollama lists it."),
    "/api/ps": ("GET", "The served model and the memory it takes, as Ollama lists it."),
    "/api/version": ("GET", "The version of Ollama's API that is spoken."),
    "/api/show": ("POST", "What the served model is and can do."),
}


class OllamaAdmin:
    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[BaseRoute]:
        answers = {
            "/api/tags": self.tags,
            "/api/ps": self.running,
            "/api/version": self.version,
            "/api/show": self.show,
        }
        return [Route(path, answers[path], methods=[method]) for path, (method, _) in PATHS.items()]

    async def tags(self, request: Request) -> Response:
        return _json({"models": [_entry(await self._service.ready())]})

    async def running(self, request: Request) -> Response:
        loaded = await self._service.ready()
        memory = {
            "size_vram": 0 if loaded.info.device.startswith("cpu") else loaded.info.weights_bytes,
            "expires_at": _NEVER,
            "context_length": loaded.info.context_length,
        }
        return _json({"models": [_entry(loaded) | memory]})

    async def version(self, request: Request) -> Response:
        return _json({"version": API_VERSION, "mantou": self._service.version})

    async def show(self, request: Request) -> Response:
        body = parse_object(await read_body(request.scope, request.receive))
        for name in _NAMES:
            name.read(body)
        loaded = await self._service.ready()
        info, template = loaded.info, loaded.template
        can = {
            "completion": True,
            "tools": template.supports_tools,
            "thinking": template.supports_thinking or template.reasoning is not None,
            "vision": info.vision,
        }
        return _json(
            {
                "modelfile": "",
                "parameters": "",
                "template": "",
                "details": _details(loaded),
                "model_info": {
                    "general.architecture": info.model_type,
                    "general.basename": info.id,
                    f"{info.model_type}.context_length": info.context_length,
                    f"{info.model_type}.vocab_size": info.vocab_size,
                },
                "capabilities": [name for name, has in can.items() if has],
                "modified_at": _made(loaded),
            }
        )


def _entry(loaded: Loaded) -> dict[str, Any]:
    info = loaded.info
    return {
        "name": info.id,
        "model": info.id,
        "modified_at": _made(loaded),
        "size": info.weights_bytes,
        "digest": hashlib.sha256(info.id.encode()).hexdigest(),
        "details": _details(loaded),
    }


def _details(loaded: Loaded) -> dict[str, Any]:
    info = loaded.info
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": info.model_type,
        "families": [info.model_type],
        "parameter_size": "",
        "quantization_level": info.dtype,
    }


def _made(loaded: Loaded) -> str:
    return datetime.fromtimestamp(loaded.created, UTC).isoformat().replace("+00:00", "Z")


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
