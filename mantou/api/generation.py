"""The sequences of one HTTP response while they run: submit, collect, stop, give up. Knows no dialect and no SSE."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mantou.api.envelope import current
from mantou.api.faults import RequestFailed
from mantou.data import (
    FillUsage,
    Request,
    SpeculationUsage,
    TextEvent,
    TokenEvent,
    TokenLogprobs,
    ToolCall,
    ToolDelta,
    Usage,
)
from mantou.errors import MantouError, QueueFull

if TYPE_CHECKING:
    from mantou.api.service import Loaded, Service
    from mantou.chat.reasoning import ReasoningFormat
    from mantou.chat.tools import ToolUse


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One answer to make: a sequence for the engine, and how its tokens become text."""

    request: Request
    stop: tuple[str, ...] = ()
    reasoning: ReasoningFormat | None = None
    reasoning_open: bool = False
    prompt: int = 0  # which prompt of the body it answers; answers to one prompt bill it once
    tools: ToolUse | None = None
    continues: bool = False  # the answer goes on in the prompt's last text, not after a turn's header


@dataclass(slots=True)
class Answer:
    """What one sequence has said, folded together."""

    text: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    tools: list[ToolDelta] = field(default_factory=list[ToolDelta])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    events: list[TextEvent] = field(default_factory=list[TextEvent])  # as they came, in order
    finish: str | None = None

    def add(self, event: TextEvent) -> None:
        self.events.append(event)
        if event.text:
            self.text.append(event.text)
        if event.reasoning:
            self.reasoning.append(event.reasoning)
        self.tools.extend(event.tools)
        self.logprobs.extend(event.logprobs)
        if event.finish is not None:
            self.finish = event.finish

    def calls(self) -> tuple[ToolCall, ...]:
        """The tool calls, whole and in order."""
        found: dict[int, list[ToolDelta]] = {}
        for delta in self.tools:
            found.setdefault(delta.index, []).append(delta)
        return tuple(
            ToolCall(deltas[0].id, deltas[0].name, "".join(delta.arguments for delta in deltas))
            for deltas in found.values()
        )


class _Row:
    """One sequence: its text so far, and when its last token came."""

    __slots__ = ("_seen_at", "_stopped", "_stream", "index", "plan", "usage")

    def __init__(self, index: int, plan: RowPlan, loaded: Loaded) -> None:
        self.index = index
        self.plan = plan
        self.usage: Usage | None = None
        # The text side pulls in the tokenizer library, which /health must not wait for.
        from mantou.chat.stream import TextStream

        self._stream = TextStream(
            loaded.tokenizer,
            stop=plan.stop,
            reasoning=plan.reasoning,
            reasoning_open=plan.reasoning_open,
            tools=plan.tools,
            after=plan.request.prompt if plan.continues else (),
        )
        self._stopped: TextEvent | None = None
        self._seen_at: float | None = None

    @property
    def stopping(self) -> bool:
        """The text has ended (a stop string, the only tool call), and the engine has not said its last word yet."""
        return self._stopped is not None and self.usage is None

    def feed(self, event: TokenEvent) -> TextEvent | None:
        """The text that this event makes certain. Raises RequestFailed if the engine gave the sequence up."""
        if self._stopped is not None:
            return self._end_stopped(event)
        if event.finish in ("error", "cancelled"):
            raise RequestFailed(event.error or "The server stopped this request before it was finished.")
        text = self._stream.feed(event)
        if event.finish is not None:
            self.usage = text.usage or Usage(
                len(self.plan.request.prompt),
                self._stream.num_tokens,
                reasoning_tokens=self._stream.num_reasoning_tokens,
            )
            return replace(text, usage=self.usage)
        if text.finish is None:
            return text
        self._stopped = text
        return replace(text, finish=None)

    def _end_stopped(self, event: TokenEvent) -> TextEvent | None:
        """The engine may have run past the end of the text; only the tokens up to it count."""
        if event.finish is None or self._stopped is None:
            return None
        spent = event.usage or Usage(len(self.plan.request.prompt), 0)
        self.usage = replace(
            spent,
            completion_tokens=self._stream.num_tokens,
            reasoning_tokens=self._stream.num_reasoning_tokens,
        )
        return TextEvent(
            finish=self._stopped.finish, stop_sequence=self._stopped.stop_sequence, usage=self.usage
        )

    def since_last(self, now: float) -> float | None:
        """Seconds since the last tokens, None for the first."""
        last, self._seen_at = self._seen_at, now
        return None if last is None else now - last


