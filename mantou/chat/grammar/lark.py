"""Writes one grammar in llguidance's Lark dialect, rule by rule. Knows no tools, no reasoning and no requests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_CHARACTER = r"(.|\n)"
ANYTHING = f"/{_CHARACTER}*/"
_ESCAPES = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "/": r"\/"}


class Lark:
    """Rules as they are needed. Expressions are strings that may stand on the right of a rule."""

    def __init__(self, specials: Mapping[str, int]) -> None:
        """`specials`: tags that are one token for the model, and no text."""
        self._specials = specials
        self._find = (
            re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))))
            if specials
            else None
        )
        self._rules: list[str] = []
        self._others: list[dict[str, str]] = []
        self._known: dict[str, str] = {}

    # ------------------------------------------------------------------ expressions
    def spelled(self, text: str) -> str:
        """A fixed text, with the tags in it as tokens; "" for an empty one."""
        parts: list[str] = []
        place = 0
        for found in self._find.finditer(text) if self._find else ():
            parts += [_quoted(text[place : found.start()]), f"<[{self._specials[found[0]]}]>"]
            place = found.end()
        parts.append(_quoted(text[place:]))
        return " ".join(part for part in parts if part)

    def until(self, end: str, least: int = 0, most: int | None = None, regex: str = "") -> str:
        """Any text of `least` to `most` characters, and the `end` that it does not hold; with `regex` (in which a
        slash is escaped), a text that it matches.
        """
        amount = "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"
        body = f"({regex})" if regex else f"{_CHARACTER}{amount}"
        found = self._find.match(end) if self._find else None
        if found:
            return f"{self.terminal(body)} {self.spelled(end)}"
        first, mark, rest = end, "", ""
        if self._find and (inner := self._find.search(end)):
            first, mark, rest = end[: inner.start()], inner[0], end[inner.end() :]
        lazy = self._named(
            "until",
            f"/{body}{_escaped_regex(first)}/",
            lambda name, body: f"{name}[lazy]: {body}",
        )
        return f"{lazy} {self.spelled(mark + rest)}".strip()

    def terminal(self, regex: str) -> str:
        """Text that matches a regex, in which a slash is escaped."""
        return self._named("TEXT", f"/{regex}/")

    def json(self, schema: Mapping[str, Any]) -> str:
        return self._named("value", f"%json {json.dumps(schema)}")

    def rule(self, kind: str, body: str) -> str:
        return self._named(kind, body)

    def nested(self, grammar: str) -> str:
        """A grammar of its own, with its own rule `start`."""
        name = f"other{len(self._others)}"
        self._others.append({"name": name, "lark_grammar": grammar})
        return f"@{name}"

    # ------------------------------------------------------------------ the whole
    def text(self, start: str) -> str:
        """The finished grammar, as llguidance reads it."""
        main = "\n".join((f"start: {start}", *self._rules, ""))
        if not self._others:
            return main
        return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, *self._others]})

    def _named(
        self, kind: str, body: str, line: Callable[[str, str], str] = lambda name, body: f"{name}: {body}"
    ) -> str:
        key = line(kind, body)
        if key not in self._known:
            self._known[key] = name = f"{kind}_{len(self._known)}"
            self._rules.append(line(name, body))
        return self._known[key]


def either(options: Sequence[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _escaped_regex(text: str) -> str:
    return "".join(_ESCAPES.get(char, re.escape(char)) for char in text)
