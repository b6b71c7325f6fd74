"""An engine that generates nothing: one model thread for the calls of a server that only embeds. No text, no HTTP."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from mantou.data import FinishReason, Request
from mantou.errors import BadRequest, EngineStopped, MantouError, ModelError

log = logging.getLogger(__name__)
T = TypeVar("T")


class CallEngine:
    """The front of `Engine` without rows. `load` runs first, on the model thread; `release` last, there too.

    `on_ready` and `on_failed` are called from there. `refusal` is what a request for an answer gets.
    """

    def __init__(
        self,
        load: Callable[[], None],
        *,
        refusal: str,
        release: Callable[[], None] = lambda: None,
        on_ready: Callable[[], None] = lambda: None,
        on_failed: Callable[[MantouError], None] = lambda error: None,
    ) -> None:
        self._load = load
        self._refusal = refusal
        self._release = release
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._admission = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="mantou-model", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        raise BadRequest(self._refusal, param="model")

    def cancel(self, request_id: str, finish: FinishReason = "cancelled") -> None:
        """There is never a row."""

    def call(self, fn: Callable[[], T]) -> Future[T]:
        """Runs `fn` on the model thread, in order. Raises EngineStopped while shutting down."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                result = fn()
            except Exception as error:  # it belongs to the caller, who finds it in the future
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._admission:
            if self._closing:
                raise EngineStopped("The server is shutting down; send the request to another one.")
            self._inbox.put(run)
        return future

    def stats(self) -> Mapping[str, Any]:
        return {"running": 0, "waiting": 0, "rows": 0}

    def close(self, timeout: float | None = 30.0) -> None:
        """Takes no more calls, finishes those that were taken, stops the thread."""
        with self._admission:
            self._closing = True
        self._inbox.put(lambda: None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _work(self) -> None:
        try:
            self._load()
        except MantouError as error:
            self._refuse(error)
        except Exception as error:  # whatever loading raises must reach the user as a sentence
            log.exception("loading failed")
            self._refuse(ModelError(f"The model could not be loaded ({type(error).__name__}: {error})."))
        else:
            self._on_ready()
            while not self._closing:
                self._inbox.get()()
            self._drain()
        self._release()

    def _refuse(self, error: MantouError) -> None:
        with self._admission:
            self._closing = True
        self._on_failed(error)
        self._drain()

    def _drain(self) -> None:
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                return
