"""Anthropic's response objects as types: what is sent, and what /openapi.json describes. Knows no engine.

Field names and nulls are those of Anthropic's own SDK.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from mantou.api.sse import named_event
from mantou.data import Usage

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(Struct):
    """The prompt is the sum of the three input counts."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageBody(Struct, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCountBody(Struct):
    input_tokens: int


# ------------------------------------------------------------------ stream
class MessageStart(Struct, tag_field="type", tag="message_start"):
    message: MessageBody


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputDelta(Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


Delta = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: Delta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: int


class Ending(Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    delta: Ending
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    pass


class Ping(Struct, tag_field="type", tag="ping"):
    pass


# ------------------------------------------------------------------ errors
class ErrorDetails(Struct):
    error_code: str


class ErrorObject(Struct, omit_defaults=True):
    type: str
    message: str
    details: ErrorDetails | None = None


class ErrorEnvelope(Struct, tag_field="type", tag="error"):
    error: ErrorObject
    request_id: str


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping | ErrorEnvelope

encode = msgspec.json.Encoder().encode


def as_event(value: Event) -> bytes:
    """One server-sent event. Its name is the value's type."""
    return named_event(str(value.__struct_config__.tag).encode(), encode(value))


PING = as_event(Ping())


def message_usage(usage: Usage) -> MessageUsage:
    """What came from the cache is counted apart. Writing to ours costs nobody anything, so it is never counted."""
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )
