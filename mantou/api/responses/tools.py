"""Tools of the Responses API: read, told to the model, and their calls told apart again. Knows no engine.

A model knows functions only, so a custom tool is offered as a function with one text, `input`, and the functions of a
namespace under a joined name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mantou.api.fields import check_depth, kind_of
from mantou.api.openai.tools import ToolChoice, offered_tools
from mantou.api.reading import flag_of, needed_text, object_of, text_of
from mantou.chat.grammar.regular import regex_of
from mantou.errors import BadRequest

# What only OpenAI's own servers can run, or would make of what the caller runs. Agents send some of these with every
# request, beside tools that they run themselves.
_HOSTED = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_preview",
)
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool that may be called. `echo` is how a response describes it."""

    name: str  # as the model sees it
    own_name: str  # as the caller named it
    echo: Mapping[str, Any]
    function: Mapping[str, Any]  # OpenAI's chat shape, for the template
    custom: bool = False
    namespace: str | None = None
    enforced: Mapping[str, Any] | None = None  # the function with what its text must match, for the grammar


@dataclass(frozen=True, slots=True)
class Toolbox:
    """All tools of a request, and which of them may be called."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    choice_echo: str | Mapping[str, Any] = "auto"

    @property
    def offered(self) -> tuple[Mapping[str, Any], ...]:
        return offered_tools(self.choice, [tool.function for tool in self.tools])

    @property
    def enforced(self) -> tuple[Mapping[str, Any], ...]:
        """The same, with the grammars of custom tools."""
        return offered_tools(self.choice, [tool.enforced or tool.function for tool in self.tools])

    def named(self, name: str) -> Tool:
        """The tool behind a name that the model called; an unknown one is a function."""
        return next((tool for tool in self.tools if tool.name == name), Tool(name, name, {}, {}))

    def echoes(self) -> list[dict[str, Any]]:
        """A namespace is described once."""
        found = {id(tool.echo): dict(tool.echo) for tool in self.tools}
        return list(found.values())


def joined(namespace: str | None, name: str) -> str:
    """A function's name as the model sees it."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def read_tools(value: Any, name: str) -> tuple[Tool, ...]:
    """Raises BadRequest for a tool that is not well-formed, and where all tools would have to be run by the server."""
    if not isinstance(value, list):
        raise BadRequest(f"{name} must be a list of tools, got {kind_of(value)}.", param=name)
    check_depth(name, value)
    found: list[Tool] = []
    hosted: list[str] = []
    for index, entry in enumerate(value):
        where = f"{name}[{index}]"
        tool = object_of(entry, where)
        match needed_text(tool, "type", where):
            case "function":
                found.append(_function(tool, where))
            case "custom":
                found.append(_custom(tool, where))
            case "namespace":
                found += _namespace(tool, where)
            case kind if kind in _HOSTED:
                hosted.append(kind)
            case kind:
                raise BadRequest(
                    f"{where}.type {kind!r} is not known; send function or custom tools.",
                    param=f"{where}.type",
                )
    if hosted and not found:
        raise BadRequest(
            f"This server does not run tools such as {hosted[0]}; send function or custom tools that you run.",
            param=name,
        )
    _check_unique(found, name)
    return tuple(found)


def _check_unique(tools: Sequence[Tool], name: str) -> None:
    names = [tool.name for tool in tools]
    twice = next((one for one in names if names.count(one) > 1), None)
    if twice is not None:
        raise BadRequest(f"{name} names {twice!r} twice; give every tool its own name.", param=name)


def _function(tool: Mapping[str, Any], where: str, namespace: str | None = None) -> Tool:
    own = needed_text(tool, "name", where)
    parameters = tool.get("parameters")
    if parameters is not None:
        object_of(parameters, f"{where}.parameters")
    strict = flag_of(tool, "strict", where)
    described = {"name": own, "description": text_of(tool, "description", where), "parameters": parameters}
    name = joined(namespace, own)
    return Tool(
        name,
        own,
        {"type": "function", **described, "strict": strict},
        _for_model(name, described["description"], parameters, strict),
        namespace=namespace,
    )


