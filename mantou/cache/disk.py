"""What the SSD tier asks of a file system: whole files, atomically, and one lock. Knows nothing of what they hold."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

from mantou.errors import ConfigError

READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
TEMPORARY = ".tmp"


class Disk:
    """The real one. All methods raise OSError."""

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        """The whole file or none of it, on the device when this returns."""
        temporary = path.with_name(path.name + TEMPORARY)
        try:
            with temporary.open("wb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def read(self, path: Path) -> bytearray:
        with path.open("rb") as file:
            buffer = bytearray(os.fstat(file.fileno()).st_size)
            size = file.readinto(buffer)
        del buffer[size:]
        return buffer

    def head(self, path: Path, num_bytes: int) -> bytes:
        with path.open("rb") as file:
            return file.read(num_bytes)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def lock(self, path: Path) -> int:
        """A descriptor that keeps other processes out until it is closed. Raises ConfigError if one is in there."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise ConfigError(
                f"Another process (pid {owner}) uses the SSD cache {path.parent}; stop it, or give this one a "
                "folder of its own."
            ) from error
        except OSError:
            os.close(descriptor)
            raise
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        return descriptor
