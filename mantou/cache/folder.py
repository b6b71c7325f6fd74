"""A folder of block files with its catalog and its table. Knows files and bytes; no prompts in progress, no threads.

Any thread may call it. Model threads only use what needs no file: `covers`, `holds`, `touch`, `find`.

Order of writing: file (temporary, fsync, rename), row, catalog; of removing: catalog, row, file. A process that dies in
between leaves a file without a row, which the next one reads the label of and takes in, or an unfinished temporary.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mantou.cache.blocks import Span
from mantou.cache.catalog import Catalog, Chain, Entry
from mantou.cache.disk import READ_ONLY, TEMPORARY, Disk
from mantou.cache.encoding import COLUMNS, BadBlock, Label, decode, encode, header_bytes, read_label
from mantou.cache.index import Index
from mantou.errors import ConfigError
from mantou.kv.pieces import Stack

log = logging.getLogger(__name__)

LOCK_NAME = "lock"
BLOCKS_NAME = "blocks"
_OURS = re.compile(r"[0-9a-f]{64}\.(columns|state)\.safetensors")


class Folder:
    """Raises ConfigError if the folder cannot be made or read, or if another process has it."""

    def __init__(self, directory: Path, max_bytes: int, disk: Disk) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self.read_only = False
        self.num_corrupt = 0
        self.num_evicted = 0
        self._disk = disk
        self._gave_way = False
        self._catalog = Catalog()
        self._touched: dict[str, Entry] = {}
        self._lock = threading.Lock()  # of the catalog; held for moments only
        self._index_lock = threading.Lock()
        self._descriptor = self._claim()
        try:
            self._index = self._open_index()
            self._reconcile()
        except (OSError, sqlite3.Error) as error:
            self._unlock()
            raise ConfigError(
                f"The SSD cache {directory} cannot be read ({error}); give another folder."
            ) from error

    # ------------------------------------------------------------------ opening
    def _claim(self) -> int | None:
        try:
            (self.directory / BLOCKS_NAME).mkdir(parents=True, exist_ok=True)
            return self._disk.lock(self.directory / LOCK_NAME)
        except OSError as error:
            if error.errno not in READ_ONLY or not (self.directory / BLOCKS_NAME).is_dir():
                raise ConfigError(
                    f"The SSD cache {self.directory} cannot be used ({error.strerror}); give another folder."
                ) from error
            self.read_only = True
            log.warning(
                "the SSD cache %s cannot be written (%s): it is read only", self.directory, error.strerror
            )
            return None

    def _open_index(self) -> Index:
        try:
            index = Index(self.directory, read_only=self.read_only)
            index.check()
            self._rows = index.entries()
        except sqlite3.DatabaseError as error:
            if self.read_only:
                raise
            log.warning("the table of the SSD cache %s is made anew (%s)", self.directory, error)
            Index.delete_files(self.directory)
            index = Index(self.directory)
            self._rows = index.entries()
        return index

    def _reconcile(self) -> None:
        """Rows and files agree afterwards, except that a read-only folder keeps what is too much."""
        sizes: dict[str, int] = {}
        with os.scandir(self.directory / BLOCKS_NAME) as files:
            for file in files:
                if _OURS.fullmatch(file.name):
                    sizes[file.name] = file.stat().st_size
                elif file.name.endswith(TEMPORARY) and not self.read_only:
                    self._disk.remove(Path(file.path))
        gone: list[Entry] = []
        for entry in self._rows:
            size = sizes.pop(entry.name, None)
            if size == entry.nbytes:
                self._catalog.add(entry)
            else:
                gone.append(entry)
                if size is not None:
                    self._reject(entry.name, "its size has changed")
        found = [entry for name, size in sizes.items() if (entry := self._adopt(name, size)) is not None]
        for entry in found:
            self._catalog.add(entry)
        if not self.read_only:
            self._index.save(added=found, removed=gone)
            self._make_room(0)
        del self._rows

    def _adopt(self, name: str, size: int) -> Entry | None:
        """A file without a row. Its data is checked when it is read."""
        path = self._path(name)
        try:
            label = read_label(self._disk.head(path, min(header_bytes(self._disk.head(path, 8)), size)))
        except BadBlock as error:
            self._reject(name, str(error))
            return None
        if label.file_name != name:
            self._reject(name, "it holds another block than its name says")
            return None
        return Entry(label, size)

    def _reject(self, name: str, reason: str) -> None:
        self.num_corrupt += 1
        log.warning("a file of the SSD cache is removed: %s: %s", name, reason)
        if not self.read_only:
            self._remove_file(name)

    # ------------------------------------------------------------------ lookups, without a file
    def covers(self, span: Span) -> bool:
        with self._lock:
            return self._catalog.covering(span) is not None

    def holds(self, name: str) -> bool:
        with self._lock:
            return name in self._catalog

    def find(self, prompt: Sequence[Span], limit: int, *, recurrent: bool) -> Chain:
        with self._lock:
            return self._catalog.find(prompt, limit, recurrent=recurrent)

    def touch(self, prompt: Sequence[Span]) -> None:
        """The prompt was used. Saved with the next file that is written."""
        with self._lock:
            chain = self._catalog.find(prompt, prompt[-1].hi, recurrent=False) if prompt else Chain()
            self._note_used([*reversed(chain.columns)])

    def _note_used(self, deepest_first: Sequence[Entry]) -> None:
        for entry in self._catalog.touch(deepest_first):
            self._touched[entry.name] = entry

    # ------------------------------------------------------------------ files
    def write(self, label: Label, stacks: Sequence[Stack]) -> None:
        """Raises OSError or sqlite3.Error, and has changed nothing then but for making room."""
        parts = encode(label, stacks)
        entry = Entry(
            label, sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)
        )
        if not self._make_room(entry.nbytes):
            raise OSError(errno.EFBIG, "a block is larger than the whole SSD cache")
        self._write_file(entry, parts)
        with self._lock:
            self._catalog.add(entry)
            self._note_used([entry, *self._catalog.above(entry)])
            shorter = self._catalog.covered_by(entry) if label.kind == COLUMNS else []
        try:
            self._save(added=[entry], removed=shorter)
        except sqlite3.Error:
            with self._lock:
                self._catalog.remove(entry)
            self._remove_file(entry.name)
            raise
        self._drop(shorter)

    def _write_file(self, entry: Entry, parts: Sequence[bytes | memoryview]) -> None:
        """On a full disk old blocks make room for the new one, but only once until a write succeeds: whatever else
        fills the disk may take what is freed, and a cache that gives up everything helps nobody."""
        try:
            self._disk.write(self._path(entry.name), parts)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or self._gave_way:
                raise
            self._gave_way = True
            self._make_room(entry.nbytes, self.nbytes)
            self._disk.write(self._path(entry.name), parts)
        self._gave_way = False

    def read(self, entry: Entry) -> tuple[Stack, ...]:
        """Raises BadBlock or OSError, and the entry is gone then."""
        try:
            return decode(self._disk.read(self._path(entry.name)), entry.label)
        except BadBlock as error:
            self._forget([entry])
            self._reject(entry.name, str(error))
            raise
        except OSError:
            self._forget([entry])
            raise

    def _make_room(self, num_bytes: int, limit: int | None = None) -> bool:
        """Removes the entries used least recently until `num_bytes` more fit."""
        with self._lock:
            allowed = self.max_bytes if limit is None else limit
            too_much, old = self._catalog.nbytes + num_bytes - allowed, []
            for entry in self._catalog:
                if too_much <= 0:
                    break
                old.append(entry)
                too_much -= entry.nbytes
        if too_much > 0:
            return False
        self._forget(old)
        self.num_evicted += len(old)
        for entry in old:
            self._remove_file(entry.name)
        return True

    def _drop(self, entries: Sequence[Entry]) -> None:
        with self._lock:
            for entry in entries:
                self._catalog.remove(entry)
        for entry in entries:
            self._remove_file(entry.name)

    def _forget(self, entries: Sequence[Entry]) -> None:
        """From catalog and table. A table that cannot be written is put right at the next start."""
        with self._lock:
            for entry in entries:
                self._catalog.remove(entry)
        if entries and not self.read_only:
            try:
                self._save(removed=entries)
            except sqlite3.Error as error:
                log.warning("the table of the SSD cache cannot be written: %s", error)

    def _save(self, added: Sequence[Entry] = (), removed: Sequence[Entry] = ()) -> None:
        with self._lock:
            used, self._touched = list(self._touched.values()), {}
        with self._index_lock:
            self._index.save(added, removed, used)

    def _remove_file(self, name: str) -> None:
        try:
            self._disk.remove(self._path(name))
        except OSError as error:  # it is adopted at the next start, and removed when its turn comes
            log.warning("a file of the SSD cache cannot be removed: %s: %s", name, error.strerror)

    def _path(self, name: str) -> Path:
        return self.directory / BLOCKS_NAME / name

    # ------------------------------------------------------------------ the rest
    @property
    def nbytes(self) -> int:
        with self._lock:
            return self._catalog.nbytes

    def entries(self) -> list[Entry]:
        """The least recently used first."""
        with self._lock:
            return list(self._catalog)

    def longest(self) -> int:
        with self._lock:
            return self._catalog.longest()

    def close(self) -> None:
        if not self.read_only:
            try:
                self._save()
            except sqlite3.Error as error:
                log.warning("the table of the SSD cache cannot be written: %s", error)
        self._index.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def check_integrity(self) -> None:
        """Raises AssertionError if catalog, budget and folder disagree. Only while nothing is written."""
        with self._lock:
            self._catalog.check_integrity()
            assert self._catalog.nbytes <= self.max_bytes or self.read_only
            for entry in self._catalog:
                assert self._path(entry.name).stat().st_size == entry.nbytes, entry.name


def listing(directory: Path) -> list[Entry]:
    """What the table of a folder says, also while a server uses it. Raises ConfigError."""
    if not (directory / BLOCKS_NAME).is_dir():
        raise ConfigError(
            f"{directory} is no SSD cache; give the folder that `mantou serve --ssd-cache` was given."
        )
    try:
        index = Index(directory, read_only=True)
        try:
            return index.entries()
        finally:
            index.close()
    except sqlite3.Error as error:
        raise ConfigError(
            f"The table of {directory} cannot be read ({error}); the next server on it makes it anew."
        ) from error


def verify(directory: Path, entries: Iterable[Entry]) -> Iterator[tuple[Entry, str]]:
    """Reads every file and yields those that are not what they should be, with the reason. Changes nothing."""
    disk = Disk()
    for entry in entries:
        try:
            decode(disk.read(directory / BLOCKS_NAME / entry.name), entry.label)
        except FileNotFoundError:
            continue  # a running server removes files at any time
        except (BadBlock, OSError) as error:
            yield entry, str(error)
