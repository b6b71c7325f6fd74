"""The `input` of the Responses API read into items as they are kept: checked, complete, with an id. Knows no model."""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from mantou.api.fields import check_depth, kind_of
from mantou.api.reading import list_of, needed_text, object_of, text_of
from mantou.errors import BadRequest

Item = dict[str, Any]  # JSON

ROLES = ("user", "assistant", "system", "developer")
_STATUSES = ("in_progress", "completed", "incomplete")
# Part type -> the member that holds its text.
_TEXTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
# Part type -> what a model needs for it.
_MEDIA = {
    "input_image": "vision",
    "image_url": "vision",
    "computer_screenshot": "vision",
    "input_audio": "audio input",
    "input_video": "video input",
}


def new_id(prefix: str) -> str:
    """Like OpenAI's: a prefix that tells the kind, and 24 hex digits."""
    return f"{prefix}_{secrets.token_hex(12)}"


def read_input(value: Any, name: str) -> tuple[Item, ...]:
    """Checks the whole input. Raises BadRequest that names the item and the field."""
    if isinstance(value, str):
        return (_message({"role": "user", "content": value}, name),)
    if not isinstance(value, list):
        raise BadRequest(f"{name} must be a string or a list of items, got {kind_of(value)}.", param=name)
    if not value:
        raise BadRequest(f"{name} is empty; send at least one item.", param=name)
    check_depth(name, value)
    return tuple(
        _item(object_of(entry, f"{name}[{index}]"), f"{name}[{index}]") for index, entry in enumerate(value)
    )


def text_of_parts(parts: str | list[Item]) -> str:
    """The text of a checked content or output."""
    if isinstance(parts, str):
        return parts
    return "".join(part[_TEXTS[part["type"]]] for part in parts)


def _item(entry: Item, where: str) -> Item:
    kind = text_of(entry, "type", where)
    if kind is None and "role" in entry:  # the short form of a message
        kind = "message"
    if kind is None and set(entry) == {"id"}:  # and of a reference
        kind = "item_reference"
    if kind is None:
        raise BadRequest(f"{where}.type is missing; it must be a string.", param=f"{where}.type")
    reader = _READERS.get(kind)
    if reader is None:
        raise BadRequest(
            f"{where}: items of type {kind!r} cannot be read here; send {', '.join(_READERS)}.",
            param=f"{where}.type",
        )
    return reader(entry, where)


def _message(entry: Item, where: str) -> Item:
    role = needed_text(entry, "role", where)
    if role not in ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}.", param=f"{where}.role")
    kind = "output_text" if role == "assistant" else "input_text"
    content = entry.get("content")
    if isinstance(content, str):
        parts = [_text_part(kind, content)]
    else:
        parts = [
            _part(part, f"{where}.content[{index}]", kind)
            for index, part in enumerate(list_of(content, f"{where}.content"))
        ]
    return {
        "type": "message",
        "id": text_of(entry, "id", where) or new_id("msg"),
        "status": _status(entry, where),
        "role": role,
        "content": parts,
    }


def _text_part(kind: str, text: str) -> Item:
    if kind == "output_text":
        return {"type": kind, "text": text, "annotations": [], "logprobs": []}
    return {"type": kind, "text": text}


def _part(value: Any, where: str, own_kind: str) -> Item:
    part = object_of(value, where)
    kind = needed_text(part, "type", where)
    if kind in _MEDIA:
        raise BadRequest(f"{where}: this model has no {_MEDIA[kind]}; send text parts only.", param=where)
    if kind == "input_file":
        return _text_part("input_text", _file(part, where))
    if kind not in _TEXTS:
        raise BadRequest(
            f"{where}.type {kind!r} is not a known kind of part; send text parts.", param=f"{where}.type"
        )
    text = needed_text(part, _TEXTS[kind], where)
    return {"type": "refusal", "refusal": text} if kind == "refusal" else _text_part(own_kind, text)


