"""POST /v1/embeddings: OpenAI's request and answer, with an instruction, a prompt's name and truncation as extras."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mantou.api import shapes
from mantou.api.embeddings.route import EmbeddingRoute
from mantou.api.embeddings.service import EmbeddingService, Pending, Vectors
from mantou.api.embeddings.wire import Embedding, EmbeddingList, EmbeddingUsage, encode
from mantou.api.fields import Boolean, Field, Integer, Schema, Shaped, Text, kind_of, properties, whole
from mantou.errors import BadRequest

if TYPE_CHECKING:
    from mantou.api.service import Service

PATH = "/v1/embeddings"
_EXPECTED = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


def read_input(value: Any, name: str) -> list[str | list[int]]:
    """Every form of `input` as a list of texts or token lists. Raises BadRequest."""
    if isinstance(value, str):
        items: list[Any] = [value]
    elif not isinstance(value, list):
        raise BadRequest(f"{name} must be {_EXPECTED}, got {kind_of(value)}.", param=name)
    elif value and all(whole(item) is not None for item in value):
        items = [value]
    else:
        items = value
    found: list[str | list[int]] = []
    for item in items:
        read = item if isinstance(item, str) else _tokens(item)
        if read is None or isinstance(read, str) != isinstance(items[0], str):
            raise BadRequest(f"{name} must be {_EXPECTED}, all of one kind.", param=name)
        found.append(read)
    empty = next((index for index, item in enumerate(found) if not item), None)
    if empty is not None:
        where = f"{name}[{empty}]" if isinstance(value, list) else name
        raise BadRequest(f"{where} is empty; send at least one character or token.", param=name)
    return found


def _tokens(value: Any) -> list[int] | None:
    if not isinstance(value, list):
        return None
    tokens = [token for entry in value if (token := whole(entry)) is not None]
    return tokens if len(tokens) == len(value) else None


_INPUT = Shaped(
    "input",
    f"What is embedded: {_EXPECTED}; at most 2048 items.",
    read_input,
    shapes.EMBEDDED,
)
_MODEL = Text("model", "Ignored: the served embedding model answers.")
_FORMAT = Text("encoding_format", "float (default), or base64 of little-endian float32.", ("float", "base64"))
_DIMENSIONS = Integer("dimensions", "Keep the first so many numbers, at unit length (Matryoshka models).", 1)
_USER = Text("user", "Accepted and ignored.")
TRUNCATE = Boolean("truncate", "Cut inputs that are too long instead of refusing them (default: false).")
_INSTRUCTION = Text("instruction", "The task in words, for models that were trained on instructions.")
_PROMPT = Text("prompt_name", "One of the checkpoint's own prompts, such as query.")
_FIELDS: tuple[Field[Any], ...] = (
    _INPUT, _MODEL, _FORMAT, _DIMENSIONS, _USER, _INSTRUCTION, _PROMPT, TRUNCATE,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EmbeddingAsk:
    """One request."""

    inputs: Sequence[str | list[int]]
    base64: bool
    dimensions: int | None
    instruction: str | None
    prompt_name: str | None
    truncate: bool

    def start(self, embeddings: EmbeddingService) -> Pending:
        return embeddings.embed(
            self.inputs,
            dimensions=self.dimensions,
            instruction=self.instruction,
            prompt_name=self.prompt_name,
            truncate=self.truncate,
        )

    def answer(self, result: Vectors, model: str) -> bytes:
        rows = map(_base64, result.values) if self.base64 else result.values.tolist()
        data = [Embedding("embedding", index, row) for index, row in enumerate(rows)]
        return encode(EmbeddingList("list", data, model, usage_of(result.num_tokens)))


def usage_of(num_tokens: int) -> EmbeddingUsage:
    return EmbeddingUsage(num_tokens, num_tokens)


def _base64(row: np.ndarray) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode("ascii")


def parse(body: Mapping[str, Any]) -> EmbeddingAsk:
    """Raises BadRequest that names the field."""
    inputs = _INPUT.read(body)
    if inputs is None:
        raise BadRequest(f"input is missing; send {_EXPECTED}.", param="input")
    for unused in (_MODEL, _USER):
        unused.read(body)
    return EmbeddingAsk(
        inputs=inputs,
        base64=_FORMAT.read(body) == "base64",
        dimensions=_DIMENSIONS.read(body),
        instruction=_INSTRUCTION.read(body),
        prompt_name=_PROMPT.read(body),
        truncate=bool(TRUNCATE.read(body)),
    )


def schema() -> Schema:
    """The body as a JSON schema."""
    return {"type": "object", "required": ["input"], "properties": properties(_FIELDS)}


def route(service: Service) -> EmbeddingRoute:
    return EmbeddingRoute(service, PATH, parse, schema)
