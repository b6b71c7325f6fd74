"""Where chat templates run: Jinja as transformers sets it up, sandboxed, bounded. Knows no messages.

A template comes with a model and is not trusted: it gets plain data, cannot reach or change Python objects,
and its output, its `range` loops and its repetition of values are bounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sized
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mantou.errors import BadRequest, ModelError

MAX_CHARACTERS = 1 << 24  # of one rendered prompt; over four million tokens
MAX_ITERATIONS = 1_000_000  # of all `range` loops of one rendering


class Template:
    """A compiled chat template. `variables` are the names it reads from outside."""

    def __init__(self, source: str) -> None:
        """Raises ModelError if the source is no valid Jinja."""
        self.source = source
        try:
            self.variables = frozenset(meta.find_undeclared_variables(_ENVIRONMENT.parse(source)))
            self._compiled = _ENVIRONMENT.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(
                f"The model's chat template is not valid Jinja ({error}); put a correct one in its folder."
            ) from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises BadRequest: with the template's own words if it refuses, else with what went wrong in it."""
        parts: list[str] = []
        num_characters = 0
        try:
            for part in self._compiled.generate({**variables, "range": _BoundedRange()}):
                parts.append(part)
                num_characters += len(part)
                if num_characters > MAX_CHARACTERS:
                    raise SecurityError(f"its output is longer than {MAX_CHARACTERS} characters")
        except _Refusal as error:
            raise BadRequest(str(error), param="messages") from error
        except (
            jinja2.TemplateError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            AssertionError,
            RecursionError,
            MemoryError,
        ) as error:
            reason = str(error) or type(error).__name__
            raise BadRequest(
                f"The model's chat template cannot render these messages: {reason}.", param="messages"
            ) from error
        return "".join(parts)


class _Refusal(jinja2.TemplateError):
    """The template called raise_exception: its message is meant for the user."""


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`*` and `**` are how a short expression makes a value of any size."""
        if operator == "**":
            raise SecurityError("it uses the operator **")
        for value, times in ((left, right), (right, left)):
            repeats = isinstance(times, int) and isinstance(value, str | list | tuple)
            if repeats and len(cast("Sized", value)) * times > MAX_CHARACTERS:
                raise SecurityError(f"it repeats a value beyond {MAX_CHARACTERS} elements")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """Training marks the assistant's text with {% generation %}; for a prompt the tag means nothing."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it as an attribute of the instance)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundedRange:
    """`range` for one rendering; the sandbox's own bounds each loop but not loops in loops."""

    def __init__(self) -> None:
        self._num_left = MAX_ITERATIONS

    def __call__(self, *arguments: int) -> range:
        numbers = range(*arguments)
        self._num_left -= len(numbers)
        if self._num_left < 0:
            raise SecurityError(f"its loops run more than {MAX_ITERATIONS} times")
        return numbers


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter this leaves HTML characters alone: the text is for a model."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension]
    )
    environment.filters["tojson"] = _tojson
    names = cast("dict[str, Any]", environment.globals)
    names.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


_ENVIRONMENT = _environment()
