"""Responses while they are made, apart from the connections that asked for them. Knows no fields and no HTTP.

A run makes one response in a task of its own; connections follow its events. One that was asked for in the
foreground ends when its client leaves; one in the background does not, and can be followed from any event on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from mantou.api.faults import known_error
from mantou.api.generation import Generation
from mantou.api.responses.items import Item
from mantou.api.responses.store import Kept, ResponseStore
from mantou.api.responses.wire import Ending, Event, ResponseBody, ResponseFailure, Status, as_event, encode
from mantou.api.responses.writer import ResponseWriter
from mantou.data import Usage
from mantou.errors import MantouError

_log = logging.getLogger("mantou.api")


@dataclass(frozen=True, slots=True)
class _Outcome:
    status: Status
    usage: Usage | None = None
    error: MantouError | None = None


class Run:
    """One response on its way. Belongs to the event loop.

    `events`: whether anybody may follow it; `background`: whether they may come later and from any event on.
    """

    def __init__(
        self,
        generation: Generation,
        writer: ResponseWriter,
        items: Sequence[Item],
        store: ResponseStore,
        *,
        events: bool,
        background: bool,
        owner: str,
    ) -> None:
        self.id = writer.id
        self.owner = owner  # name of the key that asked for it; "" = no key was asked for
        self.background = background
        self.error: MantouError | None = None  # why it failed, once it has
        self._generation = generation
        self._writer = writer
        self.items = items
        self._store = store
        self._has_events = events or background
        self._events: list[bytes] = []
        self._num_dropped = 0
        self._cancelled = False
        self._waiters: set[asyncio.Future[None]] = set()
        self.ended = False
        self.kept = False  # whether the store has it as it ended

    def body(self) -> ResponseBody:
        return self._writer.body()

    async def open(self) -> None:
        """It exists: who is told its id can ask for it from now on, whatever happens to the server."""
        self._emit(self._writer.begin())
        if self.background:
            try:
                await self._keep()
            except asyncio.CancelledError:
                self.abandon()
                raise

    async def make(self) -> None:
        """Runs the generation to its end and stores what came of it."""
        work = asyncio.ensure_future(self._pump())
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:  # the server goes down
            work.cancel()
            await asyncio.wait({work})
        finally:
            self._generation.close()
        await self._conclude(_outcome_of(work, cancelled=self._cancelled))

    def cancel(self) -> None:
        """Ends it as it is. Does nothing once it has ended."""
        if not self.ended:
            self._cancelled = True
            self._generation.close()

    def abandon(self) -> None:
        """Nobody wants it any more before it was started."""
        self._generation.close()

    def break_off(self, error: MantouError) -> None:
        """It will never end on its own."""
        self.error, self.ended = error, True
        self.nudge()

    # ------------------------------------------------------------------ following
    async def take(self, position: int) -> list[bytes]:
        """The events from number `position` on; waits for the first. Empty after a nudge, and at the end."""
        if position >= self._num_events and not self.ended:
            await self._wait()
        found = self._events[max(position - self._num_dropped, 0) :]
        if not self.background:  # nobody will ask for these again
            self._num_dropped += len(self._events)
            self._events.clear()
        return found

    def over(self, position: int) -> bool:
        """Whether there is no event from number `position` on, and never will be."""
        return self.ended and position >= self._num_events

    async def end(self) -> None:
        """Waits until it has ended."""
        while not self.ended:
            await self._wait()

    def nudge(self) -> None:
        """Makes every `take` return, so that the callers can do something else that is due."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    @property
    def _num_events(self) -> int:
        return self._num_dropped + len(self._events)

    async def _wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    # ------------------------------------------------------------------ making
    async def _pump(self) -> _Outcome:
        started = not self.background
        if started:
            self._emit(self._writer.proceed())
        finish = "stop"
        while not self._generation.finished:
            for _, event in await self._generation.next():
                if not started:
                    started = True
                    self._emit(self._writer.proceed())
                self._emit(self._writer.feed(event))
                finish = event.finish or finish
        if self._cancelled:
            return _Outcome("cancelled")
        usage = self._generation.usage()
        return _Outcome("incomplete" if finish == "length" else "completed", usage)

    async def _conclude(self, outcome: _Outcome) -> None:
        """The last event comes once the response is stored: a client that has it may go on from it at once."""
        self.error = outcome.error
        failure = None if outcome.error is None else ResponseFailure("server_error", outcome.error.message)
        self._emit(self._writer.end(outcome.status, outcome.usage, failure))
        last = self._writer.last()
        self.kept = await self._keep(last, running=False)
        if last is not None:
            last.response.store = self._writer.stored
            self._emit([last])
        self.ended = True
        self.nudge()

    async def _keep(self, last: Ending | None = None, *, running: bool = True) -> bool:
        """Whether the store has it as it is now."""
        if not self._writer.stored:
            return False
        body = self._writer.body()
        events = [*self._events, *([as_event(last)] if last else [])] if self.background else []
        kept = Kept(self.id, encode(body), encode(self.items), b"".join(events), running, self.owner)
        try:
            await asyncio.to_thread(self._store.put, kept, [item.id for item in body.output])
        except MantouError as error:
            _log.error("response %s could not be stored: %s", self.id, error.message)
            self._writer.keep_not()
        return self._writer.stored

    def _emit(self, events: Sequence[Event]) -> None:
        if self._has_events and events:
            self._events += map(as_event, events)
            self.nudge()


def _outcome_of(work: asyncio.Future[_Outcome], *, cancelled: bool) -> _Outcome:
    if work.cancelled():
        return _Outcome("failed", error=known_error(asyncio.CancelledError()))
    error = work.exception()
    if error is None:
        return work.result()
    return _Outcome("cancelled") if cancelled else _Outcome("failed", error=known_error(error))
