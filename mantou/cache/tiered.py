"""Two prefix stores as one: memory in front of disk. Knows neither device nor files.

Down: everything that is put goes to memory and is queued for the disk behind it; what memory gives up before the disk
has it is queued again. Up: while a request waits, `prefetch` reads what memory lacks; `match` moves it into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mantou.cache.blocks import HeldRow, Tokens, as_tokens, join
from mantou.cache.prefetch import Ticket
from mantou.cache.ram import RamStore
from mantou.cache.ssd import SsdStore
from mantou.kv.pieces import Piece, State
from mantou.protocols import CacheKey, Hit, RowKV


@dataclass(frozen=True, slots=True)
class Stacked:
    """A row whose beginning is already in host memory, so that it is not copied from the device twice."""

    held: Hit
    row: RowKV

    @property
    def since(self) -> int | None:
        return self.row.since

    def pieces(self, lo: int, hi: int) -> list[Piece]:
        """Positions [lo, hi), as they are held."""
        return HeldRow(self.held).pieces(lo, hi) if hi <= self.held.num_tokens else [self.row.columns(lo, hi)]

    def columns(self, lo: int, hi: int) -> Piece:
        return join(self.pieces(lo, hi))

    def state(self) -> State | None:
        return self.held.state or self.row.state()


class Tiered:
    wants = True

    def __init__(self, memory: RamStore, disk: SsdStore) -> None:
        self.memory, self.disk = memory, disk
        memory.on_evict = self._demote

    # ------------------------------------------------------------------ the seam
    def match(self, key: CacheKey, tokens: Sequence[int] | Tokens, session: str | None = None) -> Hit | None:
        tokens = as_tokens(tokens)
        read = self._with_memory(key, tokens, self.disk.take(key, tokens))
        if read is not None:
            self.memory.put(key, tokens[: read.num_tokens], HeldRow(read))
        hit = self.memory.match(key, tokens, session)
        if read is None or (hit is not None and hit.num_tokens >= read.num_tokens):
            return hit
        return read  # memory has no room for all of it

    def put(
        self, key: CacheKey, tokens: Sequence[int] | Tokens, row: RowKV, session: str | None = None
    ) -> None:
        tokens = as_tokens(tokens)
        self.memory.put(key, tokens, row, session)
        held = self.memory.held(key, tokens)
        if held is not None and held.num_tokens < len(tokens):
            held = Hit(held.num_tokens, held.pieces)
        if held is None:
            self.disk.put(key, tokens, row)
        else:
            stacked = Stacked(held, row)
            self.disk.spill(key, tokens, stacked, pieces=stacked.pieces)

    def prefetch(
        self,
        key: CacheKey,
        tokens: Sequence[int] | Tokens,
        session: str | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> Ticket:
        tokens = as_tokens(tokens)
        self.memory.prefetch(key, tokens, session)
        hit, num_columns = self.memory.peek(key, tokens)
        num_useful = hit.num_tokens if hit else 0
        return self.disk.prefetch(key, tokens, session, wake, num_columns=num_columns, num_useful=num_useful)

    def reach(self, key: CacheKey, tokens: Sequence[int] | Tokens) -> int:
        return max(self.memory.reach(key, tokens), self.disk.reach(key, tokens))

    def shrink(self, nbytes: int) -> int:
        freed = self.memory.shrink(nbytes)
        return freed + (self.disk.shrink(nbytes - freed) if freed < nbytes else 0)

    # ------------------------------------------------------------------ the server
    def close_session(self, session: str) -> bool:
        return self.memory.close_session(session)

    def flush(self, timeout: float | None = None) -> Mapping[str, object]:
        return self.disk.flush(timeout)

    def close(self, timeout: float | None = 30.0) -> None:
        self.disk.close(timeout)

    def stats(self) -> dict[str, object]:
        return {**self.memory.stats(), **self.disk.stats()}

    def check_integrity(self) -> None:
        self.memory.check_integrity()
        self.disk.check_integrity()

    # ------------------------------------------------------------------ between the two
    def _with_memory(self, key: CacheKey, tokens: Tokens, read: Hit | None) -> Hit | None:
        """What was read, behind the columns that memory still has. None if there is a gap by now."""
        if read is None:
            return None
        first = read.pieces[0].lo if read.pieces else read.num_tokens
        held = self.memory.held(key, tokens[:first]) if first else Hit(0, ())
        if held is None or held.num_tokens < first:
            return None
        return Hit(read.num_tokens, (*held.pieces, *read.pieces), read.state)

    def _demote(self, key: CacheKey, tokens: Tokens, hit: Hit) -> None:
        row = HeldRow(hit)
        self.disk.spill(key, tokens, row, pieces=row.pieces, demoted=True)
