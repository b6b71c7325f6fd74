"""POST /v1/chat/completions: parse, plan, encode. Knows no engine and no connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from mantou.api import defaults, shapes
from mantou.api.fields import (
    Boolean,
    Field,
    Integer,
    Object,
    Schema,
    Shaped,
    Text,
    properties,
    wrong,
)
from mantou.api.generation import Answer
from mantou.api.generation_fields import PREDICTION, TABLE, GenerationAsk, read_generation
from mantou.api.openai.logprobs import chat_logprobs
from mantou.api.openai.messages import num_characters, read_messages, read_tools
from mantou.api.openai.tools import ToolChoice, calls_body, delta_body, offered_tools, read_tool_choice
from mantou.api.openai.wire import (
    UNSET,
    ChatChoice,
    ChatCompletion,
    ChatFinish,
    ChatMessage,
    encode,
    usage_body,
)
from mantou.api.planning import Head, Job, RowOptions, length_check, plan_rows
from mantou.api.sse import DONE
from mantou.api.structured import FORMAT
from mantou.data import Grammar, Message, TextEvent, Usage
from mantou.errors import BadRequest

if TYPE_CHECKING:
    from mantou.api.service import Loaded
    from mantou.config import Config

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
MAX_TOP_LOGPROBS = 20
_FINISHES: Mapping[str, ChatFinish] = {"length": "length", "tool_calls": "tool_calls"}


@dataclass(frozen=True, slots=True)
class ChatAsk:
    """A checked body."""

    generation: GenerationAsk
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]  # that may be called
    tool_choice: ToolChoice
    parallel_tools: bool
    template_kwargs: Mapping[str, Any]
    effort: str | None
    logprobs: bool
    top_logprobs: int
    prediction: str = ""
    grammar: Grammar | None = None  # response_format
    thinking_budget: int | None = None  # reasoning.max_tokens

    @property
    def num_characters(self) -> int:
        return num_characters(self.messages)

    @property
    def compiles(self) -> bool:
        return bool(self.tools or self.grammar or self.generation.grammar)


def _reasoning(value: Any, name: str) -> tuple[str | None, int | None]:
    """What OpenRouter calls reasoning: (effort, most tokens)."""
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    try:
        return _EFFORT_INSIDE.read(value), _MOST_INSIDE.read(value)
    except BadRequest as error:
        raise BadRequest(f"{name}.{error.message}", param=f"{name}.{error.param}") from None


_EFFORT_INSIDE = Text("effort", "", EFFORTS)
_MOST_INSIDE = Integer("max_tokens", "", 0)
_MESSAGES = Shaped(
    "messages",
    "The conversation, oldest first.",
    read_messages,
    shapes.CHAT_MESSAGES,
)
_TOOLS = Shaped("tools", "Functions the model may call.", read_tools, shapes.TOOLS)
_TOOL_CHOICE = Shaped(
    "tool_choice",
    "`none` leaves the tools out; `required` or a named function asks for a call; `allowed_tools` leaves others out.",
    read_tool_choice,
    shapes.TOOL_CHOICE,
)
_PARALLEL = Boolean("parallel_tool_calls", "false: the answer ends with its first call.")
_KWARGS = Object("chat_template_kwargs", "Further variables for the chat template, such as enable_thinking.")
_REASONING = Shaped(
    "reasoning",
    "`effort`: the same as reasoning_effort, and gives way to it. `max_tokens`: the same as thinking_budget, and wins "
    "over it.",
    _reasoning,
    {
        "type": ["object", "null"],
        "properties": {
            "effort": {"type": ["string", "null"], "enum": [*EFFORTS, None]},
            "max_tokens": {"type": ["integer", "null"], "minimum": 0},
        },
    },
)
_EFFORT = Text(
    "reasoning_effort", "`none` turns thinking off; templates that know levels get the level.", EFFORTS
)
_LOGPROBS = Boolean("logprobs", "Whether to send the log-probability of every token.")
_TOP_LOGPROBS = Integer(
    "top_logprobs", "How many alternatives for every token; -1 = none.", -1, MAX_TOP_LOGPROBS
)
_OWN: tuple[Field[Any], ...] = (
    _MESSAGES,
    _TOOLS,
    _TOOL_CHOICE,
    _PARALLEL,
    _KWARGS,
    _EFFORT,
    _REASONING,
    FORMAT,
    _LOGPROBS,
    _TOP_LOGPROBS,
    PREDICTION,
)


class OpenAIChat:
    """The chat dialect."""

    path = "/v1/chat/completions"

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> ChatAsk:
        """Checks every field. Raises BadRequest that names the first wrong one."""
        messages = _MESSAGES.read(body)
        if messages is None:
            raise BadRequest("messages is missing; send a list with at least one message.", param="messages")
        top = max(_TOP_LOGPROBS.read(body) or 0, 0)
        choice = _TOOL_CHOICE.read(body) or ToolChoice()
        tools = offered_tools(choice, _TOOLS.read(body) or ())
        effort, budget = _REASONING.read(body) or (None, None)
        return ChatAsk(
            generation=read_generation(body, headers),
            messages=messages,
            tools=tools,
            tool_choice=choice,
            parallel_tools=_PARALLEL.read(body) is not False,
            template_kwargs=_KWARGS.read(body) or {},
            effort=_EFFORT.read(body) or effort,
            logprobs=(_LOGPROBS.read(body) or False) or top > 0,
            top_logprobs=top,
            prediction=PREDICTION.read(body) or "",
            grammar=FORMAT.read(body),
            thinking_budget=budget,
        )

    def plan(self, ask: ChatAsk, loaded: Loaded, config: Config, fingerprint: str, created: int) -> Job:
        """Renders the prompt. Raises BadRequest where the model cannot do what is asked."""
        if ask.tools and not loaded.template.supports_tools:
            raise BadRequest(
                "The chat template of this model cannot describe tools; use a model that can, or leave tools out.",
                param="tools",
            )
        think = defaults.thinking(ask.template_kwargs, ask.effort, config.defaults)
        prompt = loaded.template.render(
            ask.messages,
            tools=ask.tools or None,
            kwargs=_template_kwargs(ask, think),
            check=length_check(loaded, config),
        )
        head = Head(f"chatcmpl-{uuid4()}", created, loaded.info.id, fingerprint)
        options = RowOptions(
            thinking=think if loaded.template.supports_thinking else None,
            reasoning=loaded.template.reasoning,
            logprobs=ask.logprobs,
            top_logprobs=ask.top_logprobs,
            prediction=ask.prediction,
            tools=ask.tools,
            parallel_tools=ask.parallel_tools,
            tool_choice=ask.tool_choice.kind if ask.tool_choice.kind != "none" else "auto",
            tool_name=ask.tool_choice.name,
            grammar=ask.grammar,
            thinking_budget=ask.thinking_budget,
        )
        rows = plan_rows(ask.generation, [prompt], options, loaded=loaded, config=config, response_id=head.id)
        return Job(rows, ChatEncoder(head, ask, loaded))

    def schema(self) -> Schema:
        """The body as a JSON schema."""
        return {"type": "object", "required": ["messages"], "properties": properties((*_OWN, *TABLE))}


def _template_kwargs(ask: ChatAsk, think: bool | None) -> dict[str, Any]:
    kwargs = dict(ask.template_kwargs)
    if think is not None:
        kwargs["enable_thinking"] = think
    if ask.effort is not None and ask.effort != "none":
        kwargs.setdefault("reasoning_effort", ask.effort)
    return kwargs


class ChatEncoder:
    """Writes chunks from constant parts made once, so that a token costs one small JSON string."""

    def __init__(self, head: Head, ask: ChatAsk, loaded: Loaded) -> None:
        self._head = head
        self._ask = ask
        self._tokenizer = loaded.tokenizer
        self._usage_apart = ask.generation.include_usage
        chunk = {
            "id": head.id,
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }
        self._before = b"data: " + encode(chunk)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if self._usage_apart else b"]}\n\n"
        self._plain_after = b'},"logprobs":null,"finish_reason":null}' + self._after
        self._plain_before = [
            self._before + b'{"index":%d,"delta":{"content":' % index for index in range(ask.generation.n)
        ]

    def start(self, index: int) -> bytes:
        return self._chunk(index, b'"role":"assistant","content":""')

    def text(self, index: int, event: TextEvent) -> bytes:
        if event.text and not event.reasoning and not event.tools and not self._ask.logprobs:
            return self._plain_before[index] + encode(event.text) + self._plain_after
        said: list[bytes] = []
        if event.reasoning:
            reasoning = encode(event.reasoning)
            said.append(b'"reasoning":%b,"reasoning_content":%b' % (reasoning, reasoning))
        if event.text:
            said.append(b'"content":' + encode(event.text))
        deltas = [b'"tool_calls":[%b]' % encode(delta_body(delta)) for delta in event.tools]
        if said or (event.logprobs and not deltas):
            deltas.insert(0, b",".join(said))
        if not deltas:
            return b""
        logprobs = encode(chat_logprobs(self._tokenizer, event.logprobs)) if self._ask.logprobs else b"null"
        first = self._chunk(index, deltas[0], logprobs)
        return first + b"".join([self._chunk(index, delta) for delta in deltas[1:]])

    def finish(self, index: int, reason: str, usage: Usage | None) -> bytes:
        """Without stream_options, usage rides on the last chunk, so that no client has to ask for it."""
        chunk = self._chunk(index, b"", reason=encode(reason))
        if usage is None or self._usage_apart is not None:
            return chunk
        return chunk[: -len(b"}\n\n")] + b',"usage":' + encode(usage_body(usage)) + b"}\n\n"

    def done(self, usage: Usage) -> bytes:
        if not self._usage_apart:
            return DONE
        return self._before + b'],"usage":' + encode(usage_body(usage)) + b"}\n\n" + DONE

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        return encode(
            ChatCompletion(
                id=self._head.id,
                object="chat.completion",
                created=self._head.created,
                model=self._head.model,
                system_fingerprint=self._head.fingerprint,
                choices=[self._choice(index, answer) for index, answer in enumerate(answers)],
                usage=usage_body(usage),
            )
        )

    def _choice(self, index: int, answer: Answer) -> ChatChoice:
        text, reasoning, calls = "".join(answer.text), "".join(answer.reasoning) or UNSET, answer.calls()
        message = ChatMessage(
            role="assistant",
            content=None if calls and not text else text,
            reasoning=reasoning,
            reasoning_content=reasoning,
            tool_calls=calls_body(calls) or UNSET,
        )
        logprobs = chat_logprobs(self._tokenizer, answer.logprobs) if self._ask.logprobs else None
        return ChatChoice(index, message, logprobs, _FINISHES.get(answer.finish or "stop", "stop"))

    def _chunk(self, index: int, delta: bytes, logprobs: bytes = b"null", reason: bytes = b"null") -> bytes:
        choice = b'{"index":%d,"delta":{%b},"logprobs":%b,"finish_reason":%b}' % (
            index,
            delta,
            logprobs,
            reason,
        )
        return self._before + choice + self._after
