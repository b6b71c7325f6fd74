"""Conversations to prompts with the model's own chat template. Knows no HTTP and no defaults of a request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from mantou.chat.reasoning import ReasoningFormat, detect
from mantou.chat.sandbox import Template
from mantou.chat.tokenizer import Tokenizer, read_json
from mantou.data import Message, Prompt, ToolCall
from mantou.errors import BadRequest, ModelError

FALLBACK = (
    "{% for message in messages %}{{ message.role | upper }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
FALLBACK_NOTE = "The model has no chat template (a base model?): chats are sent as plain 'ROLE: text' lines."

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_NUM_LAST_BOUNDARIES = 16  # message ends looked for from the end; each costs a rendering
_CONTINUED = "\ufdd2continued\ufdd2"  # marks where a continued text ends; no document contains noncharacters


class ChatTemplate:
    """Renders messages as the model was trained to read them.

    Attributes
        reasoning: how this model marks its reasoning, None if it does not
        supports_thinking: the template has a switch for reasoning
        supports_tools: the template (or its variant for tools) writes tool definitions
        notes: what a user must know, for the ready card
    """

    def __init__(self, sources: Mapping[str, str], tokenizer: Tokenizer) -> None:
        """`sources`: variant name -> Jinja source, with a "default"; empty = FALLBACK. Raises ModelError."""
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
        self.reasoning: ReasoningFormat | None = detect(self._default.source, tokenizer)
        self.supports_thinking = bool({"enable_thinking", "thinking"} & self._default.variables)
        self.supports_tools = "tools" in self._for_tools.variables
        self._text_arguments = self.supports_tools and self._wants_text_arguments()

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """Reads chat_template.jinja, chat_template.json or tokenizer_config.json. Raises ModelError."""
        return cls(_sources(folder), tokenizer)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] = _NOTHING,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        boundaries: bool = False,
    ) -> Prompt:
        """The prompt for the next answer.

        kwargs: further template variables, e.g. enable_thinking; they cannot replace messages or tools.
        continue_final: the answer goes on from the last message's text, so nothing closes or follows it.
        boundaries: fill `Prompt.boundaries`, for the first message and the last 16.

        Raises BadRequest if the template refuses the messages or fails on them.
        """
        if not messages:
            raise BadRequest("There are no messages to answer; send at least one.", param="messages")
        values = [_message(index, message, self._text_arguments) for index, message in enumerate(messages)]
        conversation = _Conversation(
            self._for_tools if tools else self._default, values, self._variables(tools, kwargs)
        )
        if continue_final:
            text = conversation.continued()
        else:
            text = conversation.text(len(messages), add_generation_prompt=add_generation_prompt)
        tokens, spans = self._encode(text)
        answers = add_generation_prompt or continue_final
        return Prompt(
            tokens=tuple(tokens),
            text=text,
            boundaries=self._boundaries(conversation, text, tokens, spans) if boundaries else (),
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
        given = [dict(tool) for tool in tools] if tools else None
        return {"documents": None, **known, **self._tokenizer.special_tokens, "tools": given}

    def _wants_text_arguments(self) -> bool:
        """Some templates join a tool call's arguments to other text and fail on an object: try both once."""
        call = ToolCall(id="call00001", name="probe", arguments='{"a": 1}')
        messages = (
            Message(role="user", content="a"),
            Message(role="assistant", tool_calls=(call,)),
            Message(role="tool", content="b", name="probe", tool_call_id=call.id),
        )
        function = {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}}
        variables = self._variables([{"type": "function", "function": function}], _NOTHING)

        def renders(text_arguments: bool) -> bool:
            values = [_message(index, message, text_arguments) for index, message in enumerate(messages)]
            try:
                _Conversation(self._for_tools, values, variables).text(3, add_generation_prompt=True)
            except BadRequest:
                return False
            return True

        return not renders(False) and renders(True)

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


def _message(index: int, message: Message, text_arguments: bool) -> dict[str, Any]:
    """A message as templates read it. Raises BadRequest for tool arguments that are no JSON object."""
    value: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.name is not None:
        value["name"] = message.name
    if message.tool_call_id is not None:
        value["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:
        for name in ("reasoning_content", "reasoning", "thinking"):  # templates disagree on the name
            value[name] = message.reasoning
    if message.tool_calls:
        value["tool_calls"] = [_tool_call(index, call, text_arguments) for call in message.tool_calls]
    return value


def _tool_call(index: int, call: ToolCall, text_arguments: bool) -> dict[str, Any]:
    text = call.arguments or "{}"
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise BadRequest(
            f"The arguments of tool call '{call.name}' in message {index} are not a JSON object; send one.",
            param=f"messages.{index}.tool_calls",
        )
    function = {"name": call.name, "arguments": text if text_arguments else cast("dict[str, Any]", arguments)}
    return {"id": call.id, "type": "function", "function": function}


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
