"""Token rows of many callers -> batches of like lengths, one `Engine.call` each. Knows lengths; no text, no arrays.

One batch runs between two steps of the engine, so answers that are being generated go on. While there are any, a batch
is made so small that it takes no longer than `_GAP_S`; a single long row may still take longer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from mantou.data import TokenRow
from mantou.errors import MantouError, ModelError, QueueFull

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_GAP_S = 0.05  # most time that a batch may take from the answers that are being generated
_LOOK_AHEAD = 4096  # waiting rows that are looked at for a batch
_SMOOTHING = 0.3


class Caller(Protocol):
    """The part of the engine that is needed here."""

    def call(self, fn: Callable[[], Any]) -> Future[Any]: ...


@dataclass(slots=True)
class _Job(Generic[R]):
    """One caller's rows; `results` fill in any order."""

    results: list[R | None]
    num_left: int
    future: Future[list[R]] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[R]):
    row: TokenRow
    job: _Job[R]
    index: int

    @property
    def length(self) -> int:
        return len(self.row.tokens)


def choose(lengths: Sequence[int], budget: int) -> list[int]:
    """Indices of the next batch: the first row, then those nearest to it in length while width * rows <= budget.

    Rows that would be less than about three quarters full, or widen the first by more than a quarter, wait for a batch
    of their own kind. The first row always runs, so nobody waits for ever.
    """
    first = lengths[0]
    low, high = first * 3 // 4 - 8, first * 5 // 4 + 8
    near = [index for index, length in enumerate(lengths) if index and low <= length <= high]
    near.sort(key=lambda index: abs(lengths[index] - first))
    chosen, width = [0], first
    for index in near:
        wider = max(width, lengths[index])
        if wider * (len(chosen) + 1) > budget:
            break
        chosen.append(index)
        width = wider
    return chosen


class EmbeddingQueue(Generic[R]):
    """`run` computes one batch on the model thread. `busy` says whether answers are being generated."""

    def __init__(
        self,
        engine: Caller,
        run: Callable[[Sequence[TokenRow]], Sequence[R]],
        *,
        max_tokens: int,
        max_waiting: int,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine = engine
        self._run = run
        self._max_tokens = max_tokens
        self._max_waiting = max_waiting
        self._busy = busy
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting[R]] = deque()
        self._jobs: set[int] = set()
        self._calling = False  # a call is queued or runs
        self._token_s = 0.0  # seconds a padded token takes; 0 = not known yet
        self._counts = {"requests": 0, "rows": 0, "tokens": 0, "padded_tokens": 0, "batches": 0}

    def submit(self, rows: Sequence[TokenRow]) -> Future[list[R]]:
        """Queues non-empty rows. Any thread. Raises QueueFull at `max_waiting` unfinished callers.

        Cancelling the future takes back what has not run yet.
        """
        job = _Job[R]([None] * len(rows), len(rows))
        if not rows:
            job.future.set_result([])
            return job.future
        with self._lock:
            if len(self._jobs) >= self._max_waiting:
                raise QueueFull(
                    f"{self._max_waiting} embedding requests are waiting already; try again in a moment."
                )
            self._jobs.add(id(job))
            self._counts["requests"] += 1
            self._waiting.extend(_Waiting(row, job, index) for index, row in enumerate(rows))
            start, self._calling = not self._calling, True
        job.future.add_done_callback(lambda future: self._forget(job))
        if start:
            self._call()
        return job.future

    def stats(self) -> Mapping[str, Any]:
        """Plain numbers. Any thread."""
        with self._lock:
            return {**self._counts, "waiting_rows": len(self._waiting), "token_s": self._token_s}

    # ------------------------------------------------------------------ the model thread, once started
    def _call(self) -> None:
        """Asks for the next batch to run between two steps; one that is asked for from there waits for a step."""
        batch: list[_Waiting[R]] = []

        def work() -> Sequence[R]:
            batch.extend(self._take())
            return self._timed(batch) if batch else []

        try:
            future = self._engine.call(work)
        except MantouError as error:  # the engine is going down
            self._fail(self._drain(), error)
            return
        future.add_done_callback(lambda done: self._finish(batch, done))

    def _take(self) -> list[_Waiting[R]]:
        budget = self._budget()
        with self._lock:
            rows = [one for one in self._waiting if not one.job.future.done()]
            if not rows:
                self._waiting.clear()
                return []
            picked = set(choose([one.length for one in rows[:_LOOK_AHEAD]], budget))
            self._waiting = deque(one for index, one in enumerate(rows) if index not in picked)
            return [rows[index] for index in sorted(picked)]

    def _budget(self) -> int:
        if self._token_s and self._busy():
            return min(self._max_tokens, int(_GAP_S / self._token_s))
        return self._max_tokens

    def _timed(self, batch: Sequence[_Waiting[R]]) -> Sequence[R]:
        padded = max(one.length for one in batch) * len(batch)
        start = time.perf_counter()
        results = self._run([one.row for one in batch])
        spent = (time.perf_counter() - start) / padded
        with self._lock:
            share = _SMOOTHING if self._token_s else 1.0
            self._token_s += share * (spent - self._token_s)
            self._counts["batches"] += 1
            self._counts["rows"] += len(batch)
            self._counts["tokens"] += sum(one.length for one in batch)
            self._counts["padded_tokens"] += padded
        return results

    def _finish(self, batch: Sequence[_Waiting[R]], done: Future[Sequence[R]]) -> None:
        """Hands out what a batch gave, then asks for the next."""
        error = done.exception()
        if error is not None:
            known = (
                error
                if isinstance(error, MantouError)
                else ModelError(f"The embedding model failed on a batch ({type(error).__name__}: {error}).")
            )
            self._fail(batch, known)
        else:
            for one, result in zip(batch, done.result(), strict=True):
                one.job.results[one.index] = result
                one.job.num_left -= 1
                if not one.job.num_left:
                    _settle(one.job.future, [r for r in one.job.results if r is not None], None)
        with self._lock:
            self._calling = bool(self._waiting)
            more = self._calling
        if more:
            self._call()

    def _drain(self) -> list[_Waiting[R]]:
        with self._lock:
            rows, self._waiting, self._calling = list(self._waiting), deque(), False
            return rows

    def _fail(self, rows: Sequence[_Waiting[R]], error: MantouError) -> None:
        for one in rows:
            _settle(one.job.future, [], error)

    def _forget(self, job: _Job[R]) -> None:
        with self._lock:
            self._jobs.discard(id(job))


def _settle(future: Future[list[R]], results: list[R], error: MantouError | None) -> None:
    """A caller that has gone may cancel at the same moment; then nobody wants the result."""
    if future.done():
        return
    try:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(results)
    except InvalidStateError:
        return
