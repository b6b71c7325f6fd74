"""The part of Anthropic's body that makes the prompt: read, and rendered. Knows no sampling and no answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mantou.api import defaults, shapes
from mantou.api.anthropic.conversation import Conversation, read_conversation, read_system
from mantou.api.anthropic.deferred import deferred_names, definitions, resolved
from mantou.api.anthropic.tools import ToolChoice, check_tool_choice, read_tool_choice, read_tools
from mantou.api.fields import Field, Schema, Shaped, shown, whole, wrong
from mantou.api.openai.messages import num_characters
from mantou.api.reading import needed_text
from mantou.api.structured import one_grammar, read_format
from mantou.data import Grammar, Message, Prompt
from mantou.errors import BadRequest

if TYPE_CHECKING:
    from mantou.api.service import Loaded
    from mantou.config import Config

EFFORTS = ("low", "medium", "high", "xhigh", "max")
MIN_BUDGET_TOKENS = 1024
_THINKS: Mapping[str, bool] = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
_DISPLAYS = ("summarized", "omitted")


@dataclass(frozen=True, slots=True)
class Thinking:
    """`wanted` None = as the server and the model like. What is not `shown` travels in the signature."""

    wanted: bool | None = None
    budget_tokens: int | None = None
    shown: bool = True


@dataclass(frozen=True, slots=True)
class PromptAsk:
    """What a prompt is made of. `tools` are those that the model may call, `listed` those that it begins with."""

    conversation: Conversation
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    listed: tuple[Mapping[str, Any], ...]
    tool_choice: ToolChoice
    thinking: Thinking
    effort: str | None
    grammar: Grammar | None = None  # output_config.format

    @property
    def num_characters(self) -> int:
        return num_characters(self.messages)


def _thinking(value: Any, name: str) -> Thinking:
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    kind = needed_text(value, "type", name)
    if kind not in _THINKS:
        raise BadRequest(f"{name}.type must be one of {', '.join(_THINKS)}.", param=f"{name}.type")
    display = value.get("display")
    if display is not None and display not in _DISPLAYS:
        raise BadRequest(f"{name}.display must be one of {', '.join(_DISPLAYS)}.", param=f"{name}.display")
    budget = _budget(value.get("budget_tokens"), f"{name}.budget_tokens") if kind == "enabled" else None
    return Thinking(_THINKS[kind], budget, display != "omitted")


def _budget(value: Any, name: str) -> int:
    number = whole(value)
    if number is None:
        raise wrong(name, "a whole number", value)
    if number < MIN_BUDGET_TOKENS:
        raise BadRequest(f"{name} must be at least {MIN_BUDGET_TOKENS}, got {shown(number)}.", param=name)
    return number


def _effort(value: Any, name: str) -> str | None:
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    effort = value.get("effort")
    if effort is not None and effort not in EFFORTS:
        raise BadRequest(f"{name}.effort must be one of {', '.join(EFFORTS)}.", param=f"{name}.effort")
    return effort


def _output_format(body: Mapping[str, Any]) -> Grammar | None:
    value = (body.get("output_config") or {}).get("format")
    return None if value is None else read_format(value, "output_config.format")


_MESSAGES = Shaped(
    "messages",
    "The conversation, oldest first, in text, documents of text, tool calls, their results and thinking. "
    "A last message of the assistant is the beginning of the answer.",
    read_conversation,
    shapes.MESSAGES,
)
_SYSTEM = Shaped(
    "system",
    "The system prompt: a string, or text blocks, one a line. Claude Code's billing line is taken out.",
    read_system,
    shapes.SYSTEM,
)
_TOOLS = Shaped(
    "tools",
    "Tools that the caller runs. Those that Anthropic runs or defines are left out. One with `defer_loading` is "
    "described where a tool_reference in a tool's result names it.",
    read_tools,
    shapes.MESSAGES_TOOLS,
)
_TOOL_CHOICE = Shaped(
    "tool_choice",
    "`none` leaves the tools out; `any` and `tool` ask for a call. With `disable_parallel_tool_use`, the answer ends "
    "with its first call.",
    read_tool_choice,
    shapes.MESSAGES_TOOL_CHOICE,
)
_SHOWN: Schema = {"display": {"type": ["string", "null"], "enum": [*_DISPLAYS, None]}}
_THINKING = Shaped(
    "thinking",
    "Whether to think: enabled (at most `budget_tokens` of it), adaptive, between_tools or disabled; "
    "silent = as the model likes. With `display` omitted, only the signature carries the reasoning.",
    _thinking,
    shapes.either(
        shapes.record(
            {
                "type": shapes.word("enabled"),
                "budget_tokens": {"type": "integer", "minimum": MIN_BUDGET_TOKENS},
            },
            _SHOWN,
        ),
        shapes.record({"type": shapes.word("adaptive", "between_tools", "disabled")}, _SHOWN),
        shapes.NULL,
    ),
)
_OUTPUT = Shaped(
    "output_config",
    "`effort`: for templates that know levels. `format`: type json_schema with a `schema` that the answer follows.",
    _effort,
    {
        "type": ["object", "null"],
        "properties": {
            "effort": {"type": ["string", "null"], "enum": [*EFFORTS, None]},
            "format": shapes.FLAT_FORMAT,
        },
    },
)
_OUTPUT_FORMAT = Shaped(
    "output_format", "The older name of output_config.format.", read_format, shapes.FLAT_FORMAT
)
PROMPT_FIELDS: tuple[Field[Any], ...] = (
    _MESSAGES,
    _SYSTEM,
    _TOOLS,
    _TOOL_CHOICE,
    _THINKING,
    _OUTPUT,
    _OUTPUT_FORMAT,
)


def read_prompt(body: Mapping[str, Any]) -> PromptAsk:
    """Checks every field of the prompt. Raises BadRequest that names the first wrong one."""
    tools = _TOOLS.read(body) or ()
    deferred = deferred_names(body.get("tools"))
    messages, found = resolved(body.get("messages"), definitions(tools, deferred))
    conversation = _MESSAGES.read({"messages": messages})
    if conversation is None:
        raise BadRequest("messages is missing; send a list with at least one message.", param="messages")
    choice = _TOOL_CHOICE.read(body) or ToolChoice()
    check_tool_choice(choice, tools)
    if choice.kind == "none":
        tools = ()
    unlisted = deferred - {choice.name}
    return PromptAsk(
        conversation=conversation,
        messages=conversation.with_system(_SYSTEM.read(body)),
        tools=_without(tools, unlisted - found),
        listed=_without(tools, unlisted),
        tool_choice=choice,
        thinking=_THINKING.read(body) or Thinking(),
        effort=_OUTPUT.read(body),
        grammar=one_grammar(_output_format(body), _OUTPUT_FORMAT.read(body)),
    )


def _without(tools: Sequence[Mapping[str, Any]], names: Collection[str]) -> tuple[Mapping[str, Any], ...]:
    return tuple(tool for tool in tools if tool["function"]["name"] not in names)


def thinks(ask: PromptAsk, config: Config) -> bool | None:
    """Whether the model should think; None = as it likes."""
    return (
        ask.thinking.wanted
        if ask.thinking.wanted is not None
        else defaults.thinking({}, None, config.defaults)
    )


def render(
    ask: PromptAsk, loaded: Loaded, config: Config, check: Callable[[str], None] = lambda text: None
) -> Prompt:
    """The prompt, whose text is shown to `check` before it is tokenised. Raises BadRequest where the model's template
    cannot say what is asked.
    """
    if ask.tools and not loaded.template.supports_tools:
        raise BadRequest(
            "The chat template of this model cannot describe tools; use a model that can, or leave tools out.",
            param="tools",
        )
    kwargs: dict[str, Any] = {}
    think = thinks(ask, config)
    if think is not None:
        kwargs["enable_thinking"] = think
    if ask.effort is not None:
        kwargs["reasoning_effort"] = ask.effort
    return loaded.template.render(
        ask.messages,
        tools=ask.listed or None,
        kwargs=kwargs,
        continue_final=ask.conversation.continues,
        check=check,
    )
