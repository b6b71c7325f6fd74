"""Tool calls as a grammar, in each format that models write them in. Knows no reasoning and no request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mantou.chat.grammar.lark import Lark, either
from mantou.chat.grammar.regex import anchored
from mantou.chat.grammar.schema import bounded
from mantou.chat.tools import ToolFormat
from mantou.chat.tools.calls import TEXT, types_of
from mantou.errors import BadRequest

Schema = Mapping[str, Any]
MAX_CALLS = 16  # of one answer whose calls a grammar writes
_NONE = '""'
_MAX_ARGUMENT = 2**20  # characters of a text: tools write whole files


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool as a grammar sees it. `param`: where its schema stands, for errors."""

    name: str
    schema: Schema
    strict: bool
    param: str

    def json(self) -> dict[str, Any]:
        """The schema of the arguments. What is not strict may hold keywords that nobody can enforce."""
        schema = {"type": "object", **self.schema} if self.schema else {"type": "object", "properties": {}}
        return bounded(schema, self.param, lenient=not self.strict, max_string=_MAX_ARGUMENT)


Arguments = Callable[[Lark, Tool], str]


@dataclass(frozen=True, slots=True)
class Style:
    """The text around the arguments of a call, {name} in it, and around and between calls."""

    before: str
    after: str
    arguments: Arguments
    section: tuple[str, str] = ("", "")
    between: str = ""
    single: bool = False  # an answer cannot hold two


def calls(lark: Lark, form: ToolFormat, tools: Sequence[Tool], most: int, opened: str = "") -> str:
    """One to `most` calls; `opened` is what has been written of the first. Raises BadRequest for a format that has no
    grammar yet.
    """
    style = style_of(form)
    head = replace(style, before=(style.section[0] + style.before).removeprefix(opened))
    first = lark.rule("first", either([_call(lark, head, tool) for tool in tools]))
    most = 1 if style.single else min(most, MAX_CALLS)
    more = ""
    if most > 1:
        other = lark.rule("call", either([_call(lark, style, tool) for tool in tools]))
        more = f"({lark.spelled(style.between)} {other}){{0,{most - 1}}}"
    parts = (first, more, lark.spelled(style.section[1]))
    return lark.rule("calls", " ".join(part for part in parts if part))


def trigger(form: ToolFormat) -> str:
    """What begins calls in a text that may also hold none; "" where only the answer's first character tells."""
    style = style_of(form)
    whole = style.section[0] + style.before
    return max((opener for opener in form.openers if whole.startswith(opener)), key=len, default="")


def has_grammar(form: ToolFormat) -> bool:
    """Whether calls of this format can be enforced."""
    return form.name in STYLES


def style_of(form: ToolFormat) -> Style:
    if form.name == "mistral" and "[ARGS]" in form.marks:
        return _MISTRAL_ARGS
    style = STYLES.get(form.name)
    if style is None:
        raise BadRequest(
            f"Calls in the tool format {form.name} cannot be enforced yet; set tool_choice to auto.",
            param="tool_choice",
        )
    return style


def _call(lark: Lark, style: Style, tool: Tool) -> str:
    before, mark, rest = style.before.replace("{name}", tool.name).partition("{number}")
    number = lark.terminal("[0-9]{1,2}") if mark else ""
    parts = (
        lark.spelled(before),
        number,
        lark.spelled(rest),
        style.arguments(lark, tool),
        lark.spelled(style.after),
    )
    return " ".join(part for part in parts if part)


# ---------------------------------------------------------------------- arguments
def _json(lark: Lark, tool: Tool) -> str:
    return lark.json(tool.json())


