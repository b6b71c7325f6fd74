"""The text side of one request: token events in, text events out. Knows no arrays, no HTTP, no engine.

Order: ids -> text (incomplete characters withheld) -> stop strings -> reasoning split. So a stop string is
matched on the text as the model writes it, reasoning and its tags included; a tag that is a special token
ends a match.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from mantou.chat.reasoning import CLOSE_MARK, OPEN_MARK, ReasoningFormat, ReasoningSplitter
from mantou.chat.stops import make_stops
from mantou.chat.tokenizer import Tokenizer
from mantou.data import TextEvent, TokenEvent, TokenLogprobs


class TextStream:
    """Feed it every TokenEvent of one request, in order. How ids are cut into events does not matter.

    Attributes
        finished: the text has ended. If a stop string did it, the engine's row is to be cancelled; later
        events
            are ignored.
        num_tokens: tokens consumed up to the finish. After a stop this is the completion length, whatever the
            engine ran ahead. The end-of-sequence token is never in an event, so it is not counted here.

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
        after: Sequence[int] = (),
    ) -> None:
        """`after`: the prompt's ids where the text continues the prompt (a completion, a continued message).

        Raises BadRequest for an empty stop string.
        """
        self.finished = False
        self.num_tokens = 0
        self._detokenizer = tokenizer.detokenizer(after)
        self._stops = make_stops(stop)
        self._splitter = ReasoningSplitter(reasoning, opened=reasoning_open) if reasoning else None
        ids = reasoning.ids if reasoning else None
        self._marks = dict(zip(ids, (OPEN_MARK, CLOSE_MARK), strict=True)) if ids else {}
        self._logprobs: deque[tuple[int, TokenLogprobs]] = (
            deque()
        )  # (where the token's text starts, its logprobs)
        self._num_in = 0  # characters that went into the stop matcher
        self._num_out = 0  # characters that came out

    def feed(self, event: TokenEvent) -> TextEvent:
        """What became certain. `finish` is set in the last result only."""
        if self.finished:
            return TextEvent()
        parts: list[str] = []
        for index, token in enumerate(event.tokens):
            if event.logprobs:
                self._logprobs.append((self._num_in, event.logprobs[index]))
            self.num_tokens += 1
            parts.append(self._pass(self._text_of(token)))
            if self._stops.matched is not None:
                return self._result(event, parts, ended=True)
        if event.finish is not None:
            parts.append(self._pass(self._unmarked(self._detokenizer.flush())))
            if self._stops.matched is None:
                rest = self._stops.flush()
                self._num_out += len(rest)
                parts.append(rest)
        return self._result(event, parts, ended=event.finish is not None)

    def _text_of(self, token: int) -> str:
        mark = self._marks.get(token)
        if mark is not None:
            return self._unmarked(self._detokenizer.flush()) + mark
        return self._unmarked(self._detokenizer.push((token,)))

    def _unmarked(self, text: str) -> str:
        """A model may spell even a noncharacter; only tags may be read as tags."""
        if self._marks and (OPEN_MARK in text or CLOSE_MARK in text):
            text = text.replace(OPEN_MARK, "\ufffd").replace(CLOSE_MARK, "\ufffd")
        return text

    def _pass(self, text: str) -> str:
        if not text:
            return ""
        self._num_in += len(text)
        text = self._stops.feed(text)
        self._num_out += len(text)
        return text

    def _result(self, event: TokenEvent, parts: Sequence[str], *, ended: bool) -> TextEvent:
        self.finished = ended
        content, reasoning = self._split("".join(parts), ended=ended)
        matched = self._stops.matched
        usage = event.usage
        if matched is not None and usage is not None:  # the engine had ended the sequence further on
            usage = replace(usage, completion_tokens=self.num_tokens)
        return TextEvent(
            text=content,
            reasoning=reasoning,
            logprobs=self._shown_logprobs(everything=ended and matched is None),
            finish="stop" if matched is not None else event.finish,
            stop_sequence=matched,
            error=event.error if matched is None else None,
            usage=usage,
        )

    def _split(self, text: str, *, ended: bool) -> tuple[str, str]:
        if self._splitter is None:
            return text, ""
        content, reasoning = self._splitter.feed(text) if text else ("", "")
        if not ended:
            return content, reasoning
        more_content, more_reasoning = self._splitter.flush()
        return content + more_content, reasoning + more_reasoning

    def _shown_logprobs(self, *, everything: bool) -> tuple[TokenLogprobs, ...]:
        shown: list[TokenLogprobs] = []
        while self._logprobs and (everything or self._logprobs[0][0] < self._num_out):
            shown.append(self._logprobs.popleft()[1])
        return tuple(shown)
