"""POST /v1/messages: parse, plan, encode. Knows no engine and no connection."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from mantou.api.anthropic.errors import NoThreads
from mantou.api.anthropic.prompt import PROMPT_FIELDS, PromptAsk, read_prompt, render, thinks
from mantou.api.anthropic.stream import BlockEvent, BlockWriter, whole_blocks
from mantou.api.anthropic.wire import (
    PING,
    Block,
    Ending,
    MessageBody,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    as_event,
    encode,
    message_usage,
)
from mantou.api.fields import Field, Integer, Object, Schema, Shaped, kind_of, properties, wrong
from mantou.api.generation import Answer
from mantou.api.generation_fields import TABLE, GenerationAsk, read_generation
from mantou.api.planning import Head, Job, RowOptions, length_check, plan_rows
from mantou.data import TextEvent, Usage
from mantou.errors import BadRequest

if TYPE_CHECKING:
    from mantou.api.service import Loaded
    from mantou.config import Config

MAX_STOPS = 64
_CHOICES: Mapping[str, Literal["auto", "required", "named"]] = {
    "auto": "auto",
    "none": "auto",  # of no tools
    "any": "required",
    "tool": "named",
}
_CLAUDE_CODE_SESSION = "x-claude-code-session-id"  # gives way to the names that all routes share
_INTERLEAVED = "interleaved-thinking"  # with this beta, a budget is for all turns of a tool loop


@dataclass(frozen=True, slots=True)
class MessagesAsk:
    """A checked body. `max_tokens` 0 asks for a prompt to be computed and nothing to be said."""

    generation: GenerationAsk
    prompt: PromptAsk
    max_tokens: int
    user_id: str | None

    @property
    def num_characters(self) -> int:
        return self.prompt.num_characters

    @property
    def compiles(self) -> bool:
        return bool(self.prompt.tools or self.prompt.grammar or self.generation.grammar)


def _stop_sequences(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise wrong(name, "a list of strings", value)
    for index, entry in enumerate(value):
        if not isinstance(entry, str):
            raise BadRequest(f"{name}[{index}] must be a string, got {kind_of(entry)}.", param=name)
    stops = tuple(entry for entry in value if entry)
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"{name} may hold at most {MAX_STOPS} sequences, got {len(stops)}.", param=name)
    return stops


def _thread(value: Any, name: str) -> None:
    raise NoThreads("This server holds no threads; send the whole conversation without thread.", param=name)


def _unused(name: str) -> Field[None]:
    return Shaped(name, "Accepted and not used.", lambda value, name: None)


_MAX_TOKENS = Integer(
    "max_tokens", "Most tokens to generate; 0 = only put the prompt into the prompt cache.", 0
)
_STOPS = Shaped(
    "stop_sequences",
    f"Up to {MAX_STOPS} strings that end the answer and are not part of it; empty ones are ignored.",
    _stop_sequences,
    {"type": ["array", "null"], "items": {"type": "string"}, "maxItems": MAX_STOPS},
)
_THREAD = Shaped(
    "thread", "Refused: every request carries its whole conversation.", _thread, {"type": "null"}
)
_METADATA = Object(
    "metadata",
    "`user_id`: any string; nothing depends on it.",
    {"properties": {"user_id": {"type": ["string", "null"]}}},
)
_UNUSED = tuple(
    _unused(name)
    for name in ("cache_control", "container", "context_management", "inference_geo", "service_tier", "speed")
)
_NOT_ANTHROPIC = ("max_tokens", "max_completion_tokens", "n", "stop", "stream_options", "logit_bias")
_SHARED = tuple(entry for entry in TABLE if entry.name not in _NOT_ANTHROPIC)
_FIELDS: tuple[Field[Any], ...] = (
    _MAX_TOKENS,
    *PROMPT_FIELDS,
    _STOPS,
    _METADATA,
    *_SHARED,
    _THREAD,
    *_UNUSED,
)


class AnthropicMessages:
    """The Anthropic Messages dialect."""

    path = "/v1/messages"

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> MessagesAsk:
        """Checks every field. Raises BadRequest that names the first wrong one."""
        _THREAD.read(body)
        max_tokens = _MAX_TOKENS.read(body)
        if max_tokens is None:
            raise BadRequest("max_tokens is missing; it must be a whole number.", param="max_tokens")
        shared = read_generation({entry.name: body.get(entry.name) for entry in _SHARED}, headers)
        prompt = read_prompt(body)
        budget = prompt.thinking.budget_tokens
        if (
            budget is not None
            and budget >= max_tokens
            and _INTERLEAVED not in headers.get("anthropic-beta", "")
        ):
            raise BadRequest(
                f"thinking.budget_tokens must be less than max_tokens, which is {max_tokens}.",
                param="thinking.budget_tokens",
            )
        return MessagesAsk(
            generation=replace(
                shared,
                max_tokens=max(max_tokens, 1),
                stop=_STOPS.read(body) or (),
                session=shared.session or headers.get(_CLAUDE_CODE_SESSION),
            ),
            prompt=prompt,
            max_tokens=max_tokens,
            user_id=_user_id(body),
        )

    def plan(self, ask: MessagesAsk, loaded: Loaded, config: Config, fingerprint: str, created: int) -> Job:
        """Renders the prompt. Raises BadRequest where the model cannot do what is asked."""
        template = loaded.template
        prompt = render(ask.prompt, loaded, config, length_check(loaded, config))
        head = Head(f"msg_{secrets.token_hex(12)}", created, loaded.info.id, fingerprint)
        options = RowOptions(
            thinking=thinks(ask.prompt, config) if template.supports_thinking else None,
            reasoning=template.reasoning,
            tools=ask.prompt.tools,
            parallel_tools=ask.prompt.tool_choice.parallel,
            tool_choice=_CHOICES[ask.prompt.tool_choice.kind],
            tool_name=ask.prompt.tool_choice.name,
            grammar=ask.prompt.grammar,
            thinking_budget=ask.prompt.thinking.budget_tokens,
        )
        (row,) = plan_rows(
            ask.generation, [prompt], options, loaded=loaded, config=config, response_id=head.id
        )
        row = replace(row, continues=ask.prompt.conversation.continues)
        limit = row.request.max_tokens or 0
        return Job((row,), MessageEncoder(head, ask, len(prompt.tokens), limit))

    def schema(self) -> Schema:
        """The body as a JSON schema."""
        return {
            "type": "object",
            "required": ["max_tokens", "messages"],
            "properties": properties(_FIELDS) | {"max_tokens": {**_MAX_TOKENS.schema(), "type": "integer"}},
        }


def _user_id(body: Mapping[str, Any]) -> str | None:
    value = (_METADATA.read(body) or {}).get("user_id")
    if value is not None and not isinstance(value, str):
        raise wrong("metadata.user_id", "a string", value)
    return value


class MessageEncoder:
    """Writes the one answer of a message. `limit`: tokens that it was allowed in the end."""

    def __init__(self, head: Head, ask: MessagesAsk, num_prompt_tokens: int, limit: int) -> None:
        self._head = head
        self._ask = ask
        self._num_prompt_tokens = num_prompt_tokens
        self._cut_by_context = limit < ask.max_tokens  # never so for 0
        self._silent = ask.max_tokens == 0
        self._blocks = BlockWriter(show_thinking=ask.prompt.thinking.shown)
        self._pinged = False
        self._called = False
        self._stop_sequence: str | None = None

    def start(self, index: int) -> bytes:
        """How much of the prompt came from the cache is known at the end only."""
        usage = MessageUsage(self._num_prompt_tokens, 0, 0, 0)
        return as_event(MessageStart(self._body([], None, usage)))

    def text(self, index: int, event: TextEvent) -> bytes:
        return self._written(self._read(event))

    def finish(self, index: int, reason: str, usage: Usage | None) -> bytes:
        last = self._written(self._end())
        if usage is None:
            return last
        tail = MessageDelta(self._ending(reason), self._usage(usage))
        return b"".join((last, as_event(tail), as_event(MessageStop())))

    def done(self, usage: Usage) -> bytes:
        return b""

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """The same events, folded."""
        (answer,) = answers
        events = [written for event in answer.events for written in self._read(event)]
        blocks = whole_blocks([*events, *self._end()])
        return encode(self._body(blocks, self._ending(answer.finish or "stop"), self._usage(usage)))

    def _read(self, event: TextEvent) -> list[BlockEvent]:
        if self._silent:
            return []
        self._stop_sequence = event.stop_sequence or self._stop_sequence
        self._called = self._called or bool(event.tools)
        return self._blocks.feed(event)

    def _end(self) -> list[BlockEvent]:
        return [] if self._silent else self._blocks.end()

    def _written(self, events: Sequence[BlockEvent]) -> bytes:
        parts: list[bytes] = []
        for written in events:
            parts.append(as_event(written))
            if not self._pinged:  # once, after the first block has begun
                self._pinged = True
                parts.append(PING)
        return b"".join(parts)

    def _ending(self, finish: str) -> Ending:
        if finish == "length":
            return Ending("model_context_window_exceeded" if self._cut_by_context else "max_tokens", None)
        if self._silent:
            return Ending("max_tokens", None)
        if self._called:
            return Ending("tool_use", None)
        if self._stop_sequence is not None:
            return Ending("stop_sequence", self._stop_sequence)
        return Ending("end_turn", None)

    def _usage(self, usage: Usage) -> MessageUsage:
        return message_usage(replace(usage, completion_tokens=0) if self._silent else usage)

    def _body(self, content: list[Block], ending: Ending | None, usage: MessageUsage) -> MessageBody:
        return MessageBody(
            id=self._head.id,
            role="assistant",
            model=self._head.model,
            content=content,
            stop_reason=None if ending is None else ending.stop_reason,
            stop_sequence=None if ending is None else ending.stop_sequence,
            usage=usage,
        )
