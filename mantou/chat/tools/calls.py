"""The tool calls of one answer as their parts become certain: names, ids, arguments. Knows no format.

A call begins when its name is known to be one of the offered tools, and from then on it cannot be taken back: what is
wrong later ends its arguments, which are made whole.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from mantou.chat.tools.reader import Malformed, Reader, Steps
from mantou.chat.tools.values import completion, convert, quoted, read_value
from mantou.data import ToolDelta

Schema = Mapping[str, Any]

_ANY: frozenset[str] = frozenset()
_STRUCTURES = frozenset({"object", "array", "null"})
TEXT = frozenset({"string"})
_NAMES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
    "none": "null",
}
_TEXTS = TEXT | {"null"}


class Enough(Exception):
    """The last call that was allowed has ended."""


class Calls:
    """Written to by a parser, emptied by the splitter.

    Attributes
        num_begun, num_ended: calls of this answer
    """

    def __init__(self, reader: Reader, tools: Mapping[str, Schema], limit: int | None = None) -> None:
        """`tools`: name -> JSON schema of its arguments. `limit`: how many calls an answer may have."""
        self._reader = reader
        self._limit = limit
        self._tools = tools
        self._schema: Schema = {}
        self._arguments: list[str] = []  # of the call that is open
        self._num_fields = 0
        self._deltas: list[ToolDelta] = []
        self.num_begun = self.num_ended = 0

    @property
    def open(self) -> bool:
        return self.num_begun > self.num_ended

    def take(self) -> tuple[ToolDelta, ...]:
        """What became certain since the last time; at most one delta a call."""
        taken, self._deltas = tuple(self._deltas), []
        return taken

    # ------------------------------------------------------------------ the parsers' side
    def begin(self, name: str, call_id: str = "") -> None:
        """Raises Malformed for a tool that was not offered."""
        if name not in self._tools:
            raise Malformed
        self._reader.release()
        self._schema = self._tools[name]
        self._arguments, self._num_fields = [], 0
        self._deltas.append(ToolDelta(self.num_begun, call_id or f"call_{secrets.token_hex(12)}", name))
        self.num_begun += 1

    def write(self, text: str) -> None:
        """A further piece of the arguments' JSON. What was read before it cannot be given back any more."""
        if not text:
            return
        self._reader.keep()
        self._arguments.append(text)
        index, last = self.num_begun - 1, self._deltas[-1] if self._deltas else None
        if last is not None and last.index == index:
            self._deltas[-1] = ToolDelta(index, last.id, last.name, last.arguments + text)
        else:
            self._deltas.append(ToolDelta(index, arguments=text))

    def field(self, key: str) -> frozenset[str]:
        """Begins an argument of an object that is written argument by argument; returns the types it may have."""
        self.write(("{" if not self._num_fields else ", ") + quoted(key) + ": ")
        self._num_fields += 1
        properties = self._schema.get("properties")
        schema = cast("Schema", properties).get(key) if isinstance(properties, Mapping) else None
        return types_of(schema, self._schema)

    def end(self) -> None:
        """The call is complete, or as complete as it gets. Raises Enough if no other may follow."""
        text = "".join(self._arguments)
        self.write(completion(text) if text else "{}")
        self.num_ended += 1
        self._arguments = []
        self._reader.keep()
        if self.num_ended == self._limit:
            raise Enough


def types_of(schema: Any, root: Schema) -> frozenset[str]:
    """The JSON types that a schema allows; empty where it does not say. Follows local references in `root`."""
    return _types(schema, root, {})


