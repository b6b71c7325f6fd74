"""Calls of Mistral: a tag, then name[ARGS]{...} or a JSON list."""

from __future__ import annotations

import re

from mantou.chat.tools.calls import Calls
from mantou.chat.tools.json_calls import read_calls
from mantou.chat.tools.reader import Reader, Steps
from mantou.chat.tools.splitter import ToolFormat
from mantou.chat.tools.values import read_object

_OPENER, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[\w.\-]+")


def _read(reader: Reader, calls: Calls, opener: str) -> Steps[None]:
    yield from reader.space()
    if (yield from reader.peek()) in ("[", "{"):
        yield from read_calls(reader, calls, opener)
        return
    more = True
    while more:
        name = yield from reader.run(_NAME)
        yield from reader.space()
        if (yield from reader.accept(_ID)):
            yield from reader.run(_NAME)
        yield from reader.accept(_ARGUMENTS)
        calls.begin(name)
        yield from read_object(reader, calls.write)
        calls.end()
        yield from reader.space()
        more = bool(_NAME.match((yield from reader.peek())))


MISTRAL = ToolFormat("mistral", (_OPENER,), _read, tags=(_ARGUMENTS, _ID))
