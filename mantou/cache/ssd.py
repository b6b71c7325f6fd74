"""The prefix store on disk: blocks in files, one process a folder. Knows no device, no tree and no eviction of memory.

The model thread only looks up, queues and takes what was read. One thread writes, one reads. A file that is not what
it should be is removed and counted, and whoever asked computes instead.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mantou.cache import blocks
from mantou.cache.blocks import Span, Tokens, as_tokens, key_text, spans
from mantou.cache.catalog import Chain, Entry, begins
from mantou.cache.disk import Disk
from mantou.cache.encoding import COLUMNS, STATE, BadBlock, Label
from mantou.cache.folder import Folder
from mantou.cache.prefetch import Ticket, nothing_to_wait_for
from mantou.cache.spool import Spool
from mantou.kv.pieces import Piece, Stack, State
from mantou.protocols import CacheKey, Hit, RowKV

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    restores: int = 0  # prompts that were continued from disk
    restore_ms_last: float = 0.0
    spills: int = 0  # files written
    demotions: int = 0  # files queued because memory gave up the last copy
    dropped_spills: int = 0  # the queue was full
    failed_spills: int = 0  # the file system refused
    skipped_states: int = 0  # on the way, and larger than the columns since the last one
    prefetches: int = 0
    skipped_prefetches: int = 0  # too much read already waits to be used


@dataclass(frozen=True, slots=True)
class Job:
    """`parts`: the stacks of contiguous columns, which the writer joins: the model thread has no time for copies."""

    label: Label
    parts: tuple[tuple[Stack, ...], ...]


class SsdStore:
    """Raises ConfigError if the folder cannot be used or another process has it."""

    wants = True

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        *,
        recurrent: bool = False,
        max_pending_bytes: int = 256 << 20,
        max_staged_bytes: int = 4 << 30,
        disk: Disk | None = None,
    ) -> None:
        self.recurrent = recurrent
        self.counters = Counters()
        self._max_staged_bytes = max_staged_bytes
        self._folder = Folder(directory, max_bytes, disk or Disk())
        self._tickets: dict[bytes, Ticket] = {}  # by the address of the whole prompt
        self._lock = threading.Lock()  # of the tickets; the folder has its own
        self._complained = False
        self._token_bytes = 0.0  # of the columns, and of a state, that were queued last
        self._state_bytes = 0
        self._writer: Spool[Job] = Spool(self._write, max_pending_bytes, yields=True)
        self._reader: Spool[Callable[[], None]] = Spool(lambda read: read(), 0)
        self._writer.start("mantou-ssd-write")
        self._reader.start("mantou-ssd-read")

    # ------------------------------------------------------------------ the seam
    def match(self, key: CacheKey, tokens: Sequence[int] | Tokens, session: str | None = None) -> Hit | None:
        """What a prefetch has brought for exactly this prompt. Never reads and never waits."""
        hit = self.take(key, as_tokens(tokens))
        return hit if hit is not None and (not hit.pieces or hit.pieces[0].lo == 0) else None

    def put(
        self, key: CacheKey, tokens: Sequence[int] | Tokens, row: RowKV, session: str | None = None
    ) -> None:
        """Queues what is not on disk yet. What the queue has no room for is counted and left out."""
        self.spill(key, as_tokens(tokens), row)

    def reach(self, key: CacheKey, tokens: Sequence[int] | Tokens) -> int:
        return self._folder.find(list(spans(key, as_tokens(tokens))), len(tokens), recurrent=False).num_tokens

    def shrink(self, nbytes: int) -> int:
        """Gives back what was read and not taken yet."""
        freed = 0
        with self._lock:
            while self._tickets and freed < nbytes:
                _, ticket = self._tickets.popitem()
                freed += ticket.num_bytes
                ticket.drop()
        return freed

    # ------------------------------------------------------------------ down
    def spill(
        self,
        key: CacheKey,
        tokens: Tokens,
        row: RowKV,
        *,
        pieces: Callable[[int, int], Sequence[Piece]] | None = None,
        demoted: bool = False,
    ) -> None:
        """Queues what is not on disk yet; `pieces` gives the row's columns without joining them."""
        pieces = pieces or (lambda lo, hi: (row.columns(lo, hi),))
        if self._folder.read_only:
            self.counters.dropped_spills += 1
            return
        prompt = list(spans(key, tokens))
        text = key_text(key)
        for span in prompt:
            label = Label(COLUMNS, text, span.parent, span.address, span.lo, span.tokens)
            if self._known(label, span):
                continue
            found = pieces(span.lo, span.hi)
            if not found or found[0].lo != span.lo or found[0].lo == found[0].hi:
                break
            self._token_bytes = found[0].nbytes / (found[0].hi - found[0].lo)
            if not self._queue(label, tuple(piece.stacks for piece in found), demoted):
                break
            self._writer.cancel(lambda job, longer=label: _is_part(job.label, longer))
        if self.recurrent and prompt:
            self._spill_state(text, prompt[-1], row, demoted)
        self._folder.touch(prompt)

    def _spill_state(self, text: str, last: Span, row: RowKV, demoted: bool) -> None:
        label = Label(STATE, text, last.parent, last.address, last.lo, last.tokens)
        if label.file_name in self._writer or self._folder.holds(label.file_name):
            return
        if row.since is not None and not self._worth_a_state(row.since, last.hi):
            self.counters.skipped_states += 1
            return
        state = row.state()
        if state is not None and state.num_tokens == last.hi:
            self._state_bytes = state.nbytes
            self._queue(label, (state.stacks,), demoted)

    def _worth_a_state(self, since: int, here: int) -> bool:
        """Of states on the way, as many as take no more of the disk than the columns between them."""
        gap = int(self._state_bytes / self._token_bytes) if self._token_bytes else 0
        return gap <= blocks.BLOCK or here // gap > since // gap

    def _known(self, label: Label, span: Span) -> bool:
        return label.file_name in self._writer or self._folder.covers(span)

    def _queue(self, label: Label, parts: tuple[tuple[Stack, ...], ...], demoted: bool) -> bool:
        num_bytes = sum(stack.nbytes for stacks in parts for stack in stacks)
        queued = self._writer.put(label.file_name, Job(label, parts), num_bytes)
        self.counters.dropped_spills += not queued
        self.counters.demotions += queued and demoted
        return queued

    def _write(self, job: Job) -> None:
        """On the writer's thread."""
        span = Span(job.label.parent, job.label.address, job.label.lo, job.label.tokens)
        if job.label.kind == COLUMNS and self._folder.covers(span):
            return
        try:
            self._folder.write(job.label, blocks.join_stacks(job.parts))
        except (OSError, sqlite3.Error) as error:
            self.counters.failed_spills += 1
            if not self._complained:
                log.warning("the SSD cache %s cannot be written: %s", self._folder.directory, error)
            self._complained = True
        else:
            self.counters.spills += 1
            self._complained = False

    # ------------------------------------------------------------------ up
    def prefetch(
        self,
        key: CacheKey,
        tokens: Sequence[int] | Tokens,
        session: str | None = None,
        wake: Callable[[], None] = lambda: None,
        *,
        num_columns: int = 0,
        num_useful: int = 0,
    ) -> Ticket:
        """Begins to read what `match` will be asked for, and returns at once; `wake` is called from another thread.

        A faster tier already has `num_columns` columns, and serves `num_useful` tokens without this one.
        """
        prompt = list(spans(key, as_tokens(tokens)))
        limit = len(tokens) - 1
        chain = self._folder.find(prompt, limit, recurrent=self.recurrent)
        if chain.num_tokens <= num_useful:
            return nothing_to_wait_for()
        address = prompt[-1].address
        with self._lock:
            ticket = self._tickets.get(address)
            begun = ticket is not None
            if ticket is None:
                ticket = self._tickets[address] = Ticket(lambda ticket: self._forget(address, ticket))
            ticket.join(wake)
        if not begun:
            self.counters.prefetches += 1
            self._folder.touch(prompt)
            skip = num_columns // blocks.BLOCK * blocks.BLOCK
            self._reader.put(address.hex(), lambda: self._restore(ticket, prompt, limit, skip), 0)
        return ticket

    def take(self, key: CacheKey, tokens: Tokens) -> Hit | None:
        """What a prefetch has brought for this prompt; its pieces begin where the faster tier's columns ended."""
        if not self._tickets:
            return None
        *_, last = spans(key, tokens)
        with self._lock:
            ticket = self._tickets.pop(last.address, None)
        if ticket is None:
            return None
        hit = ticket.hit
        ticket.drop()
        self.counters.restores += hit is not None
        return hit

    def _forget(self, address: bytes, ticket: Ticket) -> None:
        with self._lock:
            if self._tickets.get(address) is ticket:
                del self._tickets[address]

    def _restore(self, ticket: Ticket, prompt: list[Span], limit: int, skip: int) -> None:
        """On the reader's thread. Each file that cannot be read leaves the folder, and the rest is tried again."""
        started = time.perf_counter()
        read: dict[str, tuple[Stack, ...]] = {}
        while not ticket.closed:
            chain = self._folder.find(prompt, limit, recurrent=self.recurrent)
            wanted = [e for e in chain.entries if e.label.kind == STATE or e.label.lo >= skip]
            if not self._has_room(wanted):
                self.counters.skipped_prefetches += 1
                break
            if self._read_all(wanted, read):
                hit = _assemble(chain, wanted, read)
                ticket.fulfil(hit, sum(entry.nbytes for entry in wanted))
                self.counters.restore_ms_last = (time.perf_counter() - started) * 1000
                return
        ticket.fulfil(None)

    def _has_room(self, wanted: Sequence[Entry]) -> bool:
        """Whether so much more may wait in memory. One prompt may, whatever its size."""
        with self._lock:
            staged = sum(ticket.num_bytes for ticket in self._tickets.values())
        return not staged or staged + sum(entry.nbytes for entry in wanted) <= self._max_staged_bytes

    def _read_all(self, wanted: Sequence[Entry], read: dict[str, tuple[Stack, ...]]) -> bool:
        for entry in wanted:
            if entry.name not in read:
                try:
                    read[entry.name] = self._folder.read(entry)
                except (BadBlock, OSError):
                    return False
        return True

    # ------------------------------------------------------------------ the server
    def close_session(self, session: str) -> bool:
        """The disk keeps no sessions."""
        return False

    def flush(self, timeout: float | None = None) -> Mapping[str, object]:
        """Waits until everything queued is on disk; any thread but the model's may call it."""
        started = time.perf_counter()
        done = self._writer.flush(timeout)
        elapsed_ms = (time.perf_counter() - started) * 1000
        return {"flushed": done, "elapsed_ms": elapsed_ms, **self.stats()}

    def close(self, timeout: float | None = 30.0) -> None:
        """Writes what is queued, as far as the time allows, and gives the folder free."""
        self._writer.close(timeout)
        self._reader.close(timeout)
        self._folder.close()

    def stats(self) -> dict[str, object]:
        counters, folder = self.counters, self._folder
        return {
            "ssd_cache": {
                "dir": str(folder.directory),
                "read_only": folder.read_only,
                "entries": len(folder.entries()),
                "bytes": folder.nbytes,
                "max_bytes": folder.max_bytes,
                "restores": counters.restores,
                "restore_ms_last": counters.restore_ms_last,
                "spills": counters.spills,
                "demotions": counters.demotions,
                "evictions": folder.num_evicted,
                "skipped_states": counters.skipped_states,
                "prefetches": counters.prefetches,
                "skipped_prefetches": counters.skipped_prefetches,
                "pending_snapshots": len(self._writer),
                "pending_spill_bytes": self._writer.num_bytes,
                "dropped_spills": counters.dropped_spills,
                "failed_spills": counters.failed_spills,
                "corrupt_files": folder.num_corrupt,
                "longest_durable_prefix_tokens": folder.longest(),
            }
        }

    def check_integrity(self) -> None:
        """Raises AssertionError if the books disagree. Waits for the writer."""
        self._writer.flush()
        self._folder.check_integrity()


def _is_part(label: Label, longer: Label) -> bool:
    """Whether queued columns are useless once `longer` is written."""
    return (
        label.kind == COLUMNS
        and label.parent == longer.parent
        and len(label.tokens) < len(longer.tokens)
        and begins(longer.tokens, label.tokens)
    )


def _assemble(chain: Chain, wanted: Sequence[Entry], read: Mapping[str, tuple[Stack, ...]]) -> Hit | None:
    if not chain.num_tokens:
        return None
    pieces = tuple(
        Piece(e.label.lo, e.label.hi, read[e.name]).cut(e.label.lo, min(e.label.hi, chain.num_tokens))
        for e in wanted
        if e.label.kind == COLUMNS
    )
    state = State(chain.num_tokens, read[chain.state.name]) if chain.state else None
    return Hit(chain.num_tokens, pieces, state)
