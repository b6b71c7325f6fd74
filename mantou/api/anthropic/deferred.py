"""Tools that a model reads of where a tool search has found them, not at the beginning. Knows no template.

Claude Code adds such tools to `tools`, marked with `defer_loading`, once a `tool_reference` in a tool's result names
them. Described at the beginning, each would change what all tokens behind it depend on: no turn after a search would go
on from the prompt cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mantou.api.fields import wrong


def deferred_names(tools: Any) -> frozenset[str]:
    """The deferred ones of a `tools` list that is otherwise checked already."""
    found: set[str] = set()
    entries: list[Any] = tools or []
    for index, tool in enumerate(entries):
        match tool:
            case {"name": str(name), "defer_loading": True}:
                found.add(name)
            case {"defer_loading": None | False | True}:
                pass
            case {"defer_loading": other}:
                raise wrong(f"tools[{index}].defer_loading", "true or false", other)
            case _:
                pass
    return frozenset(found)


def definitions(tools: Sequence[Mapping[str, Any]], names: frozenset[str]) -> dict[str, str]:
    """Name -> what the model reads of a function tool where a reference stands for it."""
    functions = [tool["function"] for tool in tools if tool["function"]["name"] in names]
    return {one["name"]: f"<function>{msgspec.json.encode(one).decode()}</function>" for one in functions}


def resolved(messages: Any, known: Mapping[str, str]) -> tuple[Any, frozenset[str]]:
    """`messages`, checked or not, with definitions in place of references, and the names that were referred to."""
    found: set[str] = set()

    def part(value: Any) -> Any:
        match value:
            case {"type": "tool_reference", "tool_name": str(name)} if name in known:
                found.add(name)
                return {"type": "text", "text": known[name]}
            case _:
                return value

    def block(value: Any) -> Any:
        match value:
            case {"type": "tool_result", "content": list(parts)}:
                return {**value, "content": [part(one) for one in parts]}
            case _:
                return value

    def message(value: Any) -> Any:
        match value:
            case {"content": list(blocks)}:
                return {**value, "content": [block(one) for one in blocks]}
            case _:
                return value

    if not isinstance(messages, list):
        return messages, frozenset()
    return [message(one) for one in messages], frozenset(found)
