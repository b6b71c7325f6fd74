"""Lark grammars as regexes: the same texts match, and what is not regular is said to be none."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from mantou.api.responses.tools import Toolbox, read_tools
from mantou.chat.grammar.grammars import Grammars, Setting
from mantou.chat.grammar.regular import regex_of
from mantou.chat.tools import ToolUse, named
from mantou.errors import BadRequest
from tests.fakes_api import byte_tokenizer
from tests.unit.grammar_walk import constraint, walk

TOKENIZER = byte_tokenizer()
NOTES = """
start: title entry+ [footer]   // a comment
title: "= " /[A-Z][a-z]+/ LF
entry: ("- " | "* ") words LF -> bullet
     | "#" NUMBER~1..2 LF
words: WORD (" " WORD){0,2}
footer.2: "end"i "\\"!\\n"?
NUMBER: /[0-9]/
%import common (WORD, LF)
"""


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("= Ab\n- one two three\n#12\n", True),
        ('= Ab\n* one\nEnd"!\n', True),
        ("= Ab\n* one\nend", True),
        ("= Ab\n", False),
        ("= Ab\n- one two three four\n", False),
        ("= Ab\n#123\n", False),
        ("Ab\n- one\n", False),
    ],
)
def test_a_regular_grammar_matches_the_same_texts(text: str, good: bool) -> None:
    regex = regex_of(NOTES)
    assert regex is not None
    assert bool(re.fullmatch(regex, text)) == good


@pytest.mark.parametrize(
    "grammar",
    [
        'start: a\na: "x" a | "y"',
        'start: "a" b',
        'start: "a"\n%ignore " "',
        'start: "a" (',
        "",
        "start: " + "(" * 5000,
        'start: a a\na: b b\nb: c c\nc: d d\nd: "' + "x" * 5000 + '"',
        "%import python.NAME\nstart: NAME",
    ],
)
def test_what_has_no_regex_is_said_to_have_none(grammar: str) -> None:
    assert regex_of(grammar) is None


def custom(syntax: str, definition: str) -> Toolbox:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    return Toolbox(read_tools([{"type": "custom", "name": "note", "format": form}], "tools"))


@pytest.mark.parametrize("form_name", ["hermes", "llama3", "qwen3_coder", "glm47", "minimax_m2"])
@pytest.mark.parametrize(("syntax", "definition"), [("lark", NOTES), ("regex", r"= [a-z]{2}(\n\"\\/){1,3}")])
def test_a_custom_tool_gets_what_its_grammar_allows_in_every_format(
    form_name: str, syntax: str, definition: str
) -> None:
    box = custom(syntax, definition)
    form = named(form_name, TOKENIZER)
    use = ToolUse.of(form, box.enforced, parallel=False)
    setting = Setting(tools=use, choice="required", strict=frozenset({"note"}))
    found = constraint(Grammars(TOKENIZER), None, setting)
    _, text = walk(TOKENIZER, found, random.Random(form_name), hints=['end"!\n', "\n"])
    expected = regex_of(definition) if syntax == "lark" else definition
    assert re.fullmatch(str(expected), said(text, form_name), re.DOTALL), text


TAGS = {
    "qwen3_coder": ("<parameter=input>\n", "\n</parameter>"),
    "glm47": ("<arg_value>", "</arg_value>"),
    "minimax_m2": ('<parameter name="input">', "</parameter>"),
}


def said(text: str, form_name: str) -> str:
    """The input of the call."""
    if form_name in ("hermes", "llama3"):
        start = text.index("{", text.index('s": '))
        value: Any = json.JSONDecoder().raw_decode(text[start:])[0]
        return value["input"]
    opener, closer = TAGS[form_name]
    return text.partition(opener)[2].partition(closer)[0]


def test_a_grammar_that_is_none_is_refused_with_the_tool_s_name() -> None:
    use = ToolUse.of(named("hermes", TOKENIZER), custom("regex", "(").enforced)
    with pytest.raises(BadRequest, match=r"tools \(note\)|tools cannot be used"):
        Grammars(TOKENIZER).write(None, Setting(tools=use, strict=frozenset({"note"})))
    with pytest.raises(BadRequest, match="lark or regex"):
        custom("gbnf", "root ::= a")


def test_grammars_with_recursion_are_told_and_not_enforced() -> None:
    box = custom("lark", 'start: "(" start ")" | "x"')
    assert box.enforced == box.offered
    assert 'start: "(" start ")"' in box.offered[0]["function"]["description"]
