"""Tool parsers: however an answer is cut, the same calls; mlx-lm's parsers read the same; nothing is lost."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import jiter
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mantou.chat.habits import with_types
from mantou.chat.reasoning import ReasoningSplitter
from mantou.chat.tools import ToolFormat, ToolSplitter, ToolUse, check_name, detect, named
from mantou.chat.tools.formats import NAMES
from mantou.errors import ConfigError
from mantou.models.load import enter_mlx_lm
from tests.unit.tool_cases import CASES, TOOLS, Case, tool

MLX_LM = (
    *("function_gemma", "gemma4", "glm47", "json_tools", "kimi_k2", "kimi_k3", "laguna", "longcat"),
    *("minicpm5", "minimax_m2", "mistral", "muse_spark", "pythonic", "qwen3_coder"),
)


@dataclass
class Words:
    """A vocabulary of tokens that have these names; their ids are their places."""

    names: tuple[str, ...] = ()
    special: bool = True

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(range(len(self.names))) if self.special else frozenset()

    def token_id(self, piece: str) -> int | None:
        return self.names.index(piece) if piece in self.names else None


PLAIN = Words()


@dataclass
class Said:
    """One answer, put together from its parts."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    size: int = 0
    after: list[int] = field(default_factory=list)  # calls and characters of arguments behind each part

    def whole(self) -> tuple[Any, ...]:
        return self.content, self.reasoning, tuple(self.calls), self.size

    def parsed(self) -> tuple[tuple[str, Any], ...]:
        return tuple((name, json.loads(arguments)) for name, arguments in self.calls)


def run(
    form: ToolFormat, parts: list[str], *, cut: bool = False, parallel: bool = True, offered: Any = TOOLS
) -> Said:
    said = Said()
    reasoning = ReasoningSplitter(form.reasoning, opened=False) if form.reasoning else None
    splitter = ToolSplitter(
        ToolUse.of(form, offered, parallel=parallel),
        inside=lambda: reasoning is not None and reasoning.inside,
    )

    def pieces() -> Iterator[Any]:
        for part in parts:
            yield from splitter.feed(part)
            said.after.append(sum(len(arguments) + 1 for _, arguments in said.calls))
        yield from splitter.end(cut=cut)

    for piece in pieces():
        said.size += piece.size
        assert len({delta.index for delta in piece.tools}) == len(piece.tools), "at most one delta a call"
        for delta in piece.tools:
            if delta.name:
                assert delta.index == len(said.calls)
                said.calls.append((delta.name, ""))
                said.ids.append(delta.id)
            assert delta.index == len(said.calls) - 1, "calls come one after the other"
            name, arguments = said.calls[-1]
            said.calls[-1] = name, arguments + delta.arguments
        content, inner = reasoning.feed(piece.text) if reasoning else (piece.text, "")
        said.content += content
        said.reasoning += inner
    content, inner = reasoning.flush() if reasoning else ("", "")
    said.content += content
    said.reasoning += inner
    return said


def cut_at(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


def tags_of(form: ToolFormat) -> tuple[str, ...]:
    tags = (*form.openers, *form.closers, *form.starts, *form.tags)
    return tuple(tag for tag in dict.fromkeys(tags) if len(tag) > 1)


def bound(name: str) -> ToolFormat:
    """The format where all its tags are special tokens; tags made of several are not in a vocabulary."""
    tags = [tag for tag in tags_of(named(name, PLAIN)) if re.fullmatch(r"[<\[]\S+[>\]]", tag)]
    return named(name, Words(tuple(tag for tag in tags if tag.count("<") < 2)))


def with_marks(form: ToolFormat, text: str) -> str:
    """The text as the stream hands it on: special tokens are noncharacters."""
    for tag, mark in sorted(form.marks.items(), key=lambda entry: -len(entry[0])):
        text = text.replace(tag, mark)
    return text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.form)
def test_whole_and_letter_by_letter(case: Case) -> None:
    form = named(case.form, PLAIN)
    whole = run(form, [case.text])
    assert (whole.content, whole.reasoning, whole.parsed()) == (case.content, case.reasoning, case.calls)
    assert whole.size == len(case.text), "every character is accounted for"
    assert run(form, list(case.text)).whole() == whole.whole()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.form)
