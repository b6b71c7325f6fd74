"""uvicorn around the app: one process, one event loop, sockets that are already bound. Knows no routes, no model."""

from __future__ import annotations

import uvicorn

from mantou.api.app import create_app
from mantou.api.service import Service

# A stream may still be running when the server is told to stop; it gets this long to end.
_GRACE_S = 5
# Longer than the idle time of common clients' connection pools, so that they close first and no request is lost.
_KEEP_ALIVE_S = 75


def create_server(service: Service, *, grace_s: int = _GRACE_S) -> uvicorn.Server:
    """A server that is ready to `run(sockets=[...])`. It writes no access log: requests hold private text.

    grace_s: how long open requests may go on once it is told to stop; then they are cut and their rows freed.
    """
    return uvicorn.Server(
        uvicorn.Config(
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
            timeout_graceful_shutdown=grace_s,
        )
    )
