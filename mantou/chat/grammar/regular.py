"""A Lark grammar that is regular, as one regex: so that it can be enforced inside a JSON string. Knows no tokens.

Only rules that never lead back to themselves have a regex; `regex_of` says None for all other grammars, and for what it
does not read: %ignore, %declare, %override, %extend and templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_REGEX = 32_768  # characters: rules are written out wherever they are used
_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|\#[^\n]*)
    |(?P<import>%import\s+common\s*(?:\.\s*\w+(?:\s*->\s*\w+)?|\([\w\s,]*\)))
    |(?P<alias>->\s*\w+)
    |(?P<text>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?:[^/\\\n]|\\.)+/[imslux]*)
    |(?P<name>[?!]?[A-Za-z_]\w*)
    |(?P<count>~\s*\d+(?:\s*\.\.\s*\d+)?|\{\s*\d*\s*(?:,\s*\d*\s*)?\})
    |(?P<priority>\.\s*-?\d+)
    |(?P<sign>[:|()\[\]?*+])""",
    re.VERBOSE,
)
_COMMON: Mapping[str, str] = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+(?:[eE][+-]?[0-9]+)?)",
    "SIGNED_NUMBER": (r"[+-]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+(?:[eE][+-]?[0-9]+)?)"),
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
_META = frozenset(r"\.+*?()|[]{}^$#&-~/")
_WHITE = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


class _NotRegular(Exception):
    """There is no regex, or none that is found here."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str


@dataclass(slots=True)
class _Rules:
    """The tokens of each rule's right side, and the regexes that were made of them."""

    bodies: dict[str, list[_Token]] = field(default_factory=dict[str, list[_Token]])
    made: dict[str, str] = field(default_factory=dict[str, str])
    open: set[str] = field(default_factory=set[str])

    def regex(self, name: str) -> str:
        if name not in self.made:
            if name in self.open or name not in self.bodies:
                raise _NotRegular
            self.open.add(name)
            self.made[name] = _Expression(self.bodies[name], self).whole()
            self.open.remove(name)
        return self.made[name]


def regex_of(grammar: str) -> str | None:
    """What matches exactly the texts of a grammar's rule `start`; None if no regex is found."""
    try:
        return _read(grammar).regex("start")
    except (_NotRegular, RecursionError):
        return None


def _read(grammar: str) -> _Rules:
    rules = _Rules()
    tokens = _tokens(grammar)
    body: list[_Token] | None = None
    for place, token in enumerate(tokens):
        if token.kind == "import":
            _import(token.text, rules)
            body = None
        elif token.kind == "name" and _begins_rule(tokens, place):
            body = rules.bodies.setdefault(token.text.lstrip("?!"), [])
        elif body is None:
            raise _NotRegular
        elif token.kind != "priority":
            body.append(token)
    return rules


def _begins_rule(tokens: list[_Token], place: int) -> bool:
    rest = tokens[place + 1 : place + 3]
    if rest and rest[0].kind == "priority":
        rest = rest[1:]
    return bool(rest) and rest[0].text == ":"


def _tokens(grammar: str) -> list[_Token]:
    found: list[_Token] = []
    place = 0
    while place < len(grammar):
        match = _TOKEN.match(grammar, place)
        if match is None or match.lastgroup is None:
            raise _NotRegular
        if match.lastgroup not in ("skip", "alias"):
            found.append(_Token(match.lastgroup, match[0]))
        place = match.end()
    return found


def _import(text: str, rules: _Rules) -> None:
    names = re.sub(r"%import\s+common\s*", "", text)
    for entry in re.split(r"[\s,]+(?!->)(?<!->)", names.strip(".() \n\t")):
        name, _, alias = (part.strip() for part in entry.partition("->"))
        if name not in _COMMON:
            raise _NotRegular
        rules.made[alias or name] = _COMMON[name]


class _Expression:
    """The right side of one rule: alternatives of sequences of counted parts."""

    def __init__(self, tokens: list[_Token], rules: _Rules) -> None:
        self._tokens = [token for token in tokens if token.text != ":"]
        self._rules = rules
        self._place = 0

    def whole(self) -> str:
        found = self._alternatives()
        if self._place < len(self._tokens):
            raise _NotRegular
        return found

    def _alternatives(self) -> str:
        options = [self._sequence()]
        while self._next("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"

    def _sequence(self) -> str:
        parts: list[str] = []
        size = 0
        while self._place < len(self._tokens) and self._tokens[self._place].text not in ("|", ")", "]"):
            parts.append(self._counted())
            size += len(parts[-1])
            if size > MAX_REGEX:
                raise _NotRegular
        return "".join(parts)

    def _counted(self) -> str:
        found = self._part()
        while self._place < len(self._tokens):
            token = self._tokens[self._place]
            if token.text in ("?", "*", "+"):
                found = f"(?:{found}){token.text}"
            elif token.kind == "count":
                low, _, high = token.text.strip("~{} ").replace(" ", "").replace("..", ",").partition(",")
                exact = "," not in token.text and ".." not in token.text
                found = f"(?:{found}){{{low or 0}{'' if exact else ',' + high}}}"
            else:
                break
            self._place += 1
        return found

    def _part(self) -> str:
        token = self._tokens[self._place]
        self._place += 1
        if token.text in ("(", "["):
            found = self._alternatives()
            if not self._next(")" if token.text == "(" else "]"):
                raise _NotRegular
            return f"(?:{found})" if token.text == "(" else f"(?:{found})?"
        match token.kind:
            case "text":
                return _literal(token.text)
            case "regex":
                body, _, flags = token.text[1:].rpartition("/")
                kept = "".join(flag for flag in flags if flag in "ims")
                return f"(?{kept}:{body})" if kept else f"(?:{body})"
            case "name":
                return f"(?:{self._rules.regex(token.text)})"
            case _:
                raise _NotRegular

    def _next(self, text: str) -> bool:
        if self._place < len(self._tokens) and self._tokens[self._place].text == text:
            self._place += 1
            return True
        return False


def _literal(token: str) -> str:
    quoted = token.removesuffix("i") if token.endswith('"i') else token
    try:
        text: str = json.loads(quoted)
    except ValueError:
        raise _NotRegular from None
    escaped = "".join(_WHITE.get(char, f"\\{char}" if char in _META else char) for char in text)
    return f"(?i:{escaped})" if quoted != token else f"(?:{escaped})" if len(escaped) > 1 else escaped
