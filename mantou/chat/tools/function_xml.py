"""Calls as <function=name> with <parameter=key> inside: Qwen3-Coder, Qwen3.5, Seed-OSS."""

from __future__ import annotations

import re

from mantou.chat.tools.calls import Calls, Lines, read_argument
from mantou.chat.tools.json_calls import read_call
from mantou.chat.tools.reader import NAME_LENGTH, Reader, Steps
from mantou.chat.tools.splitter import ToolFormat

_NAME = re.compile(r"[^\s<>\ufdd0-\ufdef]+")


def _read(reader: Reader, calls: Calls, opener: str) -> Steps[None]:
    if opener != "<function=":
        yield from reader.space()
        if (yield from reader.peek()) == "{":  # what the smaller ones of these models also write
            yield from read_call(reader, calls)
            return
        yield from reader.expect("<function=")
    calls.begin((yield from _name(reader)))
    while True:
        yield from reader.space()
        if (yield from reader.expect("<parameter=", "</function>")) == "</function>":
            calls.end()
            return
        kinds = calls.field((yield from _name(reader)))
        yield from read_argument(reader, calls, kinds, Lines, "</parameter>")


def _name(reader: Reader) -> Steps[str]:
    yield from reader.space()
    name = yield from reader.run(_NAME, NAME_LENGTH)
    yield from reader.space()
    yield from reader.expect(">")
    return name


QWEN3_CODER = ToolFormat("qwen3_coder", ("<tool_call>", "<function="), _read, ("</tool_call>", "</function>"))
SEED = ToolFormat("seed", ("<seed:tool_call>", "<function="), _read, ("</seed:tool_call>", "</function>"))