def test_special_tokens_are_known_by_id(case: Case) -> None:
    form = bound(case.form)
    said = run(form, list(with_marks(form, case.text)))
    assert (said.content, said.reasoning, said.parsed()) == (case.content, case.reasoning, case.calls)


@pytest.mark.parametrize("name", sorted({case.form for case in CASES}))
def test_what_spells_a_special_tag_is_text(name: str) -> None:
    form = bound(name)
    if not set(form.openers) <= set(form.marks):
        return  # one of its openers is no single token
    text = next(case.text for case in CASES if case.form == name and case.calls)
    said = run(form, [re.sub(r"^[\s{]+", "Text: ", text)])
    assert not said.calls


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(CASES), st.lists(st.integers(0, 2000), max_size=12), st.booleans())
def test_cuts_change_nothing(case: Case, places: list[int], special: bool) -> None:
    form = bound(case.form) if special else named(case.form, PLAIN)
    text = with_marks(form, case.text)
    assert run(form, cut_at(text, places)).whole() == run(form, [text]).whole()


@cache
def texts(name: str) -> st.SearchStrategy[str]:
    """Anything that may come of the format's tags, of parts of real calls and of other text."""
    form = named(name, PLAIN)
    real = [case.text for case in CASES if case.form == name]
    pieces = [part for text in real for part in re.findall(r"<[^<>]*>|[^<>\s]+|\s+", text)]
    words = st.sampled_from(
        [*tags_of(form), *pieces, "word", " ", "\n", "{", "}", '"', "'", "\\", ",", ":", "[", "é", "<"]
    )
    mixed = st.lists(words, max_size=14).map("".join)

    def damage(args: tuple[str, int, int, str]) -> str:
        text, start, length, other = args
        start %= len(text) + 1
        return text[:start] + other + text[start + length :]

    damaged = st.tuples(st.sampled_from(real), st.integers(0, 2000), st.integers(0, 5), words).map(damage)
    return st.lists(damaged | mixed, min_size=1, max_size=2).map("".join)


NAMED_TEXTS = st.sampled_from(sorted({case.form for case in CASES})).flatmap(
    lambda name: st.tuples(st.just(name), texts(name))
)


@settings(deadline=None, max_examples=600)
@given(NAMED_TEXTS, st.lists(st.integers(0, 400), max_size=12), st.booleans(), st.booleans())
@example(
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": [1, }</tool_call> so'), [5, 40], False, False
)
@example(  # a head that is too long, with an opener behind the limit
    (
        "kimi_k2",
        "<|tool_call_begin|>"
        + "x" * 260
        + "<|tool_call_begin|>now:1<|tool_call_argument_begin|>{}<|tool_call_end|>",
    ),
    [277],
    False,
    False,
)
def test_any_text(made: tuple[str, str], places: list[int], cut: bool, single: bool) -> None:
    name, text = made
    form = named(name, PLAIN)
    whole = run(form, [text], cut=cut, parallel=not single)
    assert run(form, cut_at(text, places), cut=cut, parallel=not single).whole() == whole.whole()
    for index, (_, arguments) in enumerate(whole.calls):
        if not cut or index < len(whole.calls) - 1:
            assert isinstance(json.loads(arguments), dict), "what was called can be called"
        elif arguments:
            jiter.from_json(arguments.encode(), partial_mode="trailing-strings")
    if single:
        assert len(whole.calls) <= 1
    if not whole.calls and form.reasoning is None:
        assert whole.content == text, "what is no call comes back as it was"


@pytest.mark.parametrize("name", MLX_LM)
def test_agrees_with_mlx_lm(name: str) -> None:
    enter_mlx_lm()
    oracle = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    cases = [case for case in CASES if case.oracle == name]
    assert cases
    for case in cases:
        start, end = oracle.tool_call_start, oracle.tool_call_end
        found: list[Any] = []
        for part in case.text.split(start)[1:]:
            read = oracle.parse_tool_call(part.split(end)[0] if end else part, TOOLS)
            found += read if isinstance(read, list) else [read]
        assert [(call["name"], call["arguments"]) for call in found] == list(case.calls)
        said = run(named(name, PLAIN), [case.text])
        assert said.parsed() == case.calls
        assert said.content == case.content


