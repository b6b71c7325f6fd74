"""Schemas that require themselves: without a way out they are refused, with one they are what they always were."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import jsonschema
import pytest

from mantou.chat.grammar.endless import endless
from mantou.chat.grammar.grammars import Grammars, Setting
from mantou.data import Grammar
from mantou.errors import BadRequest
from tests.fakes_api import byte_tokenizer
from tests.unit.grammar_walk import constraint, walk

TOKENIZER = byte_tokenizer()
GRAMMARS = Grammars(TOKENIZER)
ROOT = {"$ref": "#"}
NULL = {"type": "null"}
LOOP = {"$ref": "#/$defs/loop"}


def obj(required: list[str] | None = None, /, **properties: Any) -> dict[str, Any]:
    needed = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": needed}


DEFS = {"$defs": {"loop": obj(next=LOOP)}}

ENDLESS = {
    "required member": obj(next=ROOT),
    "reference to itself": ROOT,
    "two that need each other": LOOP | {"$defs": {"loop": obj(a={"$ref": "#/$defs/b"}), "b": obj(b=LOOP)}},
    "list of at least one": {"type": "array", "items": ROOT, "minItems": 1},
    "first of a list": {"type": "array", "prefixItems": [NULL, ROOT], "minItems": 2},
    "part of an allOf": {"allOf": [obj(a=NULL), ROOT]},
    "each way of an anyOf": obj(next={"anyOf": [ROOT, {"type": "array", "items": ROOT, "minItems": 1}]}),
    "the other way is false": obj(next={"oneOf": [ROOT, False]}),
    "map of at least one": {"type": "object", "additionalProperties": ROOT, "minProperties": 1},
    "required by a name it does not give": {
        "type": "object",
        "additionalProperties": ROOT,
        "required": ["a"],
    },
    "by anchor": {"$anchor": "me", **obj(next={"$ref": "#me"})},
    "by its own name": {"$id": "https://example.com/x", **obj(next={"$ref": "https://example.com/x"})},
    "by a name with signs in it": {
        "$ref": "#/definitions/a~1b%20c",
        "definitions": {"a/b c": obj(n={"$ref": "#/definitions/a~1b c"})},
    },
    "outside the definitions": LOOP
    | {"$defs": {"loop": {"$ref": "#/components/x"}}, "components": {"x": LOOP}},
}

FINITE = {
    "optional member": obj(["value"], value={"type": "boolean"}, next=ROOT),
    "or null": obj(next={"anyOf": [ROOT, NULL]}),
    "or null as a type": {**obj(next=ROOT), "type": ["object", "null"]},
    "list that may be empty": obj(children={"type": "array", "items": ROOT}),
    "list whose first differs": {"type": "array", "prefixItems": [NULL], "items": ROOT, "minItems": 1},
    "map that may be empty": {"type": "object", "additionalProperties": ROOT},
    "an endless part beside": obj([], a=LOOP, b=NULL) | DEFS,
    "an endless way beside": obj(a={"anyOf": [LOOP, NULL]}) | DEFS,
    "list of an endless part": obj(a={"type": "array", "items": LOOP}) | DEFS,
    "an endless part that nobody needs": obj(a=NULL) | DEFS,
    "one definition twice": obj(a={"$ref": "#/$defs/n"}, b={"$ref": "#/$defs/n"}) | {"$defs": {"n": NULL}},
}


def wish(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


@pytest.mark.parametrize("name", ENDLESS)
def test_a_schema_without_a_way_out_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="requires itself without end"):
        GRAMMARS.write(wish(ENDLESS[name]), Setting())


@pytest.mark.parametrize("name", FINITE)
def test_a_schema_with_a_way_out_is_followed_to_its_end(name: str) -> None:
    checker = jsonschema.Draft202012Validator(FINITE[name])
    for seed in range(3):
        _, text = walk(TOKENIZER, constraint(GRAMMARS, wish(FINITE[name])), random.Random(seed))
        checker.validate(json.loads(text))


def test_only_the_parts_without_an_end_are_named() -> None:
    assert endless(obj([], a=LOOP, b=NULL) | DEFS) == {
        "/properties/a",
        "/$defs/loop",
        "/$defs/loop/properties/next",
    }
    assert not endless(obj(next={"oneOf": [ROOT, NULL]}))
    assert not endless(True)


def test_a_chain_of_references_in_the_worst_order_takes_one_look_a_part() -> None:
    names = [f"d{n}" for n in range(5000)]
    chain = {b: {"$ref": f"#/$defs/{a}"} for a, b in pairwise(names)}
    for last, found in ((NULL, 0), ({"$ref": f"#/$defs/{names[-1]}"}, 5001)):
        document = {"$ref": f"#/$defs/{names[-1]}", "$defs": {**chain, names[0]: last}}
        assert len(endless(document)) == found


def test_text_without_end_in_other_grammars_is_refused_or_ends_in_a_clear_error() -> None:
    with pytest.raises(BadRequest, match="requires text without end"):
        GRAMMARS.write(Grammar("lark", 'start: "ab" start'), Setting())
    later = constraint(GRAMMARS, Grammar("lark", 'start: /[xy]/ loop\nloop: "ab" loop'))
    x, a = TOKENIZER.encode("xa", add_special_tokens=False)
    later.advance(x)
    assert 0 < len(later.forced()) <= 64
    with pytest.raises(BadRequest, match="requires text without end"):
        later.advance(a)
