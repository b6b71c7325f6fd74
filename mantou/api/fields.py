"""Fields of a JSON body: how one is read, what is wrong with it, how it is documented. Knows no request in particular.

Every field reads as None when it is absent or null, and raises BadRequest naming itself when its value is not usable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from mantou.errors import BadRequest

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Schema = dict[str, Any]

# Beyond this a number overflows float32 somewhere in a sampler; no setting of the field comes near it.
HUGE = 1e9
# Deeper values come from no real client, and templates walk them recursively.
MAX_DEPTH = 64


def kind_of(value: object) -> str:
    """The JSON name of a decoded value, with its article."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
        case _:
            return "an object"


def wrong(name: str, expected: str, value: object) -> BadRequest:
    """The error for a value of the wrong type."""
    return BadRequest(f"{name} must be {expected}, got {kind_of(value)}.", param=name)


def whole(value: object) -> int | None:
    """A whole number, also as JSON may write it: 16.0 and 1.6e1 are 16. None for everything else."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def shown(value: float) -> str:
    """A number short enough for a sentence."""
    if isinstance(value, int) and abs(value) >= 10**15:
        return "a far larger number" if value > 0 else "a far smaller number"
    return f"{value:g}" if isinstance(value, float) else str(value)


class Field(Protocol[T_co]):
    """One entry of a field table."""

    @property
    def name(self) -> str: ...
    def read(self, body: Mapping[str, Any]) -> T_co | None: ...
    def schema(self) -> Schema: ...


def _check_range(name: str, value: float, low: float | None, high: float | None) -> None:
    if (low is None or value >= low) and (high is None or value <= high):
        return
    if low is not None and high is not None:
        bounds = f"between {low:g} and {high:g}"
    else:
        bounds = f"at least {low:g}" if low is not None else f"at most {high:g}"
    raise BadRequest(f"{name} must be {bounds}, got {shown(value)}.", param=name)


def _range_schema(kind: str, doc: str, low: float | None, high: float | None) -> Schema:
    schema: Schema = {"type": [kind, "null"], "description": doc}
    if low is not None:
        schema["minimum"] = low
    if high is not None:
        schema["maximum"] = high
    return schema


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number in [low, high]."""

    name: str
    doc: str
    low: float = -HUGE
    high: float = HUGE

    def read(self, body: Mapping[str, Any]) -> float | None:
        value = body.get(self.name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong(self.name, "a number", value)
        _check_range(self.name, value, self.low, self.high)
        return float(value)

    def schema(self) -> Schema:
        return _range_schema("number", self.doc, self.low, self.high)


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number in [low, high]; None leaves a side open."""

    name: str
    doc: str
    low: int | None = None
    high: int | None = None

    def read(self, body: Mapping[str, Any]) -> int | None:
        value = body.get(self.name)
        if value is None:
            return None
        number = whole(value)
        if number is None and isinstance(value, float):
            raise BadRequest(f"{self.name} must be a whole number, got {shown(value)}.", param=self.name)
        if number is None:
            raise wrong(self.name, "a whole number", value)
        _check_range(self.name, number, self.low, self.high)
        return number

    def schema(self) -> Schema:
        return _range_schema("integer", self.doc, self.low, self.high)


@dataclass(frozen=True, slots=True)
class Boolean:
    name: str
    doc: str

    def read(self, body: Mapping[str, Any]) -> bool | None:
        value = body.get(self.name)
        if value is not None and not isinstance(value, bool):
            raise wrong(self.name, "true or false", value)
        return value

    def schema(self) -> Schema:
        return {"type": ["boolean", "null"], "description": self.doc}


@dataclass(frozen=True, slots=True)
class Text:
    """A string; with `choices`, one of them."""

    name: str
    doc: str
    choices: tuple[str, ...] = ()

    def read(self, body: Mapping[str, Any]) -> str | None:
        value = body.get(self.name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise wrong(self.name, "a string", value)
        if self.choices and value not in self.choices:
            raise BadRequest(f"{self.name} must be one of {', '.join(self.choices)}.", param=self.name)
        return value

    def schema(self) -> Schema:
        schema: Schema = {"type": ["string", "null"], "description": self.doc}
        return schema | {"enum": [*self.choices, None]} if self.choices else schema


@dataclass(frozen=True, slots=True)
class Object:
    """A JSON object, passed on as it is once its depth is checked. `shape`: what a caller makes of it."""

    name: str
    doc: str
    shape: Schema = field(default_factory=dict)

    def read(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        value = body.get(self.name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise wrong(self.name, "an object", value)
        check_depth(self.name, value)
        return value

    def schema(self) -> Schema:
        return {"type": ["object", "null"], **self.shape, "description": self.doc}


@dataclass(frozen=True, slots=True)
class Shaped(Generic[T]):
    """A field with its own reader, for lists and unions. `convert` gets the value (never null) and the name."""

    name: str
    doc: str
    convert: Callable[[Any, str], T]
    shape: Schema = field(default_factory=dict)

    def read(self, body: Mapping[str, Any]) -> T | None:
        value = body.get(self.name)
        return None if value is None else self.convert(value, self.name)

    def schema(self) -> Schema:
        return self.shape | {"description": self.doc}


def check_depth(name: str, value: object, limit: int = MAX_DEPTH) -> None:
    """Raises BadRequest if a decoded JSON value nests deeper than `limit`. Walks without recursion."""
    level: list[object] = [value]
    for _ in range(limit):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise BadRequest(f"{name} is nested more than {limit} levels deep; flatten it.", param=name)


def properties(fields: tuple[Field[Any], ...]) -> dict[str, Schema]:
    """The table as JSON-schema properties."""
    return {entry.name: entry.schema() for entry in fields}
