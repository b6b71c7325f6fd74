"""Calls as JSON objects with a name and arguments, between tags or bare: Hermes, Qwen, Llama 3, Granite and others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mantou.chat.tools.calls import Calls
from mantou.chat.tools.reader import Malformed, Reader, Steps, run_whole
from mantou.chat.tools.splitter import ToolFormat
from mantou.chat.tools.values import quoted, read_object, read_text, read_value

_NAMES = ("name", "tool_name", "function", "tool")
_ARGUMENTS = ("arguments", "parameters", "args")
_IDS = ("id", "tool_call_id", "type")


@dataclass(slots=True)
class _Object:
    """One call while its members come, in whatever order."""

    calls: Calls
    strict: bool  # a member that no call has means that this is none
    begun: bool = False
    early: list[str] = field(default_factory=list[str])  # arguments that came before the name

    @property
    def write(self) -> Callable[[str], None]:
        return self.calls.write if self.begun else self.early.append

    def begin(self, name: str) -> None:
        if self.begun:
            raise Malformed
        self.calls.begin(name)
        self.begun = True
        self.calls.write("".join(self.early))


def read_calls(reader: Reader, calls: Calls, opener: str) -> Steps[None]:
    """An object, or a list of them."""
    yield from reader.space()
    if not (yield from reader.accept("[")):
        yield from read_call(reader, calls)
        return
    separator = ","
    while separator == ",":
        yield from reader.space()
        yield from read_call(reader, calls)
        yield from reader.space()
        separator = yield from reader.expect(",", "]")


def read_call(reader: Reader, calls: Calls) -> Steps[None]:
    yield from reader.expect("{")
    yield from _read_members(reader, calls, strict=False)


def _read_bare(reader: Reader, calls: Calls, opener: str) -> Steps[None]:
    """Llama 3: behind its tag, or an answer that is nothing but objects."""
    if opener != "{":
        yield from reader.space()
        yield from reader.expect("{")
    yield from _read_members(reader, calls, strict=True)


def _read_members(reader: Reader, calls: Calls, *, strict: bool) -> Steps[None]:
    call = _Object(calls, strict)
    yield from _members(reader, call)
    if not call.begun:
        raise Malformed
    calls.end()


def _members(reader: Reader, call: _Object) -> Steps[None]:
    separator = ","
    while separator == ",":
        yield from reader.space()
        key = yield from read_text(reader)
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        yield from _member(reader, call, key)
        yield from reader.space()
        separator = yield from reader.expect(",", "}")


def _member(reader: Reader, call: _Object, key: str) -> Steps[None]:
    char = yield from reader.peek()
    if key in _NAMES and char == '"':
        call.begin((yield from read_text(reader)))
    elif key in _NAMES and char == "{":  # the name and the arguments are nested once more
        reader.take()
        yield from _members(reader, call)
    elif key in _ARGUMENTS:
        yield from _arguments(reader, call, char)
    elif call.strict and key not in _IDS:
        raise Malformed
    else:
        yield from read_value(reader, lambda text: None)


def _arguments(reader: Reader, call: _Object, char: str) -> Steps[None]:
    if char == "{":
        yield from read_value(reader, call.write)
    elif char == '"':
        call.write(_parsed((yield from read_text(reader))))
    else:
        yield from reader.expect("null")
        call.write("{}")


def _parsed(text: str) -> str:
    """Arguments that were written as a string. What is no object goes on under a name of its own."""
    inner, parts = Reader({}), list[str]()
    inner.feed(text)
    inner.end(cut=False)
    try:
        run_whole(read_object(inner, parts.append))
    except Malformed:
        return f'{{"_raw": {quoted(text)}}}'
    return "".join(parts)


HERMES = ToolFormat("hermes", ("<tool_call>",), read_calls, ("</tool_call>",))
LLAMA3 = ToolFormat("llama3", ("<|python_tag|>",), _read_bare, (";", "<|eom_id|>"), starts=("{",))
GRANITE = ToolFormat("granite", ("<|tool_call|>",), read_calls, ("<|/tool_call|>",))
NEMOTRON = ToolFormat("nemotron", ("<TOOLCALL>",), read_calls, ("</TOOLCALL>",))
COMMAND = ToolFormat("command", ("<|START_ACTION|>",), read_calls, ("<|END_ACTION|>",))
