"""A prompt's way from disk to memory while its request waits. Knows tickets; what is read, and how, is the tier's."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mantou.protocols import Hit


class Ticket:
    """The prefetch of one prompt, shared by the requests that wait for it.

    The reader fulfils it, the model thread takes its hit; `close` gives it back unused. `wake` is called from the
    reader's thread once there is no more reason to wait.
    """

    def __init__(self, on_close: Callable[[Ticket], None] = lambda ticket: None) -> None:
        self.hit: Hit | None = None  # its pieces may begin after position 0: the rest is in a faster tier
        self.num_bytes = 0
        self.closed = False
        self._on_close = on_close
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._wakes: list[Callable[[], None]] = []
        self._num_holders = 0

    @property
    def ready(self) -> bool:
        """Whether waiting longer brings nothing."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        return self._done.wait(timeout)

    def join(self, wake: Callable[[], None]) -> Ticket:
        """One more request that waits."""
        with self._lock:
            self._num_holders += 1
            done = self._done.is_set()
            if not done:
                self._wakes.append(wake)
        if done:
            wake()
        return self

    def fulfil(self, hit: Hit | None, num_bytes: int = 0) -> None:
        """Called once, by the reader."""
        with self._lock:
            if not self.closed:
                self.hit, self.num_bytes = hit, num_bytes
            self._done.set()
            wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()

    def close(self) -> None:
        """A request is gone, or has what it needs. The last one that waited drops what was read."""
        with self._lock:
            self._num_holders -= 1
            last = self._num_holders <= 0 and not self.closed
        if last:
            self.drop()
            self._on_close(self)

    def drop(self) -> None:
        """Nobody needs it any more, whoever still holds it."""
        with self._lock:
            self.closed, self.hit, self.num_bytes = True, None, 0


def nothing_to_wait_for() -> Ticket:
    ticket = Ticket()
    ticket.fulfil(None)
    return ticket
