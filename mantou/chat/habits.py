"""Messages in the form that a template can digest, found by rendering small conversations. Knows no tokens.

Templates disagree on whether a tool call's arguments are an object or its JSON text, on the length of ids, and on
whether a call may stand beside text and reasoning; most say so only by failing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

from mantou.data import Message, ToolCall
from mantou.errors import BadRequest

Render = Callable[[Sequence[Mapping[str, Any]]], str]

_SHORT = 9  # letters and digits of an id that Mistral's templates accept


@dataclass(frozen=True, slots=True)
class Habits:
    """What is not as usual.

    text_arguments: they are JSON text, not an object
    short_ids: 9 letters or digits
    lone_reasoning: a message with calls has reasoning or text, not both
    """

    text_arguments: bool = False
    short_ids: bool = False
    lone_reasoning: bool = False

    def message(self, index: int, message: Message) -> dict[str, Any]:
        """A message as this template reads it. Raises BadRequest for tool arguments that are no JSON object."""
        value: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.name is not None:
            value["name"] = message.name
        if message.tool_call_id is not None:
            value["tool_call_id"] = self._id(message.tool_call_id)
        if message.reasoning is not None and not (
            self.lone_reasoning and message.content and message.tool_calls
        ):
            for name in ("reasoning_content", "reasoning", "thinking"):  # templates disagree on the name
                value[name] = message.reasoning
        if message.tool_calls:
            value["tool_calls"] = [self._tool_call(index, call) for call in message.tool_calls]
        return value

    def _tool_call(self, index: int, call: ToolCall) -> dict[str, Any]:
        text = call.arguments or "{}"
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise BadRequest(
                f"The arguments of tool call '{call.name}' in message {index} are not a JSON object; send one.",
                param=f"messages.{index}.tool_calls",
            )
        value = text if self.text_arguments else cast("dict[str, Any]", arguments)
        function = {"name": call.name, "arguments": value}
        return {"id": self._id(call.id), "type": "function", "function": function}

    def _id(self, call_id: str) -> str:
        """The id itself, or for a template that takes short ones another that is always the same."""
        if not self.short_ids or (len(call_id) == _SHORT and call_id.isascii() and call_id.isalnum()):
            return call_id
        return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:_SHORT]


def find_habits(render: Render) -> Habits:
    """The first habits that a template renders a tool call well with; the plain ones if it never does."""
    for short_ids, text_arguments in product((False, True), repeat=2):
        habits = Habits(text_arguments, short_ids)
        if _renders_call(render, habits):
            return Habits(text_arguments, short_ids, lone_reasoning=_refuses_both(render, habits))
    return Habits()


def _renders_call(render: Render, habits: Habits) -> bool:
    text = _rendered(render, habits, Message("assistant", tool_calls=(_CALL,)))
    # An object that a template puts into its text as it is comes out as Python writes it.
    return text is not None and "{'probe_key': 1}" not in text


def _refuses_both(render: Render, habits: Habits) -> bool:
    both = Message("assistant", content="text", reasoning="why", tool_calls=(_CALL,))
    only_text = Message("assistant", content="text", tool_calls=(_CALL,))
    return _rendered(render, habits, both) is None and _rendered(render, habits, only_text) is not None


_CALL = ToolCall(id="call_0123456789abcdef01234567", name="probe", arguments='{"probe_key": 1}')


def _rendered(render: Render, habits: Habits, called: Message) -> str | None:
    messages = (
        Message("user", content="a"),
        called,
        Message("tool", content="b", name=_CALL.name, tool_call_id=_CALL.id),
    )
    try:
        return render([habits.message(index, message) for index, message in enumerate(messages)])
    except BadRequest:
        return None


def with_types(schema: Any) -> Any:
    """A JSON schema whose nodes have a type wherever it can be told; some templates print it without a look."""
    if isinstance(schema, list):
        return [with_types(entry) for entry in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    node = cast("dict[str, Any]", schema)
    made = {key: _with_types_inside(key, value) for key, value in node.items()}
    if "type" not in made and "$ref" not in made:
        kind = _type(made)
        made |= {"type": kind} if kind else {}
    return made


def _with_types_inside(key: str, value: Any) -> Any:
    if key in ("properties", "$defs", "definitions", "patternProperties") and isinstance(value, dict):
        return {name: with_types(one) for name, one in cast("dict[str, Any]", value).items()}
    if key in ("items", "anyOf", "oneOf", "allOf", "prefixItems", "additionalProperties", "not"):
        return with_types(value)
    return value


def _type(node: Mapping[str, Any]) -> str:
    """What values and branches, which have their types already, say; "" where nothing does."""
    for name in ("anyOf", "oneOf", "allOf"):
        branches = cast("list[Any]", node[name]) if isinstance(node.get(name), list) else []
        kinds = [cast("dict[str, Any]", one).get("type") for one in branches if isinstance(one, dict)]
        found = next((kind for kind in kinds if kind not in (None, "null")), None)
        if isinstance(found, str):
            return found
    values = cast("list[Any]", node["enum"]) if isinstance(node.get("enum"), list) else [node.get("const")]
    match next((value for value in values if value is not None), None):
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case dict():
            return "object"
        case list():
            return "array"
        case str():
            return "string"
        case _:
            return "object" if "properties" in node else "array" if "items" in node else ""
