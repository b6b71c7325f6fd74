"""The answers of /v1/embeddings, /v1/rerank and /v1/score as types. Knows no model."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class Embedding(Struct):
    """`embedding` is a list of numbers, or with `encoding_format` base64 little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(Struct):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class RerankDocument(Struct):
    text: str


class RerankResult(Struct):
    index: int
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class Reranking(Struct):
    """`method` says where the scores come from: a cross-encoder, or the cosine of two embeddings."""

    id: str
    model: str
    method: Literal["cross-encoder", "cosine"]
    results: list[RerankResult]
    usage: EmbeddingUsage


class Score(Struct):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    method: Literal["cross-encoder", "cosine"]
    data: list[Score]
    usage: EmbeddingUsage


encode = msgspec.json.Encoder().encode
