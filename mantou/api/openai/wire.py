"""OpenAI's response objects as types: what is sent whole, and what /openapi.json describes. Knows no engine.

Field names and nulls are those of OpenAI's own SDK; `UNSET` fields are left out.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from mantou.data import FillUsage, SpeculationUsage, Usage

FinishReason = Literal["stop", "length"]  # of a completion
ChatFinish = Literal["stop", "length", "tool_calls"]


class PromptDetails(Struct):
    cached_tokens: int


class CompletionDetails(Struct):
    reasoning_tokens: int


class SpeculationBody(Struct, rename="camel"):
    """Drafts of one answer. The first four do not count copies made by fill, the last three do."""

    drafted: int
    accepted: int
    acceptance_histogram: list[int]  # [n]: rounds of which n tokens stayed
    rounds: int
    target_calls: int
    tokens_per_forward: float
    forwards_saved: int


class FillBody(Struct, rename="camel"):
    injected: int
    decode_steps: int
    verify_accepted: int
    verify_rejected: int
    wasted_samples: int


class UsageBody(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    lane: str
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    speculation: SpeculationBody | UnsetType = UNSET
    fill: FillBody | UnsetType = UNSET


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob] | None
    refusal: None = None


class Function(Struct):
    name: str
    arguments: str  # JSON


class Call(Struct):
    id: str
    type: Literal["function"]
    function: Function


class FunctionDelta(Struct, omit_defaults=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CallDelta(Struct, omit_defaults=True):
    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class ChatMessage(Struct):
    """Reasoning has two names: clients disagree on which one they read."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish


class ChatCompletion(Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody


class ChatDelta(Struct, omit_defaults=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None


class ChatChunk(Struct):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET


class TextLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TextChoice(Struct):
    text: str
    index: int
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class Completion(Struct):
    """Whole answers and chunks share one shape here; only a chunk may lack a finish reason and usage."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: UsageBody | UnsetType | None = UNSET


class Model(Struct, omit_defaults=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_window: int | UnsetType = UNSET
    reasoning: bool | UnsetType = UNSET
    vision: bool | UnsetType = UNSET


class ModelList(Struct):
    object: Literal["list"]
    data: list[Model]


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    error: ErrorDetail


encode = msgspec.json.Encoder().encode


def usage_body(usage: Usage) -> UsageBody:
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptDetails(usage.cached_tokens),
        lane=usage.lane,
        completion_tokens_details=CompletionDetails(usage.reasoning_tokens)
        if usage.reasoning_tokens
        else UNSET,
        speculation=_speculation(usage.speculation) if usage.speculation else UNSET,
        fill=_fill(usage.fill) if usage.fill else UNSET,
    )


def _speculation(spent: SpeculationUsage) -> SpeculationBody:
    return SpeculationBody(
        drafted=spent.drafted,
        accepted=spent.accepted,
        acceptance_histogram=list(spent.histogram),
        rounds=sum(spent.histogram),
        target_calls=spent.target_calls,
        tokens_per_forward=round(spent.tokens / max(spent.target_calls, 1), 3),
        forwards_saved=spent.tokens - spent.target_calls,
    )


def _fill(spent: FillUsage) -> FillBody:
    # A sure span is appended in place of a draw, so no sample is ever thrown away.
    return FillBody(spent.injected, spent.decode_steps, spent.verify_accepted, spent.verify_rejected, 0)
