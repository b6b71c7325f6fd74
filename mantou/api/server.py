"""uvicorn around the app: one process, one event loop, sockets that are already bound. Knows no routes, no model."""

from __future__ import annotations

import time
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from mantou.api.app import create_app

if TYPE_CHECKING:
    from mantou.api.service import Service

# Longer than the idle time of common clients' connection pools, so that they close first and no request is lost.
_KEEP_ALIVE_S = 75


class DrainingServer(uvicorn.Server):
    """Told to stop by a signal, it first lets running requests end, and tells new ones to come back later.

    Only then does it close its sockets, so that nobody meets a closed port while answers are still on their way. What
    still runs after `grace_s` is cancelled, with the reason as its last event. A second signal ends it at once.
    """

    def __init__(self, config: uvicorn.Config, service: Service, grace_s: float) -> None:
        super().__init__(config)
        self._service = service
        self._grace_s = grace_s
        self._deadline: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called between two bytecodes of the main thread, so it only leaves a note."""
        self._captured_signals.append(sig)
        if self._service.draining:
            self.should_exit = self.force_exit = True
        self._service.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        if self._service.draining and not self.should_exit:
            now = time.monotonic()
            self._deadline = self._deadline or now + self._grace_s
            if now >= self._deadline:
                self.config.timeout_graceful_shutdown = 0
            idle = not len(self._service.running) and not self._service.num_background()
            self.should_exit = idle or now >= self._deadline
        return await super().on_tick(counter)


def create_server(service: Service, *, grace_s: int | None = None) -> uvicorn.Server:
    """A server that is ready to `run(sockets=[...])`. It writes no access log: requests hold private text.

    grace_s: how long open requests may go on once it is told to stop (None = as configured); then they are cut and
    their rows freed.
    """
    grace = service.config.drain_timeout_s if grace_s is None else grace_s
    config = uvicorn.Config(
        create_app(service),
        host=service.config.host,
        port=service.config.port,
        loop="auto",
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=grace,
    )
    return DrainingServer(config, service, grace)
