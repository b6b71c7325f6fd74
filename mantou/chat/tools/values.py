"""Values as models write them (JSON, Python literals, Gemma's notation) to JSON text, as they come. Knows no tools."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass

from mantou.chat.tools.reader import Malformed, Reader, Steps, Write, run_whole

MAX_DEPTH = 64
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?\Z")
_WORD = re.compile(r"[\w+\-.]+")
_BARE = re.compile(r"[^,{}\[\]<>\n\ufdd0-\ufdef]+")
_BARE_KEY = re.compile(r"[\w$.\-]+")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
# What a string is made of, besides escapes, its quotes, control characters and special tokens.
_PLAIN = {quote: re.compile(rf'[^"{quote}\\\x00-\x1f\ufdd0-\ufdef]+') for quote in "\"'"}
_SIMPLE_ESCAPES = frozenset('"\\/bfnrt')
_CODES = {"u": 4, "x": 2, "U": 8}
_HEX = re.compile(r"[0-9A-Fa-f]+\Z")


@dataclass(frozen=True, slots=True)
class Syntax:
    """How values are written."""

    verbatim: bool = True  # white space passes through
    raw_quote: str = ""  # surrounds a string that knows no escapes
    bare: bool = False  # keys have no quotes, and neither need strings


JSON = Syntax()
PYTHON = Syntax(verbatim=False)


def quoted(text: str) -> str:
    """A JSON string."""
    return json.dumps(text, ensure_ascii=False)


class _Out:
    """Where JSON text goes. What is between two elements waits for the second, which may never come."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self.lead = ""

    def __call__(self, text: str) -> None:
        self._write(self.lead + text)
        self.lead = ""


def read_value(reader: Reader, write: Write, syntax: Syntax = JSON) -> Steps[None]:
    """Reads one value and writes it as JSON; `completion` can at any time make a whole value of what was written.

    Raises Malformed behind what can still be read of a text that is no value.
    """
    out = _Out(write)
    closers: list[str] = []
    yield from reader.space()
    while True:
        opened = yield from _open_or_scalar(reader, out, syntax, closers)
        yield from _next_place(reader, out, syntax, closers, opened)
        if not closers:
            return
        if closers[-1] == "}":
            yield from _key(reader, out, syntax)


def read_object(reader: Reader, write: Write, syntax: Syntax = JSON) -> Steps[None]:
    yield from reader.space()
    if (yield from reader.peek()) != "{":
        raise Malformed
    yield from read_value(reader, write, syntax)


def read_text(reader: Reader) -> Steps[str]:
    """The value of a string in quotes."""
    parts: list[str] = []
    quote = yield from reader.expect('"', "'")
    yield from _string(reader, parts.append, quote)
    value: str = json.loads("".join(parts))
    return value.encode("utf-16", "surrogatepass").decode(
        "utf-16", "replace"
    )  # halves of characters are none


def _open_or_scalar(reader: Reader, out: _Out, syntax: Syntax, closers: list[str]) -> Steps[bool]:
    """Whether the value opened a container."""
    char = yield from reader.peek()
    if char not in _CLOSERS:
        yield from _scalar(reader, out, syntax)
        return False
    if len(closers) == MAX_DEPTH or (char == "(" and syntax.verbatim):
        raise Malformed
    reader.take()
    closers.append(_CLOSERS[char])
    out("{" if char == "{" else "[")
    return True


def _next_place(reader: Reader, out: _Out, syntax: Syntax, closers: list[str], opened: bool) -> Steps[None]:
    """Behind an opening bracket or a value: closes what ends, and goes to the next element if there is one."""
    while closers:
        gap = yield from reader.space()
        comma = "" if opened else (yield from reader.accept(","))
        behind = (yield from reader.space()) if comma else ""
        if (yield from reader.peek()) != closers[-1]:
            if not opened and not comma:
                raise Malformed
            out.lead = gap + comma + behind if syntax.verbatim else ", " if comma else ""
            return
        reader.take()  # a comma before it is dropped
        out((gap + behind if syntax.verbatim else "") + ("}" if closers.pop() == "}" else "]"))
        opened = False


def _key(reader: Reader, write: Write, syntax: Syntax) -> Steps[None]:
    parts: list[str] = []  # written with its colon, so that no text ends between them
    quote = yield from reader.accept('"', "'", *filter(None, [syntax.raw_quote]))
    if quote and quote == syntax.raw_quote:
        yield from _raw_string(reader, parts.append, quote)
    elif quote:
        yield from _string(reader, parts.append, quote)
    elif syntax.bare:
        parts.append(quoted((yield from reader.run(_BARE_KEY)) or _fail()))
    else:
        raise Malformed
    gap = yield from reader.space()
    yield from reader.expect(":")
    behind = yield from reader.space()
    write("".join(parts) + (f"{gap}:{behind}" if syntax.verbatim else ": "))


def _fail() -> str:
    raise Malformed