def test_every_format_of_mlx_lm_has_a_parser() -> None:
    assert set(MLX_LM) <= set(NAMES)
    assert {case.form for case in CASES} | {"json_tools"} == set(NAMES)


@pytest.mark.parametrize("name", sorted(set(MLX_LM) - {"json_tools", "laguna"}))
def test_arguments_come_while_they_are_written(name: str) -> None:
    case = max((case for case in CASES if case.form == name and case.calls), key=lambda case: len(case.text))
    said = run(named(name, PLAIN), list(case.text))
    grew = [later - earlier for earlier, later in pairwise(said.after)]
    share = sum(step > 0 for step in grew) / sum(grew)
    assert share > 0.2, "from letter to letter something came"
    assert max(grew) < 80


def test_an_unknown_tool_is_text() -> None:
    text = 'Hm. <tool_call>\n{"name": "rm", "arguments": {"a": "<tool_call>"}}\n</tool_call>'
    said = run(named("hermes", PLAIN), [text])
    assert (said.calls, said.content) == ([], text)


def test_a_known_tool_behind_an_unknown_one_is_called() -> None:
    text = '<tool_call>{"name": "rm"}</tool_call><tool_call>{"name": "now"}</tool_call>'
    said = run(named("hermes", PLAIN), list(text))
    assert said.parsed() == (("now", {}),)
    assert said.content == '<tool_call>{"name": "rm"}</tool_call>'


def test_a_call_that_breaks_off_is_made_whole_unless_the_limit_cut_it() -> None:
    text = '<tool_call>{"name": "write_file", "arguments": {"path": "/a", "content": ["x'
    form = named("hermes", PLAIN)
    assert run(form, [text]).calls == [("write_file", '{"path": "/a", "content": ["x"]}')]
    assert run(form, [text], cut=True).calls == [("write_file", '{"path": "/a", "content": ["x')]
    xml = "<tool_call>\n<function=write_file>\n<parameter=path>\n/a\n</parameter>\n<parameter=content>\nfoo\n</par"
    form = named("qwen3_coder", PLAIN)
    assert run(form, [xml]).calls == [("write_file", '{"path": "/a", "content": "foo\\n</par"}')]
    said = run(form, [xml], cut=True)
    assert (said.content, said.calls) == ("", [("write_file", '{"path": "/a", "content": "foo')])


def test_what_follows_a_broken_call_is_text() -> None:
    said = run(named("hermes", PLAIN), ['<tool_call>{"name": "now", "arguments": {"a": oops}} and so on'])
    assert said.calls == [("now", '{"a": null}')]
    assert said.content == "oops}} and so on"


def test_types_follow_the_schema() -> None:
    properties = {
        "text": {"type": "string"},
        "number": {"type": "number"},
        "whole": {"type": ["integer", "null"]},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    }
    offered = [tool("f", {"type": "object", "properties": properties})]
    values = {
        "text": ("007", "007"),
        "number": ("1e3", 1000.0),
        "whole": ("5.0", 5),
        "flag": ("True", True),
        "list": ("[1, 'a', None]", [1, "a", None]),
        "either": ("12 monkeys", "12 monkeys"),
        "unknown": ('{"a": 1}', {"a": 1}),
        "other": ("plain", "plain"),
    }
    body = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, (text, _) in values.items())
    said = run(
        named("qwen3_coder", PLAIN),
        list(f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"),
        offered=offered,
    )
    assert said.parsed() == (("f", {key: value for key, (_, value) in values.items()}),)


def test_names_of_types_as_python_has_them() -> None:
    offered = [tool("f", {"type": "dict", "properties": {"a": {"type": "int"}, "b": {"type": "str"}}})]
    pairs = "<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>1</arg_value>"
    said = run(named("glm47", PLAIN), [f"<tool_call>f{pairs}</tool_call>"], offered=offered)
    assert said.parsed() == (("f", {"a": 1, "b": "1"}),)


def test_only_entities_of_xml_are_read() -> None:
    text = '<function name="get_weather"><param name="city">?a=1&copy=2&#233;&lt;</param></function>'
    assert run(named("minicpm5", PLAIN), [text]).parsed() == (("get_weather", {"city": "?a=1&copy=2é<"}),)


def test_half_characters_do_not_reach_the_wire() -> None:
    inner = r'"{\"path\": \"\ud83d\", \"content\": \"\ud83d\ude00\"}"'
    text = f'<tool_call>{{"name": "write_file", "arguments": {inner}}}</tool_call>'
    assert run(named("hermes", PLAIN), [text]).calls == [
        ("write_file", '{"path": "\ufffd", "content": "😀"}')
    ]


def test_schemas_that_lead_to_themselves_end() -> None:
    again = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in "abcdefghij"]}
    schema = {"properties": {"x": again}, "$defs": dict.fromkeys("abcdefghij", again)}
    deep: dict[str, Any] = {"enum": [1]}
    for _ in range(60):
        deep = {"anyOf": [deep, {"type": "null"}]}
    schema["properties"]["y"] = deep
    offered = [tool("f", schema)]
    text = (
        "<tool_call><function=f><parameter=x>1</parameter><parameter=y>1</parameter></function></tool_call>"
    )
    assert run(named("qwen3_coder", PLAIN), [text], offered=offered).parsed() == (("f", {"x": 1, "y": 1}),)
    assert with_types(schema)["properties"]["y"]["type"] == "integer"


