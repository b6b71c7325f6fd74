"""Calls as Python calls with keyword arguments, in a list (LFM2) or in a fence (MiniCPM3)."""

from __future__ import annotations

import re

from mantou.chat.tools.calls import Calls
from mantou.chat.tools.reader import Reader, Steps
from mantou.chat.tools.splitter import ToolFormat
from mantou.chat.tools.values import PYTHON, read_value

_NAME = re.compile(r"[\w.\-]+")
_KEY = re.compile(r"\w+")


def _read(reader: Reader, calls: Calls, opener: str) -> Steps[None]:
    yield from reader.space()
    begins = yield from reader.accept("[", "```python", "```")
    more = True
    while more:
        yield from reader.space()
        name = yield from reader.run(_NAME)
        yield from reader.expect("(")
        calls.begin(name)
        yield from _arguments(reader, calls)
        calls.end()
        yield from reader.space()
        if begins == "[":
            more = (yield from reader.expect(",", "]")) == ","
        else:
            more = bool(begins) and not (yield from reader.accept("```"))


def _arguments(reader: Reader, calls: Calls) -> Steps[None]:
    yield from reader.space()
    separator = yield from reader.accept(")")
    while separator != ")":
        key = yield from reader.run(_KEY)
        yield from reader.space()
        yield from reader.expect("=")
        calls.field(key)
        yield from read_value(reader, calls.write, PYTHON)
        yield from reader.space()
        separator = yield from reader.expect(",", ")")
        yield from reader.space()
        separator = (yield from reader.accept(")")) or separator


PYTHONIC = ToolFormat("pythonic", ("<|tool_call_start|>",), _read, ("<|tool_call_end|>",))
