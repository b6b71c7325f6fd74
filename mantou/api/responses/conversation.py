"""Checked items of the Responses API as the messages that a template renders. Knows no template and no field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mantou.api.anthropic.signature import carried, recall
from mantou.api.responses.items import Item, text_of_parts
from mantou.api.responses.tools import joined
from mantou.api.volatile import without_volatile
from mantou.data import Message, ToolCall
from mantou.errors import BadRequest

_SUMMARISED = "Summary of our conversation so far:"


def conversation(items: Sequence[Item], instructions: str | None) -> tuple[Message, ...]:
    """Instructions and all that system and developer say come first, as one message; then what was said, in order.

    Raises BadRequest for the result of a call that nobody made, and where nothing was said.
    """
    reader = _Reader()
    for index, item in enumerate(items):
        reader.read(item, f"input[{index}]")
    reader.close()
    parts = [instructions or "", *reader.system]
    system = "\n\n".join(part for part in map(without_volatile, parts) if part)
    if not (system or reader.messages):
        raise BadRequest("input holds nothing to answer; send at least one message.", param="input")
    head = (Message(role="system", content=system),) if system else ()
    return (*head, *reader.messages)


@dataclass(slots=True)
class _Reply:
    """What the assistant said in one turn: reasoning, then text, then calls."""

    reasoning: list[str] = field(default_factory=list[str])
    texts: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])

    def message(self) -> Message | None:
        if not (self.reasoning or self.texts or self.calls):
            return None
        return Message(
            role="assistant",
            content="".join(self.texts),
            tool_calls=tuple(self.calls),
            reasoning="\n".join(self.reasoning) or None,
        )


class _Reader:
    def __init__(self) -> None:
        self.system: list[str] = []
        self.messages: list[Message] = []
        self._reply = _Reply()
        self._called: dict[str, str] = {}  # id of every call so far -> name of its tool

    def close(self) -> None:
        """The assistant's turn is over."""
        message = self._reply.message()
        if message is not None:
            self.messages.append(message)
            self._reply = _Reply()

    def read(self, item: Item, where: str) -> None:
        match item:
            case {"type": "message", "role": "assistant", "content": content}:
                if self._reply.texts or self._reply.calls:
                    self.close()
                self._reply.texts.append(text_of_parts(content))
            case {"type": "message", "role": "user", "content": content}:
                self.close()
                self.messages.append(Message(role="user", content=text_of_parts(content)))
            case {"type": "message", "content": content}:
                self.system.append(text_of_parts(content))
            case {"type": "reasoning"}:
                if self._reply.texts or self._reply.calls:
                    self.close()
                self._reply.reasoning.append(_thoughts(item, where))
            case {"type": "compaction", "encrypted_content": content}:
                self._compacted(content, where)
            case {"type": "function_call", "arguments": arguments}:
                self._call(item, arguments)
            case {"type": "custom_tool_call", "input": given}:
                self._call(item, msgspec.json.encode({"input": given}).decode())
            case {"call_id": call_id, "output": output}:
                self._result(call_id, text_of_parts(output), where)
            case _:
                raise AssertionError("items are checked before they come here")

    def _call(self, item: Item, arguments: str) -> None:
        name = joined(item.get("namespace"), item["name"])
        self._called[item["call_id"]] = name
        self._reply.calls.append(ToolCall(item["call_id"], name, arguments or "{}"))

    def _compacted(self, content: str, where: str) -> None:
        """What was said before: one message of the user, and the summary as the assistant's answer to it.

        Templates that want the two to take turns render that; they refuse several messages of the user in a row.
        """
        summary = carried(content)
        if summary is None:
            raise BadRequest(
                f"{where}.encrypted_content was not made by this server, or was changed on its way; send what "
                "/v1/responses/compact answered as it came, or the items that it stands for.",
                param=f"{where}.encrypted_content",
            )
        self.close()
        if self.messages and all(message.role == "user" for message in self.messages):
            said = "\n\n".join(message.content or "" for message in self.messages)
            self.messages = [Message(role="user", content=said)]
        self._reply.texts.append(f"{_SUMMARISED}\n{summary}")

    def _result(self, call_id: str, text: str, where: str) -> None:
        if call_id not in self._called:
            raise BadRequest(
                f"{where}.call_id {call_id!r} names no call of an earlier item; send the call before its output.",
                param=f"{where}.call_id",
            )
        self.close()
        self.messages.append(
            Message(role="tool", content=text, tool_call_id=call_id, name=self._called[call_id])
        )


def _thoughts(item: Item, where: str) -> str:
    """The reasoning itself where it is there, else its summary, else what the item carries."""
    parts: list[dict[str, Any]] = item.get("content") or item["summary"]
    shown = "".join(part["text"] for part in parts)
    try:
        return recall(shown, item.get("encrypted_content", ""), where)
    except BadRequest:
        raise BadRequest(
            f"{where}.encrypted_content was changed on its way; send reasoning items back as they came, or leave them "
            "out.",
            param=f"{where}.encrypted_content",
        ) from None
