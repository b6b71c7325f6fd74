"""OpenAI's `tool_choice`, and tool calls in answers. Knows no engine and no template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import UNSET

from mantou.api.fields import kind_of, wrong
from mantou.api.openai.wire import Call, CallDelta, Function, FunctionDelta
from mantou.data import ToolCall, ToolDelta
from mantou.errors import BadRequest

Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`required`: at least one call; `named`: of the tool `name`. `allowed`: only these may be called; None = all."""

    kind: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None
    allowed: tuple[str, ...] | None = None


def read_tool_choice(value: Any, name: str) -> ToolChoice:
    """Raises BadRequest for what is none of OpenAI's forms."""
    if isinstance(value, dict):
        return _object(value, name)
    match value:
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case str():
            raise BadRequest(f"{name} must be none, auto, required or a named function.", param=name)
        case _:
            raise wrong(name, "a string or an object", value)


def offered_tools(choice: ToolChoice, tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """The tools that may be called. Raises BadRequest for a choice that these tools cannot fulfil."""
    if choice.kind == "none":
        return ()
    names = [tool["function"]["name"] for tool in tools]
    for wanted in ((choice.name,) if choice.name is not None else choice.allowed) or ():
        if wanted not in names:
            raise BadRequest(
                f"tool_choice names the tool {wanted!r}, which is not in tools.", param="tool_choice"
            )
    if choice.kind == "required" and not tools:
        raise BadRequest("tool_choice required needs at least one tool in tools.", param="tool_choice")
    allowed = names if choice.allowed is None else choice.allowed
    return tuple(tool for tool in tools if tool["function"]["name"] in allowed)


def calls_body(calls: Sequence[ToolCall]) -> list[Call]:
    return [Call(call.id, "function", Function(call.name, call.arguments)) for call in calls]


def delta_body(delta: ToolDelta) -> CallDelta:
    """The first of a call has its id and name, and then always arguments, be they empty; the SDKs add to them."""
    if not delta.name:
        return CallDelta(delta.index, function=FunctionDelta(UNSET, delta.arguments))
    return CallDelta(delta.index, delta.id, "function", FunctionDelta(delta.name, delta.arguments))


def _object(value: Mapping[str, Any], name: str) -> ToolChoice:
    match value:
        case {"type": "function", "function": {"name": str(chosen)}}:
            return ToolChoice("named", chosen)
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(some)},
        }:
            return ToolChoice(
                mode, allowed=tuple(_allowed(one, f"{name}.allowed_tools.tools") for one in some)
            )
        case {"type": str(kind)}:
            raise BadRequest(
                f"{name} of type {kind!r} is not known or not complete; send none, auto, required, "
                '{"type": "function", "function": {"name": ...}} or allowed_tools.',
                param=name,
            )
        case _:
            raise BadRequest(
                f"{name}.type must be a string, got {kind_of(value.get('type'))}.", param=f"{name}.type"
            )


def _allowed(value: Any, where: str) -> str:
    match value:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case _:
            raise BadRequest(f"{where} may hold functions with a name only.", param=where)
