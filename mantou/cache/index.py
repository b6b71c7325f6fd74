"""The SSD tier's table of files, in SQLite. Knows rows; what is in the files is told by the files themselves.

Files are the truth and the table is a quick way to know them: a file without a row is looked at again, a row without a
file is dropped, and a table that cannot be read is made anew from the files. A row has a checksum of its own, because
SQLite has none: a row with a wrong position would put good columns in the wrong place.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import xxhash

from mantou.cache.catalog import Entry
from mantou.cache.encoding import Label

VERSION = 2
FILE_NAME = "index.sqlite"
_SIDE_FILES = ("", "-wal", "-shm")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS blocks (
    name TEXT PRIMARY KEY, kind TEXT NOT NULL, key TEXT NOT NULL, parent BLOB NOT NULL, address BLOB NOT NULL,
    lo INTEGER NOT NULL, tokens BLOB NOT NULL, nbytes INTEGER NOT NULL, used INTEGER NOT NULL, checksum BLOB NOT NULL
) WITHOUT ROWID
"""


class Index:
    """One connection, used by one thread at a time. Methods raise sqlite3.Error."""

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        path = folder / FILE_NAME
        if read_only:
            self._db = _open_read_only(path)
            return
        self._db = sqlite3.connect(path, check_same_thread=False)
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            if self._db.execute("PRAGMA user_version").fetchone()[0] != VERSION:
                self._db.execute("DROP TABLE IF EXISTS blocks")
            self._db.execute(_SCHEMA)
            self._db.execute(f"PRAGMA user_version = {VERSION}")
            self._db.commit()
        except sqlite3.Error:
            self._db.close()
            raise

    @staticmethod
    def delete_files(folder: Path) -> None:
        for suffix in _SIDE_FILES:
            (folder / (FILE_NAME + suffix)).unlink(missing_ok=True)

    def entries(self) -> list[Entry]:
        """The least recently used first. A row that was changed by something else is left out."""
        rows = self._db.execute(
            "SELECT kind, key, parent, address, lo, tokens, nbytes, checksum, used FROM blocks ORDER BY used"
        )
        return [
            Entry(
                Label(kind, key, parent, address, lo, np.frombuffer(tokens, "<i4").astype(np.int32)),
                nbytes,
                used,
            )
            for kind, key, parent, address, lo, tokens, nbytes, checksum, used in rows
            if checksum == _checksum(kind, key, parent, address, lo, tokens, nbytes) and isinstance(used, int)
        ]

    def check(self) -> None:
        """Raises sqlite3.DatabaseError if a page is not what it should be."""
        [found] = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)

    def save(
        self, added: Iterable[Entry] = (), removed: Iterable[Entry] = (), used: Iterable[Entry] = ()
    ) -> None:
        """One transaction."""
        with self._db:
            self._db.executemany("DELETE FROM blocks WHERE name = ?", [(e.name,) for e in removed])
            self._db.executemany(
                "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [_row(e) for e in added],
            )
            self._db.executemany(
                "UPDATE blocks SET used = ? WHERE name = ?", [(e.used, e.name) for e in used]
            )

    def close(self) -> None:
        self._db.close()


def _open_read_only(path: Path) -> sqlite3.Connection:
    """As it is now, if its writer's side files can be used; else as it was when it was last tidied up."""
    uri = f"{path.absolute().as_uri()}?mode=ro"
    db = sqlite3.connect(uri, uri=True, check_same_thread=False)
    try:
        db.execute("SELECT 1 FROM blocks LIMIT 1").fetchone()
    except sqlite3.OperationalError:
        db.close()
        db = sqlite3.connect(f"{uri}&immutable=1", uri=True, check_same_thread=False)
    return db


def _row(entry: Entry) -> tuple[object, ...]:
    label = entry.label
    tokens = label.tokens.astype("<i4", copy=False).tobytes()
    fields = (label.kind, label.key, label.parent, label.address, label.lo, tokens, entry.nbytes)
    return (entry.name, *fields, entry.used, _checksum(*fields))


def _checksum(*fields: object) -> bytes:
    """Of everything in a row but its time of use; of whatever types a damaged row gives."""
    return xxhash.xxh3_128_digest(repr(fields).encode(errors="surrogatepass"))
