"""API keys: how one is made, kept and recognised. Knows only hashes of them; knows no routes and no quotas.

A key has 256 random bits, so its plain sha256 tells nothing of it and needs no salt.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import filelock
import msgspec

from mantou.errors import ConfigError

_log = logging.getLogger("mantou.keys")

# admin has all of them. Routes that only name the model need a key with any scope.
SCOPES = ("generate", "embed", "audio", "read", "admin")
DEFAULT_SCOPES = ("generate", "embed", "audio")
# The key of --api-key; no key in a file may be called so.
OPERATOR = "operator"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Who may call, and what. The quotas are for a minute; 0 = none."""

    name: str
    sha256: str
    scopes: tuple[str, ...] = DEFAULT_SCOPES
    requests_per_minute: int = 0
    tokens_per_minute: int = 0  # prompt and answer together
    created: str = ""

    def may(self, scope: str) -> bool:
        """Whether it opens routes of this scope; "any" asks for no scope in particular."""
        return scope == "any" or scope in self.scopes or "admin" in self.scopes


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int = 1
    keys: tuple[Key, ...] = ()


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def operator_key(text: str) -> Key:
    """The key that --api-key or MANTOU_API_KEY names: every scope, no quota. Raises ConfigError for one too short."""
    if len(text) < 8:
        raise ConfigError("--api-key is shorter than 8 characters; choose one that nobody can guess.")
    return Key(OPERATOR, digest(text), SCOPES)


class KeyFile:
    """A JSON file of keys, written whole and in one rename, readable by its owner only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[Key, ...]:
        """Raises ConfigError if there is no such file or it is not one of keys."""
        try:
            content = msgspec.json.decode(self.path.read_bytes(), type=_Content)
        except FileNotFoundError:
            raise ConfigError(
                f"There is no key file {self.path}; make one with `mantou keys add NAME --file {self.path}`."
            ) from None
        except OSError as error:
            raise ConfigError(f"The key file {self.path} cannot be read ({error.strerror}).") from None
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{self.path} is not a key file: {error}.") from None
        _check(content, self.path)
        return content.keys

    def add(
        self,
        name: str,
        scopes: Sequence[str] = DEFAULT_SCOPES,
        *,
        requests_per_minute: int = 0,
        tokens_per_minute: int = 0,
    ) -> str:
        """Adds a key and returns its text, which is kept nowhere. Raises ConfigError for a name that is taken."""
        text = f"mantou-{secrets.token_urlsafe(32)}"
        now = datetime.now(UTC).isoformat(timespec="seconds")
        key = Key(name, digest(text), tuple(scopes), requests_per_minute, tokens_per_minute, now)
        with self._locked():
            keys = self.read() if self.path.exists() else ()
            if any(known.name == name for known in keys):
                raise ConfigError(
                    f"There is a key called {name!r} already; remove it first, or choose another name."
                )
            self._write((*keys, key))
        return text

    def remove(self, name: str) -> None:
        """Raises ConfigError if there is no such key."""
        with self._locked():
            keys = self.read()
            left = tuple(key for key in keys if key.name != name)
            if len(left) == len(keys):
                raise ConfigError(f"{self.path} has no key called {name!r}; `mantou keys ls` shows them.")
            self._write(left)

    def _locked(self) -> filelock.BaseFileLock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return filelock.FileLock(self.path.with_name(f"{self.path.name}.lock"), mode=0o600)

    def _write(self, keys: tuple[Key, ...]) -> None:
        content = _Content(keys=keys)
        _check(content, self.path)
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise ConfigError(f"The key file {self.path} cannot be written ({error.strerror}).") from None


def _check(content: _Content, path: Path) -> None:
    if content.version != 1:
        raise ConfigError(f"{path} is of version {content.version}; this server reads version 1.")
    names = [key.name for key in content.keys]
    for key in content.keys:
        if not _NAME.fullmatch(key.name) or key.name == OPERATOR or names.count(key.name) > 1:
            raise ConfigError(
                f"{key.name!r} is no name for a key: 1 to 64 of A-Z a-z 0-9 . _ -, each once, and not {OPERATOR}."
            )
        unknown = [scope for scope in key.scopes if scope not in SCOPES]
        if unknown or not key.scopes:
            raise ConfigError(f"The scopes of {key.name} must be some of {', '.join(SCOPES)}.")
        if not _SHA256.fullmatch(key.sha256):
            raise ConfigError(f"sha256 of {key.name} must be 64 hex digits.")
        if min(key.requests_per_minute, key.tokens_per_minute) < 0:
            raise ConfigError(f"The quotas of {key.name} may not be negative.")


class KeyRing:
    """The keys that open the server now. A change of the file counts from the next request on.

    Raises ConfigError if the file cannot be read at the start. Later a broken file is logged and the keys from before
    stay; a missing file leaves no key but the operator's.
    """

    def __init__(self, path: Path | None = None, operator: str | None = None) -> None:
        self._file = None if path is None else KeyFile(path)
        self._operator = () if operator is None else (operator_key(operator),)
        self._stamp = self._look()
        self._keys = self._operator if self._file is None else (*self._operator, *self._file.read())

    @property
    def wanted(self) -> bool:
        """Whether the server asks for keys at all."""
        return self._file is not None or bool(self._operator)

    def find(self, text: str) -> Key | None:
        """The key with this text. Every key is compared, in constant time, so that time tells nothing."""
        self._refresh()
        presented = digest(text)
        found: Key | None = None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, presented):
                found = key
        return found

    def _look(self) -> tuple[int, int, int] | None:
        if self._file is None:
            return None
        try:
            seen = self._file.path.stat()
        except OSError:
            return None
        return seen.st_mtime_ns, seen.st_size, seen.st_ino

    def _refresh(self) -> None:
        stamp = self._look()
        if self._file is None or stamp == self._stamp:
            return
        self._stamp = stamp
        if stamp is None:
            _log.error("the key file %s is gone; its keys do not count any more", self._file.path)
            self._keys = self._operator
            return
        try:
            self._keys = (*self._operator, *self._file.read())
        except ConfigError as error:
            _log.error("the keys stay as they were: %s", error.message)