def _types(schema: Any, root: Schema, known: dict[str, frozenset[str]]) -> frozenset[str]:
    """`known`: what references lead to, so that each is followed once; one that leads to itself says nothing."""
    if not isinstance(schema, Mapping):
        return _ANY
    node = cast("Schema", schema)
    kind, reference = node.get("type"), node.get("$ref")
    if isinstance(kind, str):
        return frozenset({_named(kind)})
    if isinstance(kind, list):
        return frozenset(_named(str(one)) for one in cast("list[Any]", kind))
    if isinstance(reference, str):
        if reference not in known:
            known[reference] = _ANY
            known[reference] = _types(_target(reference, root), root, known)
        return known[reference]
    if "const" in node or isinstance(node.get("enum"), list):
        values = cast("list[Any]", node.get("enum", [node.get("const")]))
        return frozenset(_type_of(value) for value in values)
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(node.get(name), list):
            branches = [_types(one, root, known) for one in cast("list[Any]", node[name])]
            if name == "allOf":
                return next((types for types in branches if types), _ANY)
            return frozenset[str]().union(*branches) if all(branches) else _ANY
    return frozenset({"object"} if "properties" in node else {"array"} if "items" in node else ())


def _named(kind: str) -> str:
    """Schemas that were made by hand also name types as Python does."""
    return _NAMES.get(kind.lower(), kind.lower())


def _target(reference: str, root: Schema) -> Any:
    value: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        value = cast("Schema", value).get(part) if isinstance(value, Mapping) else None
    return value


def _type_of(value: Any) -> str:
    kinds: Sequence[tuple[type | tuple[type, ...], str]] = (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (Mapping, "object"),
        (list, "array"),
    )
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


# ---------------------------------------------------------------------- arguments that are text between tags
class Trim(ABC):
    """Passes text on without what surrounds it. Subclasses say what that is."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._started = False
        self._held = ""

    def __call__(self, text: str) -> None:
        text, self._held = self._held + text, ""
        if not self._started:
            text, started = self._without_start(text)
            if not started:
                self._held = text
                return
            self._started = True
        kept = self._without_end(text)
        self._held = text[len(kept) :]
        if kept:
            self._write(kept)

    @abstractmethod
    def _without_start(self, text: str) -> tuple[str, bool]:
        """(the rest, True) once the value has begun; (what to keep, False) before that."""

    @abstractmethod
    def _without_end(self, text: str) -> str:
        """What of it is certain to be no end."""


class Stripped(Trim):
    """No white space at either end."""

    def _without_start(self, text: str) -> tuple[str, bool]:
        text = text.lstrip()
        return text, bool(text)

    def _without_end(self, text: str) -> str:
        return text.rstrip()


class Lines(Trim):
    """One line break at either end belongs to the markup."""

    def _without_start(self, text: str) -> tuple[str, bool]:
        return (text.removeprefix("\n"), True) if text else ("", False)

    def _without_end(self, text: str) -> str:
        return text.removesuffix("\n")


class Whole(Trim):
    """Everything belongs to the text."""

    def _without_start(self, text: str) -> tuple[str, bool]:
        return text, True

    def _without_end(self, text: str) -> str:
        return text


def read_argument(
    reader: Reader, calls: Calls, kinds: frozenset[str], trim: type[Trim], *ends: str
) -> Steps[None]:
    """The text up to one of `ends` as the JSON value of an argument that was begun with `Calls.field`.

    A string, an object and a list stream; a number or a constant comes when it is whole.
    """
    gap = ""
    if kinds == TEXT:
        yield from _read_string(reader, calls, trim, gap, *ends)
        return
    if kinds and kinds <= _TEXTS:
        gap = yield from reader.space()
        if (yield from reader.accept(*(f"null{space}{end}" for space in ("", "\n") for end in ends))):
            calls.write("null")
            return
        yield from _read_string(reader, calls, trim, gap, *ends)
        return
    if kinds and kinds <= _STRUCTURES:
        gap = yield from reader.space()
        if (yield from reader.peek()) in ("{", "["):
            yield from read_value(reader, calls.write)
            yield from reader.space()
            yield from reader.expect(*ends)
            return
    text, _ = yield from reader.until(*ends)
    parts: list[str] = []
    trim(parts.append)(gap + text)
    calls.write(convert("".join(parts), kinds))


def _read_string(reader: Reader, calls: Calls, trim: type[Trim], before: str, *ends: str) -> Steps[None]:
    calls.write('"')
    write = trim(lambda text: calls.write(quoted(text)[1:-1]))
    write(before)
    yield from reader.pour(write, *ends)
    calls.write('"')
