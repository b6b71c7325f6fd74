"""The engine's sequences: who waits, who runs, in which slot, and how one ends. Knows no arrays and no plan."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from mantou.data import FinishReason, TokenEvent, TokenLogprobs
from mantou.engine.counters import Counters
from mantou.engine.sequence import Sequence
from mantou.engine.shapes import Shapes
from mantou.engine.slots import Slots
from mantou.errors import MantouError

log = logging.getLogger(__name__)


class Roster:
    """Rows run in order of arrival. Events wait here until the step is over."""

    def __init__(self, shapes: Shapes, counters: Counters) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.slots = Slots(shapes)
        self._counters = counters
        self._events: list[TokenEvent] = []

    def every(self) -> list[Sequence]:
        return [*self.waiting, *self.running]

    def admit(self, request_id: str) -> Sequence:
        """Moves a waiting sequence to the running ones and gives it a slot."""
        sequence = next(row for row in self.waiting if row.id == request_id)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.slots.join(sequence)
        return sequence

    def leave(self, row: Sequence) -> None:
        self.running.remove(row)
        self.slots.leave(row)

    def drop_ended_waiters(self) -> None:
        self.waiting = deque(row for row in self.waiting if row.finish is None)

    # ------------------------------------------------------------------ events
    def emit(
        self,
        row: Sequence,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        finish: FinishReason | None,
    ) -> None:
        if finish is not None:
            self.end(row, finish, tokens=tokens, logprobs=logprobs)
        elif tokens:
            row.logprobs += logprobs
            self._events.append(TokenEvent(row.id, tokens, logprobs))

    def end(
        self,
        row: Sequence,
        finish: FinishReason,
        error: str | None = None,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        """The last event of a request. Whatever fails afterwards, there is one only."""
        if row.ended:
            return
        row.finish, row.ended = finish, True
        row.close_ticket()
        row.release_claim()
        finished = self._counters.finished  # replaced, not changed: another thread may be reading it
        self._counters.finished = {**finished, finish: finished.get(finish, 0) + 1}
        self._events.append(TokenEvent(row.id, tokens, logprobs, finish, error, row.usage()))

    def own_fault(self, row: Sequence, action: Callable[[], Any]) -> bool:
        """Runs a row's own hook; if it raises, that row ends with an error event and its neighbours go on."""
        try:
            action()
        except MantouError as error:
            self.end(row, "error", error.message)
            return False
        except Exception:  # the boundary: one request's hook never stops the engine
            log.exception("request %s failed", row.id)
            self.end(row, "error", "This request failed inside the server; the server's log says why.")
            return False
        return True

    def take_events(self) -> list[TokenEvent]:
        events, self._events = self._events, []
        return events

    def check_integrity(self) -> None:
        for slot, row in enumerate(self.slots.rows):
            assert row is None or (row.slot == slot and row in self.running), (slot, row)
        assert len(self.slots) == len(self.running), (len(self.slots), len(self.running))
