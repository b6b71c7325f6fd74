"""One thread that does queued work in order, bounded by bytes. Knows no files: the owner says what to do with a job."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Spool(Generic[T]):
    """Jobs by name. `handle` runs on the spool's thread and must not raise."""

    handle: Callable[[T], None]
    max_bytes: int
    yields: bool = False  # its thread runs when the others leave a core free, where a thread can be told so
    num_bytes: int = 0  # queued, and of the job in hand
    _jobs: OrderedDict[str, tuple[T, int]] = field(default_factory=OrderedDict)
    _in_hand: str | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _closing: bool = False
    _thread: threading.Thread | None = None

    def start(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, name: str, job: T, num_bytes: int) -> bool:
        """False if the queue has no room for it. A job of any size fits an empty queue."""
        with self._changed:
            if self._closing or (self.num_bytes and self.num_bytes + num_bytes > self.max_bytes):
                return False
            self._jobs[name] = (job, num_bytes)
            self.num_bytes += num_bytes
            self._changed.notify_all()
            return True

    def cancel(self, unwanted: Callable[[T], bool]) -> None:
        """Takes jobs back that have not begun."""
        with self._changed:
            for name in [name for name, (job, _) in self._jobs.items() if unwanted(job)]:
                self.num_bytes -= self._jobs.pop(name)[1]
            self._changed.notify_all()

    def __contains__(self, name: str) -> bool:
        with self._changed:
            return name in self._jobs or name == self._in_hand

    def __len__(self) -> int:
        with self._changed:
            return len(self._jobs) + (self._in_hand is not None)

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until everything that was queued is done. False if that took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and self._in_hand is None, timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Does what is queued, as far as the time allows, and ends the thread. False if jobs were left."""
        deadline = None if timeout is None else time.monotonic() + timeout
        done = self.flush(timeout)
        with self._changed:
            self._closing = True
            self._jobs.clear()  # what is in hand is finished
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(None if deadline is None else max(deadline - time.monotonic(), 1.0))
        return done

    def _run(self) -> None:
        if self.yields and sys.platform == "linux":  # elsewhere niceness is the whole process's
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if self._closing:
                    return
                name, (job, num_bytes) = self._jobs.popitem(last=False)
                self._in_hand = name
            self.handle(job)
            del job
            with self._changed:
                self._in_hand = None
                self.num_bytes -= num_bytes
                self._changed.notify_all()
