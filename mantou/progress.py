"""Progress of long steps (download, convert, load) for GET /downloads and the terminal. Knows no HTTP and no models."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Literal, TypedDict

STEPS = ("download", "convert", "load")
_WINDOW_S = 5.0

State = Literal["active", "done", "error"]


class TaskRow(TypedDict):
    """One task as GET /downloads shows it. Times are Unix seconds, sizes bytes; `stage` says what runs now."""

    repo_id: str
    state: State
    stage: str
    current_file: str | None
    received_bytes: int
    total_bytes: int | None
    files_done: int
    files_total: int | None
    bytes_per_sec: float
    started_at: float
    finished_at: float | None
    error: str | None


Listener = Callable[["Task"], None]


class Task:
    """One long job: a chain of stages, each with its own byte count. Safe to use from several threads.

    As a context manager it ends with `done()`, or with `fail(...)` if the block raised.
    """

    def __init__(self, label: str, total_bytes: int | None, changed: Listener) -> None:
        self._lock = threading.Lock()
        self._changed = changed
        self._label = label
        self._stage = ""
        self._state: State = "active"
        self._received = 0
        self._total = total_bytes
        self._file: str | None = None
        self._files_done = 0
        self._files_total: int | None = None
        self._started = time.time()
        self._finished: float | None = None
        self._error: str | None = None
        self._samples: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def stage(self, name: str, total_bytes: int | None = None, *, files: int | None = None) -> None:
        """Starts a stage; the byte and file counts start again at zero."""
        with self._lock:
            self._stage, self._received, self._total = name, 0, total_bytes
            self._file, self._files_done, self._files_total = None, 0, files
            self._samples = deque([(time.monotonic(), 0)])
        self._changed(self)

    def file(self, name: str | None, *, finished: int = 0, files: int | None = None) -> None:
        """Names the file in work, counts `finished` files as done, and corrects the number of files."""
        with self._lock:
            self._file = name
            self._files_done += finished
            self._files_total = self._files_total if files is None else files
        self._changed(self)

    def advance(self, num_bytes: int, *, total_bytes: int | None = None) -> None:
        """Counts bytes of this stage; `total_bytes` corrects the total where it becomes known late."""
        now = time.monotonic()
        with self._lock:
            self._received += num_bytes
            if total_bytes is not None:
                self._total = total_bytes
            self._samples.append((now, self._received))
            while len(self._samples) > 2 and now - self._samples[0][0] > _WINDOW_S:
                self._samples.popleft()
        self._changed(self)

    def done(self) -> None:
        """Ends the task well; a task that already ended stays as it is."""
        self._finish("done", None)

    def fail(self, message: str) -> None:
        """Ends the task with one sentence for the user."""
        self._finish("error", message)

    def row(self) -> TaskRow:
        """What the task looks like now."""
        with self._lock:
            return TaskRow(
                repo_id=self._label,
                state=self._state,
                stage=self._stage,
                current_file=self._file,
                received_bytes=self._received,
                total_bytes=self._total,
                files_done=self._files_done,
                files_total=self._files_total,
                bytes_per_sec=self._rate() if self._state == "active" else 0.0,
                started_at=self._started,
                finished_at=self._finished,
                error=self._error,
            )

    def _rate(self) -> float:
        (t0, n0), (_, n1) = self._samples[0], self._samples[-1]
        elapsed = time.monotonic() - t0
        return (n1 - n0) / elapsed if elapsed > 0 else 0.0

    def _finish(self, state: State, error: str | None) -> None:
        with self._lock:
            if self._state != "active":
                return
            self._state, self._error, self._file = state, error, None
            self._finished = time.time()
        self._changed(self)

    def __enter__(self) -> Task:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if error is None:
            self.done()
        else:
            self.fail(str(error) or type(error).__name__)


class ProgressBoard:
    """The last tasks of this process, newest last."""

    def __init__(self, keep: int = 5) -> None:
        self._lock = threading.Lock()
        self._tasks: deque[Task] = deque(maxlen=keep)
        self._listeners: tuple[Listener, ...] = ()

    def task(self, label: str, total_bytes: int | None = None) -> Task:
        """Starts a task. `label` is what the user asked for, e.g. a repo id."""
        task = Task(label, total_bytes, self._tell)
        with self._lock:
            self._tasks.append(task)
        self._tell(task)
        return task

    def snapshot(self) -> list[TaskRow]:
        """The last tasks, oldest first, as JSON-ready rows."""
        with self._lock:
            tasks = tuple(self._tasks)
        return [task.row() for task in tasks]

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener(task)` after every change, on the thread that made it. Returns the way to stop."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def stop() -> None:
            with self._lock:
                self._listeners = tuple(known for known in self._listeners if known is not listener)

        return stop

    def _tell(self, task: Task) -> None:
        for listener in self._listeners:
            listener(task)
