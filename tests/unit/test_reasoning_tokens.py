"""How many tokens of an answer were reasoning: those inside the block and its tags, however they come."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mantou.chat.reasoning import ReasoningFormat
from mantou.chat.stream import TextStream
from mantou.data import TokenEvent, Usage
from tests.fakes_api import byte_tokenizer

TOKENIZER = byte_tokenizer()
TAGS = ReasoningFormat("think-tag", "<think>", "</think>")


def count(text: str, cuts: Sequence[int], *, opened: bool, stop: Sequence[str] = ()) -> tuple[int, int, str]:
    """(reasoning tokens, all tokens, reasoning) of a text whose tokens are its bytes."""
    stream = TextStream(TOKENIZER, stop=stop, reasoning=TAGS, reasoning_open=opened)
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    reasoning, start = "", 0
    for size in [*cuts, len(tokens)]:
        reasoning += stream.feed(TokenEvent("a", tuple(tokens[start : start + size]))).reasoning
        start += size
    last = stream.feed(TokenEvent("a", finish="stop", usage=Usage(1, len(tokens) + 1)))
    if last.usage is not None:
        assert last.usage.reasoning_tokens == stream.num_reasoning_tokens
    return stream.num_reasoning_tokens, stream.num_tokens, reasoning + last.reasoning


@given(st.lists(st.integers(0, 9), max_size=20))
def test_the_block_and_its_closing_tag_are_counted(cuts: list[int]) -> None:
    assert count("Why? 🤔</think>So.", cuts, opened=True) == (17, 20, "Why? 🤔")


@given(st.lists(st.integers(0, 9), max_size=20))
def test_an_opening_tag_counts_once_it_is_one(cuts: list[int]) -> None:
    number, _, reasoning = count("<think>Why?</think>So.", cuts, opened=False)
    assert (number, reasoning) == (len(">Why?</think>"), "Why?")


@pytest.mark.parametrize(("text", "number"), [("So.", 0), ("", 0), ("a <think>b</think>", 0)])
def test_an_answer_without_reasoning_has_none(text: str, number: int) -> None:
    assert count(text, [1, 2], opened=False)[0] == number


def test_a_block_that_is_never_closed_is_all_reasoning() -> None:
    assert count("Why", [1], opened=True) == (3, 3, "Why")


def test_a_stop_string_ends_the_count() -> None:
    number, total, reasoning = count("Why? STOP and more", [40], opened=True, stop=["STOP"])
    assert (number, total, reasoning) == (9, 9, "Why? ")
