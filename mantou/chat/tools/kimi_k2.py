"""Calls of Kimi K2: a section of calls, each with an id that holds the name, and JSON arguments."""

from __future__ import annotations

import re

from mantou.chat.tools.calls import Calls
from mantou.chat.tools.reader import NAME_LENGTH, Malformed, Reader, Steps
from mantou.chat.tools.splitter import ToolFormat
from mantou.chat.tools.values import read_object

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?(.+?):\d+\Z", re.DOTALL)


def _read(reader: Reader, calls: Calls, opener: str) -> Steps[None]:
    """The model's own id is the call's: its template writes nothing else of a call's head into the history."""
    if opener == _SECTION:
        yield from reader.space()
        yield from reader.expect(_CALL)
    head, _ = yield from reader.until(_ARGUMENTS, limit=NAME_LENGTH)
    found = _ID.match(head.strip())
    if found is None:
        raise Malformed
    calls.begin(found[1], head.strip())
    yield from read_object(reader, calls.write)
    yield from reader.space()
    yield from reader.expect(_CALL_END)
    calls.end()


KIMI_K2 = ToolFormat("kimi_k2", (_SECTION, _CALL), _read, (_SECTION_END, _CALL_END), tags=(_ARGUMENTS,))
