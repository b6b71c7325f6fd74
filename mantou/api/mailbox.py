"""Carries a step's events from the model thread to the event loop. Knows no text and no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from mantou.data import TokenEvent


class Inbox:
    """The events of one or more requests, for one consumer. Lives on the event loop.

    It is over when every request in it has finished, or when it was closed.
    """

    __slots__ = ("_closed", "_events", "_loop", "_nudged", "_open", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop, request_ids: Sequence[str]) -> None:
        self._loop = loop
        self._open = set(request_ids)
        self._events: list[TokenEvent] = []
        self._waiter: asyncio.Future[None] | None = None
        self._nudged = False
        self._closed = False

    @property
    def over(self) -> bool:
        """Whether no further event can be taken."""
        return self._closed or (not self._open and not self._events)

    async def take(self) -> list[TokenEvent]:
        """Waits, then hands over everything that has arrived; empty after `nudge`, `close` or the last event."""
        if not (self._events or self._nudged or self.over):
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._nudged = False
        events, self._events = self._events, []
        return events

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        while not self.over:
            for event in await self.take():
                yield event

    def add(self, event: TokenEvent) -> None:
        self._events.append(event)
        if event.finish is not None:
            self._open.discard(event.request_id)
        self._wake()

    def nudge(self) -> None:
        """Makes the pending (or next) `take` return at once."""
        self._nudged = True
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._events.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncMailbox:
    """A `Mailbox` that wakes the event loop once a step and sorts the events there.

    `put` may be called from any thread; everything else belongs to the loop's thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._inboxes: dict[str, Inbox] = {}

    def put(self, events: Sequence[TokenEvent]) -> None:
        """One wake-up for all events. After the loop has closed nobody listens, and the events are dropped."""
        if not events:
            return
        try:
            self._loop.call_soon_threadsafe(self._dispatch, tuple(events))
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def open(self, *request_ids: str) -> Inbox:
        """An inbox for these requests. Open it before they are submitted, so that no event is missed."""
        inbox = Inbox(self._loop, request_ids)
        for request_id in request_ids:
            self._inboxes[request_id] = inbox
        return inbox

    def discard(self, *request_ids: str) -> None:
        """Nobody wants these any more: closes their inbox and drops what still comes."""
        for request_id in request_ids:
            inbox = self._inboxes.pop(request_id, None)
            if inbox is not None:
                inbox.close()

    @property
    def num_open(self) -> int:
        """Requests that still wait for their last event."""
        return len(self._inboxes)

    def _dispatch(self, events: tuple[TokenEvent, ...]) -> None:
        for event in events:
            inbox = self._inboxes.get(event.request_id)
            if inbox is None:
                continue
            inbox.add(event)
            if event.finish is not None:
                del self._inboxes[event.request_id]
