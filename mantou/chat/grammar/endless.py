"""Which parts of a JSON schema no value can match, because they require themselves without end. Knows no grammar.

A part can finish if all that it requires can: the least fixed point over the parts of a document. What is not looked at
(patterns of names, how parts exclude each other) counts as a way out, so that nothing which has one is found here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, cast
from urllib.parse import unquote

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "additionalItems")
_TYPES = ("null", "array", "object")  # null stands for all that have no parts


def endless(schema: Mapping[str, Any] | bool) -> frozenset[str]:
    """JSON pointers ("" = the root) of the parts that no finite value matches."""
    return _Document(schema).endless()


class _Document:
    """The parts of a schema by their pointer: those under its keywords and those that references lead to."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._parts: dict[str, Any] = {}
        self._anchors: dict[str, str] = {}
        self._finite: set[str] = set()
        unread = deque([("", root)])
        while unread:
            path, part = unread.popleft()
            if path not in self._parts:
                self._parts[path] = part
                unread += self._inside(path, part)

    def endless(self) -> frozenset[str]:
        needed_by: dict[str, set[str]] = {}
        for path, part in self._parts.items():
            target = self._target(part)
            for inner in [inner for inner, _ in _inner(path, part)] + ([] if target is None else [target]):
                needed_by.setdefault(inner, set()).add(path)
        queue = deque(reversed(self._parts))  # inner parts first: references aside, one look is enough
        queued = set(queue)
        while queue:
            path = queue.popleft()
            queued.remove(path)
            if path in self._finite or not self._finishes(path):
                continue
            self._finite.add(path)
            again = [p for p in needed_by.get(path, ()) if p not in self._finite and p not in queued]
            queue += again
            queued.update(again)
        return frozenset(self._parts.keys() - self._finite)

    def _inside(self, path: str, part: Any) -> Iterator[tuple[str, Any]]:
        yield from _inner(path, part)
        if not isinstance(part, Mapping):
            return
        node = cast("Mapping[str, Any]", part)
        if isinstance(node.get("$anchor"), str):
            self._anchors[node["$anchor"]] = path
        reference = self._fragment(node)
        if reference is not None and reference.startswith("/"):
            found: Any = self._root
            for name in map(_unescaped, reference[1:].split("/")):
                if isinstance(found, list) and name.isdecimal() and int(name) < len(cast("list[Any]", found)):
                    found = found[int(name)]
                elif isinstance(found, Mapping) and name in found:
                    found = found[name]
                else:
                    return
            yield reference, found

    def _fragment(self, node: Mapping[str, Any]) -> str | None:
        """What a reference names within this document; None if it leads elsewhere."""
        reference = node.get("$ref")
        if not isinstance(reference, str):
            return None
        name = self._root.get("$id")
        if isinstance(name, str) and name:
            reference = reference.removeprefix(name.removesuffix("#"))
        return unquote(reference[1:]) if reference.startswith("#") else None if reference else ""

    def _target(self, part: Any) -> str | None:
        """The part that a reference leads to. None if there is none: its compiler says what is wrong with it."""
        fragment = self._fragment(part) if isinstance(part, Mapping) else None
        if fragment is None or fragment in self._parts:
            return fragment
        return self._anchors.get(fragment)

    # ------------------------------------------------------------------ one part
    def _finishes(self, path: str) -> bool:
        node = self._parts[path]
        if not isinstance(node, Mapping) or "enum" in node or "const" in node:
            return True
        target = self._target(node)
        if target is not None and target not in self._finite:
            return False
        if not all(self._ends(f"{path}/allOf/{n}") for n in range(_length(node, "allOf"))):
            return False
        for key in ("anyOf", "oneOf"):
            ways = [n for n in range(_length(node, key)) if node[key][n] is not False]
            if ways and not any(self._ends(f"{path}/{key}/{n}") for n in ways):
                return False
        kinds = node.get("type", _TYPES)
        ways = cast("list[Any]", kinds) if isinstance(kinds, list | tuple) else [kinds]
        return any(self._finishes_as(kind, path) for kind in ways)

    def _finishes_as(self, kind: Any, path: str) -> bool:
        if kind == "object":
            return self._object_finishes(path)
        return kind != "array" or self._array_finishes(path)

    def _object_finishes(self, path: str) -> bool:
        node = self._parts[path]
        named = node["properties"] if isinstance(node.get("properties"), Mapping) else {}
        closed = node.get("additionalProperties") is False
        more = bool(node.get("patternProperties")) or (
            not closed and self._ends(f"{path}/additionalProperties")
        )
        good = [name for name in named if self._ends(f"{path}/properties/{_escaped(name)}")]
        required = node["required"] if isinstance(node.get("required"), list) else ()
        if not all(name in good if name in named else more for name in required if isinstance(name, str)):
            return False
        return more or len(good) >= _number(node, "minProperties")

    def _array_finishes(self, path: str) -> bool:
        node = self._parts[path]
        least = _number(node, "minItems")
        old = isinstance(node.get("items"), list)  # as drafts before 2020-12 had them
        first, rest = ("items", "additionalItems") if old else ("prefixItems", "items")
        given = _length(node, first)
        if not all(self._ends(f"{path}/{first}/{n}") for n in range(min(given, least))):
            return False
        return least <= given or self._ends(f"{path}/{rest}")

    def _ends(self, path: str) -> bool:
        """Whether a part finishes, as far as is known yet; one that is not there may be anything."""
        return path in self._finite or path not in self._parts


def _inner(path: str, part: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(part, Mapping):
        return
    node = cast("Mapping[str, Any]", part)
    for key in _MAPS:
        if isinstance(node.get(key), Mapping):
            yield from ((f"{path}/{key}/{_escaped(name)}", one) for name, one in node[key].items())
    for key in _LISTS:
        yield from ((f"{path}/{key}/{n}", node[key][n]) for n in range(_length(node, key)))
    for key in _SINGLE:
        if isinstance(node.get(key), Mapping | bool):
            yield f"{path}/{key}", node[key]


def _length(node: Mapping[str, Any], key: str) -> int:
    return len(cast("list[Any]", node[key])) if isinstance(node.get(key), list) else 0


def _number(node: Mapping[str, Any], key: str) -> int:
    value = node.get(key)
    return int(value) if isinstance(value, int | float) else 0


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _unescaped(name: str) -> str:
    return name.replace("~1", "/").replace("~0", "~")
