"""Tells tool calls from text in one answer, as it is generated. Knows no format of its own, no stops, no reasoning."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mantou.chat.reasoning import ReasoningFormat
from mantou.chat.tools.calls import Calls, Enough
from mantou.chat.tools.reader import CutOff, Malformed, Reader, Steps
from mantou.data import ToolDelta

Parser = Callable[[Reader, Calls, str], Steps[None]]


class Piece(NamedTuple):
    """Parts of calls, and the text behind them. `size`: characters of the answer that it accounts for."""

    text: str = ""
    tools: tuple[ToolDelta, ...] = ()
    size: int = 0


Pieces = Generator[Piece | None, None, None]
Split = Callable[["ToolSplitter"], Pieces]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family of models writes tool calls.

    `parse` reads one call, or several, behind one of the `openers`. An opener counts anywhere outside reasoning, one
    of `starts` only where the answer, or what follows a call, begins. White space and `closers` around calls are
    markup. `rewrites` replaces markup in the text between calls. `split` takes the place of the search for openers.
    A format with `reasoning` of its own frames every answer, so it is needed without tools too.
    """

    name: str
    openers: tuple[str, ...]
    parse: Parser
    closers: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()  # what may be a special token; the openers and closers too
    rewrites: Mapping[str, str] = field(default_factory=dict[str, str])
    split: Split | None = None
    reasoning: ReasoningFormat | None = None
    marks: Mapping[str, str] = field(
        default_factory=dict[str, str]
    )  # tag -> noncharacter, where it is a special token
    ids: Mapping[int, str] = field(default_factory=dict[int, str])  # special token -> noncharacter


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request and how this model calls them."""

    form: ToolFormat
    tools: Mapping[str, Mapping[str, Any]]  # name -> JSON schema of its arguments
    parallel: bool = True

    @classmethod
    def of(cls, form: ToolFormat, offered: Sequence[Mapping[str, Any]], *, parallel: bool = True) -> ToolUse:
        """`offered`: as in an OpenAI request, {"type": "function", "function": {"name", "parameters"}}."""
        functions = [tool["function"] for tool in offered]
        return cls(form, {one["name"]: one.get("parameters") or {} for one in functions}, parallel)


class ToolSplitter:
    """Feed it the text of one answer, special tokens as the format's marks.

    All text outside calls comes back, in order, without the white space around calls. What opens like a call and is
    none comes back as it was written; what goes wrong in a call that began ends that call, and is text with the rest.

    Attributes
        num_calls: calls that have begun
        done: the only call that was allowed has ended, so the answer has
    """

    def __init__(
        self, use: ToolUse, *, inside: Callable[[], bool] = lambda: False, opened: bool = False
    ) -> None:
        """`inside`: whether the text that was returned so far ends inside reasoning. `opened`: the prompt does."""
        self.form = use.form
        self.inside = inside
        self.opened = opened
        self.reader = Reader(use.form.marks)
        self.calls = Calls(self.reader, use.tools, limit=None if use.parallel else 1)
        self.done = False
        self._num_accounted = 0
        self._pieces = (use.form.split or split)(self)

    @property
    def num_calls(self) -> int:
        return self.calls.num_begun

    def feed(self, text: str) -> Iterator[Piece]:
        self.reader.feed(text)
        return self._run()

    def end(self, *, cut: bool) -> Iterator[Piece]:
        """The rest. `cut`: the answer ended at its length limit; a call that is open then stays as it is."""
        self.reader.end(cut=cut)
        return self._run()

    def _run(self) -> Iterator[Piece]:
        for piece in self._pieces:
            if piece is None:
                break
            yield self._piece(piece.text)
        last = self._piece()
        if last.size or last.tools:
            yield last

    def _piece(self, text: str = "") -> Piece:
        """What became certain before a text, and the text."""
        size = self.reader.position - self._num_accounted
        self._num_accounted += size
        return Piece(text, self.calls.take(), size)

    def call(self, steps: Steps[None]) -> Pieces:
        """Runs a parser. What turned out to be no call comes back as text."""
        num_calls = self.num_calls
        try:
            try:
                yield from steps
            except Malformed:
                yield from self._give_back(after_call=self.num_calls > num_calls)
            except CutOff:
                if self.calls.open:
                    self.reader.drop()  # the beginning of a tag
                else:
                    yield from self._give_back(after_call=self.num_calls > num_calls)
        except Enough:
            self.done = True
        self.reader.release()

    def _give_back(self, *, after_call: bool) -> Pieces:
        text = self.reader.kept()
        if self.calls.open:
            self.calls.end()
        if after_call:
            text = text.lstrip()
        if text:
            yield Piece(text)


def split(splitter: ToolSplitter) -> Pieces:
    """Looks for openers in the text."""
    form, reader = splitter.form, splitter.reader
    fresh = True
    while not splitter.done:
        opener = yield from _text(splitter, form.starts if fresh else ())
        if not opener:
            return
        num_calls = splitter.num_calls
        yield from splitter.call(form.parse(reader, splitter.calls, opener))
        fresh = splitter.num_calls > num_calls
        if fresh and not splitter.done:
            yield from _skip_closers(reader, form)


def _skip_closers(reader: Reader, form: ToolFormat) -> Steps[None]:
    with suppress(CutOff):
        yield from reader.space()
        while form.closers and (yield from reader.accept(*form.closers)):
            yield from reader.space()


def _text(splitter: ToolSplitter, starts: tuple[str, ...]) -> Generator[Piece | None, None, str]:
    """Passes text on up to an opener, which is returned; "" at the end of the answer."""
    form, reader = splitter.form, splitter.reader
    if starts:
        first = yield from reader.first()
        if first in starts and not splitter.inside():
            reader.keep()
            yield from reader.space()
            yield from reader.accept(first)
            return first
    while True:
        body, space, found = reader.scan(*form.openers, *form.rewrites)
        if body:
            yield Piece(body)
        if not found:
            if reader.ended:
                return ""
            yield
        elif found in form.rewrites:
            reader.skip(space, found)
            yield Piece(space + form.rewrites[found])
        elif splitter.inside():
            reader.skip(space, found)
            yield Piece(space + reader.spelled(reader.marked(found)))
        else:
            reader.keep()
            reader.skip(space, found)
            return found
