"""POST /api/embed and the older /api/embeddings: Ollama's words for the embedding service. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from mantou.api import shapes
from mantou.api.embeddings.embed import read_input
from mantou.api.embeddings.route import EmbeddingRoute
from mantou.api.embeddings.service import EmbeddingService, Pending, Vectors
from mantou.api.envelope import current
from mantou.api.fields import Boolean, Field, Integer, Object, Schema, Shaped, Text, properties
from mantou.api.generation_fields import MODEL
from mantou.api.ollama.fields import KEEP_ALIVE
from mantou.errors import BadRequest

if TYPE_CHECKING:
    from mantou.api.service import Service

PATH, OLD_PATH = "/api/embed", "/api/embeddings"

_INPUT = Shaped(
    "input",
    "A text or a list of texts.",
    read_input,
    shapes.EMBEDDED,
)
_PROMPT = Text("prompt", "A text.")
_TRUNCATE = Boolean("truncate", "false: refuse what is too long instead of cutting it.")
_DIMENSIONS = Integer("dimensions", "Keep the first so many numbers, at unit length (Matryoshka models).", 1)
_OPTIONS = Object("options", "Taken and not needed.")
_SHARED: tuple[Field[Any], ...] = (MODEL, KEEP_ALIVE, _OPTIONS)


class OllamaEmbeddings(msgspec.Struct):
    """Durations are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct):
    embedding: list[float]


@dataclass(frozen=True, slots=True)
class _Ask:
    inputs: Sequence[str | list[int]]
    truncate: bool
    dimensions: int | None = None
    old: bool = False

    def start(self, embeddings: EmbeddingService) -> Pending:
        return embeddings.embed(self.inputs, dimensions=self.dimensions, truncate=self.truncate)

    def answer(self, result: Vectors, model: str) -> bytes:
        rows = result.values.tolist()
        if self.old:
            return msgspec.json.encode(OllamaEmbedding(rows[0]))
        total_ns = int(current().seconds * 1e9)
        return msgspec.json.encode(OllamaEmbeddings(model, rows, total_ns, 0, result.num_tokens))


def _parse(body: Mapping[str, Any]) -> _Ask:
    inputs = _INPUT.read(body)
    if inputs is None:
        raise BadRequest("input is missing; send a text or a list of texts.", param="input")
    for unused in _SHARED:
        unused.read(body)
    return _Ask(inputs, _TRUNCATE.read(body) is not False, _DIMENSIONS.read(body))


def _parse_old(body: Mapping[str, Any]) -> _Ask:
    prompt = _PROMPT.read(body)
    if not prompt:
        raise BadRequest("prompt is missing or empty; send a text.", param="prompt")
    for unused in _SHARED:
        unused.read(body)
    return _Ask([prompt], truncate=True, old=True)


def _schema() -> Schema:
    fields = (_INPUT, _TRUNCATE, _DIMENSIONS, *_SHARED)
    return {"type": "object", "required": ["input"], "properties": properties(fields)}


def _old_schema() -> Schema:
    found = properties((_PROMPT, *_SHARED)) | {"prompt": _PROMPT.schema() | shapes.SOME_TEXT}
    return {"type": "object", "required": ["prompt"], "properties": found}


# Path, schema of the body, what it answers.
EMBEDS: tuple[tuple[str, Callable[[], Schema], str], ...] = (
    (PATH, _schema, "Ollama's embeddings of one text or several."),
    (OLD_PATH, _old_schema, "Ollama's older route for the embedding of one text."),
)


def routes(service: Service) -> tuple[EmbeddingRoute, ...]:
    return (
        EmbeddingRoute(service, PATH, _parse, _schema),
        EmbeddingRoute(service, OLD_PATH, _parse_old, _old_schema),
    )
