"""POST /v1/rerank (the shape of Jina and Cohere) and POST /v1/score (vLLM's): how relevant texts are to a text.

A cross-encoder reads both texts together; with an embedding model the score is the cosine of their vectors. The answer
says which.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mantou.api import shapes
from mantou.api.embeddings.embed import TRUNCATE, usage_of
from mantou.api.embeddings.route import EmbeddingRoute
from mantou.api.embeddings.service import EmbeddingService, Pending, Scores
from mantou.api.embeddings.wire import (
    RerankDocument,
    Reranking,
    RerankResult,
    Score,
    ScoreList,
    encode,
)
from mantou.api.fields import Boolean, Field, Integer, Schema, Shaped, Text, properties, wrong
from mantou.errors import BadRequest

if TYPE_CHECKING:
    from mantou.api.service import Service

RERANK_PATH = "/v1/rerank"
SCORE_PATH = "/v1/score"


def _text_of(value: Any, name: str) -> str:
    """A text, or an object with one, as Jina and Cohere take them."""
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise wrong(name, "a string, or an object with the string text", value)
    if not text:
        raise BadRequest(f"{name} is empty; send at least one character.", param=name.partition("[")[0])
    return text


def _read_texts(value: Any, name: str) -> list[str]:
    if not isinstance(value, list):
        raise wrong(name, "a list of strings", value)
    return [_text_of(item, f"{name}[{index}]") for index, item in enumerate(value)]


def _read_one_or_more(value: Any, name: str) -> list[str]:
    return _read_texts(value, name) if isinstance(value, list) else [_text_of(value, name)]


_MODEL = Text("model", "Ignored: the served model answers.")
_QUERY = Text("query", "What the documents are compared with.")
_DOCUMENTS = Shaped(
    "documents", "Texts, or objects with a text; at most 2048.", _read_texts, shapes.DOCUMENTS
)
_TOP_N = Integer("top_n", "How many results to give (default: all).", 1)
_RETURN = Boolean("return_documents", "Repeat each text in its result (default: false).")
_INSTRUCTION = Text(
    "instruction", "The task in words, for embedding models that were trained on instructions."
)
_RERANK_FIELDS: tuple[Field[Any], ...] = (
    _QUERY, _DOCUMENTS, _MODEL, _TOP_N, _RETURN, _INSTRUCTION, TRUNCATE,
)  # fmt: skip
_ONE_OR_MORE = shapes.either(shapes.SOME_TEXT, shapes.DOCUMENTS)
_TEXT_1 = Shaped("text_1", "A text, or as many as text_2 has.", _read_one_or_more, _ONE_OR_MORE)
_TEXT_2 = Shaped("text_2", "A text or several.", _read_one_or_more, _ONE_OR_MORE)
_SCORE_FIELDS: tuple[Field[Any], ...] = (_TEXT_1, _TEXT_2, _MODEL, TRUNCATE)


@dataclass(frozen=True, slots=True)
class RerankAsk:
    """One request of /v1/rerank."""

    query: str
    documents: Sequence[str]
    top_n: int | None
    return_documents: bool
    instruction: str | None
    truncate: bool

    def start(self, embeddings: EmbeddingService) -> Pending:
        pairs = [(self.query, document) for document in self.documents]
        return embeddings.score(pairs, truncate=self.truncate, instruction=self.instruction)

    def answer(self, result: Scores, model: str) -> bytes:
        """Most relevant first; equal scores keep the order of the documents."""
        order = sorted(range(len(result.values)), key=lambda index: -result.values[index])
        results = [RerankResult(index, result.values[index]) for index in order[: self.top_n]]
        if self.return_documents:
            for one in results:
                one.document = RerankDocument(self.documents[one.index])
        method = "cosine" if result.method == "cosine" else "cross-encoder"
        return encode(
            Reranking(_new_id("rerank"), model, method, results, usage_of(result.num_tokens)),
        )


@dataclass(frozen=True, slots=True)
class ScoreAsk:
    """One request of /v1/score."""

    pairs: Sequence[tuple[str, str]]
    truncate: bool

    def start(self, embeddings: EmbeddingService) -> Pending:
        return embeddings.score(self.pairs, truncate=self.truncate, param="text_2")

    def answer(self, result: Scores, model: str) -> bytes:
        data = [Score(index, "score", value) for index, value in enumerate(result.values)]
        method = "cosine" if result.method == "cosine" else "cross-encoder"
        usage = usage_of(result.num_tokens)
        return encode(ScoreList(_new_id("score"), "list", int(time.time()), model, method, data, usage))


def _new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"


def parse_rerank(body: Mapping[str, Any]) -> RerankAsk:
    """Raises BadRequest that names the field."""
    query, documents = _QUERY.read(body), _DOCUMENTS.read(body)
    if not query:
        raise BadRequest("query is missing or empty; send a text.", param="query")
    if not documents:
        raise BadRequest("documents is missing or empty; send a list of texts.", param="documents")
    _MODEL.read(body)
    return RerankAsk(
        query=query,
        documents=documents,
        top_n=_TOP_N.read(body),
        return_documents=bool(_RETURN.read(body)),
        instruction=_INSTRUCTION.read(body),
        truncate=bool(TRUNCATE.read(body)),
    )


def parse_score(body: Mapping[str, Any]) -> ScoreAsk:
    """Raises BadRequest that names the field."""
    ones, others = _TEXT_1.read(body), _TEXT_2.read(body)
    for name, texts in (("text_1", ones), ("text_2", others)):
        if not texts:
            raise BadRequest(f"{name} is missing or empty; send a text or a list of texts.", param=name)
    assert ones and others
    if len(ones) not in (1, len(others)):
        raise BadRequest(
            f"text_1 has {len(ones)} texts and text_2 {len(others)}; send one, or as many as text_2 has.",
            param="text_1",
        )
    _MODEL.read(body)
    firsts = ones * len(others) if len(ones) == 1 else ones
    return ScoreAsk(list(zip(firsts, others, strict=True)), bool(TRUNCATE.read(body)))


def rerank_schema() -> Schema:
    """The body as a JSON schema."""
    return {
        "type": "object",
        "required": ["query", "documents"],
        "properties": properties(_RERANK_FIELDS) | {"query": _QUERY.schema() | shapes.SOME_TEXT},
    }


def score_schema() -> Schema:
    """The body as a JSON schema."""
    return {"type": "object", "required": ["text_1", "text_2"], "properties": properties(_SCORE_FIELDS)}


def routes(service: Service) -> list[EmbeddingRoute]:
    return [
        EmbeddingRoute(service, RERANK_PATH, parse_rerank, rerank_schema),
        EmbeddingRoute(service, SCORE_PATH, parse_score, score_schema),
    ]
