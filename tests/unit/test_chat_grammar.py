"""Grammars: what they allow is valid, what they cannot do is refused by name, and rewinding leaves no trace."""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest

from mantou.chat.grammar.grammars import MAX_SOURCE, Grammars, Setting
from mantou.chat.reasoning import ReasoningFormat
from mantou.data import Grammar
from mantou.errors import BadRequest
from tests.fakes_api import byte_tokenizer
from tests.unit.grammar_walk import allowed, constraint, walk
from tests.unit.schema_cases import cases

TOKENIZER = byte_tokenizer()
GRAMMARS = Grammars(TOKENIZER)
CASES = dict(cases())


def schema(value: object) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def accepts(wish: Grammar, text: str, setting: Setting | None = None) -> bool:
    found = constraint(GRAMMARS, wish, setting)
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        if not allowed(found)[token]:
            return False
        found.advance(token)
    return bool(allowed(found)[list(TOKENIZER.eos)].all())


def refusal(wish: Grammar) -> str:
    with pytest.raises(BadRequest) as caught:
        GRAMMARS.write(wish, Setting())
    return caught.value.message


def test_there_are_two_hundred_schemas() -> None:
    assert len(CASES) >= 200


@pytest.mark.parametrize("name", CASES)
def test_whatever_a_grammar_allows_is_valid_under_its_schema(name: str) -> None:
    dice = random.Random(name)
    checker = jsonschema.Draft202012Validator(
        CASES[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for _ in range(2):
        _, text = walk(TOKENIZER, constraint(GRAMMARS, schema(CASES[name])), dice)
        checker.validate(json.loads(text))


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        ({"type": "string", "maxLength": 3}, ['"abc"', '"ä\\n"'], ['"abcd"', "abc"]),
        ({"type": "integer", "minimum": 3, "maximum": 17}, ["3", "17"], ["2", "18", "3.5"]),
        (
            {"type": "array", "items": {"type": "null"}, "minItems": 1},
            ["[null, null]"],
            ["[]", "[null,null]"],
        ),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"]},
            ['{"b": 1}'],
            ['{"a": 1}', '{"b": 1, "c": 2}'],
        ),
        (
            {
                "allOf": [
                    {"$ref": "#/$defs/base"},
                    {"properties": {"b": {"type": "null"}}, "required": ["b"]},
                ],
                "$defs": {
                    "base": {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
                },
            },
            ['{"a": null, "b": null}'],
            ['{"a": null}'],
        ),
        (
            {
                "type": "object",
                "properties": {"not": {"type": "null"}, "$ref": {}},
                "required": ["not", "$ref"],
            },
            ['{"not": null, "$ref": 1}'],
            ['{"not": 1, "$ref": 1}'],
        ),
        ({"type": "boolean", "x-guidance": {"lenient": True}, "description": "d"}, ["true"], ["1"]),
        (True, ["1", '{"a": [true]}'], ["x"]),
    ],
)
def test_a_schema_means_what_it_says(value: object, good: list[str], bad: list[str]) -> None:
    assert all(accepts(schema(value), text) for text in good)
    assert not any(accepts(schema(value), text) for text in bad)


