"""The store that keeps nothing."""

from __future__ import annotations

from collections.abc import Sequence

from mantou.protocols import CacheKey, Snapshot


class NoStore:
    wants = False

    def match(self, key: CacheKey, tokens: Sequence[int]) -> Snapshot | None:
        return None

    def put(self, key: CacheKey, tokens: Sequence[int], snapshot: Snapshot) -> None:
        pass

    def shrink(self, nbytes: int) -> int:
        return 0
