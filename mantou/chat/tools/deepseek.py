"""Calls of DeepSeek V3 and R1 (a type, a name, fenced JSON) and of V3.1 (a name, JSON)."""

from __future__ import annotations

import re

from mantou.chat.tools.calls import Calls
from mantou.chat.tools.reader import NAME_LENGTH, Reader, Steps
from mantou.chat.tools.splitter import ToolFormat
from mantou.chat.tools.values import read_object


def _tag(name: str) -> str:
    return f"<\uff5ctool\u2581{name}\uff5c>"


_SECTION, _SECTION_END = _tag("calls\u2581begin"), _tag("calls\u2581end")
_CALL, _SEP, _CALL_END = _tag("call\u2581begin"), _tag("sep"), _tag("call\u2581end")
_NAME = re.compile(r"[^\s<>`\ufdd0-\ufdef]+")


def _read(reader: Reader, calls: Calls, opener: str) -> Steps[None]:
    if opener == _SECTION:
        yield from reader.space()
        yield from reader.expect(_CALL)
    yield from reader.space()
    head, _ = yield from reader.until(_SEP, limit=NAME_LENGTH)
    fence = ""
    if head.strip() == "function":
        name = yield from reader.run(_NAME)
        yield from reader.space()
        fence = yield from reader.accept("```json", "```")
    else:
        name = head.strip()
    calls.begin(name)
    yield from read_object(reader, calls.write)
    yield from reader.space()
    if fence:
        yield from reader.expect("```")
        yield from reader.space()
    yield from reader.expect(_CALL_END)
    calls.end()


DEEPSEEK = ToolFormat("deepseek", (_SECTION, _CALL), _read, (_SECTION_END, _CALL_END), tags=(_SEP,))