def test_regex_choice_lark_and_gbnf_match_the_whole_answer() -> None:
    assert accepts(Grammar("regex", "^a/b+$"), "a/bb")
    assert not accepts(Grammar("regex", "a|b"), "ab")
    assert accepts(Grammar("choice", '["yes", "say \\"no\\""]'), 'say "no"')
    assert accepts(Grammar("lark", 'start: "a" B\nB: /c+/'), "acc")
    assert accepts(Grammar("lark", 'root ::= "a" [0-9]+'), "a12")
    assert accepts(Grammar("json_object"), '{"a": {"b": []}}')
    assert not accepts(Grammar("json_object"), "[]")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"type": "string", "minLenght": 2}, "'minLenght'"),
        ({"properties": {"a": {"not": {}}}}, "at /properties/a the keyword 'not'"),
        ({"if": {}, "then": {}}, "'if'"),
        ({"not": {}, "x-guidance": {"lenient": True}}, "'not'"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "array", "contains": {}}, "'contains'"),
        ({"type": "object", "propertyNames": {}}, "'propertyNames'"),
        ({"type": "object", "dependentRequired": {}}, "'dependentRequired'"),
        ({"type": "string", "nullable": True}, "'nullable'"),
        ({"type": "string", "format": "zip"}, "zip"),
        ({"type": "strin"}, "strin"),
        ({"type": "string", "pattern": "(?=a)b"}, "regex"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"$ref": "#/$defs/nowhere"}, "nowhere"),
        ({"$ref": "#"}, "response_format"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"enum": []}, "Unsatisfiable"),
        (False, "nothing"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(value: object, named: str) -> None:
    assert named in refusal(schema(value))


@pytest.mark.parametrize(
    "wish",
    [
        Grammar("regex", "(a{1000}){1000}"),
        Grammar("lark", "start: /(a{1000}){1000}/"),
        Grammar("lark", 'start: b{500}\nb: ("a" | "c"){1000,2000}\nd: (b{200}){200}'),
        Grammar("regex", "(?=a)b"),
        Grammar("regex", "("),
        Grammar("lark", 'start: "a" MISSING'),
        Grammar("lark", "start: start"),
        Grammar("lark", "root ::= ("),
        schema({"enum": ["x" * MAX_SOURCE]}),
        schema({"properties": {f"p{n}": {} for n in range(3000)}}),
    ],
)
def test_a_bomb_is_refused_and_the_next_grammar_compiles(wish: Grammar) -> None:
    assert refusal(wish)
    assert accepts(Grammar("choice", '["yes"]'), "yes")


def test_the_end_is_allowed_exactly_where_the_grammar_is_satisfied() -> None:
    (eos,) = TOKENIZER.eos
    found = constraint(GRAMMARS, Grammar("regex", "ab?"))
    seen = []
    for token in TOKENIZER.encode("ab", add_special_tokens=False):
        seen.append(bool(allowed(found)[eos]))
        found.advance(token)
    assert [*seen, bool(allowed(found)[eos])] == [False, True, True]
    assert allowed(found).sum() == 1, "nothing but the end follows"


def test_rewinding_restores_masks_and_forced_tokens_even_across_the_end() -> None:
    dice = random.Random(5)
    (eos,) = TOKENIZER.eos
    for name in ("object", "one-of", "enum-many", "pattern-open", "reference"):
        tokens, _ = walk(TOKENIZER, constraint(GRAMMARS, schema(CASES[name])), dice)
        straight = constraint(GRAMMARS, schema(CASES[name]))
        expected = []
        for token in [*tokens, None]:
            expected.append((straight.mask().copy(), list(straight.forced())))
            if token is not None:
                straight.advance(token)
        wild = constraint(GRAMMARS, schema(CASES[name]))
        place = 0
        for _ in range(60):
            step = dice.randint(-place, len(tokens) - place)
            if step < 0:
                wild.rewind(-step)
            for token in tokens[place : place + max(step, 0)]:
                wild.advance(token)
            place += step
            if place == len(tokens):
                wild.advance(eos)
                assert allowed(wild)[eos]
                wild.rewind(1)
            mask, forced = expected[place]
            assert np.array_equal(wild.mask(), mask)
            assert list(wild.forced()) == forced


def test_forced_tokens_are_what_the_masks_leave() -> None:
    found = constraint(GRAMMARS, schema(CASES["object"]))
    certain = list(found.forced())
    assert TOKENIZER.decode(certain).startswith('{"a": ')
    for token in certain:
        assert list(np.flatnonzero(allowed(found))) == [token]
        found.advance(token)


def test_a_grammar_waits_for_the_end_of_reasoning() -> None:
    form = ReasoningFormat("think-tag", "<think>", "</think>")
    wish = schema({"type": "integer"})
    opened = Setting(reasoning=form, reasoning_open=True)
    assert accepts(wish, 'is it {"a"?</think>\n\n12', opened)
    assert not accepts(wish, "12", opened)
    closed = Setting(reasoning=form)
    assert accepts(wish, "<think>hm</think>12", closed)
    assert accepts(wish, "12", closed)
    assert not accepts(wish, "<think>hm</think>12", Setting(reasoning=form, may_reason=False))


def test_a_compiled_grammar_is_made_once() -> None:
    grammars = Grammars(TOKENIZER)
    first = grammars.write(schema(CASES["object"]), Setting())
    assert grammars._get(first, "x") is grammars._get(first, "x")


def test_a_free_answer_has_no_grammar() -> None:
    assert GRAMMARS.write(None, Setting()) == ""
