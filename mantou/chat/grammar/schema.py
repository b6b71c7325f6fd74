"""JSON schemas as the grammar engine takes them: every keyword checked, every open end bounded. Knows no tokens.

A keyword that cannot be enforced is an error that names it. What a schema leaves open (the length of a text or a list,
the names of further members, any value at all) is bounded, so that a small model that repeats itself comes to an end;
what the bounds allow is always valid under the schema as it was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from mantou.chat.grammar.endless import endless
from mantou.chat.grammar.regex import check_regex
from mantou.errors import BadRequest

Schema = dict[str, Any]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MAX_STRING = 16_384  # characters of a text without maxLength
MAX_ITEMS = 1_024  # of a list without maxItems
MAX_MEMBERS = 128  # of a map without maxProperties
MAX_KEY = 128  # characters of a name that the schema does not give
MAX_INTEGER = 10**15  # beyond it, not every reader keeps every digit
MAX_PROPERTIES = 2_000  # of all objects of a schema; the time to compile them grows with the square
MAX_DEPTH = 6  # of a value that may be anything

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
_DEFINITIONS = ("$defs", "definitions")
_MAPS = ("properties", "patternProperties", *_DEFINITIONS)
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems")
_ASSERTIONS = _words(
    "type enum const $ref required minProperties maxProperties minItems maxItems minLength maxLength pattern format "
    "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf"
).union(_MAPS, _LISTS, _SINGLE)
_ANNOTATIONS = _words(
    "title description default examples example $comment deprecated readOnly writeOnly $schema id $vocabulary "
    "contentEncoding contentMediaType contentSchema discriminator"
)
_NAMES = ("$id", "$anchor")  # what references may lead to
_NO_OPS = {"uniqueItems": False, "nullable": False, "unevaluatedProperties": True, "unevaluatedItems": True}
_HINTS = {
    "nullable": 'write "type": [..., "null"]',
    "if": "write the cases as anyOf",
    "not": "say what is allowed instead",
    "dependencies": "write the cases as anyOf",
}
_COMBINE = ("anyOf", "oneOf", "allOf", "$ref")
_ANY = "mantou-any-"


def bounded(
    schema: Mapping[str, Any] | bool, param: str, *, lenient: bool = False, max_string: int = MAX_STRING
) -> Schema:
    """A schema that can be compiled. Raises BadRequest, naming the keyword and its place.

    lenient: keywords that cannot be enforced are left to the model, for tools that are not strict.
    """
    root = _Bounds(schema, param, lenient=lenient, max_string=max_string)
    return root.schema() | {"x-guidance": _LAYOUT | {"lenient": lenient, "coerce_one_of": lenient}}


class _Bounds:
    """One document on its way. References are kept, so a recursive schema stays as small as it is."""

    def __init__(
        self, schema: Mapping[str, Any] | bool, param: str, *, lenient: bool, max_string: int
    ) -> None:
        self._root = schema
        self._max_string = max_string
        self._param = param
        self._lenient = lenient
        self._uses_any = False
        self._num_properties = 0
        self._merged = set(_merged_references(schema))
        self._endless = endless(schema)

    def schema(self) -> Schema:
        if "" in self._endless:
            raise BadRequest(
                f"{self._param} requires itself without end, so no answer could be complete; make one of the "
                'references optional, or an anyOf with another way, such as {"type": "null"}.',
                param=self._param,
            )
        found = self._node(self._root, "", merged=False)
        if found is True:  # the root may be anything
            self._uses_any = True
            found = {"$ref": f"#/$defs/{_ANY}{MAX_DEPTH}"}
        if found is False:
            raise BadRequest(f"{self._param} is false, which nothing can match.", param=self._param)
        out = cast("Schema", found)
        if self._uses_any:
            out["$defs"] = {**out.get("$defs", {}), **_any_definitions()}
        return out

    def _node(self, value: Any, path: str, *, merged: bool) -> Schema | bool:
        """`merged`: other parts of the schema hold for the same value, so that nothing may be closed here."""
        if isinstance(value, bool):
            return value
        if path in self._endless:
            return False  # nothing matches it, and who entered it would not come out
        if not isinstance(value, Mapping):
            raise self._wrong(path, "a part that is no schema")
        node = {key: entry for key, entry in cast("Schema", value).items() if self._known(key, entry, path)}
        merged = merged or path in self._merged
        self._check_bools(node, path)
        for pattern in (node.get("pattern"), *_keys(node.get("patternProperties"))):
            if isinstance(pattern, str):
                check_regex(pattern, self._param)
        parts = self._parts(node, path, merged=merged)
        if merged or any(key in node for key in _COMBINE) or "enum" in node or "const" in node:
            return node | parts
        return self._bound(node | parts, path)

    def _known(self, key: str, value: Any, path: str) -> bool:
        """Whether the keyword goes on to the compiler."""
        if key in _ASSERTIONS:
            return True
        if key in _NAMES:
            return isinstance(value, str)
        if key in _ANNOTATIONS or key.startswith("x-") or self._lenient:
            return False
        if key in _NO_OPS and value == _NO_OPS[key] and isinstance(value, bool):
            return False
        hint = _HINTS.get(key, "leave it out")
        raise self._wrong(path, f"the keyword {key!r}, which is not supported: {hint}")

    def _check_bools(self, node: Schema, path: str) -> None:
        for key in ("exclusiveMinimum", "exclusiveMaximum"):
            if isinstance(node.get(key), bool):
                raise self._wrong(path, f"{key} that is no number")

    def _parts(self, node: Schema, path: str, *, merged: bool) -> Schema:
        """The schemas inside a node."""
        beside = sum(key in _ASSERTIONS and key not in _DEFINITIONS for key in node) > 1
        out: Schema = {}
        self._count(node.get("properties"))
        for key in _MAPS:
            if isinstance(node.get(key), dict):
                out[key] = {
                    name: self._inner(part, f"{path}/{key}/{_escaped(name)}", merged=False)
                    for name, part in node[key].items()
                }
        for key in _LISTS:
            if isinstance(node.get(key), list):
                joint = key == "allOf" or (key != "prefixItems" and (beside or merged))
                out[key] = [
                    self._inner(part, f"{path}/{key}/{n}", merged=joint) for n, part in enumerate(node[key])
                ]
        for key in _SINGLE:
            if isinstance(node.get(key), list):  # items as drafts before 2020-12 had them
                out[key] = [
                    self._inner(p, f"{path}/{key}/{n}", merged=False) for n, p in enumerate(node[key])
                ]
            elif key in node:
                out[key] = self._inner(node[key], f"{path}/{key}", merged=False)
        return out

    def _count(self, properties: Any) -> None:
        self._num_properties += len(cast("Schema", properties)) if isinstance(properties, dict) else 0
        if self._num_properties > MAX_PROPERTIES:
            raise BadRequest(
                f"{self._param} has more than {MAX_PROPERTIES} properties; split it.", param=self._param
            )

    def _inner(self, part: Any, path: str, *, merged: bool) -> Schema | bool:
        found = self._node(part, path, merged=merged)
        if merged or not (found is True or found == {}):
            return found
        return self._any(path)

    def _any(self, path: str) -> Schema:
        self._uses_any = True
        return {"$ref": f"#/$defs/{_ANY}{max(MAX_DEPTH - path.count('/') // 2, 1)}"}

    # ------------------------------------------------------------------ bounds
    def _bound(self, node: Schema, path: str) -> Schema | bool:
        if not any(key in _ASSERTIONS and key not in _DEFINITIONS for key in node):
            return node or True if not path else True
        kinds = node.get("type")
        types = set(cast("list[str]", kinds)) if isinstance(kinds, list) else {kinds}
        # A pattern of a text as long as a file is not counted too: both together are beyond what can be compiled.
        free = "format" not in node and not ("pattern" in node and self._max_string > MAX_STRING)
        if "string" in types and free and "maxLength" not in node:
            node["maxLength"] = max(self._max_string, 2 * _number(node, "minLength"))
        if "integer" in types and "multipleOf" not in node:
            self._bound_integer(node)
        if "array" in types or "items" in node or "prefixItems" in node:
            self._bound_array(node, path)
        if "object" in types or "properties" in node or "patternProperties" in node:
            self._bound_object(node, path)
        return node

    def _bound_integer(self, node: Schema) -> None:
        """Only an end that is open, and only where the other leaves room."""
        low, high = (
            [node[key] for key in keys if isinstance(node.get(key), int | float)]
            for keys in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
        )
        if "number" in ({*node["type"]} if isinstance(node.get("type"), list) else ()):
            return
        if not low and not (high and min(high) <= -MAX_INTEGER):
            node["minimum"] = -MAX_INTEGER
        if not high and not (low and max(low) >= MAX_INTEGER):
            node["maximum"] = MAX_INTEGER

    def _bound_array(self, node: Schema, path: str) -> None:
        if "items" not in node:
            node["items"] = self._any(path)
        closed = node["items"] is False or (isinstance(node["items"], list) and "additionalItems" in node)
        if "maxItems" not in node and not closed:
            node["maxItems"] = max(MAX_ITEMS, 2 * _number(node, "minItems"))

    def _bound_object(self, node: Schema, path: str) -> None:
        named = {*node.get("properties", {})}
        needed = {*cast("list[str]", node.get("required", []))}
        more = node.get("additionalProperties")
        listed = bool(named) and needed <= named and _number(node, "minProperties") <= len(named)
        if more is None and listed and "patternProperties" not in node:
            more = node["additionalProperties"] = False
        if more is None and "patternProperties" not in node:
            more = self._any(path)
            if named or needed:
                node["additionalProperties"] = more
        if more is False or named or needed or "patternProperties" in node:
            return
        node.pop("additionalProperties", None)
        node["patternProperties"] = {f"^(.|\\n){{0,{MAX_KEY}}}$": more}
        node["additionalProperties"] = False
        node.setdefault("maxProperties", max(MAX_MEMBERS, 2 * _number(node, "minProperties")))

    def _wrong(self, path: str, what: str) -> BadRequest:
        place = f" at {path[:200]}" if path else ""
        return BadRequest(f"{self._param} has{place} {what}.", param=self._param)


def _keys(value: Any) -> tuple[Any, ...]:
    return tuple(cast("Schema", value)) if isinstance(value, dict) else ()


def _number(node: Schema, key: str) -> int:
    value = node.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _merged_references(schema: Any) -> Iterator[str]:
    """Paths of what is referred to from where other parts of a schema hold as well."""
    open_parts: list[tuple[Any, bool]] = [(schema, False)]
    while open_parts:
        part, merged = open_parts.pop()
        if isinstance(part, list):
            open_parts += [(one, merged) for one in cast("list[Any]", part)]
        if not isinstance(part, Mapping):
            continue
        node = cast("Schema", part)
        reference = node.get("$ref")
        beside = sum(key in _ASSERTIONS and key not in _DEFINITIONS for key in node) > 1
        if isinstance(reference, str) and (merged or beside):
            yield reference.removeprefix("#")
        for key, value in node.items():
            joint = key == "allOf" or (key in ("anyOf", "oneOf") and (beside or merged))
            open_parts.append((value, joint))


def _any_definitions() -> Schema:
    """Any value down to a depth, one definition a level."""

    def level(depth: int) -> Schema:
        plain: list[Schema] = [
            {"type": "null"},
            {"type": "boolean"},
            {"type": "number"},
            {"type": "string", "maxLength": MAX_STRING},
        ]
        if not depth:
            return {"anyOf": plain}
        inner = {"$ref": f"#/$defs/{_ANY}{depth - 1}"}
        nested: list[Schema] = [
            {"type": "array", "items": inner, "maxItems": MAX_ITEMS},
            {
                "type": "object",
                "patternProperties": {f"^(.|\\n){{0,{MAX_KEY}}}$": inner},
                "additionalProperties": False,
                "maxProperties": MAX_MEMBERS,
            },
        ]
        return {"anyOf": [*plain, *nested]}

    return {f"{_ANY}{depth}": level(depth) for depth in range(MAX_DEPTH + 1)}
