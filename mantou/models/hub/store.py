"""mantou's own folder of converted models: one lock, one atomic rename a model. Knows no formats and no network."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path

from mantou.errors import DownloadError
from mantou.progress import Task

MANIFEST = "mantou.json"
LOCKS = ".locks"
PARTIAL = ".partial-"


@dataclass(frozen=True, slots=True)
class Manifest:
    """Where a converted folder comes from. It is written last, so a folder that has it is whole."""

    repo_id: str
    source: str
    converter: int
    created_at: float = field(default_factory=time.time)


Fill = Callable[[Path, Path], Manifest]


def default_cache_dir() -> Path:
    """The platform's cache folder for converted models."""
    from platformdirs import user_cache_path

    return user_cache_path("mantou") / "models"


def folder_name(label: str, *identity: object) -> str:
    """A readable folder name that is unique for `identity`."""
    key = sha256(json.dumps(identity, default=str).encode()).hexdigest()[:16]
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', label).strip('-.')[:80]}-{key}"


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a converted folder; None if there is none or it is not readable."""
    try:
        return Manifest(**json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


class Store:
    """Makes a model folder once, whoever asks: other processes wait for the first and then use its folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, name: str) -> Path | None:
        """The whole folder of that name, if it was made before."""
        folder = self.root / name
        return folder if read_manifest(folder) is not None else None

    def make(self, name: str, task: Task, fill: Fill) -> Path:
        """The folder of that name; if it is not here yet, `fill(folder, scratch)` writes the model into `folder`.

        Both folders are empty and lie on the store's disk; nothing of them is visible until `fill` has returned.
        Raises what `fill` raises, and DownloadError where the disk fails or is full; then nothing is left behind.
        """
        from filelock import FileLock, Timeout

        with _disk_errors(self.root):
            locks = self.root / LOCKS
            locks.mkdir(parents=True, exist_ok=True)
            lock = FileLock(locks / f"{name}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                task.stage("wait for another process that converts the same model")
                lock.acquire()
            try:
                return self.find(name) or self._make(name, fill)
            finally:
                lock.release()

    def _make(self, name: str, fill: Fill) -> Path:
        # The lock is held, so a partial folder of this name was left by a process that died.
        partial = self.root / f"{PARTIAL}{name}"
        shutil.rmtree(partial, ignore_errors=True)
        folder, scratch = partial / "model", partial / "scratch"
        try:
            folder.mkdir(parents=True)
            scratch.mkdir()
            manifest = fill(folder, scratch)
            (folder / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2), encoding="utf-8")
            _flush(folder)
            shutil.rmtree(self.root / name, ignore_errors=True)  # a folder without a readable manifest
            folder.rename(self.root / name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return self.root / name


def check_space(folder: Path, num_bytes: int) -> None:
    """Raises DownloadError if the disk of `folder` has not `num_bytes` left, before anything is written."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise DownloadError(
            _no_space(folder, f"{num_bytes / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free")
        )


@contextmanager
def _disk_errors(folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise disk_error(folder, error) from error


def disk_error(folder: Path, error: OSError) -> DownloadError:
    """One sentence for an OSError that came from writing into `folder`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DownloadError(_no_space(folder, "the disk is full"))
    return DownloadError(
        f"Cannot write the model into {folder}: {error.strerror or error}; choose another cache folder."
    )


def _no_space(folder: Path, why: str) -> str:
    return f"No room for the model in {folder}: {why}; free some space (mantou gc) or choose another cache folder."


def _flush(folder: Path) -> None:
    """Files reach the disk before the rename does, so that a power cut leaves no whole-looking empty folder."""
    mode = (folder / MANIFEST).stat().st_mode
    for path in folder.iterdir():
        path.chmod(mode)  # safetensors writes files that only their owner may read
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
