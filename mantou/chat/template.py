"""Conversations to prompts with the model's own chat template. Knows no HTTP and no defaults of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from mantou.chat.habits import Habits, find_habits, with_types
from mantou.chat.reasoning import ReasoningFormat, detect
from mantou.chat.sandbox import Template
from mantou.chat.tokenizer import Tokenizer, read_json
from mantou.chat.tools import ToolFormat, ToolUse, named
from mantou.chat.tools import detect as detect_tools
from mantou.data import Message, Prompt
from mantou.errors import BadRequest, ModelError

FALLBACK = (
    "{% for message in messages %}{{ message.role | upper }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
FALLBACK_NOTE = "The model has no chat template (a base model?): chats are sent as plain 'ROLE: text' lines."
UNKNOWN_TOOLS_NOTE = (
    "The chat template does not show how this model writes tool calls: JSON in <tool_call> tags is expected; "
    "--tool-parser names another format."
)

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_NUM_LAST_BOUNDARIES = 2  # message ends looked for from the end; each costs a rendering
_CONTINUED = "\ufdd2continued\ufdd2"  # marks where a continued text ends; no document contains noncharacters


class ChatTemplate:
    """Renders messages as the model was trained to read them.

    Attributes
        reasoning: how this model marks its reasoning, None if it does not
        tool_format: how this model writes tool calls, None if it is not known
        supports_thinking: the template has a switch for reasoning
        supports_tools: the template (or its variant for tools) writes tool definitions
        notes: what a user must know, for the ready card
        finds_boundaries: whether renders look for the ends of messages, where a recurrent state is worth keeping
    """

    def __init__(
        self, sources: Mapping[str, str], tokenizer: Tokenizer, tool_parser: str | None = None
    ) -> None:
        """`sources`: variant name -> Jinja source, with a "default"; empty = FALLBACK.

        tool_parser: name of a tool format, "off" = calls stay text, None = as the template shows.

        Raises ModelError, or ConfigError for an unknown format.
        """
        self.notes = () if sources else (FALLBACK_NOTE,)
        variants = {name: Template(source) for name, source in (sources or {"default": FALLBACK}).items()}
        if "default" not in variants:
            names = ", ".join(sorted(variants))
            raise ModelError(
                f"The model has chat templates named {names} but no 'default'; rename one of them."
            )
        self._default = variants["default"]
        self._for_tools = variants.get("tool_use", self._default)
        self._tokenizer = tokenizer
        self.finds_boundaries = False
        self.supports_thinking = bool({"enable_thinking", "thinking"} & self._default.variables)
        self.supports_tools = "tools" in self._for_tools.variables
        self._calls_are_text = tool_parser == "off"
        self.tool_format = self._find_tool_format(tool_parser)
        own = self.tool_format.reasoning if self.tool_format is not None else None
        self.reasoning: ReasoningFormat | None = own or detect(self._default.source, tokenizer)
        self._habits = find_habits(self._probe) if self.supports_tools else Habits()

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer, tool_parser: str | None = None) -> ChatTemplate:
        """Reads chat_template.jinja, chat_template.json or tokenizer_config.json. Raises as the constructor does."""
        return cls(_sources(folder), tokenizer, tool_parser)

    def _find_tool_format(self, name: str | None) -> ToolFormat | None:
        if name not in (None, "off"):
            return named(name, self._tokenizer)
        form = detect_tools(self._for_tools.source, self._tokenizer)
        if form is None and self.supports_tools:
            self.notes = (*self.notes, UNKNOWN_TOOLS_NOTE)
            form = named("hermes", self._tokenizer)
        return form

    def tool_use(self, offered: Sequence[Mapping[str, Any]], *, parallel: bool = True) -> ToolUse | None:
        """How to find calls of the `offered` tools (OpenAI's shape) in an answer; None if there is nothing to find."""
        if self._calls_are_text:
            offered = ()
        if self.tool_format is None or not (offered or self.tool_format.reasoning):
            return None
        return ToolUse.of(self.tool_format, offered, parallel=parallel)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] = _NOTHING,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        boundaries: bool | None = None,
        check: Callable[[str], None] = lambda text: None,
    ) -> Prompt:
        """The prompt for the next answer.

        kwargs: further template variables, e.g. enable_thinking; they cannot replace messages or tools.
        continue_final: the answer goes on from the last message's text, so nothing closes or follows it.
        boundaries: fill `Prompt.boundaries`, for the first message and the last 2; None = as `finds_boundaries` says.
        check: sees the text before it is tokenised, and raises if it is too long.

        Raises BadRequest if the template refuses the messages or fails on them.
        """
        if not messages:
            raise BadRequest("There are no messages to answer; send at least one.", param="messages")
        values = [self._habits.message(index, message) for index, message in enumerate(messages)]
        conversation = _Conversation(
            self._for_tools if tools else self._default, values, self._variables(tools, kwargs)
        )
        if continue_final:
            text = conversation.continued()
        else:
            text = conversation.text(len(messages), add_generation_prompt=add_generation_prompt)
        check(text)
        tokens, spans = self._encode(text)
        answers = add_generation_prompt or continue_final
        looks = self.finds_boundaries if boundaries is None else boundaries
        return Prompt(
            tokens=tuple(tokens),
            text=text,
            boundaries=self._boundaries(conversation, text, tokens, spans) if looks else (),
            reasoning_open=answers
            and self._reasoning_open(conversation, text, len(messages) - continue_final),
        )

    def _variables(
        self, tools: Sequence[Mapping[str, Any]] | None, kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What a template sees besides the messages."""
        known = dict(kwargs)
        if "enable_thinking" in known and "enable_thinking" not in self._default.variables:
            known.setdefault("thinking", known["enable_thinking"])  # the same switch under its other name
        given = [_described(tool) for tool in tools] if tools else None
        return {"documents": None, **known, **self._tokenizer.special_tokens, "tools": given}

    def _probe(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """A rendering with one tool."""
        function = {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}}
        variables = self._variables([{"type": "function", "function": function}], _NOTHING)
        conversation = _Conversation(self._for_tools, messages, variables)
        return conversation.text(len(messages), add_generation_prompt=True)

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens and their spans in `text`. The tokenizer's BOS is added unless the template wrote it."""
        tokens, spans = self._tokenizer.encode_spans(text)
        bos = self._tokenizer.bos_prefix
        if bos and tokens[:1] != [*bos]:
            return [*bos, *tokens], [(0, 0), *spans]
        return tokens, spans

    def _boundaries(
        self,
        conversation: _Conversation,
        text: str,
        tokens: Sequence[int],
        spans: Sequence[tuple[int, int]],
    ) -> tuple[int, ...]:
        """Token counts at message ends that touch an added token.

        Text is split at added tokens before anything else, so the tokens in front of such a place depend on
        nothing behind it: every prompt that starts with this text starts with these tokens.
        """
        num_tokens_at: dict[int, int] = {len(text): len(tokens)}
        for index, (token, (start, end)) in enumerate(zip(tokens, spans, strict=True)):
            if token in self._tokenizer.added_ids and end > start:
                num_tokens_at.setdefault(start, index)
                num_tokens_at.setdefault(end, index + 1)
        total = len(conversation.messages)
        found: set[int] = set()
        for count in sorted({1, *range(max(1, total - _NUM_LAST_BOUNDARIES + 1), total + 1)}):
            try:
                prefix = conversation.text(count, add_generation_prompt=False)
            except BadRequest:  # this part of the conversation alone is not one
                continue
            if len(prefix) in num_tokens_at and text.startswith(prefix):
                found.add(num_tokens_at[len(prefix)])
        return tuple(sorted(found - {0}))

    def _reasoning_open(self, conversation: _Conversation, text: str, num_before: int) -> bool:
        """Whether the model's own part of the text opens a reasoning block and leaves it open.

        A user who writes about the tag opens nothing, so it must stand behind what the `num_before` messages
        that are not the model's to continue render to.
        """
        if self.reasoning is None:
            return False
        opened = text.rfind(self.reasoning.open)
        if opened < 0 or text.rfind(self.reasoning.close) > opened:
            return False
        before = conversation.text(num_before, add_generation_prompt=False) if num_before else ""
        return opened >= _common_length(before, text)


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The messages of one request, ready for the template; parts of it can be rendered."""

    template: Template
    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]

    def text(self, count: int, *, add_generation_prompt: bool) -> str:
        """The first `count` messages."""
        return self._render(self.messages[:count], add_generation_prompt)

    def continued(self) -> str:
        """All messages, cut right behind the text of the last. Raises BadRequest if the template drops it."""
        *others, last = self.messages
        marked = {**last, "content": last["content"] + _CONTINUED}
        text, mark, _ = self._render([*others, marked], False).rpartition(_CONTINUED)
        if not mark:
            raise BadRequest(
                "The model's chat template does not show the last message's text, so it cannot be continued; "
                "send a last message with text.",
                param="messages",
            )
        return text

    def _render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        return self.template.render(
            {**self.variables, "messages": list(messages), "add_generation_prompt": add_generation_prompt}
        )


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(tool["function"])
    if isinstance(function.get("parameters"), dict):
        function["parameters"] = with_types(function["parameters"])
    return {**tool, "function": function}


def _common_length(first: str, second: str) -> int:
    """Length of the longest common start."""
    if second.startswith(first):
        return len(first)
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _sources(folder: Path) -> dict[str, str]:
    """Variant name -> source, from the first place that has one."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        extra = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        return {"default": _read_text(path)} | {other.stem: _read_text(other) for other in extra}
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = read_json(folder / name).get("chat_template")
        if isinstance(value, str):
            return {"default": value}
        if isinstance(value, list):
            return dict(_named(entry, folder / name) for entry in cast("list[Any]", value))
    return {}


def _named(entry: Any, path: Path) -> tuple[str, str]:
    match entry:
        case {"name": str(name), "template": str(source)}:
            return name, source
        case _:
            raise ModelError(f"{path} has a chat template without name or text; download the model again.")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read ({error}); download the model again.") from error
