"""An answer as output items of the Responses API: which is open, when it ends, its events. Knows no bytes, no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

from msgspec import UNSET

from mantou.api.anthropic.signature import sign
from mantou.api.openai.wire import TokenLogprob
from mantou.api.responses.custom import CustomInput
from mantou.api.responses.items import new_id
from mantou.api.responses.tools import Tool, Toolbox
from mantou.api.responses.wire import (
    ArgumentsDelta,
    ArgumentsDone,
    CustomCallItem,
    CustomInputDelta,
    CustomInputDone,
    Event,
    FunctionCallItem,
    Item,
    ItemAdded,
    ItemDone,
    ItemStatus,
    MessageItem,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    PartAdded,
    PartDone,
    ReasoningItem,
    SummaryDelta,
    SummaryDone,
    SummaryPartAdded,
    SummaryPartDone,
    SummaryText,
)
from mantou.data import TextEvent, TokenLogprobs, ToolDelta

Number = Callable[[], int]  # the next sequence number
ReadLogprobs = Callable[[Sequence[TokenLogprobs]], list[TokenLogprob]]


class _Open(Protocol):
    """An item on its way, at `index` of the output."""

    def begin(self) -> list[Event]: ...
    def item(self, status: ItemStatus) -> Item:
        """As far as it has come."""
        ...

    def close(self, status: ItemStatus) -> list[Event]: ...


class _Message:
    def __init__(self, number: Number, index: int) -> None:
        self._number, self._index, self._id = number, index, new_id("msg")
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def begin(self) -> list[Event]:
        return [
            ItemAdded(self._number(), self._index, MessageItem(self._id, "in_progress", [])),
            PartAdded(self._number(), self._id, self._index, OutputText("")),
        ]

    def add(self, text: str, logprobs: list[TokenLogprob]) -> Event:
        self._pieces.append(text)
        self._logprobs += logprobs
        return OutputTextDelta(self._number(), self._id, self._index, text, logprobs)

    def item(self, status: ItemStatus) -> Item:
        return MessageItem(self._id, status, [self._part()])

    def close(self, status: ItemStatus) -> list[Event]:
        part = self._part()
        return [
            OutputTextDone(self._number(), self._id, self._index, part.text, part.logprobs),
            PartDone(self._number(), self._id, self._index, part),
            ItemDone(self._number(), self._index, MessageItem(self._id, status, [part])),
        ]

    def _part(self) -> OutputText:
        return OutputText("".join(self._pieces), [], list(self._logprobs))


class _Reasoning:
    def __init__(self, number: Number, index: int, *, carried: bool) -> None:
        self._number, self._index, self._id = number, index, new_id("rs")
        self._carried = carried
        self._pieces: list[str] = []

    def begin(self) -> list[Event]:
        return [
            ItemAdded(self._number(), self._index, ReasoningItem(self._id, "in_progress", [])),
            SummaryPartAdded(self._number(), self._id, self._index, SummaryText("")),
        ]

    def add(self, text: str) -> Event:
        self._pieces.append(text)
        return SummaryDelta(self._number(), self._id, self._index, text)

    def item(self, status: ItemStatus) -> Item:
        text = "".join(self._pieces)
        carried = sign(text, shown=False) if self._carried else UNSET
        return ReasoningItem(self._id, status, [SummaryText(text)], carried)

    def close(self, status: ItemStatus) -> list[Event]:
        text = "".join(self._pieces)
        return [
            SummaryDone(self._number(), self._id, self._index, text),
            SummaryPartDone(self._number(), self._id, self._index, SummaryText(text)),
            ItemDone(self._number(), self._index, self.item(status)),
        ]


class _Function:
    def __init__(self, number: Number, index: int, tool: Tool, call_id: str) -> None:
        self._number, self._index, self._id = number, index, new_id("fc")
        self._tool, self._call_id = tool, call_id
        self._pieces: list[str] = []

    def begin(self) -> list[Event]:
        return [ItemAdded(self._number(), self._index, self.item("in_progress"))]

    def add(self, arguments: str) -> list[Event]:
        self._pieces.append(arguments)
        return [ArgumentsDelta(self._number(), self._id, self._index, arguments)]

    def item(self, status: ItemStatus) -> Item:
        return FunctionCallItem(
            self._id,
            status,
            self._call_id,
            self._tool.own_name,
            "".join(self._pieces),
            self._tool.namespace or UNSET,
        )

    def close(self, status: ItemStatus) -> list[Event]:
        return [
            ArgumentsDone(self._number(), self._id, self._index, "".join(self._pieces)),
            ItemDone(self._number(), self._index, self.item(status)),
        ]


class _Custom:
    def __init__(self, number: Number, index: int, tool: Tool, call_id: str) -> None:
        self._number, self._index, self._id = number, index, new_id("ctc")
        self._tool, self._call_id = tool, call_id
        self._input = CustomInput()
        self._pieces: list[str] = []

    def begin(self) -> list[Event]:
        return [ItemAdded(self._number(), self._index, self.item("in_progress"))]

    def add(self, arguments: str) -> list[Event]:
        return self._said(self._input.feed(arguments))

    def item(self, status: ItemStatus) -> Item:
        return CustomCallItem(
            self._id,
            status,
            self._call_id,
            self._tool.own_name,
            "".join(self._pieces),
            self._tool.namespace or UNSET,
        )

    def close(self, status: ItemStatus) -> list[Event]:
        return [
            *self._said(self._input.end()),
            CustomInputDone(self._number(), self._id, self._index, "".join(self._pieces)),
            ItemDone(self._number(), self._index, self.item(status)),
        ]

    def _said(self, text: str) -> list[Event]:
        if not text:
            return []
        self._pieces.append(text)
        return [CustomInputDelta(self._number(), self._id, self._index, text)]


class ItemWriter:
    """Feed it every TextEvent of one answer, then `end`. One item is open at a time.

    White space outside a message waits: it belongs to the text that follows, or is layout between tool calls. Calls
    beyond `most_calls` are ignored, as the API says.
    """

    def __init__(
        self,
        toolbox: Toolbox,
        *,
        most_calls: int | None = None,
        carries_reasoning: bool = False,
        read_logprobs: ReadLogprobs | None = None,
    ) -> None:
        self.number: Number = count().__next__
        self._toolbox = toolbox
        self._most_calls = most_calls
        self._carries = carries_reasoning
        self._read_logprobs = read_logprobs
        self._done: list[Item] = []
        self._open: _Open | None = None
        self._call = -1  # index of the tool call that is open
        self._space = ""
        self._space_logprobs: list[TokenLogprob] = []

    @property
    def output(self) -> list[Item]:
        """All items, the last one as far as it has come."""
        return [*self._done, *([self._open.item("in_progress")] if self._open else [])]

    def feed(self, event: TextEvent) -> list[Event]:
        """What became certain, in order."""
        written: list[Event] = []
        if event.reasoning:
            self._think(event.reasoning, written)
        if event.text:
            self._say(event.text, self._logprobs(event), written)
        for delta in event.tools:
            self._use(delta, written)
        return written

    def end(self, status: ItemStatus) -> list[Event]:
        """Closes what is open. A complete answer without any item gets one message without text."""
        written: list[Event] = []
        if self._open is None and not self._done and status == "completed":
            self._say_first(written)
        self._close(status, written)
        return written

    def _logprobs(self, event: TextEvent) -> list[TokenLogprob]:
        return self._read_logprobs(event.logprobs) if self._read_logprobs else []

    def _think(self, reasoning: str, written: list[Event]) -> None:
        item = self._open
        if not isinstance(item, _Reasoning):
            item = _Reasoning(self.number, self._next_index(written), carried=self._carries)
            self._begin(item, written)
        written.append(item.add(reasoning))

    def _say(self, text: str, logprobs: list[TokenLogprob], written: list[Event]) -> None:
        item = self._open
        if isinstance(item, _Message):
            written.append(item.add(text, logprobs))
            return
        self._space += text
        self._space_logprobs += logprobs
        if not self._space.isspace():
            self._say_first(written)

    def _say_first(self, written: list[Event]) -> None:
        item = _Message(self.number, self._next_index(written))
        self._begin(item, written)
        if self._space:
            written.append(item.add(self._space, self._space_logprobs))
        self._drop_space()

    def _use(self, delta: ToolDelta, written: list[Event]) -> None:
        if self._most_calls is not None and delta.index >= self._most_calls:
            return
        item = self._open
        if not isinstance(item, _Function | _Custom) or delta.index != self._call:
            tool = self._toolbox.named(delta.name)
            kind = _Custom if tool.custom else _Function
            item = kind(self.number, self._next_index(written), tool, delta.id or new_id("call"))
            self._begin(item, written)
            self._call = delta.index
        if delta.arguments:
            written += item.add(delta.arguments)

    def _next_index(self, written: list[Event]) -> int:
        """Where the next item goes, once the open one is done."""
        self._close("completed", written)
        return len(self._done)

    def _begin(self, item: _Open, written: list[Event]) -> None:
        self._open = item
        written += item.begin()
        if not isinstance(item, _Message):
            self._drop_space()

    def _drop_space(self) -> None:
        self._space, self._space_logprobs = "", []

    def _close(self, status: ItemStatus, written: list[Event]) -> None:
        if self._open is not None:
            written += self._open.close(status)
            self._done.append(self._open.item(status))
            self._open = None
