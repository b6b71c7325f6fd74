"""Structured output as every dialect spells it, read into one `Grammar`. Knows no tokenizer and compiles nothing.

`response_format` (OpenAI), `text.format` (Responses), `output_config.format` and `output_format` (Anthropic) are read
by `read_format`; `structured_outputs` and `guided_*`, which clients of other servers send with any route, by
`read_extensions`. `one_grammar` joins what a body said in several places.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from mantou.api import shapes
from mantou.api.fields import Field, Shaped, check_depth, kind_of, wrong
from mantou.data import Grammar
from mantou.errors import BadRequest

MAX_CHOICES = 1000
# A schema nests values in keywords, so its tree is about three times as deep as its documents.
MAX_SCHEMA_DEPTH = 192
_KINDS = ("text", "json_object", "json_schema", "regex", "lark", "choice")
_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "lark",
}
_STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}


def read_format(value: Any, name: str) -> Grammar | None:
    """An object with a `type`; None for type text. Raises BadRequest.

    The schema of a json_schema stands beside its type or, as in OpenAI's chat, in an object `json_schema`.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise BadRequest(f"{name} must be an object with a type, got {kind_of(value)}.", param=name)
    entry = cast("dict[str, Any]", value)
    match kind:
        case "text":
            return None
        case "json_object":
            return Grammar("json_object", param=name)
        case "json_schema":
            return _json_schema(entry, name)
        case "regex":
            return _of("regex", entry.get("regex", entry.get("pattern")), f"{name}.regex")
        case "lark" | "grammar":
            return _of("lark", entry.get("lark", entry.get("grammar")), f"{name}.{kind}")
        case "choice":
            return _of("choice", entry.get("choice", entry.get("choices")), f"{name}.choice")
        case _:
            raise BadRequest(f"{name}.type must be one of {', '.join(_KINDS)}.", param=f"{name}.type")


def read_extensions(body: Mapping[str, Any]) -> Grammar | None:
    """`structured_outputs` and `guided_*`. Raises BadRequest."""
    return one_grammar(*(entry.read(body) for entry in EXTENSIONS))


def one_grammar(*found: Grammar | None) -> Grammar | None:
    """The only one that is set. Raises BadRequest if a body asks for two."""
    said = [grammar for grammar in found if grammar is not None]
    if len(said) > 1:
        raise BadRequest(
            f"{said[0].param} and {said[1].param} both say what the answer must be; send one of them.",
            param=said[1].param,
        )
    return said[0] if said else None


def _json_schema(entry: Mapping[str, Any], name: str) -> Grammar:
    nested, where = entry.get("json_schema"), name
    if nested is not None:
        if not isinstance(nested, dict):
            raise wrong(f"{name}.json_schema", "an object", nested)
        entry, where = cast("dict[str, Any]", nested), f"{name}.json_schema"
    if "schema" not in entry:
        raise BadRequest(f"{where}.schema is missing; it must be a JSON schema.", param=f"{where}.schema")
    strict = entry.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise wrong(f"{where}.strict", "true or false", strict)
    return _of("json_schema", entry["schema"], f"{where}.schema")


def _of(kind: str, value: Any, name: str) -> Grammar:
    match kind:
        case "json_schema":
            return Grammar("json_schema", _schema(value, name), name)
        case "choice":
            return Grammar("choice", _choices(value, name), name)
        case _:
            if not isinstance(value, str):
                raise wrong(name, "a string", value)
            if not value:
                raise BadRequest(
                    f"{name} is empty; leave it out, or say what the answer must be.", param=name
                )
            return Grammar("regex" if kind == "regex" else "lark", value, name)


def _schema(value: Any, name: str) -> str:
    """The schema's own text: a value, or (guided_json) a string of JSON."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value.encode())
        except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
            raise BadRequest(
                f"{name} is a string that is not JSON; send a JSON schema.", param=name
            ) from None
    if not isinstance(value, dict | bool):
        raise wrong(name, "a JSON schema", value)
    check_depth(name, value, MAX_SCHEMA_DEPTH)
    return msgspec.json.encode(value).decode()


def _choices(value: Any, name: str) -> str:
    if not isinstance(value, list):
        raise wrong(name, "a list of strings", value)
    entries = cast("list[Any]", value)
    if not entries or len(entries) > MAX_CHOICES:
        raise BadRequest(f"{name} must hold 1 to {MAX_CHOICES} strings, got {len(entries)}.", param=name)
    if not all(isinstance(entry, str) and entry for entry in entries):
        raise BadRequest(f"{name} may hold strings only, none of them empty.", param=name)
    return msgspec.json.encode(entries).decode()


def _structured(value: Any, name: str) -> Grammar | None:
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    entry = cast("dict[str, Any]", value)
    found = [
        _of(_STRUCTURED[key], entry[key], f"{name}.{key}")
        for key in _STRUCTURED
        if entry.get(key) is not None
    ]
    if entry.get("json_object"):
        found.append(Grammar("json_object", param=f"{name}.json_object"))
    for key in entry:
        if key not in _STRUCTURED and key != "json_object" and entry[key] not in (None, False):
            raise BadRequest(
                f"{name}.{key} is not supported; send one of {', '.join(_STRUCTURED)} or json_object.",
                param=f"{name}.{key}",
            )
    return one_grammar(*found)


def _guided(key: str) -> Field[Grammar]:
    shown = {"json_schema": shapes.SCHEMA, "choice": shapes.CHOICES}
    kind = _GUIDED[key]
    return Shaped(
        key,
        f"The same as structured_outputs.{key.removeprefix('guided_')}.",
        lambda value, name: _of(kind, value, name),
        shapes.either(shown.get(kind, shapes.SOME_TEXT), shapes.NULL),
    )


FORMAT = Shaped(
    "response_format",
    "What the answer is: type text, json_object, json_schema (`json_schema`: {`schema`: ...}), regex (`regex`), lark "
    "(`lark`) or choice (`choice`: a list of texts).",
    read_format,
    shapes.RESPONSE_FORMAT,
)
EXTENSIONS: tuple[Field[Grammar | None], ...] = (
    Shaped(
        "structured_outputs",
        "What the answer is, with any route: one of json (a schema), regex, choice, grammar (Lark or GBNF) or "
        "json_object.",
        _structured,
        shapes.STRUCTURED_OUTPUTS,
    ),
    *(_guided(key) for key in _GUIDED),
)
