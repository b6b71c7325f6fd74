"""The order of tool definitions is the client's and the template's business: it is never changed on the way."""

from __future__ import annotations

from typing import Any

from mantou.data import Message, Prompt
from tests.fakes_api import TEMPLATE, byte_tokenizer, chat_template

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("write", "list", "read")
]
SORTING = TEMPLATE.replace("tools | tojson", "tools | sort(attribute='function.name') | tojson")


def prompt(source: str, tools: list[dict[str, Any]]) -> Prompt:
    return chat_template(byte_tokenizer(), source).render([Message("user", "hi")], tools=tools)


def test_a_template_that_sorts_gives_one_prefix_whatever_the_order() -> None:
    assert prompt(SORTING, TOOLS).tokens == prompt(SORTING, TOOLS[::-1]).tokens


def test_a_template_that_does_not_shows_the_tools_as_they_came() -> None:
    one, other = prompt(TEMPLATE, TOOLS), prompt(TEMPLATE, TOOLS[::-1])
    assert one.tokens != other.tokens
    assert other.text.index('"read"') < other.text.index('"list"') < other.text.index('"write"')