class Generation:
    """Runs the rows of one response on the engine. Belongs to the event loop.

    `start` it, take `next()` until `finished`, and always `close` it: rows that still run are then cancelled.
    `arrived` is `time.perf_counter()` at the request's arrival.
    """

    def __init__(self, service: Service, loaded: Loaded, plans: Sequence[RowPlan], arrived: float) -> None:
        self._engine = service.engine
        self._mailbox = service.mailbox
        self._metrics = service.metrics
        self._arrived = arrived
        self._rows = {plan.request.id: _Row(index, plan, loaded) for index, plan in enumerate(plans)}
        self._running = set(self._rows)
        self._inbox = self._mailbox.open(*self._rows)
        self._closed = False
        self._exchange = current()
        self._exchange.work.model = loaded.info.id

    def start(self) -> None:
        """Submits every row or none. Raises what the engine raises: QueueFull, EngineStopped, BadRequest."""
        submitted: set[str] = set()
        try:
            for row in self._rows.values():
                self._engine.submit(row.plan.request)
                submitted.add(row.plan.request.id)
            self._account_prompts()
        except MantouError as error:
            self._metrics.rejected[error.code or error.type] += 1
            if isinstance(error, QueueFull) and submitted:
                raise QueueFull(f"{error.message} {len(self._rows)} answers need as many places.") from None
            raise
        finally:
            if len(submitted) < len(self._rows):
                self._running = submitted
                self.close()

    @property
    def finished(self) -> bool:
        """Whether every row has ended, or the generation was closed."""
        return self._closed or not self._running

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    async def next(self) -> list[tuple[int, TextEvent]]:
        """(row index, event) of everything that came since the last call; waits for the first.

        Empty after `nudge` or `close`. Raises RequestFailed if a row failed; the response is then lost as a whole.
        """
        events = await self._inbox.take()
        now = time.perf_counter()
        found: list[tuple[int, TextEvent]] = []
        for event in events:
            row = self._rows[event.request_id]
            if event.tokens:
                self._measure(row, len(event.tokens), now)
            try:
                text = row.feed(event)
            except RequestFailed:
                self._running.discard(event.request_id)
                self._metrics.finished["error"] += 1
                raise
            if row.stopping:
                self._engine.cancel(event.request_id, "stop")
            if row.usage is not None:
                self._exchange.work.cached_tokens += row.usage.cached_tokens
                self._end(event.request_id, text, now)
            if text is not None:
                found.append((row.index, text))
        return found

    def nudge(self) -> None:
        """Makes `next` return, so that its caller can do something else that is due."""
        self._inbox.nudge()

    def close(self) -> None:
        """Gives up the rows that still run, so that the engine frees them before its next step. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for request_id in self._running:
            self._engine.cancel(request_id)
            self._metrics.finished["abort"] += 1
        self._mailbox.discard(*self._rows)

    def usage(self) -> Usage:
        """The bill of the whole response: every prompt once, every answer. Needs all rows to have ended."""
        ended = [(row.plan.prompt, row.usage) for row in self._rows.values() if row.usage is not None]
        first = dict(reversed(ended))
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in first.values()),
            completion_tokens=sum(usage.completion_tokens for _, usage in ended),
            cached_tokens=sum(usage.cached_tokens for usage in first.values()),
            lane=ended[0][1].lane if ended else "batched",
            speculation=SpeculationUsage.sum([usage.speculation for _, usage in ended]),
            fill=FillUsage.sum([usage.fill for _, usage in ended]),
            reasoning_tokens=sum(usage.reasoning_tokens for _, usage in ended),
        )

    def _account_prompts(self) -> None:
        """Every prompt counts once, however many answers it gets."""
        prompts = {row.plan.prompt: len(row.plan.request.prompt) for row in self._rows.values()}
        self._exchange.work.rows.update(self._rows)
        self._exchange.work.prompt_tokens += sum(prompts.values())
        self._exchange.charge(sum(prompts.values()))

    def _measure(self, row: _Row, num_tokens: int, now: float) -> None:
        work = self._exchange.work
        work.completion_tokens += num_tokens
        self._exchange.charge(num_tokens)
        if work.first_token_s is None:
            work.first_token_s = now - self._arrived
        waited = row.since_last(now)
        if waited is None:
            self._metrics.first_token_s.observe(now - self._arrived)
        else:
            self._metrics.inter_token_s.observe(waited / num_tokens, num_tokens)

    def _end(self, request_id: str, text: TextEvent | None, now: float) -> None:
        self._running.discard(request_id)
        self._metrics.end_to_end_s.observe(now - self._arrived)
        finish = text.finish if text is not None and text.finish else "stop"
        if finish == "tool_calls":  # the model stopped all the same
            finish = "stop"
        self._metrics.finished[finish] += 1
        self._exchange.work.finishes.append(finish)
