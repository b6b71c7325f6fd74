"""Responses that were made, in SQLite: for a second turn, for a client that comes back. Knows their bytes only.

In memory or in a folder; there it survives the server's end, whatever ends it. A response is forgotten some time after
it was written, or when its place is needed, the longest unused first.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

from mantou.errors import ConfigError, MantouError

FILE_NAME, LOCK_NAME = "responses.sqlite", "responses.lock"
VERSION = 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, nbytes INTEGER NOT NULL, written REAL NOT NULL, used INTEGER NOT NULL,
    running INTEGER NOT NULL, body BLOB NOT NULL, input BLOB NOT NULL, events BLOB NOT NULL,
    owner TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS responses_used ON responses (used);
CREATE TABLE IF NOT EXISTS items (id TEXT PRIMARY KEY, response TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS items_response ON items (response);
"""
# From version 1, where nobody knew whose a response was.
_OWNERS = "ALTER TABLE responses ADD COLUMN owner TEXT NOT NULL DEFAULT ''"


class StoreFailed(MantouError):
    """The disk would not take or give a response."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A stored response. `body` and `input` are JSON: the response, and the list of all items that led to it."""

    id: str
    body: bytes
    input: bytes
    events: bytes = b""  # its whole stream, if that can be asked for again
    running: bool = False  # not finished when this was written
    owner: str = ""  # name of the key that asked for it; "" = no key was asked for


class ResponseStore(Protocol):
    """Every method blocks for a moment, may be called from any thread, and raises StoreFailed."""

    @property
    def keeps(self) -> bool:
        """Whether it keeps anything at all."""
        ...

    def put(self, kept: Kept, item_ids: Iterable[str] = ()) -> None:
        """Stores it, in place of what had its id. `item_ids`: items of its output, by which it can be found."""
        ...

    def get(self, response_id: str) -> Kept | None: ...
    def of_item(self, item_id: str) -> Kept | None: ...
    def delete(self, response_id: str) -> bool:
        """False for an unknown id."""
        ...

    def interrupted(self) -> list[Kept]:
        """Those that were running when the server before this one ended."""
        ...

    def close(self) -> None: ...


class NoResponses:
    """Keeps nothing."""

    keeps = False

    def put(self, kept: Kept, item_ids: Iterable[str] = ()) -> None: ...
    def get(self, response_id: str) -> Kept | None:
        return None

    def of_item(self, item_id: str) -> Kept | None:
        return None

    def delete(self, response_id: str) -> bool:
        return False

    def interrupted(self) -> list[Kept]:
        return []

    def close(self) -> None: ...


