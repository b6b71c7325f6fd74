"""A prefix store whose server is restarted between two turns: memory is empty then, the disk is not. For the matrix."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mantou.cache.ram import RamStore
from mantou.cache.ssd import SsdStore
from mantou.cache.tiered import Tiered


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
