"""The OpenAPI 3.1 document, made from the field tables and the response types. Knows no service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from mantou.api import operations_openapi
from mantou.api.anthropic.count import TokenCount
from mantou.api.anthropic.wire import ErrorEnvelope, Event, MessageBody, TokenCountBody
from mantou.api.embeddings import openapi as embeddings_openapi
from mantou.api.ollama.wire import OllamaChatLine, OllamaError, OllamaGenerateLine
from mantou.api.openai.wire import ChatChunk, ChatCompletion, Completion, ErrorBody, Model, ModelList
from mantou.api.responses import compact
from mantou.api.responses import openapi as responses_openapi
from mantou.api.responses.create import OpenAIResponses
from mantou.api.responses.wire import CompactedBody, ResponseBody
from mantou.api.responses.wire import Event as ResponseEvent
from mantou.api.sse import event_schema

if TYPE_CHECKING:
    from mantou.api.generation_route import Dialect

Schema = dict[str, Any]


class _Described(Protocol):
    @property
    def path(self) -> str: ...
    def schema(self) -> Schema: ...


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a generation route sends: its whole answer, what a stream is made of, and its errors."""

    whole: Any
    chunk: Any
    error: Any = ErrorBody
    stream: str = "chunks as server-sent events up to `data: [DONE]`"
    busy: str = "429"  # status of a full queue
    media: str = "text/event-stream"


_ANSWERS: Mapping[str, _Answer] = {
    "/v1/chat/completions": _Answer(ChatCompletion, ChatChunk),
    "/v1/completions": _Answer(Completion, Completion),
    "/v1/messages": _Answer(
        MessageBody, Event, ErrorEnvelope, "server-sent events up to `message_stop`", "529"
    ),
    "/api/chat": _Answer(
        OllamaChatLine,
        OllamaChatLine,
        OllamaError,
        "a line of JSON for each part",
        media="application/x-ndjson",
    ),
    "/api/generate": _Answer(
        OllamaGenerateLine,
        OllamaGenerateLine,
        OllamaError,
        "a line of JSON for each part",
        media="application/x-ndjson",
    ),
    OpenAIResponses.path: _Answer(ResponseBody, ResponseEvent),
}
_OBJECT: Schema = {"type": "object"}
_ERRORS = {
    "400": "A field is wrong; `param` names it.",
    "413": "The body is too large.",
    "429": "The queue is full; try again after `Retry-After` seconds.",
    "500": "The server failed on this request.",
    "503": "No model is loaded.",
    "529": "The queue is full, or the server is shutting down; try again later.",
}
# Path -> (what it answers, its content type, its schema or the type that has one).
_READS: Mapping[str, tuple[str, str, Schema | type]] = {
    "/v1": ("Name, version, model and routes.", "application/json", _OBJECT),
    "/v1/models": ("The served model, then what else could be served.", "application/json", ModelList),
    "/v1/models/{model_id}": ("The served model.", "application/json", Model),
    "/health": ("Alive, whatever the model does.", "application/json", _OBJECT),
    "/stats": ("What the server does now.", "application/json", _OBJECT),
    "/downloads": ("The last downloads, conversions and loads.", "application/json", _OBJECT),
    "/library": ("The models on this disk.", "application/json", _OBJECT),
    "/metrics": ("Prometheus text.", "text/plain", {"type": "string"}),
    "/openapi.json": ("This document.", "application/json", _OBJECT),
    "/": ("A page that shows the state.", "text/html", {"type": "string"}),
}
# Path -> (what it does, the schema of its body).
_ACTIONS: Mapping[str, tuple[str, Schema]] = {
    "/admin/cache/session/close": (
        "Ends the retention of a session's prompts.",
        {"type": "object", "properties": {"session_id": {"type": ["string", "null"]}}},
    ),
    "/admin/cache/flush": ("Stores everything that is queued for the SSD.", _OBJECT),
}


