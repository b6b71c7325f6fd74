"""Reasoning: formats are found in a model's own files; the splitter equals a search in the whole text."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from mantou.chat.reasoning import CLOSE_MARK, FORMATS, OPEN_MARK, ReasoningFormat, ReasoningSplitter, detect
from tests.unit.chat_folders import tokenizer

THINK = FORMATS[0]
CHANNEL = ReasoningFormat("channel", "<|channel>", "<channel|>", header="thought\n", ids=(1, 2))

TEXT_PARTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", "<", "\n", " ", "word", "é😀", "</think"]),
    max_size=12,
)
MARK_PARTS = st.lists(
    st.sampled_from([OPEN_MARK, CLOSE_MARK, "thought\n", "thou", "ght\n", "\n", " ", "word", "<|channel>"]),
    max_size=12,
)


def split_text(text: str, opened: bool) -> tuple[str, str]:
    """Think tags, on the whole text."""
    if not opened:
        start = re.match(r"\s*<think>", text)
        if start is None:
            return text, ""
        text = text[start.end() :]
    reasoning, _, content = text.partition("</think>")
    return content.lstrip("\n"), reasoning.strip("\n")


def split_marks(text: str, opened: bool) -> tuple[str, str]:
    """Special tokens, on the whole text: blocks may come anywhere."""
    content, reasoning = "", ""
    if not opened:
        answer, *blocks = text.split(OPEN_MARK)
        content = answer.replace(CLOSE_MARK, "")
        if blocks and not answer.strip():
            content = ""
    else:
        first, mark, rest = text.partition(CLOSE_MARK)
        reasoning = first.strip("\n")
        answer, *blocks = rest.split(OPEN_MARK) if mark else [""]
        content = answer.lstrip("\n").replace(CLOSE_MARK, "")
    for block in blocks:
        inside, mark, after = block.partition(CLOSE_MARK)
        reasoning += inside.removeprefix("thought\n").strip("\n")
        content += after.lstrip("\n").replace(CLOSE_MARK, "")
    return content, reasoning


def run(splitter: ReasoningSplitter, pieces: list[str]) -> tuple[str, str]:
    results = [*map(splitter.feed, pieces), splitter.flush()]
    return "".join([content for content, _ in results]), "".join([reasoning for _, reasoning in results])


@st.composite
def cut(draw: st.DrawFn, parts: st.SearchStrategy[list[str]]) -> list[str]:
    """A text of these parts, cut anywhere."""
    text = "".join(draw(parts))
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@settings(deadline=None)
@given(cut(TEXT_PARTS), st.booleans())
@example(["<", "think>a\n", "\n</thi", "nk>\n", "\nb"], False)
@example(["a\n</thi"], True)
def test_think_tags_equal_a_search_in_the_whole_text(pieces: list[str], opened: bool) -> None:
    assert run(ReasoningSplitter(THINK, opened=opened), pieces) == split_text("".join(pieces), opened)


def _balanced(text: str, opened: bool) -> bool:
    """No opening inside a block: the reference above does not describe that."""
    for mark in re.findall(f"[{OPEN_MARK}{CLOSE_MARK}]", text):
        if mark == OPEN_MARK and opened:
            return False
        opened = mark == OPEN_MARK
    return True


@settings(deadline=None)
@given(cut(MARK_PARTS), st.booleans())
@example(
    [OPEN_MARK, "thou", "ght\nwhy\n", CLOSE_MARK, "\nso ", OPEN_MARK, "thought\n", "more", CLOSE_MARK, "end"],
    False,
)
def test_special_tokens_equal_a_search_in_the_whole_text(pieces: list[str], opened: bool) -> None:
    text = "".join(pieces)
    assume(_balanced(text, opened))
    assert run(ReasoningSplitter(CHANNEL, opened=opened), pieces) == split_marks(text, opened)


@settings(deadline=None)
@given(cut(MARK_PARTS), st.booleans())
def test_special_tokens_do_not_depend_on_the_cut(pieces: list[str], opened: bool) -> None:
    whole = ["".join(pieces)]
    assert run(ReasoningSplitter(CHANNEL, opened=opened), pieces) == run(
        ReasoningSplitter(CHANNEL, opened=opened), whole
    )


def test_an_answer_that_explains_the_tag_is_content() -> None:
    text = "The <think> tag opens a block, </think> closes it."
    assert run(ReasoningSplitter(THINK, opened=False), [text]) == (text, "")


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    splitter = ReasoningSplitter(THINK, opened=True)
    assert [
        splitter.feed(piece) for piece in ("\n", "why", "\n", "not", "</", "b", "</think>", "\n\n", "so")
    ] == [
        ("", ""),
        ("", "why"),
        ("", ""),
        ("", "\nnot"),
        ("", ""),
        ("", "</b"),
        ("", ""),
        ("", ""),
        ("so", ""),
    ]


@pytest.mark.parametrize(
    ("template", "kind", "name"),
    [
        ("{{ '<think>\\n' }}", "metaspace", "think-tag"),
        ("{{ content.split('</think>') }}", "byte_level", "think-tag"),
        ("no tags", "byte_level", "think-tag"),  # they are in the vocabulary
        ("{{ '<|channel>thought' }}", "byte_level", "gemma-channel"),
        ("<|channel|>analysis", "metaspace", None),  # another format, with other tokens
        ("[THINK]", "metaspace", "bracket-think"),
    ],
)
def test_the_format_comes_from_the_model_files(template: str, kind: str, name: str | None) -> None:
    found = detect(template, tokenizer(kind))
    assert (found and found.name) == name


def test_tags_that_are_special_tokens_are_bound_to_their_ids() -> None:
    loaded = tokenizer("byte_level")
    channel = detect("<|channel>", loaded)
    assert channel is not None
    assert channel.ids == (loaded.token_id("<|channel>"), loaded.token_id("<channel|>"))
    think = detect("<think>", loaded)
    assert think is not None
    assert think.ids is None  # added tokens, but shown as text
