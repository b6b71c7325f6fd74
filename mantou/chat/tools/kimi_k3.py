"""Answers of Kimi K3: nested blocks for reasoning, text and calls, with typed arguments."""

from __future__ import annotations

import re
from typing import Any

from mantou.chat.reasoning import CLOSE_MARK, OPEN_MARK, ReasoningFormat
from mantou.chat.tools.calls import TEXT, Calls, Whole, read_argument
from mantou.chat.tools.reader import NAME_LENGTH, Malformed, Reader, Steps
from mantou.chat.tools.splitter import ToolFormat
from mantou.chat.tools.values import read_object

_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def _end(block: str) -> str:
    return f"{_CLOSE}{block}{_SEP}"


def _start(block: str) -> str:
    return f"{_OPEN}{block}{_SEP}"


def _read(reader: Reader, calls: Calls, opener: str) -> Steps[None]:
    if opener == _start("tools"):
        yield from reader.space()
        yield from reader.expect(f"{_OPEN}call ")
    attributes = yield from _attributes(reader)
    calls.begin(attributes.get("tool", ""))
    while True:
        yield from reader.space()
        block = yield from reader.expect(f"{_OPEN}argument ", f"{_OPEN}json ", _end("call"))
        if block == _end("call"):
            calls.end()
            return
        attributes = yield from _attributes(reader)
        if block == f"{_OPEN}json ":
            yield from read_object(reader, calls.write)
            yield from reader.space()
            yield from reader.expect(_end("json"))
        elif "key" not in attributes:
            raise Malformed
        else:
            calls.field(attributes["key"])
            kinds = TEXT if attributes.get("type", "string") == "string" else frozenset[str]()
            yield from read_argument(reader, calls, kinds, Whole, _end("argument"))


def _attributes(reader: Reader) -> Steps[dict[str, str]]:
    text, end = yield from reader.until(_SEP, limit=2 * NAME_LENGTH)
    if not end:
        raise Malformed
    found: list[Any] = _ATTRIBUTE.findall(text)
    return {name: value.replace("&quot;", '"').replace("&amp;", "&") for name, value in found}


KIMI_K3 = ToolFormat(
    "kimi_k3",
    (_start("tools"), f"{_OPEN}call "),
    _read,
    (_end("tools"), _end("call")),
    tags=(_OPEN, _CLOSE, _SEP),
    rewrites={
        _start("think"): OPEN_MARK,
        _end("think"): CLOSE_MARK,
        _start("response"): "",
        _end("response"): "",
        _end("message"): "",
    },
    reasoning=ReasoningFormat("kimi-think", _start("think"), _end("think"), marked=True),
)
