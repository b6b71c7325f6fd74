"""Calls as call:name{key:value} with quotes of their own: Gemma 4, FunctionGemma."""

from __future__ import annotations

import re
from functools import partial

from mantou.chat.tools.calls import Calls
from mantou.chat.tools.reader import Reader, Steps
from mantou.chat.tools.splitter import ToolFormat
from mantou.chat.tools.values import Syntax, read_object

_NAME = re.compile(r"[\w.\-]+")


def _read(reader: Reader, calls: Calls, opener: str, *, syntax: Syntax) -> Steps[None]:
    yield from reader.space()
    yield from reader.expect("call:")
    more = True
    while more:
        calls.begin((yield from reader.run(_NAME)))
        yield from read_object(reader, calls.write, syntax)
        calls.end()
        yield from reader.space()
        more = bool((yield from reader.accept("call:")))


def _format(name: str, opener: str, closer: str, quote: str) -> ToolFormat:
    syntax = Syntax(verbatim=False, raw_quote=quote, bare=True)
    return ToolFormat(name, (opener,), partial(_read, syntax=syntax), (closer,), tags=(quote,))


GEMMA4 = _format("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _format("function_gemma", "<start_function_call>", "<end_function_call>", "<escape>")
