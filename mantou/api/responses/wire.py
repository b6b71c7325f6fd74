"""The Responses API's objects as types: what is sent, and what /openapi.json describes. Knows no engine.

Field names and nulls are those of OpenAI's own SDK and of the public Open Responses schema, which also wants the
numbers that a response was drawn with. `UNSET` fields are left out.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from mantou.api.openai.wire import TokenLogprob
from mantou.api.sse import named_event
from mantou.data import Usage

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


# ------------------------------------------------------------------ items
class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[TokenLogprob] = []


class SummaryText(Struct, tag_field="type", tag="summary_text"):
    text: str


class MessageItem(Struct, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    """`encrypted_content` carries the reasoning for callers that keep the conversation themselves."""

    id: str
    status: ItemStatus
    summary: list[SummaryText]
    encrypted_content: str | UnsetType = UNSET


class FunctionCallItem(Struct, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str  # JSON
    namespace: str | UnsetType = UNSET


class CustomCallItem(Struct, tag_field="type", tag="custom_tool_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


Item = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem


# ------------------------------------------------------------------ the response
class InputDetails(Struct):
    """Writing to our prompt cache costs nobody anything, so it is never counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(Struct):
    code: str
    message: str


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class ReasoningBody(Struct):
    effort: str | None = None
    summary: str | None = None


class ResponseBody(Struct, tag_field="object", tag="response"):
    id: str
    created_at: int
    completed_at: int | None
    status: Status
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[Item]
    usage: ResponseUsage | None
    previous_response_id: str | None
    instructions: str | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    max_tool_calls: int | None
    text: dict[str, Any]
    reasoning: ReasoningBody
    truncation: Literal["auto", "disabled"]
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    max_output_tokens: int | None
    store: bool
    background: bool
    metadata: dict[str, str]
    prompt_cache_key: str | None
    safety_identifier: str | None
    user: str | None
    service_tier: Literal["default"] = "default"


class CompactedBody(Struct, tag_field="object", tag="response.compaction"):
    """`output`: items for the input of a later request."""

    id: str
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponseUsage | None


class DeletedResponse(Struct):
    id: str
    deleted: bool
    object: Literal["response"] = "response"


class ItemList(Struct, tag_field="object", tag="list"):
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


# ------------------------------------------------------------------ stream
class _Event(Struct):
    sequence_number: int


class _Snapshot(_Event):
    response: ResponseBody


class Created(_Snapshot, tag_field="type", tag="response.created"):
    pass


class Queued(_Snapshot, tag_field="type", tag="response.queued"):
    pass


class InProgress(_Snapshot, tag_field="type", tag="response.in_progress"):
    pass


class Completed(_Snapshot, tag_field="type", tag="response.completed"):
    pass


class Incomplete(_Snapshot, tag_field="type", tag="response.incomplete"):
    pass


class Failed(_Snapshot, tag_field="type", tag="response.failed"):
    pass


Ending = Completed | Incomplete | Failed


class ItemAdded(_Event, tag_field="type", tag="response.output_item.added"):
    output_index: int
    item: Item


class ItemDone(_Event, tag_field="type", tag="response.output_item.done"):
    output_index: int
    item: Item


class _OfItem(_Event):
    item_id: str
    output_index: int


class PartAdded(_OfItem, tag_field="type", tag="response.content_part.added"):
    part: OutputText
    content_index: int = 0


class PartDone(_OfItem, tag_field="type", tag="response.content_part.done"):
    part: OutputText
    content_index: int = 0


class OutputTextDelta(_OfItem, tag_field="type", tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob] = []
    content_index: int = 0


class OutputTextDone(_OfItem, tag_field="type", tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob] = []
    content_index: int = 0


class SummaryPartAdded(_OfItem, tag_field="type", tag="response.reasoning_summary_part.added"):
    part: SummaryText
    summary_index: int = 0


class SummaryPartDone(_OfItem, tag_field="type", tag="response.reasoning_summary_part.done"):
    part: SummaryText
    summary_index: int = 0


class SummaryDelta(_OfItem, tag_field="type", tag="response.reasoning_summary_text.delta"):
    delta: str
    summary_index: int = 0


class SummaryDone(_OfItem, tag_field="type", tag="response.reasoning_summary_text.done"):
    text: str
    summary_index: int = 0


class ArgumentsDelta(_OfItem, tag_field="type", tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_OfItem, tag_field="type", tag="response.function_call_arguments.done"):
    arguments: str


class CustomInputDelta(_OfItem, tag_field="type", tag="response.custom_tool_call_input.delta"):
    delta: str


class CustomInputDone(_OfItem, tag_field="type", tag="response.custom_tool_call_input.done"):
    input: str


class StreamError(Struct):
    message: str
    type: str
    code: str | None
    param: str | None


class ErrorEvent(_Event, tag_field="type", tag="error"):
    """Two shapes in one: OpenAI's flat one, and the nested one of Open Responses, which the SDKs raise."""

    message: str
    code: str | None
    param: str | None
    error: StreamError


Event = (
    Created
    | Queued
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | OutputTextDelta
    | OutputTextDone
    | SummaryPartAdded
    | SummaryPartDone
    | SummaryDelta
    | SummaryDone
    | ArgumentsDelta
    | ArgumentsDone
    | CustomInputDelta
    | CustomInputDone
    | ErrorEvent
)

encode = msgspec.json.Encoder().encode


def as_event(value: Event) -> bytes:
    """One server-sent event. Its name is the value's type."""
    return named_event(str(value.__struct_config__.tag).encode(), encode(value))


def response_usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )
