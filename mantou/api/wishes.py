"""What callers of the library ask beside sampling: a form of the answer, tools, reasoning. Knows no HTTP, no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from mantou.api.openai.messages import read_tools
from mantou.api.openai.tools import offered_tools, read_tool_choice
from mantou.api.planning import RowOptions
from mantou.api.structured import one_grammar, read_format
from mantou.data import Grammar, Sampling
from mantou.errors import BadRequest

if TYPE_CHECKING:
    from mantou.chat.template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Wishes:
    """As the fields of the same names in a chat request; silent unless they are given.

    response_format: an object with a type, as OpenAI's
    grammar: what the answer must match: Lark or GBNF text, or a `data.Grammar`
    tools, tool_choice, parallel_tool_calls: OpenAI's; a choice of required or of a named tool is enforced
    thinking: turns reasoning on or off; None = as the model likes
    thinking_budget: most tokens of reasoning
    """

    response_format: Mapping[str, Any] | None = None
    grammar: Grammar | str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    thinking: bool | None = None
    thinking_budget: int | None = None

    def for_chat(self, template: ChatTemplate) -> RowOptions:
        """Raises BadRequest for what is malformed, or what the model's template cannot say."""
        choice = read_tool_choice(self.tool_choice, "tool_choice")
        tools = offered_tools(choice, read_tools(list(self.tools), "tools"))
        if tools and not template.supports_tools:
            raise BadRequest(
                "The chat template of this model cannot describe tools; use a model that can, or leave tools out.",
                param="tools",
            )
        return RowOptions(
            thinking=self.thinking,
            reasoning=template.reasoning,
            tools=tools,
            parallel_tools=self.parallel_tool_calls,
            tool_choice=choice.kind if choice.kind != "none" else "auto",
            tool_name=choice.name,
            grammar=self._grammar(),
            thinking_budget=self._budget(),
        )

    def for_text(self) -> RowOptions:
        """Plain text has neither tools nor reasoning. Raises BadRequest if they are asked for."""
        for name in ("tools", "thinking", "thinking_budget"):
            if getattr(self, name):
                raise BadRequest(f"{name} needs a conversation; use generate, stream or batch.", param=name)
        return RowOptions(grammar=self._grammar())

    def _grammar(self) -> Grammar | None:
        form = None if self.response_format is None else read_format(self.response_format, "response_format")
        given = self.grammar
        if isinstance(given, str):
            given = read_format({"type": "grammar", "grammar": given}, "grammar")
        return one_grammar(form, given)

    def _budget(self) -> int | None:
        if self.thinking_budget is not None and self.thinking_budget < 0:
            raise BadRequest("thinking_budget must be at least 0.", param="thinking_budget")
        return self.thinking_budget


_NAMES = frozenset(field.name for field in fields(Wishes))


def split(options: Mapping[str, Any]) -> tuple[Wishes, Sampling]:
    """Keyword arguments of the library: those of `Wishes`, and those of `Sampling`. Raises TypeError for others."""
    wishes = {name: value for name, value in options.items() if name in _NAMES}
    return Wishes(**wishes), Sampling(
        **{name: value for name, value in options.items() if name not in _NAMES}
    )
