"""The stores that keep nothing: no prompts, no answers in progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mantou.cache.prefetch import Ticket, nothing_to_wait_for
from mantou.data import GenerationCheckpoint
from mantou.protocols import CacheKey, Claim, Hit, RowKV


class NoStore:
    wants = False

    def match(self, key: CacheKey, tokens: Sequence[int], session: str | None = None) -> Hit | None:
        return None

    def put(self, key: CacheKey, tokens: Sequence[int], row: RowKV, session: str | None = None) -> None:
        pass

    def prefetch(
        self, key: CacheKey, tokens: Sequence[int], session: str | None, wake: Callable[[], None]
    ) -> Ticket:
        return nothing_to_wait_for()

    def reach(self, key: CacheKey, tokens: Sequence[int]) -> int:
        return 0

    def shrink(self, nbytes: int) -> int:
        return 0

    def close_session(self, session: str) -> bool:
        return False

    def flush(self, timeout: float | None = None) -> Mapping[str, object]:
        return {}

    def stats(self) -> Mapping[str, object]:
        return {}

    def close(self, timeout: float | None = 30.0) -> None:
        pass


class NoClaim:
    found: GenerationCheckpoint | None = None
    ready = True

    def save(self, checkpoint: GenerationCheckpoint) -> None:
        pass

    def release(self, *, done: bool) -> None:
        pass


class NoCheckpoints:
    every = 0

    def claim(self, identity: bytes, seed: int, wake: Callable[[], None]) -> Claim:
        return NoClaim()

    def flush(self, timeout: float | None = None) -> Mapping[str, object]:
        return {}

    def stats(self) -> Mapping[str, object]:
        return {}

    def close(self, timeout: float | None = 30.0) -> None:
        pass
