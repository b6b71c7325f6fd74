"""Anthropic's content blocks read as text. Knows no turn, no order and no template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mantou.api.fields import kind_of
from mantou.api.reading import list_of, needed_text, object_of, text_of
from mantou.errors import BadRequest

# What servers of Anthropic's add to a conversation when they run tools: without those, nothing of use to a model here.
SERVER_BLOCKS = frozenset(
    {
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
        "container_upload",
    }
)


def kind_of_block(value: Any, where: str) -> tuple[str, dict[str, Any]]:
    """Its type and its members."""
    block = object_of(value, where)
    return needed_text(block, "type", where), block


def text_of_content(value: Any, where: str) -> str:
    """A string, or a list of blocks that have a text, one a line."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRequest(f"{where} must be a string or a list of blocks, got {kind_of(value)}.", param=where)
    return "\n".join(_readable(block, f"{where}[{index}]") for index, block in enumerate(value))


def _readable(value: Any, where: str) -> str:
    kind, block = kind_of_block(value, where)
    read = READABLE.get(kind)
    if read is None:
        raise BadRequest(f"{where}.type must be one of {', '.join(READABLE)} here.", param=f"{where}.type")
    return read(block, where)


def _text(block: Mapping[str, Any], where: str) -> str:
    return needed_text(block, "text", where)


def _image(block: Mapping[str, Any], where: str) -> str:
    raise BadRequest(f"{where}: this model has no vision; send text and documents of text only.", param=where)


def _document(block: Mapping[str, Any], where: str) -> str:
    """Title, context and text, one a line."""
    source = object_of(block.get("source"), f"{where}.source")
    match needed_text(source, "type", f"{where}.source"):
        case "text":
            text = needed_text(source, "data", f"{where}.source")
        case "content":
            text = text_of_content(source.get("content"), f"{where}.source.content")
        case _:
            raise BadRequest(
                f"{where}.source: only documents of text can be read; send a source of type text or content.",
                param=f"{where}.source",
            )
    return _lines(text_of(block, "title", where), text_of(block, "context", where), text)


def _search_result(block: Mapping[str, Any], where: str) -> str:
    content = list_of(block.get("content"), f"{where}.content")
    return _lines(
        needed_text(block, "title", where),
        needed_text(block, "source", where),
        text_of_content(content, f"{where}.content"),
    )


def _tool_reference(block: Mapping[str, Any], where: str) -> str:
    return needed_text(block, "tool_name", where)


def _lines(*parts: str | None) -> str:
    return "\n".join(part for part in parts if part)


# Block type -> its text. An image has none, and says so.
READABLE: Mapping[str, Callable[[Mapping[str, Any], str], str]] = {
    "text": _text,
    "image": _image,
    "document": _document,
    "search_result": _search_result,
    "tool_reference": _tool_reference,
}
