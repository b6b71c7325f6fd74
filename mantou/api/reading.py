"""Members of nested JSON objects, read one by one: their errors say where. Knows no field in particular."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mantou.api.fields import kind_of
from mantou.errors import BadRequest


def object_of(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{where} must be an object, got {kind_of(value)}.", param=where)
    return value


def list_of(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadRequest(f"{where} must be a list, got {kind_of(value)}.", param=where)
    return value


def text_of(owner: Mapping[str, Any], key: str, where: str) -> str | None:
    """A string; None where it is absent or null."""
    value = owner.get(key)
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"{where}.{key} must be a string, got {kind_of(value)}.", param=f"{where}.{key}")
    return value


def flag_of(owner: Mapping[str, Any], key: str, where: str) -> bool | None:
    """True or false; None where it is absent or null."""
    value = owner.get(key)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(
            f"{where}.{key} must be true or false, got {kind_of(value)}.", param=f"{where}.{key}"
        )
    return value


def needed_text(owner: Mapping[str, Any], key: str, where: str) -> str:
    value = text_of(owner, key, where)
    if value is None:
        raise BadRequest(f"{where}.{key} is missing; it must be a string.", param=f"{where}.{key}")
    return value
