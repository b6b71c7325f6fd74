"""All responses that can be asked for: those that run and those that are stored. Knows no fields and no HTTP.

A key finds its own, one with the scope admin those of all; to the others a response is as if it were not there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from mantou.api.envelope import current
from mantou.api.faults import NotFound, known_error
from mantou.api.responses.items import Item
from mantou.api.responses.run import Run
from mantou.api.responses.store import Kept, ResponseStore
from mantou.api.responses.wire import encode
from mantou.api.sse import named_event
from mantou.errors import BadRequest

_INTERRUPTED = "The server ended before this response was finished; send the request again."


class Runs:
    """Belongs to the event loop."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self._live: dict[str, Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """What ran when the server before this one ended has failed, and says so."""
        for kept in await asyncio.to_thread(self.store.interrupted):
            await asyncio.to_thread(self.store.put, _failed(kept))

    async def close(self) -> None:
        """Ends what runs, as failed, and lets go of the store."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.to_thread(self.store.close)

    def start(self, run: Run) -> None:
        """The run can be found from now on."""
        self._live[run.id] = run
        task = asyncio.get_running_loop().create_task(run.make())
        self._tasks.add(task)

        def over(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not run.ended:
                run.break_off(known_error(asyncio.CancelledError() if task.cancelled() else _error_of(task)))
            if run.kept or not run.background:  # what could not be stored stays here for its client
                self._live.pop(run.id, None)

        task.add_done_callback(over)

    @property
    def num_running(self) -> int:
        """Runs that have not ended, also those that nobody waits for."""
        return len(self._tasks)

    def live(self, response_id: str) -> Run | None:
        run = self._live.get(response_id)
        return run if run is not None and _may_see(run.owner) else None

    async def _kept(self, response_id: str) -> Kept | None:
        kept = await asyncio.to_thread(self.store.get, response_id)
        return kept if kept is not None and _may_see(kept.owner) else None

    async def stored(self, response_id: str) -> Kept:
        """Raises NotFound for an id that nothing is stored under."""
        kept = await self._kept(response_id)
        if kept is None:
            raise NotFound(f"Response with id {response_id!r} not found.")
        return kept

    async def forget(self, response_id: str) -> None:
        """Ends it if it runs. Raises NotFound."""
        run = self.live(response_id)
        if run is not None:
            run.cancel()
            await run.end()
            self._live.pop(response_id, None)
        elif await self._kept(response_id) is None:
            raise NotFound(f"Response with id {response_id!r} not found.")
        if not await asyncio.to_thread(self.store.delete, response_id) and run is None:
            raise NotFound(f"Response with id {response_id!r} not found.")

    async def history(self, response_id: str) -> tuple[list[Item], str | None]:
        """All that was said up to the end of a response, and its instructions. Raises BadRequest or NotFound."""
        run = self.live(response_id)
        if run is not None and not run.ended:
            raise BadRequest(
                f"Response {response_id!r} is not finished; wait until it is, or cancel it.",
                param="previous_response_id",
            )
        kept = await self._kept(response_id)
        if kept is None:
            missing = NotFound(
                f"Previous response with id {response_id!r} not found; send the whole conversation as input."
                if self.store.keeps
                else "This server stores no responses (--response-store off); send the whole conversation as input.",
                param="previous_response_id",
            )
            missing.code = "previous_response_not_found"
            raise missing
        body: dict[str, Any] = msgspec.json.decode(kept.body)
        return [*msgspec.json.decode(kept.input), *body["output"]], body["instructions"]

    async def resolved(self, items: Sequence[Item]) -> tuple[Item, ...]:
        """The items with every reference replaced by what it names. Raises BadRequest for an unknown one."""
        known = {item["id"]: item for item in items if item["type"] != "item_reference"}
        return tuple([await self._resolve(item, known) for item in items])

    async def _resolve(self, item: Item, known: dict[str, Item]) -> Item:
        if item["type"] != "item_reference":
            return item
        name = item["id"]
        if name not in known:
            kept = await asyncio.to_thread(self.store.of_item, name)
            if kept is None or not _may_see(kept.owner):
                raise BadRequest(
                    f"Item with id {name!r} not found; send the item itself in place of the reference.",
                    param="input",
                )
            said = msgspec.json.decode(kept.body)["output"]
            known |= {one["id"]: one for one in said}
        return known[name]


def _may_see(owner: str) -> bool:
    """Whether the request that is being answered may know of a response of this key."""
    own = current()
    return own.sees_all or owner == own.caller


def _error_of(task: asyncio.Task[None]) -> BaseException:
    return task.exception() or RuntimeError("a response ended without its end")


def _failed(kept: Kept) -> Kept:
    body: dict[str, Any] = msgspec.json.decode(kept.body)
    body |= {"status": "failed", "error": {"code": "server_error", "message": _INTERRUPTED}}
    number = kept.events.count(b"\n\n")
    event = {"type": "response.failed", "sequence_number": number, "response": body}
    last = named_event(b"response.failed", encode(event))
    return Kept(kept.id, encode(body), kept.input, kept.events + last, owner=kept.owner)
