"""Answers in progress on disk, for a repeat of their request. Knows no KV, no model and no text.

The model thread only looks up, queues and takes what was read. One thread does reads, writes and removals in the order
in which they were asked for, so a repeat finds what the run before it has just queued. The folder is part of an SSD
cache, whose lock keeps other servers out.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mantou.cache import checkpoint_file
from mantou.cache.checkpoint_file import HEAD_BYTES, identity_of, read_head
from mantou.cache.disk import TEMPORARY, Disk
from mantou.cache.encoding import BadBlock
from mantou.cache.spool import Spool
from mantou.data import GenerationCheckpoint
from mantou.errors import ConfigError

log = logging.getLogger(__name__)

FOLDER_NAME = "checkpoints"
MAX_BYTES = 256 << 20
MAX_PENDING_BYTES = 64 << 20
_FILE_BYTES = 4096  # what the smallest file takes, so that the budget bounds their number as well
_TOKEN_BYTES = 5  # about, in a file; and of a log-probability
_LOGPROB_BYTES = 16


@dataclass(slots=True)
class Counts:
    saved: int = 0  # files written
    resumed: int = 0  # requests that went on from one
    replayed_tokens: int = 0
    removed: int = 0  # their request was answered
    evictions: int = 0
    dropped: int = 0  # the queue was full
    failed: int = 0  # the file system refused
    corrupt_files: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    name: str  # of the file
    writes: bool
    run: Callable[[], None]


@dataclass(slots=True)
class Shelf:
    """Which files there are or will be, by age and by identity. Its owner holds a lock."""

    nbytes: int = 0
    sizes: OrderedDict[str, int] = field(default_factory=OrderedDict)  # the oldest first
    names: dict[str, dict[str, None]] = field(default_factory=dict)  # identity -> names, the oldest first

    def add(self, name: str, num_bytes: int) -> None:
        """The newest."""
        self.remove(name)
        size = max(num_bytes, _FILE_BYTES)
        self.sizes[name] = size
        self.names.setdefault(name.partition(".")[0], {})[name] = None
        self.nbytes += size

    def restore(self, name: str, num_bytes: int | None) -> None:
        """What was added did not come: there is the file from before, or none."""
        if num_bytes is None:
            self.remove(name)
        else:
            self.add(name, num_bytes)

    def remove(self, name: str) -> bool:
        size = self.sizes.pop(name, None)
        if size is None:
            return False
        self.nbytes -= size
        identity = name.partition(".")[0]
        del self.names[identity][name]
        if not self.names[identity]:
            del self.names[identity]
        return True


class SsdClaim:
    """`Claim` on one file of a `SsdCheckpoints`."""

    def __init__(self, store: SsdCheckpoints, name: str) -> None:
        self.found: GenerationCheckpoint | None = None
        self.name = name
        self._store = store
        self._done = threading.Event()

    @property
    def ready(self) -> bool:
        return self._done.is_set()

    def fulfil(self, found: GenerationCheckpoint | None) -> None:
        self.found = found
        self._done.set()

    def save(self, checkpoint: GenerationCheckpoint) -> None:
        self._store.save(self.name, checkpoint)

    def release(self, *, done: bool) -> None:
        self._store.release(self.name, done=done)


class SsdCheckpoints:
    """Raises ConfigError if the folder cannot be written."""

    def __init__(
        self, directory: Path, every: int, *, max_bytes: int = MAX_BYTES, disk: Disk | None = None
    ) -> None:
        self.every = every
        self.directory = directory / FOLDER_NAME
        self.max_bytes = max_bytes
        self.counts = Counts()
        self._disk = disk or Disk()
        self._shelf = Shelf()
        self._claims: Counter[str] = Counter()  # names that a running request saves under
        self._number = 0
        self._complained = False
        self._lock = threading.Lock()  # of shelf and claims; held for moments only
        self._open()
        self._spool: Spool[Job] = Spool(lambda job: job.run(), MAX_PENDING_BYTES)
        self._spool.start("mantou-checkpoints")

    def _open(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe = self.directory / f"probe{TEMPORARY}"
            probe.touch()
            for path in self.directory.glob(f"*{TEMPORARY}"):
                self._disk.remove(path)
            files = [(self._age(path), path) for path in self.directory.iterdir() if identity_of(path.name)]
            for number, path in sorted(files):
                self._shelf.add(path.name, path.stat().st_size)
                self._number = number
        except OSError as error:
            raise ConfigError(
                f"The folder {self.directory} cannot be written ({error.strerror}), so no generation checkpoint can be "
                "kept; give another --ssd-cache, or leave --generation-checkpoint out."
            ) from error

    def _age(self, path: Path) -> int:
        try:
            return read_head(self._disk.head(path, HEAD_BYTES)).number
        except BadBlock:
            return 0  # the first to go; whoever reads it removes it

    # ------------------------------------------------------------------ the model thread
    def claim(self, identity: bytes, seed: int, wake: Callable[[], None]) -> SsdClaim:
        with self._lock:
            left = self._shelf.names.get(identity.hex(), {})
            found = next((name for name in reversed(left) if not self._claims[name]), None)
            name = found or checkpoint_file.file_name(identity, seed)
            self._claims[name] += 1
        claim = SsdClaim(self, name)
        if found is None:
            claim.fulfil(None)
        elif not self._spool.put(f"read {id(claim)}", Job(name, False, lambda: self._read(claim, wake)), 0):
            claim.fulfil(None)  # closing
        return claim

    def save(self, name: str, checkpoint: GenerationCheckpoint) -> None:
        """What is queued under the same name and not begun is replaced."""
        self._spool.cancel(lambda job: job.writes and job.name == name)
        size = len(checkpoint.tokens) * _TOKEN_BYTES
        size += sum(_LOGPROB_BYTES * (1 + len(entry.top)) for entry in checkpoint.logprobs)
        with self._lock:
            before = self._shelf.sizes.get(name)
            self._shelf.add(name, size)
        job = Job(name, True, lambda: self._write(name, checkpoint))
        if not self._spool.put(f"write {name}", job, size):
            self.counts.dropped += 1
            with self._lock:
                self._shelf.restore(name, before)

    def release(self, name: str, *, done: bool) -> None:
        with self._lock:
            self._claims[name] -= 1
            if not self._claims[name]:
                del self._claims[name]
            known = done and self._shelf.remove(name)
        if known:
            self._spool.cancel(lambda job: job.writes and job.name == name)
            self.counts.removed += 1
            self._spool.put(f"remove {name}", Job(name, False, lambda: self._remove(name)), 0)

    # ------------------------------------------------------------------ the spool's thread
    def _read(self, claim: SsdClaim, wake: Callable[[], None]) -> None:
        try:
            found = checkpoint_file.decode(claim.name, self._disk.read(self.directory / claim.name))
        except FileNotFoundError:  # its write was dropped
            found = None
        except (BadBlock, OSError) as error:
            self.counts.corrupt_files += 1
            log.warning("a generation checkpoint is removed: %s: %s", claim.name, error)
            with self._lock:
                self._shelf.remove(claim.name)
            self._remove(claim.name)
            found = None
        else:
            self.counts.resumed += 1
            self.counts.replayed_tokens += len(found.tokens)
        claim.fulfil(found)
        wake()

    def _write(self, name: str, checkpoint: GenerationCheckpoint) -> None:
        with self._lock:
            if name not in self._shelf.sizes:  # it had to make room meanwhile
                return
        self._number += 1
        content = checkpoint_file.encode(name, self._number, checkpoint)
        try:
            if len(content) > self.max_bytes:
                raise OSError(errno.EFBIG, "it is larger than all checkpoints may be")
            self._disk.write(self.directory / name, [content])
        except OSError as error:
            self.counts.failed += 1
            if not self._complained:
                log.warning("no generation checkpoint can be written to %s: %s", self.directory, error)
            self._complained = True
            if not (self.directory / name).exists():  # else the one before is still good
                with self._lock:
                    self._shelf.remove(name)
            return
        self.counts.saved += 1
        self._complained = False
        with self._lock:
            if name in self._shelf.sizes:  # else it was answered meanwhile, and its removal is queued
                self._shelf.add(name, len(content))
        self._make_room(name)

    def _make_room(self, newest: str) -> None:
        """Removes the oldest; those of running requests last."""
        with self._lock:
            old: list[str] = []
            order = sorted(self._shelf.sizes, key=lambda name: name in self._claims)  # stable
            while self._shelf.nbytes > self.max_bytes and order and order[0] != newest:
                old.append(order.pop(0))
                self._shelf.remove(old[-1])
        self.counts.evictions += len(old)
        for name in old:
            self._remove(name)

    def _remove(self, name: str) -> None:
        try:
            self._disk.remove(self.directory / name)
        except OSError as error:
            log.warning("a generation checkpoint cannot be removed: %s: %s", name, error.strerror)

    # ------------------------------------------------------------------ the server
    def flush(self, timeout: float | None = None) -> Mapping[str, object]:
        """Waits until everything queued is on disk; any thread but the model's may call it."""
        started = time.perf_counter()
        done = self._spool.flush(timeout)
        return {"flushed": done, "elapsed_ms": (time.perf_counter() - started) * 1000, **self.stats()}

    def close(self, timeout: float | None = 30.0) -> None:
        """Writes what is queued, as far as the time allows."""
        self._spool.close(timeout)

    def stats(self) -> dict[str, object]:
        counts, shelf = self.counts, self._shelf
        return {
            "generation_checkpoints": {
                "every_tokens": self.every,
                "entries": len(shelf.sizes),
                "bytes": shelf.nbytes,
                "max_bytes": self.max_bytes,
                "pending": len(self._spool),
                "pending_bytes": self._spool.num_bytes,
                "saved": counts.saved,
                "resumed": counts.resumed,
                "replayed_tokens": counts.replayed_tokens,
                "removed": counts.removed,
                "evictions": counts.evictions,
                "dropped": counts.dropped,
                "failed": counts.failed,
                "corrupt_files": counts.corrupt_files,
            }
        }

    def check_integrity(self) -> None:
        """Raises AssertionError if books and folder disagree. Waits for the spool."""
        self._spool.flush()
        shelf = self._shelf
        assert shelf.nbytes == sum(shelf.sizes.values())
        assert sorted(name for names in shelf.names.values() for name in names) == sorted(shelf.sizes)
        on_disk = {path.name for path in self.directory.iterdir()}
        assert on_disk <= set(shelf.sizes), on_disk - set(shelf.sizes)


def listing(directory: Path) -> list[tuple[Path, int]]:
    """The checkpoints in an SSD cache and their bytes, also while a server uses it; by name."""
    found: list[tuple[Path, int]] = []
    for path in sorted((directory / FOLDER_NAME).glob("*.checkpoint")):
        try:
            found.append((path, path.stat().st_size))
        except FileNotFoundError:  # a running server removes files at any time
            continue
    return found


def verify(directory: Path) -> Iterator[tuple[Path, str]]:
    """Reads every checkpoint and yields those that are not whole, with the reason. Changes nothing."""
    disk = Disk()
    for path, _ in listing(directory):
        try:
            checkpoint_file.decode(path.name, disk.read(path))
        except FileNotFoundError:
            continue
        except (BadBlock, OSError) as error:
            yield path, str(error)


def clean(directory: Path, *, everything: bool) -> int:
    """Removes unfinished files and broken checkpoints, or all of them; no server may use the folder. How many."""
    for path in (directory / FOLDER_NAME).glob(f"*{TEMPORARY}"):
        path.unlink(missing_ok=True)
    unwanted = [path for path, _ in (listing if everything else verify)(directory)]
    for path in unwanted:
        path.unlink(missing_ok=True)
    return len(unwanted)
