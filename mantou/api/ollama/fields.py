"""Fields of Ollama's bodies: messages, `options`, `format`, `think`. Knows no engine, no template and no answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from mantou.api import shapes
from mantou.api.fields import (
    Boolean,
    Field,
    Integer,
    Number,
    Object,
    Schema,
    Shaped,
    kind_of,
    properties,
    wrong,
)
from mantou.api.generation_fields import MODEL, STOP, THINKING_BUDGET, GenerationAsk, read_session
from mantou.api.openai.messages import read_messages
from mantou.api.reading import text_of
from mantou.api.structured import read_format
from mantou.data import Grammar, Message
from mantou.errors import BadRequest

EFFORTS = ("low", "medium", "high")

_NUM_PREDICT = Integer("num_predict", "Most tokens to generate; -1 and -2 = until the model ends.", -2, 10**9)
_REPEAT_LAST_N = Integer(
    "repeat_last_n", "How many last tokens the penalties see; 0 = off, -1 = all.", -1, 10**9
)
_REPEAT_PENALTY = Number("repeat_penalty", "Divides the logits of seen tokens; 0 or 1 = off.", 0)
_PRESENCE = Number("presence_penalty", "Taken once from the logit of a seen token.")
_FREQUENCY = Number("frequency_penalty", "Taken from the logit of a seen token for each time it was seen.")
_PLAIN: tuple[Field[Any], ...] = (
    Integer("seed", "Makes the draw repeatable."),
    Number("temperature", "0 = always the most likely token.", 0),
    Number("top_p", "Smallest set of tokens whose probability exceeds this; 0 or 1 = off.", 0, 1),
    Integer("top_k", "Only the k most likely tokens; 0 = off.", 0),
    Number("min_p", "Drops tokens below this share of the best one's probability; 0 = off.", 0, 1),
)
_NUM_CTX = Integer("num_ctx", "Advisory: the context is as long as the server's.", 1)
_MIROSTAT = Integer("mirostat", "Not supported: 0 only.", 0, 0)
_TYPICAL_P = Number("typical_p", "Not supported: 1 only.", 1, 1)
_OPTIONS: tuple[Field[Any], ...] = (
    *_PLAIN,
    _NUM_PREDICT,
    STOP,
    _REPEAT_PENALTY,
    _REPEAT_LAST_N,
    _PRESENCE,
    _FREQUENCY,
    _NUM_CTX,
    _MIROSTAT,
    _TYPICAL_P,
)


def _format(value: Any, name: str) -> Grammar | None:
    """ "json", a JSON schema, or nothing."""
    if value == "":
        return None
    if isinstance(value, str):
        if value != "json":
            raise BadRequest(f"{name} must be json or a JSON schema.", param=name)
        return Grammar("json_object", param=name)
    if not isinstance(value, dict):
        raise wrong(name, "json or a JSON schema", value)
    return read_format({"type": "json_schema", "schema": value}, name)


def _think(value: Any, name: str) -> bool | str:
    if isinstance(value, bool) or value in EFFORTS:
        return value
    raise BadRequest(f"{name} must be true, false, {', '.join(EFFORTS)}.", param=name)


def _keep_alive(value: Any, name: str) -> str | float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise wrong(name, "a duration such as 5m, or seconds", value)
    return value


def read_images(value: Any, name: str) -> None:
    """Empty lists are what clients send without an image."""
    if not isinstance(value, list):
        raise wrong(name, "a list", value)
    if value:
        raise BadRequest(f"{name}: this model has no vision; send text only.", param=name)


def _messages(value: Any, name: str) -> tuple[Message, ...]:
    """Ollama's messages are OpenAI's with other names for some fields; () asks for the model to be loaded."""
    if not isinstance(value, list):
        raise BadRequest(f"{name} must be a list of messages, got {kind_of(value)}.", param=name)
    entries = cast("list[Any]", value)
    if not entries:
        return ()
    return read_messages([_message(entry, f"{name}[{at}]") for at, entry in enumerate(entries)], name)


def _message(value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        return value  # the reader below says what is wrong with it
    entry = dict(cast("dict[str, Any]", value))
    if entry.get("images") is not None:
        read_images(entry["images"], f"{where}.images")
    if entry.get("content") is None:
        entry["content"] = ""
    for own, common in (("thinking", "reasoning"), ("tool_name", "name")):
        text_of(entry, common, where)  # a wrong one is wrong beside the other too
        if entry.get(own) is not None:
            entry[common] = entry[own]
    return entry


MESSAGES = Shaped(
    "messages",
    "The conversation, oldest first; empty or null = load the model.",
    _messages,
    shapes.OLLAMA_MESSAGES,
)
FORMAT = Shaped(
    "format",
    "`json` or a JSON schema that the answer follows.",
    _format,
    shapes.OLLAMA_FORMAT,
)
THINK = Shaped(
    "think",
    "Whether the model thinks first; a level where the template knows levels.",
    _think,
    shapes.THINK,
)
KEEP_ALIVE = Shaped(
    "keep_alive",
    "Taken and not needed: the model stays loaded.",
    _keep_alive,
    {"type": ["string", "number", "null"]},
)
STREAM = Boolean("stream", "Send the answer in lines while it is made; true unless it is said otherwise.")
OPTIONS = Object("options", "Sampling and length, see below.")
SHARED: tuple[Field[Any], ...] = (MODEL, STREAM, FORMAT, THINK, THINKING_BUDGET, KEEP_ALIVE)


@dataclass(frozen=True, slots=True)
class Shared:
    """What both routes read alike."""

    generation: GenerationAsk
    grammar: Grammar | None
    think: bool | str | None


def read_shared(body: Mapping[str, Any], headers: Mapping[str, str]) -> Shared:
    """Raises BadRequest that names the first wrong field."""
    MODEL.read(body)
    KEEP_ALIVE.read(body)
    return Shared(_generation(body, headers), FORMAT.read(body), THINK.read(body))


def shared_schema(own: tuple[Field[Any], ...], required: tuple[str, ...] = ()) -> Schema:
    options: Schema = {
        "type": ["object", "null"],
        "description": OPTIONS.doc,
        "properties": {**properties(_OPTIONS), "num_predict": _NUM_PREDICT.schema() | {"not": {"const": 0}}},
    }
    found = {**properties((*own, *SHARED)), "options": options}
    return {"type": "object", "required": list(required), "properties": found}


def _generation(body: Mapping[str, Any], headers: Mapping[str, str]) -> GenerationAsk:
    stream = STREAM.read(body)
    options = OPTIONS.read(body) or {}
    try:
        plain: dict[str, Any] = {entry.name: entry.read(options) for entry in _PLAIN}
        limit, last_n = _NUM_PREDICT.read(options), _REPEAT_LAST_N.read(options)
        penalties = [one.read(options) for one in (_REPEAT_PENALTY, _PRESENCE, _FREQUENCY)]
        for unused in (_NUM_CTX, _MIROSTAT, _TYPICAL_P):
            unused.read(options)
        stop = STOP.read(options) or ()
    except BadRequest as error:
        raise BadRequest(f"options.{error.message}", param=f"options.{error.param}") from None
    if limit == 0:
        raise BadRequest(
            "options.num_predict must be at least 1, or -1 for no limit.", param="options.num_predict"
        )
    if last_n == 0:
        penalties = [0.0, 0.0, 0.0]
    seen = None if last_n is None else max(last_n, 0)  # ours: 0 = the whole history
    return GenerationAsk(
        stream=stream is not False,
        stop=stop,
        max_tokens=None if limit is None or limit < 0 else limit,
        repetition_penalty=penalties[0],
        repetition_context_size=seen,
        presence_penalty=penalties[1],
        presence_context_size=seen,
        frequency_penalty=penalties[2],
        frequency_context_size=seen,
        session=read_session(body, headers),
        thinking_budget=THINKING_BUDGET.read(body),
        **plain,
    )
