"""Embeddings and relevance scores of texts, for every caller: routes, library, command line. Knows no JSON, no arrays
of a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mantou.chat.embedding_text import EmbeddingText, Preface
from mantou.data import TokenRow
from mantou.errors import BadRequest, MantouError

if TYPE_CHECKING:
    from mantou.engine.embedding_queue import EmbeddingQueue
    from mantou.models.embedder_recipe import Recipe

MAX_INPUTS = 2048  # of one request, as at OpenAI's


class NotFinite(MantouError):
    """The model computed something that is not a number."""


@dataclass(frozen=True, slots=True)
class EmbeddingInfo:
    """What GET /stats and the ready card say of the model. `num_dims` is 0 for a cross-encoder."""

    id: str
    model_type: str
    num_dims: int
    max_tokens: int
    pooling: str
    normalized: bool
    dtype: str
    weights_bytes: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Vectors:
    """f32 [N, D], in the order of the inputs."""

    values: np.ndarray
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Scores:
    """One relevance a pair. `method` is cross-encoder, or cosine of two embeddings."""

    values: tuple[float, ...]
    num_tokens: int
    method: str


@dataclass(frozen=True, slots=True)
class Pending:
    """Work in the queue: `future` gives the rows' results, `finish` makes the answer of them. Cancel the future to
    give up.
    """

    future: Future[list[np.ndarray]]
    finish: Callable[[Sequence[np.ndarray]], Any]

    def wait(self) -> Any:
        """Blocks until it is done. Not on the event loop and not on the model thread."""
        return self.finish(self.future.result())


class EmbeddingService:
    """One embedding model or cross-encoder behind the queue. Every method may be called from any thread."""

    def __init__(
        self, info: EmbeddingInfo, text: EmbeddingText, queue: EmbeddingQueue[np.ndarray], recipe: Recipe
    ) -> None:
        self.info = info
        self._text = text
        self._queue = queue
        self._recipe = recipe

    def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        instruction: str | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
    ) -> Pending:
        """Queues inputs; their result is `Vectors`. Tokenises on the calling thread.

        `dimensions` keeps the first so many numbers and brings them to unit length again. Raises BadRequest for what
        cannot be embedded, and QueueFull.
        """
        if self._recipe.scores:
            raise BadRequest(
                f"{self.info.id} is a cross-encoder: it ranks at /v1/rerank and /v1/score and has no embeddings.",
                param="model",
            )
        if dimensions is not None and not 1 <= dimensions <= self.info.num_dims:
            raise BadRequest(
                f"dimensions must be between 1 and {self.info.num_dims}, the length of this model's vectors, "
                f"got {dimensions}.",
                param="dimensions",
            )
        _check_count(inputs, "input")
        rows = self._text.rows(inputs, Preface(instruction, prompt_name), truncate=truncate)

        def finish(found: Sequence[np.ndarray]) -> Vectors:
            values = np.stack(found)
            _check_finite(values, "input")
            return Vectors(shortened(values, dimensions), _num_tokens(rows))

        return Pending(self._queue.submit(rows), finish)

    def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        truncate: bool = False,
        param: str = "documents",
        instruction: str | None = None,
    ) -> Pending:
        """Queues pairs (query, document); their result is `Scores`.

        A cross-encoder reads both together. An embedding model embeds each text once and gives the cosine; a query
        goes behind the checkpoint's "query" prompt if it has one, or behind `instruction`.
        """
        _check_count(pairs, param)
        if self._recipe.scores:
            if instruction is not None:
                raise BadRequest("A cross-encoder takes no instruction; leave it out.", param="instruction")
            rows = self._text.pairs(pairs, truncate=truncate, param=param)
            return Pending(self._queue.submit(rows), lambda found: _scores(found, rows, param))
        return self._cosines(pairs, truncate, param, instruction)

    def stats(self) -> Mapping[str, Any]:
        """The `embeddings` block of GET /stats."""
        return {"model": self.info, **self._queue.stats()}

    def _cosines(
        self, pairs: Sequence[tuple[str, str]], truncate: bool, param: str, instruction: str | None
    ) -> Pending:
        queries = list(dict.fromkeys(query for query, _ in pairs))
        documents = list(dict.fromkeys(document for _, document in pairs))
        prompts = self._recipe.prompts
        asks = Preface(instruction, None if instruction or "query" not in prompts else "query")
        answers = Preface(None, "document" if "document" in prompts else None)
        rows = [
            *self._text.rows(queries, asks, truncate=truncate, param="query"),
            *self._text.rows(documents, answers, truncate=truncate, param=param),
        ]

        def finish(found: Sequence[np.ndarray]) -> Scores:
            values = shortened(np.stack(found), None)
            _check_finite(values, param)
            places = {text: values[index] for index, text in enumerate(queries)}
            others = {text: values[len(queries) + index] for index, text in enumerate(documents)}
            cosines = (float(places[one] @ others[other]) for one, other in pairs)
            return Scores(tuple(cosines), _num_tokens(rows), "cosine")

        return Pending(self._queue.submit(rows), finish)


def shortened(values: np.ndarray, dimensions: int | None) -> np.ndarray:
    """f32 [N, D] -> [N, dimensions] of unit length (Kusupati et al. 2022, arXiv:2205.13147); None keeps a model's own
    length where that is one already.
    """
    if dimensions is None and np.allclose(np.linalg.norm(values, axis=1), 1.0, atol=1e-3):
        return values
    kept = values[:, :dimensions]
    return kept / np.maximum(np.linalg.norm(kept, axis=1, keepdims=True), 1e-12)


def _scores(found: Sequence[np.ndarray], rows: Sequence[TokenRow], param: str) -> Scores:
    values = np.stack(found)
    _check_finite(values[:, None], param)
    return Scores(tuple(float(value) for value in values), _num_tokens(rows), "cross-encoder")


def _check_count(inputs: Sequence[object], param: str) -> None:
    if not inputs:
        raise BadRequest(f"{param} is empty; send at least one text.", param=param)
    if len(inputs) > MAX_INPUTS:
        raise BadRequest(f"{param} has {len(inputs)} items; send at most {MAX_INPUTS} at once.", param=param)


def _check_finite(values: np.ndarray, param: str) -> None:
    wrong = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if wrong.size:
        raise NotFinite(
            f"The model gave numbers that are not finite for {param}[{wrong[0]}]; "
            "serve it as float32, or choose another checkpoint."
        )


def _num_tokens(rows: Sequence[TokenRow]) -> int:
    return sum(len(row.tokens) for row in rows)