def _for_model(name: str, description: Any, parameters: Any, strict: bool | None) -> dict[str, Any]:
    said = {"description": description, "parameters": parameters, "strict": strict}
    function = {"name": name, **{key: value for key, value in said.items() if value is not None}}
    return {"type": "function", "function": function}


def _custom(tool: Mapping[str, Any], where: str) -> Tool:
    name = needed_text(tool, "name", where)
    description = text_of(tool, "description", where)
    form = tool.get("format")
    text = description or ""
    pattern: str | None = None
    if form is not None:
        form = object_of(form, f"{where}.format")
        match needed_text(form, "type", f"{where}.format"):
            case "text":
                pass
            case "grammar":
                definition = needed_text(form, "definition", f"{where}.format")
                syntax = needed_text(form, "syntax", f"{where}.format")
                if syntax not in ("lark", "regex"):
                    raise BadRequest(
                        f"{where}.format.syntax must be lark or regex.", param=f"{where}.format.syntax"
                    )
                pattern = definition if syntax == "regex" else regex_of(definition)
                text += f"\nThe input must follow this {syntax} grammar:\n{definition}"
            case _:
                raise BadRequest(
                    f"{where}.format.type must be text or grammar.", param=f"{where}.format.type"
                )
    echo: dict[str, Any] = {"type": "custom", "name": name, "format": form or {"type": "text"}}
    if description is not None:
        echo["description"] = description
    function = _for_model(name, text or None, _INPUT, None)
    return Tool(
        name, name, echo, function, custom=True, enforced=_with_pattern(name, pattern) if pattern else None
    )


def _with_pattern(name: str, pattern: str) -> Mapping[str, Any]:
    """The function as the grammar sees it: its one text matches the whole regex."""
    text = {"type": "string", "pattern": f"^(?:{pattern})$"}
    parameters = {**_INPUT, "properties": {"input": text}, "additionalProperties": False}
    return _for_model(name, None, parameters, strict=True)


def _namespace(tool: Mapping[str, Any], where: str) -> list[Tool]:
    name = needed_text(tool, "name", where)
    members = tool.get("tools")
    if not isinstance(members, list):
        raise BadRequest(
            f"{where}.tools must be a list of functions, got {kind_of(members)}.", param=f"{where}.tools"
        )
    found: list[Tool] = []
    for index, entry in enumerate(members):
        place = f"{where}.tools[{index}]"
        member = object_of(entry, place)
        if needed_text(member, "type", place) != "function":
            raise BadRequest(f"{place}.type must be function inside a namespace.", param=f"{place}.type")
        found.append(_function(member, place, name))
    return [Tool(one.name, one.own_name, tool, one.function, namespace=name) for one in found]


# ------------------------------------------------------------------ tool_choice
def read_tool_choice(value: Any, name: str) -> ToolChoice:
    """Raises BadRequest for what is none of the API's forms."""
    match value:
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function" | "custom", "name": str(chosen)}:
            return ToolChoice("named", joined(text_of(value, "namespace", name), chosen))
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(some)}:
            return ToolChoice(mode, allowed=tuple(_allowed(one, f"{name}.tools") for one in some))
        case {"type": str(kind)}:
            raise BadRequest(
                f"{name} of type {kind!r} cannot be served or is not complete; send none, auto, required, "
                '{"type": "function", "name": ...} or allowed_tools.',
                param=name,
            )
        case str():
            raise BadRequest(f"{name} must be none, auto, required or a named tool.", param=name)
        case _:
            raise BadRequest(f"{name} must be a string or an object, got {kind_of(value)}.", param=name)


def _allowed(value: Any, where: str) -> str:
    match value:
        case {"type": "function" | "custom", "name": str(name)}:
            return joined(text_of(value, "namespace", where), name)
        case _:
            raise BadRequest(f"{where} may hold functions and custom tools with a name only.", param=where)