@dataclass(frozen=True, slots=True)
class Fields:
    """Arguments one by one: {key} and {type} in `before`, then the value. `quotes`: around a text that is a value."""

    before: str
    after: str
    between: str = ""
    quotes: str = ""
    python: bool = False
    json_text: bool = False  # texts are written as JSON strings

    def __call__(self, lark: Lark, tool: Tool) -> str:
        schema = tool.json()
        properties: Mapping[str, Any] = schema.get("properties", {})
        needed = set(schema.get("required", ()))
        fields = [(self._field(lark, tool, schema, key), key in needed) for key in properties]
        return self._sequence(lark, fields)

    def _sequence(self, lark: Lark, fields: list[tuple[str, bool]]) -> str:
        """In the order of the schema; what is optional may be left out."""
        between = lark.spelled(self.between)
        if not between:
            return " ".join(field if needed else f"({field})?" for field, needed in fields)
        # rest[first]: the fields from here on, with a separator before each but the very first
        rest = {True: "", False: ""}
        for field, needed in reversed(fields):
            after = lark.rule("more", rest[False]) if rest[False] else ""
            with_it = {True: f"{field} {after}", False: f"{between} {field} {after}"}
            if not needed:
                without = {first: lark.rule("more", rest[first] or _NONE) for first in (True, False)}
                with_it = {first: f"({with_it[first]} | {without[first]})" for first in (True, False)}
            rest = with_it
        return rest[True]

    def _field(self, lark: Lark, tool: Tool, root: dict[str, Any], key: str) -> str:
        given: Any = root["properties"][key]
        kinds = types_of(given, root)
        shown = (
            "string"
            if kinds == TEXT or not kinds
            else "number"
            if kinds & {"integer", "number"}
            else "object"
        )
        is_text = "true" if kinds == TEXT or not kinds else "false"
        head = self.before.replace("{text}", is_text).replace("{type}", shown).replace("{key}", key)
        before = lark.spelled(head)
        return lark.rule("field", f"{before} {self._value(lark, tool, root, given, kinds)}")

    def _value(self, lark: Lark, tool: Tool, root: dict[str, Any], given: Any, kinds: frozenset[str]) -> str:
        after = lark.spelled(self.after)
        own: dict[str, Any] = given if isinstance(given, dict) else {}
        choices = own.get("enum", [own["const"]] if "const" in own else None)
        if kinds <= {"string", "null"} and "string" in kinds and not self.json_text:
            if choices and all(isinstance(choice, str) for choice in choices):
                texts = [lark.spelled(self.quotes + choice + self.quotes) or _NONE for choice in choices]
                return f"{either(texts)} {after}".strip()
            # The text ends at the tag, as for the parser; line breaks around it are no part of the tag, unless a regex
            # says which of them are the text's.
            regex = _pattern(tool, own)
            end = (self.quotes + self.after).rstrip("\n")
            end = end if regex else end.lstrip("\n")
            text = lark.until(end, own.get("minLength", 0), own.get("maxLength"), regex)
            rest = lark.spelled("\n") if self.after.endswith("\n") else ""
            return f"{lark.spelled(self.quotes)} {text} {rest}".strip()
        if self.python and kinds <= {"boolean"} and kinds:
            return f'("True" | "False") {after}'.strip()
        nested = {**own, "x-guidance": root["x-guidance"]}
        if "$defs" in root or "definitions" in root:
            nested |= {key: root[key] for key in ("$defs", "definitions") if key in root}
        return f"{lark.json(nested)} {after}".strip()


def _pattern(tool: Tool, own: Mapping[str, Any]) -> str:
    """The regex that a text between tags must match; "" if it may be anything. Raises BadRequest for a text of which
    more is asked than a regex, or a length, can say.
    """
    if not tool.strict or not {"pattern", "format"} & own.keys():
        return ""
    if "format" in own or own.get("minLength") or "maxLength" in own:
        raise BadRequest(
            f"{tool.param} has a format, or a pattern with a length, for a text, which cannot be enforced in this "
            "model's calls; leave strict out.",
            param=tool.param,
        )
    from llguidance import regex_to_lark

    return regex_to_lark(anchored(str(own["pattern"])), "")


