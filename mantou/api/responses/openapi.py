"""The Responses routes in the OpenAPI document. Knows no service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mantou.api.fields import Schema
from mantou.api.openai.wire import ErrorBody
from mantou.api.responses.create import OpenAIResponses
from mantou.api.responses.wire import CompactedBody, DeletedResponse, Event, ItemList, ResponseBody
from mantou.api.sse import event_schema

TYPES: tuple[Any, ...] = (ResponseBody, Event, CompactedBody, DeletedResponse, ItemList)
_INCLUDE: Schema = {
    "name": "include[]",
    "in": "query",
    "schema": {"type": "array", "items": {"type": "string"}},
}
_STREAM: list[Schema] = [
    {"name": "stream", "in": "query", "schema": {"type": "string", "enum": ["true", "false"]}},
    {
        "name": "starting_after",
        "in": "query",
        "schema": {"type": "integer", "minimum": 0, "maximum": 10**15 - 1},
    },
    _INCLUDE,
]
_PAGE: list[Schema] = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100}},
    {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"]}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
    _INCLUDE,
]


def creation(operation: Schema, refs: Mapping[Any, Schema]) -> Schema:
    """POST /v1/responses, of which a generation route does not know that it may miss an earlier response."""
    missing = {
        "description": "No response has the id of previous_response_id.",
        "content": {"application/json": {"schema": refs[ErrorBody]}},
    }
    return {**operation, "responses": {**operation["responses"], "404": missing}}


def paths(refs: Mapping[Any, Schema]) -> dict[str, Schema]:
    """The routes below /v1/responses. `refs`: schemas of `TYPES` and of `ErrorBody`."""
    one = f"{OpenAIResponses.path}/{{response_id}}"
    retrieve = _operation(
        "v1_responses_retrieve",
        "A stored response, or one that runs; with `stream`, the events of one that was made in the background, from "
        "number `starting_after` + 1 on.",
        refs,
        ResponseBody,
        _STREAM,
    )
    retrieve["responses"]["200"]["content"]["text/event-stream"] = {"schema": event_schema(refs[Event])}
    return {
        one: {
            "get": retrieve,
            "delete": _operation(
                "v1_responses_delete", "Forgets a response, and ends it if it runs.", refs, DeletedResponse
            ),
        },
        f"{one}/cancel": {
            "post": _operation(
                "v1_responses_cancel",
                "Ends a response that runs; others come back as they are.",
                refs,
                ResponseBody,
            )
        },
        f"{one}/input_items": {
            "get": _operation(
                "v1_responses_input_items",
                "A page of the items that led to a response.",
                refs,
                ItemList,
                _PAGE,
            )
        },
    }


def _operation(
    name: str, doc: str, refs: Mapping[Any, Schema], kind: Any, query: list[Schema] | None = None
) -> Schema:
    parameters = [
        {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}},
        *(query or []),
    ]
    errors = {
        "400": "A field is wrong; `param` names it.",
        "404": "No response has this id.",
        "500": "The store failed.",
    }
    return {
        "operationId": name,
        "summary": doc,
        "parameters": parameters,
        "responses": {
            "200": {"description": doc, "content": {"application/json": {"schema": refs[kind]}}},
            **{
                status: {"description": text, "content": {"application/json": {"schema": refs[ErrorBody]}}}
                for status, text in errors.items()
            },
        },
    }
