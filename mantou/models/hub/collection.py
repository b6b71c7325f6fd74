"""Finds what can be deleted from the model caches, and deletes it. First a plan, then the act; knows no terminal.

Of the hub's cache: a snapshot that a ref points to stays; another goes unless it holds files that the kept ones
lack; then blobs go that no snapshot uses. Repos without a usable ref, lock files and unfinished downloads are never
touched. Of the converted folders: those of an older converter, and partial folders whose writer is dead.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mantou.models.hub.store import LOCKS, PARTIAL, read_manifest


@dataclass(frozen=True, slots=True)
class Garbage:
    """One thing to delete. `size_bytes` is what the disk gets back."""

    path: Path
    size_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be deleted, and what was spared although nothing points to it."""

    garbage: tuple[Garbage, ...]
    spared: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        return sum(item.size_bytes for item in self.garbage)


def plan(hub_dir: Path, store_dir: Path, *, converter: int, force: bool = False) -> Plan:
    """Looks only. `converter` is the version whose folders stay; `force` also takes snapshots that hold more files."""
    garbage: list[Garbage] = []
    spared: list[str] = []
    for repo in sorted(hub_dir.glob("models--*")):
        found, warnings = _repo_garbage(repo, force)
        garbage += found
        spared += warnings
    garbage += _store_garbage(store_dir, converter)
    return Plan(tuple(garbage), tuple(spared))


def collect(planned: Plan) -> int:
    """Deletes what was planned; returns the bytes that were freed. Raises OSError where the disk refuses."""
    for item in planned.garbage:
        if item.path.is_dir() and not item.path.is_symlink():
            shutil.rmtree(item.path)
        else:
            item.path.unlink(missing_ok=True)
    return planned.size_bytes


# ------------------------------------------------------------------ hub cache
def _repo_garbage(repo: Path, force: bool) -> tuple[list[Garbage], list[str]]:
    snapshots = {path.name: path for path in sorted((repo / "snapshots").glob("*")) if path.is_dir()}
    wanted = {ref.read_text(encoding="utf-8").strip() for ref in (repo / "refs").rglob("*") if ref.is_file()}
    kept = {name: path for name, path in snapshots.items() if name in wanted}
    if not kept:
        return [], []
    garbage: list[Garbage] = []
    spared: list[str] = []
    here = {name for path in kept.values() for name in _file_names(path)}
    for name, path in snapshots.items():
        if name in wanted:
            continue
        more = sorted(_file_names(path) - here)
        if more and not force:
            spared.append(
                f"{path} has files that no current revision has ({', '.join(more[:3])}); --force deletes it."
            )
            kept[name] = path
        else:
            garbage.append(Garbage(path, _own_bytes(path), "no ref points to this revision"))
    return garbage + list(_unused_blobs(repo, list(kept.values()))), spared


def _unused_blobs(repo: Path, kept: list[Path]) -> Iterator[Garbage]:
    blobs = [path for path in sorted((repo / "blobs").glob("*")) if path.is_file()]
    if any(path.name.endswith(".incomplete") for path in blobs):
        return  # a download runs or will go on: a finished blob may wait for its link
    used = {link.resolve() for snapshot in kept for link in snapshot.rglob("*") if link.is_symlink()}
    for path in blobs:
        if path.resolve() not in used:
            yield Garbage(path, path.stat().st_size, "no revision uses this file")


def _file_names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def _own_bytes(folder: Path) -> int:
    """Bytes of real files; a link's bytes are those of its blob, which is counted on its own."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


# ------------------------------------------------------------------ converted folders
def _store_garbage(store_dir: Path, converter: int) -> Iterator[Garbage]:
    for folder in sorted(store_dir.glob("*")):
        if not folder.is_dir() or folder.name == LOCKS:
            continue
        if folder.name.startswith(PARTIAL):
            if _is_abandoned(store_dir, folder):
                yield Garbage(folder, _own_bytes(folder), "left by a conversion that died")
            continue
        manifest = read_manifest(folder)
        if manifest is not None and manifest.converter < converter:
            yield Garbage(folder, _own_bytes(folder), "made by an older converter")


def _is_abandoned(store_dir: Path, partial: Path) -> bool:
    """Whether nobody holds the lock of a conversion; whoever starts it anew clears the folder itself."""
    from filelock import FileLock, Timeout

    path = store_dir / LOCKS / f"{partial.name.removeprefix(PARTIAL)}.lock"
    if not path.exists():
        return True
    lock = FileLock(path)
    try:
        with lock.acquire(timeout=0):
            return True
    except Timeout:
        return False