# ---------------------------------------------------------------------- formats
def _objects(arguments: str, section: tuple[str, str], between: str = ", ", head: str = '{"name": ') -> Style:
    """JSON objects with a name and arguments."""
    return Style(f'{head}"{{name}}", "{arguments}": ', "}", _json, section, between)


def _elements(call: str, field: str, section: tuple[str, str], *, typed: str = "") -> Style:
    return Style(
        f'<{call} name="{{name}}">\n',
        f"</{call}>",
        Fields(f'<{field} name="{{key}}"{typed}>', f"</{field}>\n"),
        section,
        "\n",
    )


def _functions(tag: str) -> Style:
    fields = Fields("<parameter={key}>\n", "\n</parameter>\n")
    return Style(f"<{tag}>\n<function={{name}}>\n", f"</function>\n</{tag}>", fields, between="\n")


def _pairs(prefix: str = "") -> Style:
    fields = Fields(
        f"<{prefix}arg_key>{{key}}</{prefix}arg_key>\n<{prefix}arg_value>", f"</{prefix}arg_value>\n"
    )
    return Style(f"<{prefix}tool_call>{{name}}\n", f"</{prefix}tool_call>", fields, between="\n")


def _gemma(opener: str, closer: str, quote: str) -> Style:
    return Style(f"{opener}call:{{name}}{{", f"}}{closer}", Fields("{key}:", "", between=",", quotes=quote))


_HERMES = Style('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", _json, between="\n")
_MISTRAL_ARGS = Style("[TOOL_CALLS]{name}[ARGS]", "", _json)
_DSML = "\uff5cDSML\uff5c"


def _deepseek(name: str) -> str:
    return f"<\uff5ctool\u2581{name}\uff5c>"


STYLES: Mapping[str, Style] = {
    "hermes": _HERMES,
    "json_tools": _HERMES,
    "llama3": _objects("parameters", ("", ""), "; "),
    "granite": _objects("arguments", ("<|tool_call|>[", "]")),
    "nemotron": _objects("arguments", ("<TOOLCALL>[", "]</TOOLCALL>")),
    "command": _objects(
        "parameters",
        ("<|START_ACTION|>[\n", "\n]<|END_ACTION|>"),
        ",\n",
        '    {"tool_call_id": "{number}", "tool_name": ',
    ),
    "mistral": _objects("arguments", ("[TOOL_CALLS][", "]")),
    "deepseek": Style(
        _deepseek("call\u2581begin") + "{name}" + _deepseek("sep"),
        _deepseek("call\u2581end"),
        _json,
        (_deepseek("calls\u2581begin"), _deepseek("calls\u2581end")),
    ),
    "kimi_k2": Style(
        "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        _json,
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "kimi_k3": Style(
        '<|open|>call tool="{name}" index="{number}"<|sep|><|open|>json type="object"<|sep|>',
        "<|close|>json<|sep|><|close|>call<|sep|>",
        _json,
        ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    ),
    "harmony": Style(
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", "", _json, single=True
    ),
    "qwen3_coder": _functions("tool_call"),
    "seed": _functions("seed:tool_call"),
    "glm47": _pairs(),
    "laguna": _pairs(),
    "longcat": _pairs("longcat_"),
    "minimax_m2": _elements("invoke", "parameter", ("<minimax:tool_call>\n", "\n</minimax:tool_call>")),
    "muse_spark": _elements(
        "atem:invoke", "atem:parameter", ("<atem:function_calls>\n", "\n</atem:function_calls>")
    ),
    "minicpm5": _elements("function", "param", ("", "")),
    "deepseek_v32": _elements(
        f"{_DSML}invoke",
        f"{_DSML}parameter",
        (f"<{_DSML}function_calls>\n", f"\n</{_DSML}function_calls>"),
        typed=' string="{text}"',
    ),
    "pythonic": Style(
        "{name}(",
        ")",
        Fields("{key}=", "", between=", ", python=True, json_text=True),
        ("<|tool_call_start|>[", "]<|tool_call_end|>"),
        ", ",
    ),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function_gemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
}
