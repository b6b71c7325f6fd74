"""Which models are on this machine: snapshots of the hub's cache and converted folders. Knows no network.

One SQLite row a folder, so that a scan looks into new or changed folders only. A scan runs before every answer and
drops rows whose folder is gone, so that rows are never stale; the file may be deleted at any time.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path

from mantou.errors import ConfigError, ModelError, ModelNotFound
from mantou.models.hub.folders import missing_file
from mantou.models.hub.inspection import inspect
from mantou.models.hub.store import read_manifest

_VERSION = 1  # raise it when the columns or their meaning change
_FILE = "registry.sqlite"


@dataclass(frozen=True, slots=True)
class Entry:
    """One model folder. `canonical` marks the revision that the name alone stands for."""

    path: str
    repo_id: str
    revision: str
    source: str  # "hub", or where a converted folder comes from
    canonical: bool
    stamp_ns: int  # modification time of the folder when it was looked into
    scanned_at: float
    model_type: str
    param_count: int
    num_layers: int | None
    hidden_size: int | None
    vocab_size: int | None
    context_length: int | None
    kv_bytes_per_token: int | None  # at 2 bytes a value, full-attention layers only
    size_bytes: int
    quant_bits: int | None
    quant_group_size: int | None
    quant_mode: str | None
    vision: bool
    chat_template: bool


_COLUMNS = [field.name for field in fields(Entry)]


@dataclass(frozen=True, slots=True)
class _Place:
    """A model folder as the scan finds it, before anyone looks into it."""

    path: Path
    repo_id: str
    revision: str
    source: str
    current: bool  # refs/main points here
    stamp_ns: int


class Registry:
    """Finds local models by name. `store_dir` also holds the registry's own file."""

    def __init__(self, store_dir: Path, hub_dir: Path) -> None:
        self._store_dir = store_dir
        self._hub_dir = hub_dir

    def entries(self, *, all_revisions: bool = False) -> list[Entry]:
        """Every whole model on this machine, by name; of each repo the canonical revision or all of them."""
        rows = sorted(
            self._scan(), key=lambda entry: (entry.repo_id.lower(), not entry.canonical, -entry.stamp_ns)
        )
        return [entry for entry in rows if all_revisions or entry.canonical]

    def rebuild(self) -> list[Entry]:
        """Looks into every folder again."""
        for suffix in ("", "-wal", "-shm", "-journal"):
            (self._store_dir / f"{_FILE}{suffix}").unlink(missing_ok=True)
        return self.entries(all_revisions=True)

    def find(self, repo_id: str, revision: str | None = None) -> Entry | None:
        """The entry of exactly this repo, canonical or at `revision` (a commit, or the start of one)."""
        for entry in self.entries(all_revisions=True):
            wanted = entry.canonical if revision is None else entry.revision.startswith(revision)
            if entry.repo_id == repo_id and wanted:
                return entry
        return None

    def resolve(self, query: str) -> Entry:
        """The one model whose name or source contains `query`, whatever the case; an equal name wins.

        Raises ModelNotFound, which lists the candidates, if there is none or more than one.
        """
        wanted = query.strip().lower()
        entries = self.entries()
        equal = [entry for entry in entries if entry.repo_id.lower() == wanted]
        found = equal or [entry for entry in entries if wanted in f"{entry.repo_id} {entry.source}".lower()]
        if len(found) == 1:
            return found[0]
        if found:
            raise ModelNotFound(f"{query!r} fits several models, write more of the name: {_names(found)}.")
        here = f"here are: {_names(entries)}" if entries else "there are none yet"
        raise ModelNotFound(
            f"No local model is called {query!r} ({here}); fetch one with `mantou get <org/name>` or give a path."
        )

    # -------------------------------------------------------------- scan
    def _scan(self) -> list[Entry]:
        places = [*_hub_places(self._hub_dir), *_store_places(self._store_dir)]
        try:
            self._store_dir.mkdir(parents=True, exist_ok=True)
            try:
                return self._refresh(places)
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError:  # not a database any more: it holds nothing that a scan cannot find
                (self._store_dir / _FILE).unlink()
                return self._refresh(places)
        except (OSError, sqlite3.OperationalError) as error:
            raise ConfigError(
                f"The registry {self._store_dir / _FILE} cannot be written ({error}); choose another cache folder."
            ) from error

    def _refresh(self, places: list[_Place]) -> list[Entry]:
        with closing(sqlite3.connect(self._store_dir / _FILE, timeout=10)) as database, database:
            known = _load(database)
            entries = [
                entry for place in places if (entry := _entry(place, known.get(str(place.path)))) is not None
            ]
            entries = _with_canonical(entries, {str(place.path) for place in places if place.current})
            if entries != list(known.values()):
                _store(database, entries)
            return entries


