"""The embedding routes in the OpenAPI document. Knows no service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mantou.api.embeddings import embed as embeddings
from mantou.api.embeddings import rerank
from mantou.api.embeddings.wire import EmbeddingList, Reranking, ScoreList
from mantou.api.fields import Schema
from mantou.api.openai.wire import ErrorBody

TYPES: tuple[Any, ...] = (EmbeddingList, Reranking, ScoreList)
_ERRORS = {
    "400": "A field is wrong, or the served model does not embed; `param` names the field.",
    "413": "The body is too large.",
    "429": "The queue is full; try again after `Retry-After` seconds.",
    "500": "The server failed on this request, or the model gave numbers that are not finite.",
    "503": "No model is loaded.",
}


def paths(refs: Mapping[Any, Schema]) -> dict[str, Any]:
    """Path -> its operations."""
    entries = (
        (embeddings.PATH, "Vectors of texts, from an embedding model.", embeddings.schema(), EmbeddingList),
        (rerank.RERANK_PATH, "Texts by their relevance to a query.", rerank.rerank_schema(), Reranking),
        (rerank.SCORE_PATH, "The relevance of each pair of texts.", rerank.score_schema(), ScoreList),
    )
    return {
        path: {"post": _operation(path, doc, body, refs[kind], refs)} for path, doc, body, kind in entries
    }


def _operation(path: str, doc: str, body: Schema, answer: Schema, refs: Mapping[Any, Schema]) -> Schema:
    errors = {
        status: {"description": text, "content": {"application/json": {"schema": refs[ErrorBody]}}}
        for status, text in _ERRORS.items()
    }
    return {
        "operationId": path.strip("/").replace("/", "_"),
        "summary": doc,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {"description": doc, "content": {"application/json": {"schema": answer}}},
            **errors,
        },
    }