def document(version: str, dialects: Sequence[Dialect[Any]]) -> dict[str, Any]:
    """The whole document."""
    answers = {kind for answer in _ANSWERS.values() for kind in (answer.whole, answer.chunk, answer.error)}
    types: list[Any] = [*answers, Model, ModelList, TokenCountBody]
    types += [kind for kind in responses_openapi.TYPES if kind not in answers]
    types += embeddings_openapi.TYPES
    types += operations_openapi.TYPES
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    refs = dict(zip(types, schemas, strict=True))
    paths = {dialect.path: {"post": _generation(dialect, refs)} for dialect in dialects}
    paths[OpenAIResponses.path] = {
        "post": responses_openapi.creation(_generation(OpenAIResponses(), refs), refs)
    }
    paths[compact.PATH] = {"post": responses_openapi.creation(_compaction(refs), refs)}
    paths |= responses_openapi.paths(refs)
    paths[TokenCount.path] = {"post": _count(refs)}
    paths |= embeddings_openapi.paths(refs)
    paths |= operations_openapi.paths(refs)
    paths |= {path: {"get": _read(path, *entry, refs)} for path, entry in _READS.items()}
    paths |= {path: {"post": _action(path, *entry, refs)} for path, entry in _ACTIONS.items()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mantou",
            "version": version,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": dict(components)},
    }


def _content(kind: str, schema: Schema) -> Schema:
    return {"content": {kind: {"schema": schema}}}


def _errors(refs: Mapping[Any, Schema], *statuses: str, kind: Any = ErrorBody) -> Schema:
    return {
        status: {"description": _ERRORS[status], **_content("application/json", refs[kind])}
        for status in statuses
    }


def _generation(dialect: _Described, refs: Mapping[Any, Schema]) -> Schema:
    kinds = _ANSWERS[dialect.path]
    part = refs[kinds.chunk]
    answer = {
        "description": f"The answer; with `stream`, {kinds.stream}.",
        "content": {
            "application/json": {"schema": refs[kinds.whole]},
            kinds.media: {"schema": event_schema(part) if kinds.media == "text/event-stream" else part},
        },
    }
    return {
        "operationId": dialect.path.strip("/").replace("/", "_"),
        "summary": (type(dialect).__doc__ or "").strip(),
        "requestBody": {"required": True, **_content("application/json", dialect.schema())},
        "responses": {
            "200": answer,
            **_errors(refs, "400", "413", kinds.busy, "500", "503", kind=kinds.error),
        },
    }


def _count(refs: Mapping[Any, Schema]) -> Schema:
    doc = (TokenCount.__doc__ or "").strip()
    return {
        "operationId": "v1_messages_count_tokens",
        "summary": doc,
        "requestBody": {"required": True, **_content("application/json", TokenCount.schema())},
        "responses": {
            "200": {"description": doc, **_content("application/json", refs[TokenCountBody])},
            **_errors(refs, "400", "413", "500", "503", kind=ErrorEnvelope),
        },
    }


def _compaction(refs: Mapping[Any, Schema]) -> Schema:
    doc = "A conversation as the user's messages and a summary, which the model writes: items for a later input."
    return {
        "operationId": "v1_responses_compact",
        "summary": doc,
        "requestBody": {"required": True, **_content("application/json", compact.compaction_schema())},
        "responses": {
            "200": {"description": doc, **_content("application/json", refs[CompactedBody])},
            **_errors(refs, "400", "413", "429", "500", "503"),
        },
    }


def _read(path: str, doc: str, kind: str, shape: Schema | type, refs: Mapping[Any, Schema]) -> Schema:
    schema = shape if isinstance(shape, dict) else refs[shape]
    operation: Schema = {
        "operationId": "get_" + (path.strip("/").translate(str.maketrans("/.{}", "____")) or "page"),
        "summary": doc,
        "responses": {"200": {"description": doc, **_content(kind, schema)}},
    }
    if "{model_id}" in path:
        operation["parameters"] = [
            {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
        operation["responses"]["404"] = {
            "description": "This server has another model.",
            **_content("application/json", refs[ErrorBody]),
        }
    return operation


def _action(path: str, doc: str, body: Schema, refs: Mapping[Any, Schema]) -> Schema:
    return {
        "operationId": path.strip("/").replace("/", "_"),
        "summary": doc,
        "requestBody": {"required": path != "/admin/cache/flush", **_content("application/json", body)},
        "responses": {
            "200": {"description": doc, **_content("application/json", _OBJECT)},
            **_errors(refs, "400", "413", "503"),
        },
    }
