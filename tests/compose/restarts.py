"""A prefix store whose server is restarted between two turns: memory is empty then, the disk is not. For the matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mantou.cache.ram import RamStore
from mantou.cache.ssd import SsdStore
from mantou.cache.tiered import Tiered
from mantou.protocols import CacheKey, Ticket


class Restartable:
    """Memory above disk. What a `Tiered` can do, it can."""

    wants = True

    def __init__(self, *, recurrent: bool) -> None:
        self._recurrent = recurrent
        self._folder = TemporaryDirectory()
        self._tiers = self._open()

    def _open(self) -> Tiered:
        disk = SsdStore(Path(self._folder.name), 1 << 30, recurrent=self._recurrent)
        return Tiered(RamStore(1 << 30, recurrent=self._recurrent), disk)

    def restart(self) -> None:
        self._close_tiers()
        self._tiers = self._open()

    def close(self) -> None:
        self._close_tiers()
        self._folder.cleanup()

    def _close_tiers(self) -> None:
        self._tiers.check_integrity()
        self._tiers.close()

    @property
    def hits(self) -> int:
        return self._tiers.disk.counters.restores

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tiers, name)


@dataclass(eq=False)
class _Late:
    """A ticket that has come back already, and says so when its turn is."""

    ticket: Ticket
    its_turn: Callable[[], bool]
    done: Callable[[], None]

    @property
    def ready(self) -> bool:
        return self.its_turn()

    def close(self) -> None:
        self.ticket.close()
        self.done()


class InOrder:
    """A store whose tickets come back one after another, each once the one before was used, in an order by names.

    A name is that of a prompt's row, after `draft ` for what a draft model keeps of it. Tickets that the order does not
    name are not held up.
    """

    wants = True

    def __init__(
        self, store: Restartable, prompts: Mapping[str, Sequence[int]], order: Sequence[str]
    ) -> None:
        self._store = store
        self._prompts = prompts
        self._order = list(order)
        self.used: list[str] = []
        self._wakes: dict[str, Callable[[], None]] = {}

    def prefetch(
        self,
        key: CacheKey,
        tokens: Sequence[int],
        session: str | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> Any:
        ticket = self._store.prefetch(key, tokens, session, lambda: None)
        assert ticket.wait(30), "nothing came from the slow tier"
        of = next(name for name, prompt in self._prompts.items() if tuple(tokens[: len(prompt)]) == prompt)
        name = f"draft {of}" if key.model.startswith("draft") else of
        if name not in self._order or name in self._wakes:
            return ticket
        self._wakes[name] = wake
        self._wake_next()
        return _Late(ticket, lambda: self._next == name or name in self.used, lambda: self._use(name))

    @property
    def _next(self) -> str | None:
        return next((name for name in self._order if name not in self.used), None)

    def _use(self, name: str) -> None:
        self.used.append(name)
        self._wake_next()

    def _wake_next(self) -> None:
        if self._next in self._wakes:
            self._wakes[self._next]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
