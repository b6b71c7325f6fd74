"""The store that keeps nothing."""

from __future__ import annotations

from collections.abc import Sequence

from mantou.protocols import CacheKey, Hit, RowKV


class NoStore:
    wants = False

    def match(self, key: CacheKey, tokens: Sequence[int], session: str | None = None) -> Hit | None:
        return None

    def put(self, key: CacheKey, tokens: Sequence[int], row: RowKV, session: str | None = None) -> None:
        pass

    def shrink(self, nbytes: int) -> int:
        return 0
