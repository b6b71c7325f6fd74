"""Anthropic's `system` and `messages` read into plain messages. Knows no template and no other field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from mantou.api.anthropic.blocks import READABLE, SERVER_BLOCKS, kind_of_block, text_of_content
from mantou.api.anthropic.signature import recall
from mantou.api.fields import check_depth, kind_of, wrong
from mantou.api.reading import needed_text, object_of, text_of
from mantou.api.volatile import without_volatile
from mantou.data import Message, ToolCall
from mantou.errors import BadRequest

_ROLES = ("user", "assistant", "system")
_ASSISTANTS = ("thinking", "redacted_thinking", "tool_use")
_USERS = ("tool_result", "image", "document", "search_result")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the caller sent as turns, without the system prompt of the body."""

    system: tuple[str, ...]  # system messages before the first turn
    messages: tuple[Message, ...]
    continues: bool  # the last message is the beginning of the answer

    def with_system(self, system: str | None) -> tuple[Message, ...]:
        """The messages behind one system message that holds the body's and their own."""
        parts = [part for part in (system, *self.system) if part]
        head = (Message(role="system", content="\n".join(parts)),) if parts else ()
        return (*head, *self.messages)


@dataclass(slots=True)
class _Turn:
    """All that one side said in a row."""

    role: Literal["user", "assistant"]
    texts: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    results: list[Message] = field(default_factory=list[Message])

    def messages(self) -> list[Message]:
        """Results first: whatever else the user says comes after what the assistant waited for."""
        text = "\n".join(self.texts)
        if self.role == "user":
            return (
                [*self.results, Message(role="user", content=text)]
                if text or not self.results
                else self.results
            )
        reasoning = "\n".join(self.reasoning) or None
        return [Message(role="assistant", content=text, tool_calls=tuple(self.calls), reasoning=reasoning)]


def read_system(value: Any, name: str) -> str:
    """The system prompt as one text, without what is not for the model."""
    if isinstance(value, str):
        return without_volatile(value)
    if not isinstance(value, list):
        raise wrong(name, "a string or a list of text blocks", value)
    parts = [_system_block(block, f"{name}[{index}]") for index, block in enumerate(value)]
    return "\n".join(part for part in parts if part)


def read_conversation(value: Any, name: str) -> Conversation:
    """Checks the whole list. Raises BadRequest that names the message, the block and the field."""
    if not isinstance(value, list):
        raise BadRequest(f"{name} must be a list of messages, got {kind_of(value)}.", param=name)
    reader = _Reader()
    for index, entry in enumerate(value):
        reader.message(entry, f"{name}[{index}]")
    turns = reader.turns
    if turns and turns[-1].role == "assistant":
        if turns[-1].calls:
            raise BadRequest(
                f"{name} ends with a tool call of the assistant; send its tool_result too.", param=name
            )
        if not any(turns[-1].texts):  # nothing to go on from
            turns.pop()
    if not turns:
        raise BadRequest(f"{name} is empty; send at least one message of the user.", param=name)
    return Conversation(
        tuple(reader.system),
        tuple(message for turn in turns for message in turn.messages()),
        continues=turns[-1].role == "assistant",
    )


class _Reader:
    """Reads message after message; neighbours of one role become one turn, as the API says."""

    def __init__(self) -> None:
        self.system: list[str] = []
        self.turns: list[_Turn] = []
        self._called: dict[str, str] = {}  # id of every tool call so far -> name of its tool

    def message(self, value: Any, where: str) -> None:
        entry = object_of(value, where)
        role = needed_text(entry, "role", where)
        if role not in _ROLES:
            raise BadRequest(f"{where}.role must be one of {', '.join(_ROLES)}.", param=f"{where}.role")
        content = entry.get("content")
        if role == "system":
            self._instruct(content, f"{where}.content")
            return
        turn = self._turn("assistant" if role == "assistant" else "user")
        if isinstance(content, str):
            turn.texts.append(content)
            return
        if not isinstance(content, list):
            raise wrong(f"{where}.content", "a string or a list of blocks", content)
        for index, block in enumerate(content):
            self._block(turn, block, f"{where}.content[{index}]")

    def _instruct(self, content: Any, where: str) -> None:
        """Few templates take a system message in the middle, so there it is something that the user says."""
        text = read_system(content, where)
        if not self.turns:
            self.system.append(text)
        elif text:
            self._turn("user").texts.append(text)

    def _turn(self, role: Literal["user", "assistant"]) -> _Turn:
        if not self.turns or self.turns[-1].role != role:
            self.turns.append(_Turn(role))
        return self.turns[-1]

    def _block(self, turn: _Turn, value: Any, where: str) -> None:
        kind, block = kind_of_block(value, where)
        if kind in (_USERS if turn.role == "assistant" else _ASSISTANTS):
            raise BadRequest(
                f"{where}: a block of type {kind} cannot be in a message of the {turn.role}.", param=where
            )
        if kind in READABLE:
            turn.texts.append(READABLE[kind](block, where))
        elif kind == "thinking":
            thinking = needed_text(block, "thinking", where)
            turn.reasoning.append(recall(thinking, text_of(block, "signature", where) or "", where))
        elif kind == "tool_use":
            turn.calls.append(self._call(block, where))
        elif kind == "tool_result":
            turn.results.append(self._result(block, where))
        elif kind != "redacted_thinking" and kind not in SERVER_BLOCKS:
            raise BadRequest(f"{where}.type is not a known kind of block.", param=f"{where}.type")

    def _call(self, block: Mapping[str, Any], where: str) -> ToolCall:
        given = object_of(block.get("input"), f"{where}.input")
        check_depth(f"{where}.input", given)
        call = ToolCall(
            id=needed_text(block, "id", where),
            name=needed_text(block, "name", where),
            arguments=msgspec.json.encode(given).decode(),
        )
        self._called[call.id] = call.name
        return call

    def _result(self, block: Mapping[str, Any], where: str) -> Message:
        call_id = needed_text(block, "tool_use_id", where)
        if call_id not in self._called:
            raise BadRequest(
                f"{where}.tool_use_id names no tool_use of an earlier message.", param=f"{where}.tool_use_id"
            )
        content = block.get("content")
        text = "" if content is None else text_of_content(content, f"{where}.content")
        failed = block.get("is_error")
        if failed is not None and not isinstance(failed, bool):
            raise wrong(f"{where}.is_error", "true or false", failed)
        if failed:  # templates have no other place to say so
            text = f"Error: {text}"
        return Message(role="tool", content=text, name=self._called[call_id], tool_call_id=call_id)


def _system_block(value: Any, where: str) -> str:
    kind, block = kind_of_block(value, where)
    if kind != "text":
        raise BadRequest(f"{where}.type must be text.", param=f"{where}.type")
    return without_volatile(needed_text(block, "text", where))
