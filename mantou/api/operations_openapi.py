"""The routes of operations and Ollama's describing routes in the OpenAPI document. Knows no service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mantou.api.fields import Schema
from mantou.api.ollama import embed as ollama_embed
from mantou.api.ollama.admin import PATHS
from mantou.api.ollama.embed import OllamaEmbedding, OllamaEmbeddings
from mantou.api.ollama.wire import OllamaError
from mantou.api.openai.wire import ErrorBody

TYPES: tuple[Any, ...] = (OllamaEmbeddings, OllamaEmbedding)
_OBJECT: Schema = {"type": "object"}
_NAMED: Schema = {"type": "object", "properties": {"model": {"type": ["string", "null"]}}}


def paths(refs: Mapping[Any, Schema]) -> dict[str, Schema]:
    """`refs`: schemas of `TYPES`, `OllamaError` and `ErrorBody`."""
    found = {
        path: {method.lower(): _ollama(path, method, doc, refs)} for path, (method, doc) in PATHS.items()
    }
    for route, kind in zip(ollama_embed.EMBEDS, TYPES, strict=True):
        path, schema, doc = route
        found[path] = {"post": _embed(path, schema(), doc, refs[kind], refs)}
    found["/v1/requests"] = {
        "get": {
            "operationId": "v1_requests",
            "summary": "The requests that are under way; a key sees its own.",
            "responses": {"200": _answer("Oldest first.", _OBJECT)},
        }
    }
    found["/v1/requests/{request_id}/cancel"] = {
        "post": {
            "operationId": "v1_requests_cancel",
            "summary": "Ends a request by its x-request-id or its answer's id; the request itself then answers 499.",
            "parameters": [
                {"name": "request_id", "in": "path", "required": True, "schema": {"type": "string"}}
            ],
            "responses": {
                "200": _answer("It was told to end.", _OBJECT),
                "404": _answer("No request with this id is under way.", refs[ErrorBody]),
            },
        }
    }
    ready = {"200": _answer("New requests are welcome.", _OBJECT), "503": _answer("They are not.", _OBJECT)}
    found["/ready"] = {
        "get": {
            "operationId": "get_ready",
            "summary": "Whether new requests are welcome: a model is loaded, and nobody told the server to stop.",
            "responses": ready,
        }
    }
    return found


def _answer(doc: str, schema: Schema) -> Schema:
    return {"description": doc, "content": {"application/json": {"schema": schema}}}


def _name(path: str) -> str:
    return path.strip("/").replace("/", "_")


def _ollama(path: str, method: str, doc: str, refs: Mapping[Any, Schema]) -> Schema:
    operation: Schema = {
        "operationId": _name(path),
        "summary": doc,
        "responses": {"200": _answer(doc, _OBJECT), "503": _answer("No model is loaded.", refs[OllamaError])},
    }
    if method == "POST":
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _NAMED}}}
        operation["responses"] |= {
            "400": _answer("A field is wrong.", refs[OllamaError]),
            "413": _answer("The body is too large.", refs[OllamaError]),
        }
    return operation


def _embed(path: str, body: Schema, doc: str, answer: Schema, refs: Mapping[Any, Schema]) -> Schema:
    errors = {
        "400": "A field is wrong, or no embedding model is served.",
        "413": "The body is too large.",
        "429": "The queue is full.",
        "500": "The server failed on this request.",
        "503": "No model is loaded.",
    }
    return {
        "operationId": _name(path),
        "summary": doc,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": _answer(doc, answer),
            **{status: _answer(text, refs[OllamaError]) for status, text in errors.items()},
        },
    }
