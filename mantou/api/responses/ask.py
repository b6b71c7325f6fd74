"""The body of POST /v1/responses: its fields, checked, as one value. Knows no model, no connection and no store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from mantou.api import shapes
from mantou.api.fields import (
    Boolean,
    Field,
    Integer,
    Schema,
    Shaped,
    Text,
    kind_of,
    properties,
    wrong,
)
from mantou.api.generation_fields import TABLE, GenerationAsk, read_generation
from mantou.api.openai.chat import EFFORTS, MAX_TOP_LOGPROBS
from mantou.api.openai.tools import ToolChoice
from mantou.api.responses.items import Item, read_input
from mantou.api.responses.tools import Tool, Toolbox, read_tool_choice, read_tools
from mantou.api.responses.wire import ReasoningBody
from mantou.api.structured import read_format
from mantou.data import Grammar
from mantou.errors import BadRequest

if TYPE_CHECKING:
    pass

_ALL_EFFORTS = (*EFFORTS, "max")
_SUMMARIES = ("auto", "concise", "detailed")
LOGPROBS, CARRIED = "message.output_text.logprobs", "reasoning.encrypted_content"
_INCLUDES = (
    LOGPROBS,
    CARRIED,
    # Of what this server never sends:
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
_MOST_METADATA, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512


@dataclass(frozen=True, slots=True)
class ResponsesAsk:
    """A checked body. `items` are its own input; those of earlier turns come in front of them."""

    generation: GenerationAsk
    items: tuple[Item, ...]
    instructions: str | None
    toolbox: Toolbox
    parallel_tools: bool
    max_tool_calls: int | None
    reasoning: ReasoningBody
    include: tuple[str, ...]
    truncation: Literal["auto", "disabled"]
    store: bool | None  # None = if the server stores anything
    background: bool
    previous: str | None
    metadata: Mapping[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    top_logprobs: int
    text: dict[str, Any] = field(default_factory=lambda: {"format": {"type": "text"}})

    @property
    def grammar(self) -> Grammar | None:
        """text.format"""
        return read_format(self.text["format"], "text.format")

    @property
    def compiles(self) -> bool:
        return bool(self.toolbox.offered or self.grammar or self.generation.grammar)

    @property
    def num_characters(self) -> int:
        """A rough size: what matters is whether rendering takes noticeable time."""
        return sum(len(str(item)) for item in self.items)

    def after(self, items: Sequence[Item], instructions: str | None) -> ResponsesAsk:
        """This body as the next turn of a conversation. Its own instructions win."""
        return replace(
            self,
            items=(*items, *self.items),
            instructions=self.instructions if self.instructions is not None else instructions,
        )


# ------------------------------------------------------------------ fields
def _format(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    form = value.get("format") or {"type": "text"}
    kind = form.get("type") if isinstance(form, dict) else None
    if not isinstance(kind, str):
        raise BadRequest(f"{name}.format must be an object with a type.", param=f"{name}.format")
    read_format(form, f"{name}.format")
    verbosity = value.get("verbosity")
    if verbosity is not None and verbosity not in ("low", "medium", "high"):
        raise BadRequest(f"{name}.verbosity must be one of low, medium, high.", param=f"{name}.verbosity")
    return {"format": form} | ({"verbosity": verbosity} if verbosity else {})


def _reasoning(value: Any, name: str) -> ReasoningBody:
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    effort = value.get("effort")
    if effort is not None and effort not in _ALL_EFFORTS:
        raise BadRequest(f"{name}.effort must be one of {', '.join(_ALL_EFFORTS)}.", param=f"{name}.effort")
    summary = value.get("summary") or value.get("generate_summary")
    if summary is not None and summary not in _SUMMARIES:
        raise BadRequest(f"{name}.summary must be one of {', '.join(_SUMMARIES)}.", param=f"{name}.summary")
    return ReasoningBody(effort, summary)


def _include(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise wrong(name, "a list of strings", value)
    for entry in value:
        if entry not in _INCLUDES:
            raise BadRequest(f"{name} may hold {', '.join(_INCLUDES)} only.", param=name)
    return tuple(value)


def _metadata(value: Any, name: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise wrong(name, "an object of strings", value)
    if len(value) > _MOST_METADATA:
        raise BadRequest(f"{name} may hold at most {_MOST_METADATA} pairs, got {len(value)}.", param=name)
    for key, text in value.items():
        if not isinstance(text, str):
            raise BadRequest(f"{name} must hold strings, got {kind_of(text)}.", param=name)
        if len(key) > _LONGEST_KEY or len(text) > _LONGEST_VALUE:
            raise BadRequest(
                f"{name} keys may have {_LONGEST_KEY} characters and values {_LONGEST_VALUE}.", param=name
            )
    return dict(value)


def _elsewhere(name: str, advice: str) -> Field[None]:
    def refuse(value: Any, name: str) -> None:
        raise BadRequest(f"{name} is kept at OpenAI and cannot be read here; {advice}.", param=name)

    return Shaped(name, f"Refused: {advice}.", refuse, {"type": "null"})


_INPUT = Shaped(
    "input",
    "A text of the user, or items: messages of text (and text files), calls of tools, their outputs, reasoning, "
    "compactions, and references to items of stored responses.",
    read_input,
    shapes.INPUT,
)
_INSTRUCTIONS = Text("instructions", "Comes first; those of the previous response if it is silent.")
_TOOLS = Shaped(
    "tools",
    "Functions, custom tools and namespaces of functions. A custom tool's grammar is enforced if it is a regex or "
    "Lark whose rules never lead back to themselves, without %ignore; other Lark is told to the model only. Tools that "
    "OpenAI would run are left out; a list of only such is refused.",
    read_tools,
    shapes.RESPONSES_TOOLS,
)
_TOOL_CHOICE = Shaped(
    "tool_choice",
    "`none` leaves the tools out; `required` or a named tool asks for a call; `allowed_tools` leaves others out.",
    lambda value, name: (read_tool_choice(value, name), value),
    shapes.RESPONSES_TOOL_CHOICE,
)
_PARALLEL = Boolean("parallel_tool_calls", "false: the answer ends with its first call.")
_MOST_CALLS = Integer("max_tool_calls", "Calls beyond so many are ignored.", 1)
_MAX_TOKENS = Integer(
    "max_output_tokens", "Most tokens to generate, reasoning included; silent = until the context is full.", 1
)
_OLD_MAX_TOKENS = Integer("max_tokens", "The same as max_output_tokens, and gives way to it.", 1)
_REASONING = Shaped(
    "reasoning",
    "`effort`: none turns thinking off, templates that know levels get the level. `summary`: the summary is always "
    "the reasoning itself.",
    _reasoning,
    {
        "type": ["object", "null"],
        "properties": {
            "effort": {"type": ["string", "null"], "enum": [*_ALL_EFFORTS, None]},
            "summary": {"type": ["string", "null"], "enum": [*_SUMMARIES, None]},
        },
    },
)
_TEXT = Shaped(
    "text",
    "`format`: what the answer is, as response_format of a chat, with the schema beside the type.",
    _format,
    shapes.TEXT_FORMAT,
)
_INCLUDE = Shaped(
    "include",
    f"`{LOGPROBS}`, and `{CARRIED}` for callers that keep the conversation; others are accepted.",
    _include,
    {"type": ["array", "null"], "items": {"type": "string", "enum": [*_INCLUDES]}},
)
_TRUNCATION = Text(
    "truncation",
    "auto drops the oldest turns where the input is too long; disabled refuses it.",
    ("auto", "disabled"),
)
_STORE = Boolean("store", "false: forgotten once it is answered.")
_BACKGROUND = Boolean("background", "Answer at once and go on without the client, who asks again by the id.")
_PREVIOUS = Text("previous_response_id", "Go on from this stored response.")
_METADATA = Shaped(
    "metadata",
    f"Up to {_MOST_METADATA} pairs of strings that come back with the response.",
    _metadata,
    shapes.METADATA,
)
_TOP_LOGPROBS = Integer("top_logprobs", "How many alternatives for every token.", 0, MAX_TOP_LOGPROBS)
_USER = Text("user", "Comes back with the response; nothing depends on it.")
_SAFETY = Text("safety_identifier", "Comes back with the response; nothing depends on it.")
_TIER = Text("service_tier", "Accepted and not used.")
_REFUSED = (
    _elsewhere("conversation", "go on with previous_response_id"),
    _elsewhere("prompt", "send instructions and input"),
)
_NOT_HERE = ("n", "max_tokens", "max_completion_tokens")
_SHARED = tuple(entry for entry in TABLE if entry.name not in _NOT_HERE)
_OWN: tuple[Field[Any], ...] = (
    _INPUT,
    _INSTRUCTIONS,
    _PREVIOUS,
    _STORE,
    _BACKGROUND,
    _TOOLS,
    _TOOL_CHOICE,
    _PARALLEL,
    _MOST_CALLS,
    _MAX_TOKENS,
    _OLD_MAX_TOKENS,
    _REASONING,
    _TEXT,
    _INCLUDE,
    _TOP_LOGPROBS,
    _TRUNCATION,
    _METADATA,
    _USER,
    _SAFETY,
    _TIER,
)


# ------------------------------------------------------------------ the body
def read_ask(body: Mapping[str, Any], headers: Mapping[str, str]) -> ResponsesAsk:
    """Checks every field. Raises BadRequest that names the first wrong one."""
    for refused in _REFUSED:
        refused.read(body)
    items = _INPUT.read(body)
    if items is None:
        raise BadRequest("input is missing; send a string or a list of items.", param="input")
    shared = read_generation({entry.name: body.get(entry.name) for entry in _SHARED}, headers)
    old_limit, limit = _OLD_MAX_TOKENS.read(body), _MAX_TOKENS.read(body)
    most_calls = _MOST_CALLS.read(body)
    store, background = _STORE.read(body), _BACKGROUND.read(body) or False
    if background and store is False:
        raise BadRequest("background needs a response that is stored; leave store out.", param="store")
    _TIER.read(body)
    return ResponsesAsk(
        generation=replace(shared, max_tokens=old_limit if limit is None else limit),
        items=items,
        instructions=_INSTRUCTIONS.read(body),
        toolbox=_toolbox(body, _TOOLS.read(body) or ()),
        parallel_tools=_PARALLEL.read(body) is not False,
        max_tool_calls=most_calls,
        reasoning=_REASONING.read(body) or ReasoningBody(),
        include=_INCLUDE.read(body) or (),
        truncation="auto" if _TRUNCATION.read(body) == "auto" else "disabled",
        store=store,
        background=background,
        previous=_PREVIOUS.read(body),
        metadata=_METADATA.read(body) or {},
        user=_USER.read(body),
        safety_identifier=_SAFETY.read(body),
        prompt_cache_key=body.get("prompt_cache_key"),
        top_logprobs=_TOP_LOGPROBS.read(body) or 0,
        text=_TEXT.read(body) or {"format": {"type": "text"}},
    )


def ask_schema() -> Schema:
    """The body as a JSON schema."""
    own = {entry.name for entry in _OWN}
    shared = tuple(entry for entry in _SHARED if entry.name not in own)
    return {
        "type": "object",
        "required": ["input"],
        "properties": properties((*_OWN, *shared, *_REFUSED)),
    }


def _toolbox(body: Mapping[str, Any], tools: tuple[Tool, ...]) -> Toolbox:
    """Raises BadRequest for a choice that these tools cannot fulfil."""
    choice, echo = _TOOL_CHOICE.read(body) or (ToolChoice(), "auto")
    toolbox = Toolbox(tools, choice, echo)
    _ = toolbox.offered
    return toolbox