def _names(entries: list[Entry]) -> str:
    shown = [entry.repo_id for entry in entries[:10]]
    return ", ".join(shown) + (f" and {len(entries) - 10} more" if len(entries) > 10 else "")


def _entry(place: _Place, known: Entry | None) -> Entry | None:
    """The row of a folder, taken over if the folder did not change; None if it is not a whole model."""
    same = (place.repo_id, place.revision, place.source, place.stamp_ns)
    if known is not None and same == (known.repo_id, known.revision, known.source, known.stamp_ns):
        return replace(known, canonical=False)
    try:
        if missing_file(place.path) is not None:
            return None
        traits = asdict(inspect(place.path))
    except ModelError:
        return None
    return Entry(
        path=str(place.path),
        repo_id=place.repo_id,
        revision=place.revision,
        source=place.source,
        canonical=False,
        stamp_ns=place.stamp_ns,
        scanned_at=time.time(),
        **traits,
    )


def _with_canonical(entries: list[Entry], current: set[str]) -> list[Entry]:
    """Of each repo the revision that refs/main points to, else the most recent one."""
    best: dict[str, Entry] = {}
    for entry in entries:
        rival = best.get(entry.repo_id)
        if rival is None or _rank(entry, current) > _rank(rival, current):
            best[entry.repo_id] = entry
    return [replace(entry, canonical=best[entry.repo_id] is entry) for entry in entries]


def _rank(entry: Entry, current: set[str]) -> tuple[bool, int]:
    return entry.path in current, entry.stamp_ns


def _hub_places(hub_dir: Path) -> Iterator[_Place]:
    for repo in sorted(hub_dir.glob("models--*")):
        main = repo / "refs" / "main"
        head = main.read_text(encoding="utf-8").strip() if main.is_file() else ""
        repo_id = repo.name.removeprefix("models--").replace("--", "/", 1)
        for snapshot in sorted((repo / "snapshots").glob("*")):
            if snapshot.is_dir():
                stamp = snapshot.stat().st_mtime_ns
                yield _Place(snapshot, repo_id, snapshot.name, "hub", snapshot.name == head, stamp)


def _store_places(store_dir: Path) -> Iterator[_Place]:
    for folder in sorted(store_dir.glob("[!.]*")):
        manifest = read_manifest(folder) if folder.is_dir() else None
        if manifest is not None:
            revision = folder.name.rsplit("-", 1)[-1]
            yield _Place(
                folder, manifest.repo_id, revision, manifest.source, False, folder.stat().st_mtime_ns
            )


# ------------------------------------------------------------------ database
def _load(database: sqlite3.Connection) -> dict[str, Entry]:
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version != _VERSION:
        database.execute("DROP TABLE IF EXISTS models")
        database.execute(f"CREATE TABLE models ({', '.join(_COLUMNS)}, PRIMARY KEY (path))")
        database.execute(f"PRAGMA user_version = {_VERSION}")
    rows = database.execute("SELECT * FROM models ORDER BY rowid")
    return {row[0]: _from_row(row) for row in rows}


def _from_row(row: tuple[object, ...]) -> Entry:
    values = dict(zip(_COLUMNS, row, strict=True))
    for name in ("canonical", "vision", "chat_template"):
        values[name] = bool(values[name])
    return Entry(**values)  # pyright: ignore[reportArgumentType]  SQLite keeps the types that were written


def _store(database: sqlite3.Connection, entries: list[Entry]) -> None:
    database.execute("DELETE FROM models")
    marks = ", ".join("?" * len(_COLUMNS))
    insert = f"INSERT INTO models VALUES ({marks})"  # noqa: S608  question marks only
    database.executemany(insert, [astuple(entry) for entry in entries])
