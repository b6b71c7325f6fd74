"""OpenAI's `messages` and `tools` read into plain values. Knows no template and no other field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from mantou.api.fields import check_depth, kind_of
from mantou.api.reading import flag_of, needed_text, object_of, text_of
from mantou.api.volatile import without_volatile
from mantou.data import Message, ToolCall
from mantou.errors import BadRequest

Role = Literal["system", "user", "assistant", "tool"]

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
# Part type -> what a model needs for it.
_MEDIA = {
    "image": "vision",
    "image_url": "vision",
    "input_image": "vision",
    "video": "video input",
    "video_url": "video input",
    "audio_url": "audio input",
    "input_audio": "audio input",
    "file": "file input",
}
# Only these speak without content: an assistant that called tools, a tool that had nothing to return.
_MAY_BE_SILENT = ("assistant", "tool")


def read_messages(value: Any, name: str) -> tuple[Message, ...]:
    """Checks the whole list. Raises BadRequest that names the message and the field."""
    if not isinstance(value, list):
        raise BadRequest(f"{name} must be a list of messages, got {kind_of(value)}.", param=name)
    if not value:
        raise BadRequest(f"{name} is empty; send at least one message.", param=name)
    return tuple(_message(entry, f"{name}[{index}]") for index, entry in enumerate(value))


def read_tools(value: Any, name: str) -> tuple[dict[str, Any], ...]:
    """Function tools, passed on as they are once their shape is checked."""
    if not isinstance(value, list):
        raise BadRequest(f"{name} must be a list of tools, got {kind_of(value)}.", param=name)
    check_depth(name, value)
    return tuple(_tool(entry, f"{name}[{index}]") for index, entry in enumerate(value))


def num_characters(messages: tuple[Message, ...]) -> int:
    return sum(len(message.content or "") for message in messages)


def _message(value: Any, where: str) -> Message:
    entry = object_of(value, where)
    role = _ROLES.get(needed_text(entry, "role", where))
    if role is None:
        raise BadRequest(f"{where}.role must be one of {', '.join(_ROLES)}.", param=f"{where}.role")
    content = _content(entry.get("content"), f"{where}.content")
    if content is None and role not in _MAY_BE_SILENT:
        raise BadRequest(
            f"{where}.content is missing; it must be a string or a list of parts.", param=f"{where}.content"
        )
    if role == "system" and content is not None:
        content = without_volatile(content)
    assistant = role == "assistant"
    calls = _tool_calls(entry.get("tool_calls"), f"{where}.tool_calls")
    reasoning = text_of(entry, "reasoning", where) or text_of(entry, "reasoning_content", where)
    return Message(
        role=role,
        content=content,
        name=text_of(entry, "name", where),
        tool_calls=calls if assistant else (),
        tool_call_id=text_of(entry, "tool_call_id", where),
        reasoning=reasoning if assistant else None,
    )


def _content(value: Any, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRequest(f"{where} must be a string or a list of parts, got {kind_of(value)}.", param=where)
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(value))


def _part(value: Any, where: str) -> str:
    part = object_of(value, where)
    kind = needed_text(part, "type", where)
    if kind in ("text", "refusal"):
        return needed_text(part, kind, where)
    if kind in _MEDIA:
        raise BadRequest(f"{where}: this model has no {_MEDIA[kind]}; send text parts only.", param=where)
    raise BadRequest(f"{where}.type is not a known kind of part; send text parts.", param=f"{where}.type")


def _tool_calls(value: Any, where: str) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise BadRequest(f"{where} must be a list, got {kind_of(value)}.", param=where)
    return tuple(_tool_call(entry, f"{where}[{index}]") for index, entry in enumerate(value))


def _tool_call(value: Any, where: str) -> ToolCall:
    entry = object_of(value, where)
    function = object_of(entry.get("function"), f"{where}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):  # some clients send the parsed object
        check_depth(f"{where}.function.arguments", arguments)
        arguments = msgspec.json.encode(arguments).decode()
    elif arguments is not None and not isinstance(arguments, str):
        raise BadRequest(
            f"{where}.function.arguments must be a string of JSON, got {kind_of(arguments)}.",
            param=f"{where}.function.arguments",
        )
    return ToolCall(
        id=text_of(entry, "id", where) or "",
        name=needed_text(function, "name", f"{where}.function"),
        arguments=arguments or "{}",
    )


def _tool(value: Any, where: str) -> dict[str, Any]:
    entry = object_of(value, where)
    if needed_text(entry, "type", where) != "function":
        raise BadRequest(f"{where}.type must be function.", param=f"{where}.type")
    function = object_of(entry.get("function"), f"{where}.function")
    needed_text(function, "name", f"{where}.function")
    text_of(function, "description", f"{where}.function")
    flag_of(function, "strict", f"{where}.function")
    if function.get("parameters") is not None:
        object_of(function["parameters"], f"{where}.function.parameters")
    return entry