def _file(part: Item, where: str) -> str:
    """A file of text, under its name. Raises BadRequest for other files, and for files that are elsewhere."""
    data = text_of(part, "file_data", where)
    if data is None:
        raise BadRequest(
            f"{where}: files are read from file_data only; send the text of the file in it, or as input_text.",
            param=where,
        )
    encoded = data.partition(",")[2] if data.startswith("data:") else data
    try:
        text = base64.b64decode(encoded, validate=True).decode("utf-8")
    except (binascii.Error, ValueError):  # no base64, no UTF-8
        raise BadRequest(
            f"{where}.file_data must be the base64 of a text file; send other files as input_text.",
            param=f"{where}.file_data",
        ) from None
    name = text_of(part, "filename", where)
    return f"{name}:\n{text}" if name else text


def _status(entry: Mapping[str, Any], where: str) -> str:
    status = text_of(entry, "status", where) or "completed"
    if status not in _STATUSES:
        raise BadRequest(f"{where}.status must be one of {', '.join(_STATUSES)}.", param=f"{where}.status")
    return status


def _call(prefix: str, text: str) -> Callable[[Item, str], Item]:
    """Calls of functions and of custom tools: `text` is the member with what the tool gets."""

    def read(entry: Item, where: str) -> Item:
        found = {
            "type": entry["type"],
            "id": text_of(entry, "id", where) or new_id(prefix),
            "status": _status(entry, where),
            "call_id": needed_text(entry, "call_id", where),
            "name": needed_text(entry, "name", where),
            text: needed_text(entry, text, where),
        }
        namespace = text_of(entry, "namespace", where)
        return found | ({"namespace": namespace} if namespace else {})

    return read


def _output(prefix: str) -> Callable[[Item, str], Item]:
    def read(entry: Item, where: str) -> Item:
        output = entry.get("output")
        if not isinstance(output, str):
            parts = list_of(output, f"{where}.output")
            output = [
                _part(part, f"{where}.output[{index}]", "input_text") for index, part in enumerate(parts)
            ]
        return {
            "type": entry["type"],
            "id": text_of(entry, "id", where) or new_id(prefix),
            "status": _status(entry, where),
            "call_id": needed_text(entry, "call_id", where),
            "output": output,
        }

    return read


def _reasoning(entry: Item, where: str) -> Item:
    found: Item = {
        "type": "reasoning",
        "id": text_of(entry, "id", where) or new_id("rs"),
        "status": _status(entry, where),
        "summary": [
            {"type": "summary_text", "text": needed_text(object_of(part, place), "text", place)}
            for part, place in _placed(entry.get("summary"), f"{where}.summary")
        ],
    }
    content = [
        {"type": "reasoning_text", "text": needed_text(object_of(part, place), "text", place)}
        for part, place in _placed(entry.get("content"), f"{where}.content")
    ]
    carried = text_of(entry, "encrypted_content", where)
    return (
        found
        | ({"content": content} if content else {})
        | ({"encrypted_content": carried} if carried else {})
    )


def _placed(value: Any, where: str) -> list[tuple[Any, str]]:
    parts: list[Any] = [] if value is None else list_of(value, where)
    return [(part, f"{where}[{index}]") for index, part in enumerate(parts)]


def _compaction(entry: Item, where: str) -> Item:
    return {
        "type": "compaction",
        "id": text_of(entry, "id", where) or new_id("cmp"),
        "encrypted_content": needed_text(entry, "encrypted_content", where),
    }


def _reference(entry: Item, where: str) -> Item:
    return {"type": "item_reference", "id": needed_text(entry, "id", where)}


_READERS: Mapping[str, Callable[[Item, str], Item]] = {
    "message": _message,
    "function_call": _call("fc", "arguments"),
    "function_call_output": _output("fco"),
    "custom_tool_call": _call("ctc", "input"),
    "custom_tool_call_output": _output("ctco"),
    "reasoning": _reasoning,
    "compaction": _compaction,
    "item_reference": _reference,
}
