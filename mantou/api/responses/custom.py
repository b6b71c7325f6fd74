"""The input of a custom tool out of the JSON that the model writes for it, while it is written. Knows no events."""

from __future__ import annotations

import re

import msgspec

_START = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# A whole escape; a high surrogate is one only together with the low one behind it.
_ESCAPE = re.compile(
    r"\\(?:[\"\\/bfnrt]|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u(?![dD][89abAB])[0-9a-fA-F]{4})"
)
_PLAIN = re.compile(r'[^"\\]+')


class CustomInput:
    """Feed it pieces of `{"input": "..."}`; what it returns, joined, is the decoded text.

    Everything else a model may write arrives at `end`: the `input` of another object, or what it wrote, as it is.
    """

    def __init__(self) -> None:
        self._seen: list[str] = []
        self._rest = ""  # not decoded yet
        self._inside = self._closed = self._sent = False

    def feed(self, piece: str) -> str:
        """The text that became certain."""
        self._seen.append(piece)
        if self._closed:
            return ""
        self._rest += piece
        if not self._inside:
            start = _START.match(self._rest)
            if start is None:
                return ""
            self._inside = True
            self._rest = self._rest[start.end() :]
        text = "".join(self._decoded())
        self._sent = self._sent or bool(text)
        return text

    def end(self) -> str:
        """The rest."""
        if self._sent or self._closed:
            return ""
        written = "".join(self._seen)
        try:
            value = msgspec.json.decode(written)
        except msgspec.MsgspecError:
            return written if not self._inside else ""
        given = value.get("input") if isinstance(value, dict) else None
        return given if isinstance(given, str) else written

    def _decoded(self) -> list[str]:
        found: list[str] = []
        position = 0
        while position < len(self._rest):
            if self._rest[position] == '"':
                self._closed = True
                break
            plain = _PLAIN.match(self._rest, position)
            match = plain or _ESCAPE.match(self._rest, position)
            if match is None:  # the beginning of an escape
                break
            found.append(plain[0] if plain else msgspec.json.decode(f'"{match[0]}"', type=str))
            position = match.end()
        self._rest = self._rest[position:]
        return found
