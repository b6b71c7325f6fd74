"""The text side of one request: token events in, text events out. Knows no arrays, no HTTP, no engine.

Order: ids -> text (incomplete characters withheld) -> tool calls -> stop strings -> reasoning split. So a stop
string is matched on the text as the model writes it, reasoning and its tags included, but never inside a
tool call; a tag that is a special token ends a match.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from mantou.chat.reasoning import CLOSE_MARK, OPEN_MARK, ReasoningFormat, ReasoningSplitter
from mantou.chat.stops import make_stops
from mantou.chat.tokenizer import Tokenizer
from mantou.chat.tools import ToolSplitter, ToolUse
from mantou.data import FinishReason, TextEvent, TokenEvent, TokenLogprobs, ToolDelta

if TYPE_CHECKING:
    from mantou.chat.tools.splitter import Piece

TextFinish = FinishReason | Literal["tool_calls"]
_MARKS = re.compile("[\ufdd0-\ufdef]")


class TextStream:
    """Feed it every TokenEvent of one request, in order. How ids are cut into events does not matter.

    Attributes
        finished: the text has ended. If a stop string or the only allowed tool call did it, the engine's row is to
            be cancelled; later events are ignored.
        num_tokens: tokens consumed up to the finish. After a stop this is the completion length, whatever the
            engine ran ahead. The end-of-sequence token is never in an event, so it is not counted here.
        num_reasoning_tokens: those of them that were reasoning, its tags included; usage carries this number.

    Logprobs travel with the text: those of a token come in the first event that shows a character of it, or,
    for a token without text of its own, with those of the next one. (The reasoning split may hold part of a
    tag longer.) After a stop the tokens whose text starts at the match or behind it are left out, as their
    text is. Without a stop all come, the rest in the last event.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        reasoning: ReasoningFormat | None = None,
        reasoning_open: bool = False,
        tools: ToolUse | None = None,
        after: Sequence[int] = (),
    ) -> None:
        """`after`: the prompt's ids where the text continues the prompt (a completion, a continued message).

        Raises BadRequest for an empty stop string.
        """
        self.finished = False
        self.num_tokens = self.num_reasoning_tokens = 0
        self._detokenizer = tokenizer.detokenizer(after)
        self._stops = make_stops(stop)
        self._splitter = ReasoningSplitter(reasoning, opened=reasoning_open) if reasoning else None
        self._reasons = self._splitter is not None and self._splitter.inside  # after the last token
        ids = reasoning.ids if reasoning else None
        self._marks: dict[int, str] = dict(zip(ids, (OPEN_MARK, CLOSE_MARK), strict=True)) if ids else {}
        self._tools = (
            ToolSplitter(tools, inside=self._inside_reasoning, opened=reasoning_open) if tools else None
        )
        if tools is not None:
            self._marks.update(tools.form.ids)
        self._marked = bool(self._marks) or bool(reasoning and reasoning.marked)
        self._passed: list[str] = []  # text behind the stops, before the split
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._deltas: list[ToolDelta] = []
        self._logprobs: deque[tuple[int, TokenLogprobs]] = (
            deque()
        )  # (where the token's text starts, its logprobs)
        self._num_in = 0  # characters that went in
        self._num_out = 0  # characters that came out behind the stops, or were a part of a call

    def feed(self, event: TokenEvent) -> TextEvent:
        """What became certain. `finish` is set in the last result only."""
        if self.finished:
            return TextEvent()
        for index, token in enumerate(event.tokens):
            if event.logprobs:
                self._logprobs.append((self._num_in, event.logprobs[index]))
            self.num_tokens += 1
            self._take(self._text_of(token))
            self._count_reasoning()
            if self._over:
                return self._result(event, ended=True)
        if event.finish is not None:
            self._take(self._unmarked(self._detokenizer.flush()))
            if self._tools is not None and not self._over:
                self._take_pieces(self._tools.end(cut=event.finish != "stop"))
            if not self._over:
                self._flush_stops()
        return self._result(event, ended=event.finish is not None)

    @property
    def _over(self) -> bool:
        """Something in the text has ended it."""
        return self._stops.matched is not None or (self._tools is not None and self._tools.done)

    def _count_reasoning(self) -> None:
        """Whether the last token was inside reasoning, or opened or closed it."""
        if self._splitter is None:
            return
        before = self._reasons
        self._settle()
        self._reasons = self._splitter.inside
        self.num_reasoning_tokens += before or self._reasons

    def _text_of(self, token: int) -> str:
        mark = self._marks.get(token)
        if mark is not None:
            return self._unmarked(self._detokenizer.flush()) + mark
        return self._unmarked(self._detokenizer.push((token,)))

    def _unmarked(self, text: str) -> str:
        """A model may spell even a noncharacter; only tags may be read as tags."""
        return _MARKS.sub("\ufffd", text) if self._marked else text

    def _take(self, text: str) -> None:
        if not text:
            return
        self._num_in += len(text)
        if self._tools is None:
            self._pass(text, len(text))
        else:
            self._take_pieces(self._tools.feed(text))

    def _take_pieces(self, pieces: Iterable[Piece]) -> None:
        """Takes each piece before the next is made, which may ask where the text so far ends."""
        for piece in pieces:
            if self._stops.matched is not None:
                return
            self._deltas += piece.tools
            self._pass(piece.text, piece.size)

    def _pass(self, text: str, size: int) -> None:
        """Text that stands for `size` characters of the answer, through the stops."""
        passed = self._stops.feed(text) if text else ""
        self._num_out += size - len(text) + len(passed)
        self._passed.append(passed)

    def _flush_stops(self) -> None:
        rest = self._stops.flush()
        self._num_out += len(rest)
        self._passed.append(rest)

    def _inside_reasoning(self) -> bool:
        """Whether the text so far ends inside reasoning. What asks is a tag, and a tag ends a match."""
        self._flush_stops()
        self._settle()
        return self._splitter is not None and self._splitter.inside

    def _settle(self) -> None:
        """Splits what has passed the stops."""
        text = "".join(self._passed)
        self._passed.clear()
        if self._splitter is None:
            self._content.append(text)
        elif text:
            self._add(self._splitter.feed(text))

    def _add(self, parts: tuple[str, str]) -> None:
        self._content.append(parts[0])
        self._reasoning.append(parts[1])

    def _result(self, event: TokenEvent, *, ended: bool) -> TextEvent:
        self.finished = ended
        self._settle()
        if ended and self._splitter is not None:
            self._add(self._splitter.flush())
        usage = event.usage
        if self._over and usage is not None:  # the engine had ended the sequence further on
            usage = replace(usage, completion_tokens=self.num_tokens)
        if usage is not None and self.num_reasoning_tokens:
            usage = replace(usage, reasoning_tokens=self.num_reasoning_tokens)
        result = TextEvent(
            text="".join(self._content),
            reasoning="".join(self._reasoning),
            tools=tuple(self._deltas),
            logprobs=self._shown_logprobs(everything=ended and not self._over),
            finish=self._finish(event),
            stop_sequence=self._stops.matched,
            error=None if self._over else event.error,
            usage=usage,
        )
        self._content.clear()
        self._reasoning.clear()
        self._deltas.clear()
        return result

    def _finish(self, event: TokenEvent) -> TextFinish | None:
        """A model that stopped after it had called tools waits for their results."""
        finish = "stop" if self._over else event.finish
        called = self._tools is not None and self._tools.num_calls > 0
        return "tool_calls" if called and finish == "stop" else finish

    def _shown_logprobs(self, *, everything: bool) -> tuple[TokenLogprobs, ...]:
        shown: list[TokenLogprobs] = []
        while self._logprobs and (everything or self._logprobs[0][0] < self._num_out):
            shown.append(self._logprobs.popleft()[1])
        return tuple(shown)
