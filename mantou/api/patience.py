"""Waits for an answer to begin, with an eye on the client that wants it. Knows no dialect and no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from mantou.api.faults import ClientGone
from mantou.api.sse import ClientWatch, EventWriter

T = TypeVar("T")


async def begun(
    beginning: Coroutine[Any, Any, T],
    client: ClientWatch,
    writer: EventWriter | None,
    heartbeat_s: float,
    give_up: Callable[[T], None],
) -> T:
    """What `beginning` comes to. A stream is kept alive meanwhile; it opens with its first heartbeat.

    `give_up` is called with the result if nobody waits for it any more. Raises ClientGone, and what `beginning` raises.
    """
    begin = asyncio.ensure_future(beginning)
    timeout = None if writer is None else heartbeat_s
    try:
        while not begin.done():
            await asyncio.wait({begin, client.task}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if begin.done():
                break
            if client.gone:
                raise ClientGone
            if writer is not None:
                await writer.open()
                await writer.keep_alive()
        return begin.result()
    except (ClientGone, asyncio.CancelledError):

        def abandon(begin: asyncio.Future[T]) -> None:
            if not begin.cancelled() and begin.exception() is None:
                give_up(begin.result())

        begin.cancel()
        begin.add_done_callback(abandon)
        raise
