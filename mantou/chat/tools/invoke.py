"""Calls as elements with name attributes: MiniMax M2, Muse Spark, MiniCPM5, DeepSeek V3.2 and later."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from typing import Any

from mantou.chat.tools.calls import TEXT, Calls, Stripped, Trim, Whole, read_argument
from mantou.chat.tools.reader import NAME_LENGTH, Malformed, Reader, Steps
from mantou.chat.tools.splitter import ToolFormat
from mantou.chat.tools.values import convert, quoted

_ATTRIBUTE = re.compile(r"""([\w-]+)\s*=\s*("[^"]*"|'[^']*'|[^\s"'>]+)""")
_ENTITY = re.compile(r"&(?:lt|gt|amp|quot|apos|#[0-9]{1,7}|#x[0-9A-Fa-f]{1,6});")
_CDATA, _CDATA_END = "<![CDATA[", "]]>"


@dataclass(frozen=True, slots=True)
class Elements:
    """The names of the elements: `<call name="f"><field name="k">value</field></call>` inside a section."""

    sections: tuple[str, ...]  # () = calls stand alone
    call: str
    field: str
    escapes: bool = False  # values may be CDATA or have entities

    @property
    def openers(self) -> tuple[str, ...]:
        return (*(f"<{section}>" for section in self.sections), f"<{self.call} ")

    @property
    def closers(self) -> tuple[str, ...]:
        return (*(f"</{section}>" for section in self.sections), f"</{self.call}>")

    def read(self, reader: Reader, calls: Calls, opener: str) -> Steps[None]:
        if opener != f"<{self.call} ":
            yield from reader.space()
            yield from reader.expect(f"<{self.call} ")
        attributes = yield from _attributes(reader)
        calls.begin(attributes.get("name", ""))
        while True:
            yield from reader.space()
            if (yield from reader.expect(f"<{self.field} ", f"</{self.call}>")) != f"<{self.field} ":
                calls.end()
                return
            yield from self._read_field(reader, calls)

    def _read_field(self, reader: Reader, calls: Calls) -> Steps[None]:
        attributes = yield from _attributes(reader)
        if "name" not in attributes:
            raise Malformed
        kinds, trim = calls.field(attributes["name"]), Stripped
        if "string" in attributes:  # the model itself says what the value is
            trim = Whole
            if attributes["string"] == "true":
                kinds = TEXT
            elif kinds == TEXT:
                kinds = frozenset[str]()
        yield from self._read_value(reader, calls, kinds, trim)

    def _read_value(
        self, reader: Reader, calls: Calls, kinds: frozenset[str], trim: type[Trim]
    ) -> Steps[None]:
        end = f"</{self.field}>"
        if not self.escapes:
            yield from read_argument(reader, calls, kinds, trim, end)
            return
        gap = yield from reader.space()
        if (yield from reader.accept(_CDATA)):
            yield from read_argument(reader, calls, kinds, Whole, _CDATA_END)
            yield from reader.space()
            yield from reader.expect(end)
            return
        text, _ = yield from reader.until(end)
        text = _unescaped(gap + text).strip()
        calls.write(quoted(text) if kinds == TEXT else convert(text, kinds))


def _attributes(reader: Reader) -> Steps[dict[str, str]]:
    text, end = yield from reader.until(">", limit=2 * NAME_LENGTH)
    if not end:
        raise Malformed
    found: list[Any] = _ATTRIBUTE.findall(text)
    return {name: _unescaped(value.strip("\"'")) for name, value in found}


def _unescaped(text: str) -> str:
    """XML's entities only: a link's &copy=1 is none."""
    return _ENTITY.sub(lambda found: html.unescape(found[0]), text)


def _format(name: str, elements: Elements, tags: tuple[str, ...] = ()) -> ToolFormat:
    return ToolFormat(name, elements.openers, elements.read, elements.closers, tags=tags)


_DSML = "\uff5cDSML\uff5c"
MINIMAX = _format("minimax_m2", Elements(("minimax:tool_call",), "invoke", "parameter"))
MUSE_SPARK = _format("muse_spark", Elements(("atem:function_calls",), "atem:invoke", "atem:parameter"))
MINICPM5 = _format("minicpm5", Elements((), "function", "param", escapes=True), ("</function>", "</param>"))
DSML = _format(
    "deepseek_v32",
    Elements((f"{_DSML}function_calls", f"{_DSML}tool_calls"), f"{_DSML}invoke", f"{_DSML}parameter"),
    (_DSML,),
)