def _scalar(reader: Reader, write: Write, syntax: Syntax) -> Steps[None]:
    quote = yield from reader.accept('"""', "'''", '"', "'", *filter(None, [syntax.raw_quote]))
    if quote and quote == syntax.raw_quote:
        yield from _raw_string(reader, write, quote)
    elif quote in ('"""', "'''") and syntax.verbatim:  # JSON has no such quotes: an empty string and a fault
        write('""')
        raise Malformed
    elif quote:
        yield from _string(reader, write, quote)
    elif syntax.bare:
        text = (yield from reader.run(_BARE, limit=4096)).strip()
        write(_word(text) or quoted(text))
    else:
        write(_word((yield from reader.run(_WORD, limit=512))) or _fail())


def _word(text: str) -> str:
    """JSON for a number or a constant, "" if it is neither."""
    if text in _WORDS:
        return _WORDS[text]
    if _JSON_NUMBER.match(text):
        return text
    return python_number(text)


def python_number(text: str) -> str:
    """JSON for a number as Python or a careless model writes it (0x1F, 1_000, .5, +1, 5.); "" for other text."""
    if not text.isascii():
        return ""
    for read in (lambda: int(text, 0), lambda: float(text)):
        try:
            value = read()
        except ValueError:
            continue
        if math.isfinite(value):
            return json.dumps(value)
    return ""


def _raw_string(reader: Reader, write: Write, quote: str) -> Steps[None]:
    write('"')
    end = yield from reader.pour(lambda text: write(quoted(text)[1:-1]), quote)
    if not end:
        raise Malformed
    write('"')


def _string(reader: Reader, write: Write, quote: str) -> Steps[None]:
    """A string whose opening quote has been read."""
    write('"')
    while True:
        yield from reader.flow(_PLAIN[quote[0]], write)
        if (yield from reader.accept(quote)):
            write('"')
            return
        char = yield from reader.peek()
        if not char or "\ufdd0" <= char <= "\ufdef":
            raise Malformed
        reader.take()
        write((yield from _escape(reader)) if char == "\\" else quoted(char)[1:-1])


def _escape(reader: Reader) -> Steps[str]:
    """JSON for the escape behind a backslash. One that neither JSON nor Python knows stands for its own text."""
    char = yield from reader.peek()
    if not char:
        raise Malformed
    reader.take()
    if char in _SIMPLE_ESCAPES:
        return "\\" + char
    if char in "'\n":
        return char.strip()
    length = _CODES.get(char)
    if length is None:
        return quoted("\\" + char)[1:-1]
    digits = ""
    while len(digits) < length and _HEX.match((yield from reader.peek())):
        digits += reader.take()
    if len(digits) < length or int(digits, 16) > 0x10FFFF:
        return quoted(f"\\{char}{digits}")[1:-1]
    return f"\\u{digits}" if char == "u" else json.dumps(chr(int(digits, 16)))[1:-1]


_PARTS = re.compile(r'"(?:[^"\\]|\\.)*("?)|[{}\[\],:]|[^\s"{}\[\],:]+', re.DOTALL)


def completion(text: str) -> str:
    """What makes a text that `read_value` began to write a whole value; "null" for an empty one."""
    closers: list[str] = []
    value_due, in_string = True, False
    for found in _PARTS.finditer(text):
        part = found[0]
        if part in _CLOSERS:
            closers.append(_CLOSERS[part])
        elif part in ("}", "]"):
            closers.pop()
        in_string = part.startswith('"') and not found[1]
        value_due = part == ":"
    return ('"' if in_string else "null" if value_due else "") + "".join(reversed(closers))


def convert(text: str, kinds: frozenset[str]) -> str:
    """JSON for an argument's text where its schema allows these types; none = any. What fits none stays text."""
    value = text.strip()
    if value in ("null", "None") and (not kinds or "null" in kinds):
        return "null"
    if not kinds or kinds & {"integer", "number"}:
        number = _number(value, kinds)
        if number:
            return number
    if value.lower() in ("true", "false") and (not kinds or "boolean" in kinds):
        return value.lower()
    if not kinds or kinds & {"object", "array"}:
        whole = whole_value(value)
        if whole and (not kinds or whole[0] in "{["):
            return whole
    return quoted(text)


def whole_value(text: str) -> str:
    """JSON for a text that is one object, list or quoted string; "" for other text."""
    for syntax in (JSON, PYTHON) if text[:1] in ("{", "[", "(", '"', "'") else ():
        reader, parts = Reader({}), list[str]()
        reader.feed(text)
        reader.end(cut=False)
        try:
            run_whole(read_value(reader, parts.append, syntax))
        except Malformed:
            continue
        if reader.position == len(text):
            return "".join(parts)
    return ""


def _number(value: str, kinds: frozenset[str]) -> str:
    number = value if _JSON_NUMBER.match(value) else python_number(value) if kinds else ""
    if "integer" in kinds and "number" not in kinds:
        number = number.removesuffix(".0")
        return number if re.fullmatch("-?[0-9]+", number) else ""
    return number
