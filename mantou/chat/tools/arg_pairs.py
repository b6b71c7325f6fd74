"""Calls as a name and pairs of <arg_key> and <arg_value>: GLM 4.5 to 4.7, Laguna, LongCat."""

from __future__ import annotations

import re
from functools import partial

from mantou.chat.tools.calls import Calls, Stripped, read_argument
from mantou.chat.tools.json_calls import read_call
from mantou.chat.tools.reader import NAME_LENGTH, Reader, Steps
from mantou.chat.tools.splitter import ToolFormat
from mantou.chat.tools.values import read_value

_NAME = re.compile(r"[^\s<>{}\ufdd0-\ufdef]+")


def _read(reader: Reader, calls: Calls, opener: str, *, prefix: str) -> Steps[None]:
    key, value = f"{prefix}arg_key>", f"{prefix}arg_value>"
    end = f"</{prefix}tool_call>"
    yield from reader.space()
    if (yield from reader.peek()) == "{":
        yield from read_call(reader, calls)
        return
    calls.begin((yield from reader.run(_NAME)))
    yield from _space(reader)
    if (yield from reader.peek()) == "{":
        yield from read_value(reader, calls.write)
        yield from reader.space()
        yield from reader.expect(end)
        calls.end()
        return
    while (yield from reader.expect(f"<{key}", end)) != end:
        name, _ = yield from reader.until(f"</{key}", limit=NAME_LENGTH)
        kinds = calls.field(name.strip())
        yield from _space(reader)
        yield from reader.expect(f"<{value}")
        yield from read_argument(reader, calls, kinds, Stripped, f"</{value}")
        yield from _space(reader)
    calls.end()


def _space(reader: Reader) -> Steps[None]:
    """White space; some templates taught the models to spell it."""
    yield from reader.space()
    while (yield from reader.accept("\\n")):
        yield from reader.space()


def _format(name: str, prefix: str = "") -> ToolFormat:
    tags = tuple(f"<{slash}{prefix}{tag}>" for tag in ("arg_key", "arg_value") for slash in ("", "/"))
    return ToolFormat(
        name,
        (f"<{prefix}tool_call>",),
        partial(_read, prefix=prefix),
        (f"</{prefix}tool_call>",),
        tags=tags,
    )


GLM = _format("glm47")
LAGUNA = _format("laguna")
LONGCAT = _format("longcat", "longcat_")
