"""One response as it comes into being: its body, its events in order, how it ended. Knows no connection, no store."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from mantou.api.responses.stream import ItemWriter
from mantou.api.responses.wire import (
    Completed,
    Created,
    Ending,
    Event,
    Failed,
    Incomplete,
    IncompleteDetails,
    InProgress,
    Queued,
    ResponseBody,
    ResponseFailure,
    Status,
    response_usage,
)
from mantou.data import TextEvent, Usage

_ENDINGS: Mapping[str, type[Ending]] = {"completed": Completed, "incomplete": Incomplete, "failed": Failed}


class ResponseWriter:
    """`begin`, `proceed`, then `feed` every event of the answer, then `end` and `last`."""

    def __init__(self, body: ResponseBody, items: ItemWriter) -> None:
        self._body = body
        self._items = items

    @property
    def id(self) -> str:
        return self._body.id

    @property
    def stored(self) -> bool:
        return self._body.store

    def body(self) -> ResponseBody:
        """As far as it has come."""
        return msgspec.structs.replace(self._body, output=self._items.output)

    def begin(self) -> list[Event]:
        """It exists; in the background it also waits."""
        body = self.body()
        created = Created(self._items.number(), body)
        return [created, Queued(self._items.number(), body)] if body.status == "queued" else [created]

    def proceed(self) -> list[Event]:
        """It runs."""
        self._body.status = "in_progress"
        return [InProgress(self._items.number(), self.body())]

    def feed(self, event: TextEvent) -> Sequence[Event]:
        return self._items.feed(event)

    def end(
        self, status: Status, usage: Usage | None = None, failure: ResponseFailure | None = None
    ) -> list[Event]:
        """No more text will come."""
        written = self._items.end("completed" if status == "completed" else "incomplete")
        self._body.status = status
        self._body.usage = None if usage is None else response_usage(usage)
        self._body.error = failure
        if status == "incomplete":
            self._body.incomplete_details = IncompleteDetails("max_output_tokens")
        if status == "completed":
            self._body.completed_at = int(time.time())
        return written

    def keep_not(self) -> None:
        """It could not be stored, and says so."""
        self._body.store = False

    def last(self) -> Ending | None:
        """The event that ends the stream. A cancelled response has none."""
        kind = _ENDINGS.get(self._body.status)
        return kind(self._items.number(), self.body()) if kind else None
