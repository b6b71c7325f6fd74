"""An answer as Anthropic's content blocks: which is open, when it ends. Knows no bytes and no model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from uuid import uuid4

import msgspec

from mantou.api.anthropic.signature import sign
from mantou.api.anthropic.wire import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputDelta,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from mantou.data import TextEvent, ToolDelta

BlockEvent = BlockStart | BlockDelta | BlockStop


class BlockWriter:
    """Feed it every TextEvent of one answer, then `end`. One block is open at a time; a thinking block is signed.

    White space outside a text block waits: it belongs to the text that follows, or is layout between tool calls.
    """

    def __init__(self, *, show_thinking: bool) -> None:
        self._show_thinking = show_thinking
        self._open: Block | None = None
        self._num_blocks = 0
        self._call = -1  # index of the tool call that is open
        self._thought: list[str] = []
        self._space = ""

    def feed(self, event: TextEvent) -> list[BlockEvent]:
        """What became certain, in order."""
        written: list[BlockEvent] = []
        if event.reasoning:
            self._think(event.reasoning, written)
        if event.text:
            self._say(event.text, written)
        for delta in event.tools:
            self._use(delta, written)
        return written

    def end(self) -> list[BlockEvent]:
        """Closes what is open. An answer without any block gets one empty text block."""
        written: list[BlockEvent] = []
        if not self._num_blocks:
            self._begin(TextBlock(""), written)
            if self._space:
                self._add(TextDelta(self._space), written)
        self._close(written)
        return written

    def _think(self, reasoning: str, written: list[BlockEvent]) -> None:
        if not isinstance(self._open, ThinkingBlock):
            self._begin(ThinkingBlock("", ""), written)
        self._thought.append(reasoning)
        if self._show_thinking:
            self._add(ThinkingDelta(reasoning), written)

    def _say(self, text: str, written: list[BlockEvent]) -> None:
        if not isinstance(self._open, TextBlock):
            text = self._space + text
            if text.isspace():
                self._space = text
                return
            self._begin(TextBlock(""), written)
        self._add(TextDelta(text), written)

    def _use(self, delta: ToolDelta, written: list[BlockEvent]) -> None:
        if not isinstance(self._open, ToolUseBlock) or delta.index != self._call:
            self._begin(ToolUseBlock(_tool_use_id(delta.id), delta.name, {}), written)
            self._call = delta.index
        if delta.arguments:
            self._add(InputDelta(delta.arguments), written)

    def _begin(self, block: Block, written: list[BlockEvent]) -> None:
        self._close(written)
        if not isinstance(block, TextBlock):
            self._space = ""
        written.append(BlockStart(self._num_blocks, block))
        self._open = block
        self._num_blocks += 1

    def _add(
        self, delta: TextDelta | ThinkingDelta | InputDelta | SignatureDelta, written: list[BlockEvent]
    ) -> None:
        written.append(BlockDelta(self._num_blocks - 1, delta))

    def _close(self, written: list[BlockEvent]) -> None:
        if self._open is None:
            return
        if isinstance(self._open, ThinkingBlock):
            self._add(SignatureDelta(sign("".join(self._thought), shown=self._show_thinking)), written)
            self._thought.clear()
        if isinstance(self._open, TextBlock):
            self._space = ""
        written.append(BlockStop(self._num_blocks - 1))
        self._open = None


@dataclass(slots=True)
class _Whole:
    """The deltas of one block, by kind."""

    block: Block
    pieces: list[str]
    signature: str = ""

    def finished(self) -> Block:
        text = "".join(self.pieces)
        match self.block:
            case TextBlock():
                return TextBlock(text)
            case ThinkingBlock():
                return ThinkingBlock(text, self.signature)
            case ToolUseBlock(id=call_id, name=name):
                return ToolUseBlock(call_id, name, _tool_input(text))


def whole_blocks(events: Iterable[BlockEvent]) -> list[Block]:
    """The blocks that a client makes of these events."""
    found: list[_Whole] = []
    for event in events:
        match event:
            case BlockStart(content_block=block):
                found.append(_Whole(block, []))
            case BlockDelta(
                delta=TextDelta(text=piece) | ThinkingDelta(thinking=piece) | InputDelta(partial_json=piece)
            ):
                found[-1].pieces.append(piece)
            case BlockDelta(delta=SignatureDelta(signature=signature)):
                found[-1].signature = signature
            case _:
                pass
    return [entry.finished() for entry in found]


def _tool_use_id(call_id: str) -> str:
    """Anthropic's clients know a call by this beginning of its id."""
    return f"toolu_{call_id.removeprefix('call_') or uuid4().hex[:24]}"


def _tool_input(arguments: str) -> dict[str, object]:
    """The arguments as an object. What the model left unfinished or got wrong is kept as it is, under `_raw`."""
    if not arguments:
        return {}
    try:
        value: object = msgspec.json.decode(arguments)
    except msgspec.MsgspecError:
        value = None
    return value if isinstance(value, dict) else {"_raw": arguments}