class SqliteResponses:
    """`ttl_s` seconds and `max_bytes` bytes (of all but the newest response) long; 0 seconds = for ever."""

    keeps = True

    def __init__(
        self,
        folder: Path | None,
        *,
        ttl_s: float,
        max_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`folder` None = in memory. Raises ConfigError for a folder that cannot be used, or that is in use."""
        self._ttl_s, self._max_bytes, self._clock = ttl_s, max_bytes, clock
        self._turn = threading.Lock()
        self._lock: FileLock | None = None
        if folder is None:
            self._db = _open(":memory:")
            return
        path = folder / FILE_NAME
        self._lock = _locked(folder)
        try:
            self._db = _open(str(path))
        except sqlite3.Error as error:
            self._lock.release()
            raise ConfigError(
                f"--response-store cannot read {path} ({error}); move that file away or give another folder."
            ) from None
        except ConfigError:
            self._lock.release()
            raise

    def put(self, kept: Kept, item_ids: Iterable[str] = ()) -> None:
        now = self._clock()
        nbytes = len(kept.body) + len(kept.input) + len(kept.events)
        with self._turn, _told(), self._db:
            self._forget(kept.id)
            self._db.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(kept.id, nbytes, now, self._next(), kept.running),
                    *(kept.body, kept.input, kept.events, kept.owner),
                ),
            )
            self._db.executemany(
                "INSERT OR REPLACE INTO items VALUES (?, ?)", [(item, kept.id) for item in item_ids]
            )
            self._make_room(kept.id, now)

    def get(self, response_id: str) -> Kept | None:
        with self._turn, _told():
            return self._read(response_id)

    def of_item(self, item_id: str) -> Kept | None:
        with self._turn, _told():
            found = self._db.execute("SELECT response FROM items WHERE id = ?", (item_id,)).fetchone()
            return None if found is None else self._read(found[0])

    def delete(self, response_id: str) -> bool:
        with self._turn, _told():
            if self._read(response_id) is None:
                return False
            with self._db:
                self._forget(response_id)
            return True

    def interrupted(self) -> list[Kept]:
        with self._turn, _told():
            rows = self._db.execute("SELECT id FROM responses WHERE running").fetchall()
            return [kept for [name] in rows if (kept := self._read(name)) is not None]

    def close(self) -> None:
        with self._turn:
            self._db.close()
            if self._lock is not None:
                self._lock.release()

    def _read(self, response_id: str) -> Kept | None:
        row = self._db.execute(
            "SELECT body, input, events, running, owner, written FROM responses WHERE id = ?", (response_id,)
        ).fetchone()
        if row is None or self._expired(row[5]):
            return None
        with self._db:
            self._db.execute("UPDATE responses SET used = ? WHERE id = ?", (self._next(), response_id))
        return Kept(response_id, row[0], row[1], row[2], bool(row[3]), row[4])

    def _expired(self, written: float) -> bool:
        return bool(self._ttl_s) and written <= self._clock() - self._ttl_s

    def _next(self) -> int:
        """Larger than every use so far."""
        return (self._db.execute("SELECT MAX(used) FROM responses").fetchone()[0] or 0) + 1

    def _forget(self, response_id: str) -> None:
        self._db.execute("DELETE FROM items WHERE response = ?", (response_id,))
        self._db.execute("DELETE FROM responses WHERE id = ?", (response_id,))

    def _make_room(self, newest: str, now: float) -> None:
        if self._ttl_s:
            old = self._db.execute(
                "SELECT id FROM responses WHERE written <= ?", (now - self._ttl_s,)
            ).fetchall()
            for [name] in old:
                self._forget(name)
        total = self._db.execute("SELECT SUM(nbytes) FROM responses").fetchone()[0] or 0
        while total > self._max_bytes:
            row = self._db.execute(
                "SELECT id, nbytes FROM responses WHERE id != ? ORDER BY used LIMIT 1", (newest,)
            ).fetchone()
            if row is None:
                return
            self._forget(row[0])
            total -= row[1]


def _locked(folder: Path) -> FileLock:
    """The folder, made, with its file that only this user may read. Raises ConfigError."""
    # Not bound to a thread: it is let go of by another one than took it.
    lock = FileLock(folder / LOCK_NAME, mode=0o600, thread_local=False)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / FILE_NAME).touch(mode=0o600)
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"Another server keeps its responses in {folder}; give --response-store a folder of its own."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"--response-store cannot use {folder} ({error.strerror}); give it a folder that can be written."
        ) from None
    return lock


def _open(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, 1, VERSION):
            raise ConfigError(
                f"{path} was written by another version of mantou; move it away or give --response-store another "
                "folder."
            )
        if version == 1:
            db.execute(_OWNERS)
        db.executescript(_SCHEMA)
        db.execute(f"PRAGMA user_version = {VERSION}")
        db.commit()
    except (sqlite3.Error, ConfigError):
        db.close()
        raise
    return db


@contextmanager
def _told() -> Generator[None]:
    """Errors of the disk as sentences."""
    try:
        yield
    except sqlite3.Error as error:
        raise StoreFailed(
            f"The response store failed ({error}); look at the disk of --response-store, or send store false."
        ) from error


def open_store(place: str, *, ttl_s: float, max_bytes: int) -> ResponseStore:
    """`place`: off, memory or a folder. Raises ConfigError."""
    if place == "off":
        return NoResponses()
    folder = None if place == "memory" else Path(place).expanduser()
    return SqliteResponses(folder, ttl_s=ttl_s, max_bytes=max_bytes)
