"""Where reasoning starts and ends in a model's text: formats as data, an incremental splitter. No tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from mantou.data import ReasoningBudget


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A pair of tags around reasoning. `header` is a fixed first line inside the block that is not shown.

    With `ids`, the tags are special tokens: they are recognised by id, anywhere, and never by their
    spelling. Without, they are text, and an opening tag counts only at the start of the answer: a model that
    explains the tag in its answer does not hide the rest of it. `marked`: a tool format that frames whole answers
    writes the marks below in place of the tags. `before` and `after`: what models of this format write around the
    closing tag, for a block that is cut short.
    """

    name: str
    open: str
    close: str
    header: str = ""
    ids: tuple[int, int] | None = None
    marked: bool = False
    before: str = ""
    after: str = ""

    def budget(self, num_tokens: int, *, opened: bool) -> ReasoningBudget:
        """`opened`: the prompt ends inside a block."""
        reopens = self.marked or self.ids is not None
        return ReasoningBudget(num_tokens, opened, self.open, self.close, reopens, self.before, self.after)


FORMATS = (
    ReasoningFormat("think-tag", "<think>", "</think>", before="\n", after="\n\n"),
    ReasoningFormat("gemma-channel", "<|channel>", "<channel|>", header="thought\n"),
    ReasoningFormat("bracket-think", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed-think", "<seed:think>", "</seed:think>"),
    ReasoningFormat("longcat-think", "<longcat_think>", "</longcat_think>"),
    ReasoningFormat("thinking-markers", "<|START_THINKING|>", "<|END_THINKING|>"),
)

# A special token has no text of its own once it is hidden, so in the text it is marked by a noncharacter,
# which no document contains (Unicode 16, section 23.7).
OPEN_MARK, CLOSE_MARK = "\ufdd0", "\ufdd1"


class Vocabulary(Protocol):
    """The part of a tokenizer that `detect` asks."""

    special_ids: frozenset[int]

    def token_id(self, piece: str) -> int | None: ...


def detect(template: str, vocabulary: Vocabulary) -> ReasoningFormat | None:
    """The format that a template writes, else the first whose tags are single tokens, else None."""
    for form in FORMATS:
        if form.open in template or form.close in template:
            return _bind(form, vocabulary)
    for form in FORMATS:
        if vocabulary.token_id(form.open) is not None and vocabulary.token_id(form.close) is not None:
            return _bind(form, vocabulary)
    return None


def _bind(form: ReasoningFormat, vocabulary: Vocabulary) -> ReasoningFormat:
    opening, closing = vocabulary.token_id(form.open), vocabulary.token_id(form.close)
    if opening is None or closing is None or not {opening, closing} & vocabulary.special_ids:
        return form  # at least one tag is spelled out in the text
    return replace(form, ids=(opening, closing))


class ReasoningSplitter:
    """Splits one answer into content and reasoning as it is generated. O(new text) a call.

    Newlines around the reasoning are layout (templates put them there and strip them again), so the
    reasoning neither starts nor ends with one and the content after it does not start with one; nor is white
    space before an opening tag content. All other characters but the tags arrive, in order. A block that is
    never closed is reasoning to its end.
    """

    def __init__(self, form: ReasoningFormat, *, opened: bool) -> None:
        """`opened`: the prompt ends inside a reasoning block."""
        self._by_id = form.marked or form.ids is not None
        self._open, self._close = (OPEN_MARK, CLOSE_MARK) if self._by_id else (form.open, form.close)
        self._header = form.header
        self._held = ""  # the beginning of a tag or of a header, perhaps
        self._spaces: list[str] = []  # before the first word: content, unless a tag follows
        self._num_newlines = 0  # at the end of the reasoning so far
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._state: Callable[[str], str] = self._reasoning_start if opened else self._answer_start

    @property
    def inside(self) -> bool:
        """Whether the text so far ends inside reasoning."""
        return self._state in (self._header_start, self._reasoning_start, self._inside)

    def feed(self, text: str) -> tuple[str, str]:
        """(content, reasoning) that became certain."""
        text, self._held = self._held + text, ""
        while text:
            text = self._state(text)
        return self._taken()

    def flush(self) -> tuple[str, str]:
        """The end of the answer: what was withheld."""
        if self.inside:
            self._reason(self._held)
        else:
            self._content += [*self._spaces, self._held]
        self._held, self._spaces = "", []
        return self._taken()

    def _taken(self) -> tuple[str, str]:
        taken = "".join(self._content), "".join(self._reasoning)
        self._content.clear()
        self._reasoning.clear()
        return taken

    # Each state takes what it can of a text and returns the rest, for the state that follows.
    def _answer_start(self, text: str) -> str:
        body = text.lstrip()
        self._spaces.append(text[: len(text) - len(body)])
        if body.startswith(self._open):
            self._spaces.clear()
            self._state = self._header_start
            return body[len(self._open) :]
        if self._open.startswith(body):  # also when there is no body yet
            self._held = body
            return ""
        self._content += self._spaces
        self._spaces.clear()
        self._state = self._answer
        return body

    def _header_start(self, text: str) -> str:
        if self._header.startswith(text) and text != self._header:
            self._held = text
            return ""
        self._state = self._reasoning_start
        return text.removeprefix(self._header)

    def _reasoning_start(self, text: str) -> str:
        body = text.lstrip("\n")
        if body:
            self._state = self._inside
        return body

    def _inside(self, text: str) -> str:
        end = text.find(self._close)
        if end < 0:
            cut = len(text) - _overlap(text, self._close)
            self._reason(text[:cut])
            self._held = text[cut:]
            return ""
        self._reason(text[:end])
        self._num_newlines = 0
        self._state = self._content_start
        return text[end + len(self._close) :]

    def _content_start(self, text: str) -> str:
        body = text.lstrip("\n")
        if body:
            self._state = self._answer
        return body

    def _answer(self, text: str) -> str:
        if not self._by_id:
            self._content.append(text)
            return ""
        before, mark, after = text.partition(self._open)
        self._content.append(before.replace(self._close, ""))  # a closing token with nothing open
        if mark:
            self._state = self._header_start
        return after

    def _reason(self, text: str) -> None:
        body = text.rstrip("\n")
        if body:
            self._reasoning.append("\n" * self._num_newlines + body)
            self._num_newlines = 0
        self._num_newlines += len(text) - len(body)


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag` but is not all of it."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
