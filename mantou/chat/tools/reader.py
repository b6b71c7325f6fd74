"""One answer's text as it comes, for parsers that read as if it were all there. Knows no format and no tools.

A parser is a generator: where it needs text that has not come yet, it yields. What it returns depends on the text
only, never on how the text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
Write = Callable[[str], None]

# Special tokens have no text of their own, so a tag that is one stands in the text as a noncharacter, which no
# document contains (Unicode 16, section 23.7). The first ones are taken by the reasoning tags.
FIRST_MARK, LAST_MARK = "\ufdd4", "\ufdef"
NAME_LENGTH = 256  # no name of a tool or of an argument is longer; a longer one is other text

_SPACE = re.compile(r"\s*")


class Malformed(Exception):
    """The text is not what the format promises here."""


class CutOff(Exception):
    """The answer ended at its length limit, in the middle of something."""


class Reader:
    """A cursor over one answer.

    Every method takes tags as a model's template spells them; `marks` says which of them are special tokens and how
    those stand in the text. At the end of the answer a generator returns what there is; after a length limit it
    raises CutOff.

    Attributes
        ended: no more text will come
    """

    def __init__(self, marks: Mapping[str, str]) -> None:
        """`marks`: spelling of a special token -> its noncharacter."""
        self._marks = marks
        self._spellings = {ord(mark): tag for tag, mark in marks.items()}
        self._text = ""
        self._at = 0
        self._kept: int | None = None  # where the text starts that `kept` returns
        self._num_dropped = 0
        self.ended = self._cut = False

    # ------------------------------------------------------------------ the world's side
    def feed(self, text: str) -> None:
        start = self._at if self._kept is None else self._kept
        self._text = self._text[start:] + text
        self._num_dropped += start
        self._at -= start
        self._kept = None if self._kept is None else 0

    def end(self, *, cut: bool) -> None:
        """No more text will come. `cut`: the model would have said more."""
        self.ended, self._cut = True, cut

    @property
    def position(self) -> int:
        """Characters taken since the start."""
        return self._num_dropped + self._at

    # ------------------------------------------------------------------ what may have to be given back
    def keep(self) -> None:
        """From here on the text is kept, until `release`."""
        self._kept = self._at

    def release(self) -> None:
        self._kept = None

    def kept(self) -> str:
        """The text since `keep`, special tokens spelled out; nothing is kept any more."""
        text = "" if self._kept is None else self._text[self._kept : self._at]
        self._kept = None
        return self.spelled(text)

    def drop(self) -> None:
        """Consumes all there is."""
        self._at = len(self._text)

    def spelled(self, text: str) -> str:
        return text.translate(self._spellings) if self._spellings else text

    # ------------------------------------------------------------------ the parsers' side
    def more(self) -> Steps[bool]:
        """Waits for text; False if none will come."""
        if self.ended:
            if self._cut:
                raise CutOff
            return False
        yield
        return True

    def peek(self) -> Steps[str]:
        """The next character, "" at the end."""
        while self._at == len(self._text):
            if not (yield from self.more()):
                return ""
        return self._text[self._at]

    def take(self) -> str:
        """Consumes the character that `peek` showed."""
        self._at += 1
        return self._text[self._at - 1]

    def flow(self, pattern: re.Pattern[str], write: Write) -> Steps[None]:
        """Writes the run of characters that match, as they come. The pattern matches any part of such a run."""
        while True:
            found = pattern.match(self._text, self._at)
            if found is not None and found.end() > self._at:
                self._at = found.end()
                write(found[0])
            if self._at < len(self._text) or not (yield from self.more()):
                return

    def run(self, pattern: re.Pattern[str], limit: int = NAME_LENGTH) -> Steps[str]:
        """The whole run. Raises Malformed, behind `limit` characters of it, if it is longer."""
        parts: list[str] = []
        yield from self.flow(pattern, self._limited(parts.append, limit))
        return "".join(parts)

    def space(self) -> Steps[str]:
        """The white space here."""
        parts: list[str] = []
        yield from self.flow(_SPACE, parts.append)
        return "".join(parts)

    def accept(self, *options: str) -> Steps[str]:
        """Consumes the longest of the options that the text continues with; "" if it is none."""
        spellings = {self.marked(option): option for option in options}
        while True:
            rest = self._text[self._at : self._at + max(map(len, spellings))]
            found = max((one for one in spellings if rest.startswith(one)), key=len, default="")
            open_ = any(len(one) > len(rest) and one.startswith(rest) for one in spellings)
            if not open_ or not (yield from self.more()):
                break
        self._at += len(found)
        return spellings.get(found, "")

    def expect(self, *options: str) -> Steps[str]:
        found = yield from self.accept(*options)
        if not found:
            raise Malformed
        return found

    def pour(self, write: Write, *ends: str) -> Steps[str]:
        """Writes the text up to the first of `ends`, as it becomes certain; consumes and returns that end, "" if none.

        Special tokens in between are spelled out.
        """
        spellings = {self.marked(end): end for end in ends}
        pattern = first_of(tuple(spellings))
        while True:
            found = pattern.search(self._text, self._at)
            if found is not None:
                self._give(found.start(), write)
                self._at = found.end()
                return spellings[found[0]]
            if self.ended and not self._cut:
                self._give(len(self._text), write)
            else:
                self._give(len(self._text) - num_held(self._text, self._at, tuple(spellings)), write)
            if not (yield from self.more()):
                return ""

    def until(self, *ends: str, limit: int | None = None) -> Steps[tuple[str, str]]:
        """(the text up to the first of `ends`, that end).

        Raises Malformed, behind `limit` characters of the text, if it is longer.
        """
        parts: list[str] = []
        write = parts.append if limit is None else self._limited(parts.append, limit)
        end = yield from self.pour(write, *ends)
        return "".join(parts), end

    def first(self) -> Steps[str]:
        """The next character that is no white space, "" at the end. Consumes nothing."""
        while True:
            rest = self._text[self._at :].lstrip()
            if rest or self.ended:
                return rest[:1]
            yield

    def scan(self, *tags: str) -> tuple[str, str, str]:
        """(text that is no white space before a tag, the white space before it, the tag or "").

        Consumes that text only: what may be white space before a tag, or a part of one, waits.
        """
        spellings = {self.marked(tag): tag for tag in tags}
        found = first_of(tuple(spellings)).search(self._text, self._at)
        if found is not None:
            end, tag = found.start(), spellings[found[0]]
        else:
            tag = ""
            end = len(self._text) - (0 if self.ended else num_held(self._text, self._at, tuple(spellings)))
        text = self._text[self._at : end]
        body = text if self.ended and not tag else text.rstrip()
        self._at += len(body)
        return self.spelled(body), text[len(body) :], tag

    def skip(self, *tags: str) -> None:
        """Consumes what `scan` found."""
        self._at += sum(len(self.marked(tag)) for tag in tags)

    def marked(self, tag: str) -> str:
        """A tag as it stands in the text."""
        for special, mark in self._marks.items():
            tag = tag.replace(special, mark)
        return tag

    def _limited(self, write: Write, limit: int) -> Write:
        """Raises Malformed where more than `limit` characters are consumed, and gives those beyond the limit back.

        How many came at once must not decide what is consumed: an opener may stand among them.
        """
        last = self.position + limit

        def limited(text: str) -> None:
            excess = self.position - last
            if excess > 0:
                self._at -= excess
                raise Malformed
            write(text)

        return limited

    def _give(self, end: int, write: Write) -> None:
        if end > self._at:
            text, self._at = self._text[self._at : end], end
            write(self.spelled(text))


@lru_cache(maxsize=256)
def first_of(strings: tuple[str, ...]) -> re.Pattern[str]:
    """Finds the first of the strings; at one place the longest."""
    return re.compile("|".join(map(re.escape, sorted(strings, key=len, reverse=True))))


def num_held(text: str, start: int, strings: tuple[str, ...]) -> int:
    """Characters at the end of text[start:] that may begin one of the strings."""
    longest, firsts = _shape(strings)
    for at in range(max(start, len(text) - longest + 1), len(text)):
        if text[at] in firsts:
            tail = text[at:]
            if any(string.startswith(tail) for string in strings):
                return len(tail)
    return 0


@lru_cache(maxsize=256)
def _shape(strings: tuple[str, ...]) -> tuple[int, frozenset[str]]:
    """The longest one's length, and their first characters."""
    return max(map(len, strings)), frozenset(string[0] for string in strings)


def run_whole(steps: Steps[T]) -> T:
    """The result of a parser over a reader that has ended."""
    try:
        while True:
            next(steps)
    except StopIteration as stop:
        return stop.value
