"""The engine: one model thread that owns every array, and a thread-safe front of six methods. No text, no HTTP."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, TypeVar

from mantou.data import FinishReason, Request, TokenEvent, Usage
from mantou.engine.step import Step
from mantou.errors import EngineStopped, MantouError, ModelError, ModelUnavailable, QueueFull
from mantou.protocols import Mailbox

log = logging.getLogger(__name__)
T = TypeVar("T")


class Engine:
    """Runs requests on its own thread.

    `load` builds the Step on the model thread (MLX streams are thread-local); `on_ready` and `on_failed` are called
    from there. Requests submitted before that wait. Events reach `mailbox`, all of a step's in one call.
    """

    def __init__(
        self,
        load: Callable[[], Step],
        mailbox: Mailbox,
        *,
        max_waiting: int = 64,
        on_ready: Callable[[], None] = lambda: None,
        on_failed: Callable[[MantouError], None] = lambda error: None,
    ) -> None:
        self._load = load
        self._mailbox = mailbox
        self._max_waiting = max_waiting
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._inbox: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._step: Step | None = None
        self._closing = False
        self._failure = ""  # why loading failed
        self._admission = threading.Lock()
        self._num_submitted = 0  # in the inbox, not yet seen by the model thread
        self._thread = threading.Thread(target=self._run, name="mantou-model", daemon=True)

    # ------------------------------------------------------------------ any thread
    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises QueueFull at `max_waiting` waiting requests, EngineStopped while shutting down, ModelUnavailable after
        loading failed. What was queued before gets its last event in every case.
        """
        with self._admission:
            self._check_open()
            waiting = len(self._step.waiting) if self._step else 0
            if waiting + self._num_submitted >= self._max_waiting:
                raise QueueFull(f"{self._max_waiting} requests are waiting already; try again in a moment.")
            self._num_submitted += 1
            self._inbox.put(lambda: self._accept(request))

    def cancel(self, request_id: str, finish: FinishReason = "cancelled") -> None:
        """Frees a request's row before the next step. Unknown and finished ids are ignored.

        `finish` is how it ends; "stop" for one whose text is complete, so that nothing of it is kept for a repeat.
        """
        self._inbox.put(lambda: self._step.cancel(request_id, finish) if self._step else None)

    def call(self, fn: Callable[[], T]) -> Future[T]:
        """Runs `fn` on the model thread between two steps, with nothing in flight. Raises what `submit` does."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                if self._step is not None:
                    self._step.land()
                future.set_result(fn())
            except Exception as error:  # it belongs to the caller, who finds it in the future
                future.set_exception(error)

        with self._admission:
            self._check_open()
            self._inbox.put(run)
        return future

    def stats(self) -> Mapping[str, Any]:
        """Plain numbers: running, waiting, rows, counters, kv, fairness, speed."""
        step = self._step
        if step is None:
            return {"running": 0, "waiting": self._num_submitted, "rows": 0}
        counters = asdict(step.counters)
        kv = step.runner.kv
        return {
            "running": len(step.running),
            "waiting": len(step.waiting) + self._num_submitted,
            "rows": step.axes.scheduler.max_rows,
            "requests": counters.pop("finished"),
            **counters,
            "kv": {
                "bytes": kv.nbytes,
                "slots": kv.num_slots,
                "tokens": sum(kv.lengths),
                "blocks_held": kv.pages.num_held,
                "blocks": kv.pages.num_blocks,
                "capacity_tokens": step.axes.scheduler.max_rows * step.context_length,
            },
            "fairness": {
                "max_chunks_between_tokens": counters["max_chunks_between_tokens"],
                "prompt_share": step.pacer.prompt_share,
                "chunk": step.pacer.chunk(len(step.running)),
            },
            "steps_timed": step.times.summary(),
            "compiled_steps": step.runner.compiling,
            "speed": {
                "decode_step_s": step.pacer.decode_s,
                "prompt_token_s": step.pacer.token_s,
            },
        }

    def close(self, timeout: float | None = 30.0) -> None:
        """Takes no more requests, ends the running ones with an error event, stops the thread, then stores what is
        queued of prompts and of answers in progress.
        """
        step = self._step
        with self._admission:
            self._closing = True
        self._inbox.put(lambda: None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        if step is not None:
            step.axes.checkpoints.close(timeout)
            step.axes.store.close(timeout)

    def _check_open(self) -> None:
        """Called with `_admission` held, so that nothing is queued after the model thread's last look."""
        if self._failure:
            raise ModelUnavailable(f"No model is loaded: {self._failure}")
        if self._closing:
            raise EngineStopped("The server is shutting down; send the request to another one.")

    # ------------------------------------------------------------------ the model thread
    def _accept(self, request: Request) -> None:
        with self._admission:
            self._num_submitted -= 1
        if self._step is not None:
            self._step.submit(request)
        else:
            event = TokenEvent(
                request.id, finish="error", error=self._failure, usage=Usage(len(request.prompt), 0)
            )
            self._mailbox.put([event])

    def _run(self) -> None:
        try:
            self._step = self._load()
        except MantouError as error:
            self._refuse(error)
            return
        except Exception as error:  # anything else that loading raises must reach the user as a sentence, too
            log.exception("loading failed")
            self._refuse(ModelError(f"The model could not be loaded ({type(error).__name__}: {error})."))
            return
        self._step.wake = lambda: self._inbox.put(lambda: None)
        self._on_ready()
        while not self._closing:
            self._drain_inbox(block=not self._step.busy)
            if self._step.busy and not self._closing:
                self._guard(self._step.advance)
            self._deliver(self._step)
        self._drain_inbox(block=False)
        step, self._step = self._step, None
        step.fail_all("the server is shutting down")
        self._deliver(step)
        step.runner.close()

    def _deliver(self, step: Step) -> None:
        if events := step.take_events():
            self._mailbox.put(events)

    def _guard(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception:  # a defect of the engine itself: its requests end, the server goes on
            log.exception("a step failed")
            if self._step is not None:
                self._step.fail_all("the engine failed on this step; see the server's log")

    def _drain_inbox(self, *, block: bool) -> None:
        """Does what other threads asked for; waits for the first if there is nothing else to do.

        What is asked for meanwhile waits for the next step: work that asks for more of itself must not stop the rows.
        """
        if block:
            self._guard(self._inbox.get())
        for _ in range(self._inbox.qsize()):
            self._guard(self._inbox.get())

    def _refuse(self, error: MantouError) -> None:
        """Loading failed: every request gets the reason."""
        with self._admission:
            self._closing, self._failure = True, error.message
        self._on_failed(error)
        self._drain_inbox(block=False)
