"""Anthropic's `tools` and `tool_choice` read into plain values. Knows no template and no other field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mantou.api.fields import check_depth, kind_of, wrong
from mantou.api.reading import needed_text, object_of, text_of
from mantou.errors import BadRequest

_KINDS: Mapping[str, Literal["auto", "any", "tool", "none"]] = {
    "auto": "auto",
    "any": "any",
    "tool": "tool",
    "none": "none",
}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`any`: at least one call; `tool`: of the tool `name`; `none`: none. Without `parallel`, at most one call."""

    kind: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    parallel: bool = True


def read_tools(value: Any, name: str) -> tuple[dict[str, Any], ...]:
    """The caller's own tools, as function tools. Tools that Anthropic's servers would run or define are left out."""
    if not isinstance(value, list):
        raise BadRequest(f"{name} must be a list of tools, got {kind_of(value)}.", param=name)
    check_depth(name, value)
    found = (_tool(entry, f"{name}[{index}]") for index, entry in enumerate(value))
    return tuple(tool for tool in found if tool is not None)


def read_tool_choice(value: Any, name: str) -> ToolChoice:
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    kind = _KINDS.get(needed_text(value, "type", name))
    if kind is None:
        raise BadRequest(f"{name}.type must be one of {', '.join(_KINDS)}.", param=f"{name}.type")
    single = value.get("disable_parallel_tool_use")
    if single is not None and not isinstance(single, bool):
        raise wrong(f"{name}.disable_parallel_tool_use", "true or false", single)
    return ToolChoice(
        kind=kind,
        name=needed_text(value, "name", name) if kind == "tool" else None,
        parallel=not single,
    )


def check_tool_choice(choice: ToolChoice, tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises BadRequest for a choice that these tools cannot fulfil."""
    names = [tool["function"]["name"] for tool in tools]
    if choice.kind == "any" and not names:
        raise BadRequest("tool_choice any needs at least one tool of your own in tools.", param="tool_choice")
    if choice.name is not None and choice.name not in names:
        raise BadRequest(
            f"tool_choice names the tool {choice.name!r}, which is not in tools.", param="tool_choice.name"
        )


def _tool(value: Any, where: str) -> dict[str, Any] | None:
    entry = object_of(value, where)
    if text_of(entry, "type", where) not in (None, "custom"):
        return None
    function: dict[str, Any] = {"name": needed_text(entry, "name", where)}
    description = text_of(entry, "description", where)
    if description is not None:
        function["description"] = description
    if "input_schema" not in entry:
        raise BadRequest(
            f"{where}.input_schema is missing; it must be a JSON schema.", param=f"{where}.input_schema"
        )
    function["parameters"] = object_of(entry["input_schema"], f"{where}.input_schema")
    if entry.get("strict") is not None:
        if not isinstance(entry["strict"], bool):
            raise wrong(f"{where}.strict", "true or false", entry["strict"])
        function["strict"] = entry["strict"]
    return {"type": "function", "function": function}
