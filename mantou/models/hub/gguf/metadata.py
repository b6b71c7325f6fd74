"""Typed access to the key/value pairs of a GGUF file. Knows which types are valid, not what the keys mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from mantou.errors import ModelError

T = TypeVar("T")


class Metadata:
    """Reads values and raises ModelError, naming the key, where one is missing or has the wrong type."""

    def __init__(self, pairs: Mapping[str, Any], file_name: str) -> None:
        self._pairs = pairs
        self._file_name = file_name

    def __contains__(self, key: str) -> bool:
        return key in self._pairs

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._pairs.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{key} must be an integer and is {_brief(value)}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer that fits a config: a width, a count, a length."""
        value = self.integer(key, default)
        if not 0 < value < 1 << 31:
            raise self.error(f"{key} is {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float; float32 values come back as the short decimal that they were written from (1e-05)."""
        value = self._pairs.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(f"{key} must be a number and is {_brief(value)}")
        return float(f"{value:.7g}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self._pairs.get(key, default)
        if not isinstance(value, str):
            raise self.error(f"{key} must be a text and is {_brief(value)}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._pairs.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false and is {_brief(value)}")
        return value

    def texts(self, key: str) -> list[str]:
        return self._items(key, str)

    def integers(self, key: str) -> list[int]:
        return self._items(key, int)

    def numbers(self, key: str) -> list[float]:
        return self._items(key, float)

    def error(self, what: str) -> ModelError:
        return ModelError(f"{self._file_name} cannot be converted: {what}; use another file of the model.")

    def _items(self, key: str, kind: type[T]) -> list[T]:
        value = self._pairs.get(key)
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self.error(f"{key} must be a list of {kind.__name__} and is {_brief(value)}")
        return value


def _brief(value: object) -> str:
    if value is None:
        return "missing"
    return f"a list of {len(value)}" if isinstance(value, list) else repr(value)[:40]
