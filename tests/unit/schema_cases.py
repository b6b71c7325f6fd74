"""JSON schemas in every shape and keyword that clients send: 50 leaves, each alone and in three surroundings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]


def _object(properties: Schema, required: list[str] | None = None, **more: Any) -> Schema:
    needed = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": needed, **more}


_TEXT: Schema = {"type": "string", "maxLength": 12}
_ANIMAL: list[Schema] = [
    _object({"kind": {"const": kind}, field: value}, additionalProperties=False)
    for kind, field, value in (
        ("cat", "lives", {"type": "integer", "minimum": 1, "maximum": 9}),
        ("dog", "name", _TEXT),
    )
]

# Name -> (schema without references, definitions that it needs).
LEAVES: dict[str, tuple[Any, Schema]] = {
    "text": ({"type": "string"}, {}),
    "text-longest": ({"type": "string", "maxLength": 5}, {}),
    "text-between": (
        {"type": "string", "minLength": 3, "maxLength": 6, "title": "T", "description": "d"},
        {},
    ),
    "text-shortest": ({"type": "string", "minLength": 2, "default": "xx", "examples": ["yy"]}, {}),
    "pattern-digits": ({"type": "string", "pattern": r"^\d{3}-\d{4}$"}, {}),
    "pattern-open": ({"type": "string", "pattern": "ab+c", "maxLength": 20}, {}),
    "pattern-choice": ({"type": "string", "pattern": "^(red|green|blue)(-light)?$"}, {}),
    "pattern-quote": ({"type": "string", "pattern": '^"[a-z]\\\\{1,3}"$'}, {}),
    "pattern-unicode": ({"type": "string", "pattern": "^[äöü]{1,4}$"}, {}),
    "date": ({"type": "string", "format": "date"}, {}),
    "time": ({"type": "string", "format": "time"}, {}),
    "date-time": ({"type": "string", "format": "date-time"}, {}),
    "email": ({"type": "string", "format": "email"}, {}),
    "uuid": ({"type": "string", "format": "uuid"}, {}),
    "ipv4": ({"type": "string", "format": "ipv4"}, {}),
    "integer": ({"type": "integer"}, {}),
    "integer-between": ({"type": "integer", "minimum": -5, "maximum": 120}, {}),
    "integer-beyond": ({"type": "integer", "exclusiveMinimum": 17, "exclusiveMaximum": 1003}, {}),
    "integer-least": ({"type": "integer", "minimum": 10}, {}),
    "integer-multiple": ({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700}, {}),
    "number": ({"type": "number"}, {}),
    "number-between": ({"type": "number", "minimum": 0, "maximum": 1}, {}),
    "number-beyond": ({"type": "number", "exclusiveMinimum": -2.5, "exclusiveMaximum": 2.5}, {}),
    "boolean": ({"type": "boolean"}, {}),
    "null": ({"type": "null"}, {}),
    "types": ({"type": ["string", "integer", "null"], "maxLength": 4}, {}),
    "enum-texts": ({"enum": ["a", "b c", 'quo"te', "back\\slash", "naïve", ""]}, {}),
    "enum-mixed": ({"enum": [1, "1", None, True, {"a": [1, 2]}, []]}, {}),
    "enum-typed": ({"type": "string", "enum": ["low", "high"]}, {}),
    "enum-many": ({"enum": [f"value {n}" for n in range(300)]}, {}),
    "const": ({"const": {"version": 2, "flags": [True, None]}}, {}),
    "list": ({"type": "array", "items": {"type": "integer"}}, {}),
    "list-between": ({"type": "array", "items": _TEXT, "minItems": 2, "maxItems": 4}, {}),
    "list-of-anything": ({"type": "array", "maxItems": 3}, {}),
    "list-empty": ({"type": "array", "maxItems": 0}, {}),
    "tuple": (
        {"type": "array", "prefixItems": [_TEXT, {"type": "boolean"}], "items": False, "minItems": 2},
        {},
    ),
    "tuple-open": (
        {"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "integer"}, "maxItems": 4},
        {},
    ),
    "lists-in-lists": (
        {"type": "array", "items": {"type": "array", "items": {"enum": [0, 1]}, "maxItems": 3}},
        {},
    ),
    "object": (_object({"a": _TEXT, "b": {"type": "integer"}}, additionalProperties=False), {}),
    "object-optional": (_object({"a": {"type": "null"}, "b": _TEXT, "c": {"type": "boolean"}}, ["b"]), {}),
    "object-open": (_object({"a": _TEXT}, additionalProperties={"type": "integer"}), {}),
    "object-any": ({"type": "object"}, {}),
    "object-empty": ({"type": "object", "properties": {}, "additionalProperties": False}, {}),
    "map": (
        {
            "type": "object",
            "additionalProperties": {"type": "boolean"},
            "minProperties": 1,
            "maxProperties": 3,
        },
        {},
    ),
    "map-patterns": (
        {"type": "object", "patternProperties": {"^x-[a-z]{1,5}$": _TEXT}, "additionalProperties": False},
        {},
    ),
    "names-odd": (_object({'sl/ash "q" ~': {"type": "null"}, "ünï": {"type": "boolean"}, "": _TEXT}), {}),
    "any-of": ({"anyOf": [{"type": "integer"}, _object({"x": {"type": "number"}}), {"type": "null"}]}, {}),
    "one-of": ({"oneOf": _ANIMAL, "discriminator": {"propertyName": "kind"}}, {}),
    "all-of": (
        {"type": "object", "allOf": [_object({"a": {"type": "integer"}}), _object({"b": {"type": "null"}})]},
        {},
    ),
    "reference": (
        {"$ref": "#/$defs/tree"},
        {
            "tree": _object(
                {
                    "v": {"type": "integer"},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
                }
            )
        },
    ),
    "reference-chain": (
        {"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]},
        {
            "link": _object(
                {"next": {"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]}}, additionalProperties=False
            )
        },
    ),
    "anything": ({}, {}),
}


def cases() -> Iterator[tuple[str, Schema]]:
    """(name, schema): every leaf alone, as a member, as an item and as what may be missing."""
    for name, (leaf, definitions) in LEAVES.items():
        more = {"$defs": definitions} if definitions else {}
        yield name, {**leaf, **more}
        member = _object(
            {"id": {"type": "integer", "minimum": 0, "maximum": 99}, "value": leaf},
            additionalProperties=False,
        )
        yield f"{name}-member", {"$schema": "https://json-schema.org/draft/2020-12/schema", **member, **more}
        yield f"{name}-item", {"type": "array", "items": leaf, "minItems": 1, "maxItems": 3, **more}
        optional = _object({"first": {"anyOf": [leaf, {"type": "null"}]}, "last": {"const": "end"}}, ["last"])
        yield f"{name}-optional", {**optional, "additionalProperties": False, **more}
