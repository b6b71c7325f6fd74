"""Answers of gpt-oss: messages on channels, a header before each; calls are messages with a recipient."""

from __future__ import annotations

import re
from contextlib import suppress

from mantou.chat.reasoning import CLOSE_MARK, OPEN_MARK, ReasoningFormat
from mantou.chat.tools.calls import Calls
from mantou.chat.tools.reader import CutOff, Malformed, Reader, Steps
from mantou.chat.tools.splitter import Piece, Pieces, ToolFormat, ToolSplitter
from mantou.chat.tools.values import read_object

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CALL, _CONSTRAIN = "<|call|>", "<|constrain|>"
_ANSWER = f"{_START}assistant"  # what follows the end of a message within an answer
_ENDS = ("<|end|>", _CALL, "<|return|>")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_HEADER_LENGTH = 512


def _split(splitter: ToolSplitter) -> Pieces:
    """analysis is reasoning; commentary to nobody and final are text; what has a recipient is a call."""
    with suppress(CutOff):
        if splitter.opened:
            yield from _body(splitter, CLOSE_MARK)
        while not splitter.done and (yield from splitter.reader.peek()):
            yield from _message(splitter)


def _message(splitter: ToolSplitter) -> Pieces:
    reader = splitter.reader
    reader.keep()
    head = yield from reader.accept(_START, _CHANNEL, _MESSAGE, " to=", "to=", *_ENDS)
    if head in _ENDS:
        return
    if head and head != _MESSAGE:
        try:
            rest, end = yield from reader.until(_MESSAGE, *_ENDS, limit=_HEADER_LENGTH)
        except Malformed:
            rest, end = "", ""
        if end != _MESSAGE:
            if not end:  # a text that only begins like a header
                yield Piece(reader.kept())
            return
        head += rest
    recipient = _RECIPIENT.search(head)
    if recipient is not None:
        name = recipient[1].removeprefix("functions.")
        yield from splitter.call(_read_call(reader, splitter.calls, name))
        return
    reader.release()
    if head.partition(_CHANNEL)[2].strip().startswith("analysis"):
        yield Piece(OPEN_MARK)
        yield from _body(splitter, CLOSE_MARK)
    else:
        yield from _body(splitter, "")


def _body(splitter: ToolSplitter, close: str) -> Pieces:
    """Text up to the end of its message, or up to the next header where the end was forgotten."""
    reader = splitter.reader
    while True:
        body, space, tag = reader.scan(*_ENDS, _START, _CHANNEL)
        if body:
            yield Piece(body)
        if tag:
            reader.skip(space, *((tag,) if tag in _ENDS else ()))
            yield Piece(space + close)
            return
        if reader.ended:
            return
        yield


def _read_call(reader: Reader, calls: Calls, name: str) -> Steps[None]:
    calls.begin(name)
    yield from reader.space()
    if not (yield from reader.accept(*_ENDS)):
        yield from read_object(reader, calls.write)
        yield from reader.space()
        # The end of a call is usually an end of sequence, too, and then never seen.
        if not (yield from reader.accept(*_ENDS)) and (yield from reader.peek()):
            raise Malformed
    calls.end()


def _no_openers(reader: Reader, calls: Calls, opener: str) -> Steps[None]:
    raise Malformed
    yield


HARMONY = ToolFormat(
    "harmony",
    (),
    _no_openers,
    tags=(_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS),
    split=_split,
    reasoning=ReasoningFormat(
        "gpt-oss-channels", f"{_CHANNEL}analysis{_MESSAGE}", "<|end|>", marked=True, after=_ANSWER
    ),
)