def test_wrong_values_stay_text() -> None:
    offered = [
        tool("f", {"type": "object", "properties": {"n": {"type": "integer"}, "b": {"type": "boolean"}}})
    ]
    pairs = "<arg_key>n</arg_key><arg_value>many</arg_value><arg_key>b</arg_key><arg_value></arg_value>"
    text = f"<tool_call>f{pairs}</tool_call>"
    assert run(named("glm47", PLAIN), [text], offered=offered).parsed() == (("f", {"n": "many", "b": ""}),)


def test_raw_line_breaks_and_trailing_commas_in_json_are_repaired() -> None:
    text = '<tool_call>{"name": "write_file", "arguments": {"path": \'/a\', "content": "one\ntwo\t\\d",}}</tool_call>'
    said = run(named("hermes", PLAIN), list(text))
    assert said.parsed() == (("write_file", {"path": "/a", "content": "one\ntwo\t\\d"}),)


def test_ids() -> None:
    said = run(named("hermes", PLAIN), ['<tool_call>{"name": "now"}</tool_call>' * 2])
    assert all(re.fullmatch("call_[0-9a-f]{24}", one) for one in said.ids)
    assert len(set(said.ids)) == 2
    kimi = next(case for case in CASES if case.form == "kimi_k2")
    assert run(named("kimi_k2", PLAIN), [kimi.text]).ids == [
        "functions.get_weather:0",
        "functions.ns.search-v2:1",
    ]


def test_only_one_call_where_only_one_is_allowed() -> None:
    for case in CASES:
        if case.calls:
            said = run(named(case.form, PLAIN), list(case.text), parallel=False)
            assert said.parsed() == case.calls[:1], case.form


@pytest.mark.parametrize(
    ("template", "words", "expected"),
    [
        ("<tool_call>\n{...}</tool_call>", (), "hermes"),
        ("<tool_call>\n<function=name>\n<parameter=a>", (), "qwen3_coder"),
        ("<tool_call>{name}<arg_key>", (), "glm47"),
        ("x[TOOL_CALLS]", (), "mistral"),
        ("<|start|>assistant<|channel|>analysis<|message|><|call|>", (), "harmony"),
        ("<|user|>hi<|end|>", (), None),
        ("no sign", ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"), "kimi_k3"),
        ("no sign", ("<|tool_call_start|>", "<|tool_call_end|>"), "pythonic"),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c>", (), "deepseek"),
        ("<|tool_call>call:<tool_call|>", (), "gemma4"),
    ],
)
def test_detection(template: str, words: tuple[str, ...], expected: str | None) -> None:
    form = detect(template, Words(words))
    assert (form.name if form else None) == expected


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    check_name("off")
    with pytest.raises(ConfigError, match=r"no tool parser 'qwen'; take one of .*qwen3_coder"):
        named("qwen", PLAIN)
