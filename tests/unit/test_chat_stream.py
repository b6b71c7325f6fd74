"""TextStream: the same ids in any events give the same text, and it is that of the whole answer."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mantou.chat.reasoning import FORMATS, detect
from mantou.chat.stream import TextStream
from mantou.chat.tokenizer import Tokenizer
from mantou.data import FinishReason, TextEvent, TokenEvent, TokenLogprobs, Usage
from mantou.errors import BadRequest
from tests.unit.chat_folders import tokenizer
from tests.unit.test_chat_reasoning import split_text
from tests.unit.test_chat_stops import search

THINK = FORMATS[0]


def events(ids: list[int], places: list[int], finish: FinishReason | None) -> list[TokenEvent]:
    """One event for each part between the places, each with logprobs; the last carries the finish."""
    bounds = [0, *sorted(place % (len(ids) + 1) for place in places), len(ids)]
    made: list[TokenEvent] = []
    for start, end in pairwise(bounds):
        logprobs = tuple(TokenLogprobs(token, -float(start + n)) for n, token in enumerate(ids[start:end]))
        made.append(TokenEvent("r", tuple(ids[start:end]), logprobs))
    usage = Usage(prompt_tokens=3, completion_tokens=len(ids)) if finish else None
    return [*made[:-1], replace(made[-1], finish=finish, usage=usage)]


def fold(stream: TextStream, parts: list[TokenEvent]) -> TextEvent:
    """All results as one; nothing may come behind a finish."""
    results = [stream.feed(part) for part in parts]
    ends = [n for n, result in enumerate(results) if result.finish is not None]
    if ends:
        assert all(result == TextEvent() for result in results[ends[0] + 1 :])
    return TextEvent(
        text="".join([result.text for result in results]),
        reasoning="".join([result.reasoning for result in results]),
        logprobs=tuple(entry for result in results for entry in result.logprobs),
        finish=results[ends[0]].finish if ends else None,
        stop_sequence=results[ends[0]].stop_sequence if ends else None,
    )


@st.composite
def answers(draw: st.DrawFn) -> tuple[Tokenizer, list[int], list[str]]:
    """A tokenizer, generated ids (of texts, and any ids) and stop strings that may well occur."""
    loaded = tokenizer(draw(st.sampled_from(["byte_level", "sentencepiece", "gemma_like"])))
    words = st.sampled_from(
        ["<think>", "</think>", "\n", " stopping", "abcd", " 😀", "é日", "fox STOP", "<thi"]
    )
    text_ids = st.lists(words, max_size=6).map(
        lambda parts: loaded.encode("".join(parts), add_special_tokens=False)
    )
    any_ids = st.lists(st.integers(0, loaded.vocab_size - 1), max_size=8)
    ids = [token for part in draw(st.lists(text_ids | any_ids, max_size=4)) for token in part]
    text = loaded.decode(ids)
    places = st.integers(0, max(0, len(text) - 1))
    inside = st.tuples(places, st.integers(1, 6)).map(lambda at: text[at[0] : at[0] + at[1]] or "x")
    stop = draw(st.lists(inside | st.sampled_from(["STOP", "bcd", "c", "\ufffd", "</think>"]), max_size=3))
    return loaded, ids, stop


@settings(deadline=None)
@given(
    answers(),
    st.lists(st.integers(0, 60), max_size=6),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["length", "stop", "cancelled"]),
)
def test_equals_the_whole_text(
    answer: tuple[Tokenizer, list[int], list[str]],
    places: list[int],
    reasons: bool,
    opened: bool,
    finish: FinishReason,
) -> None:
    loaded, ids, stop = answer
    stream = TextStream(loaded, stop=stop, reasoning=THINK if reasons else None, reasoning_open=opened)
    result = fold(stream, events(ids, places, finish))
    text, match = search(loaded.decode(ids), stop)
    content, reasoning = split_text(text, opened) if reasons else (text, "")
    assert (result.text, result.reasoning, result.stop_sequence) == (content, reasoning, match)
    assert result.finish == ("stop" if match is not None else finish)
    assert stream.finished


@settings(deadline=None)
@given(answers(), st.lists(st.integers(0, 60), max_size=6), st.sampled_from([None, "length"]))
def test_events_may_be_cut_anywhere(
    answer: tuple[Tokenizer, list[int], list[str]], places: list[int], finish: FinishReason | None
) -> None:
    loaded, ids, stop = answer
    singly, cut = TextStream(loaded, stop=stop), TextStream(loaded, stop=stop)
    expected = fold(singly, events(ids, list(range(len(ids))), finish))
    assert fold(cut, events(ids, places, finish)) == expected
    assert (cut.num_tokens, cut.finished) == (singly.num_tokens, singly.finished)


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), max_size=5), st.booleans())
def test_special_tokens_split_reasoning(places: list[int], opened: bool) -> None:
    loaded = tokenizer("byte_level")
    channel = detect("<|channel>", loaded)
    assert channel is not None
    start = "" if opened else "<|channel>thought\n"
    ids = loaded.encode(f"{start}why 日\n<channel|>so 😀<|im_end|>!", add_special_tokens=False)
    stream = TextStream(loaded, reasoning=channel, reasoning_open=opened)
    result = fold(stream, events(ids, places, "stop"))
    assert (result.text, result.reasoning) == ("so 😀!", "why 日")


def test_spelled_marks_are_no_tags() -> None:
    loaded = tokenizer("byte_level")
    channel = detect("<|channel>", loaded)
    ids = loaded.encode("a\ufdd0b<|channel|>", add_special_tokens=False)
    result = fold(TextStream(loaded, reasoning=channel), events(ids, [], "stop"))
    assert (result.text, result.reasoning) == ("a\ufffdb<|channel|>", "")


def one_by_one(text: str, stop: list[str]) -> tuple[TextStream, list[TextEvent], list[int]]:
    """A stream fed with one event a letter of an ASCII text, and its ids."""
    loaded = tokenizer("byte_level")
    ids = [loaded.encode(letter, add_special_tokens=False)[0] for letter in text]
    stream = TextStream(loaded, stop=stop)
    return stream, [stream.feed(part) for part in events(ids, list(range(len(ids))), None)], ids


def test_a_stop_cancels_and_counts_what_was_consumed() -> None:
    stream, results, ids = one_by_one("abcSTOPxyz", stop=["STOP"])
    finishing = [result for result in results if result.finish]
    assert [(result.finish, result.stop_sequence) for result in finishing] == [("stop", "STOP")]
    assert stream.finished
    assert stream.num_tokens == 7
    shown = [entry.token for result in results for entry in result.logprobs]
    assert shown == ids[:3]
    assert stream.feed(TokenEvent("r", (ids[0],), finish="length")) == TextEvent()
    assert stream.num_tokens == 7


def test_logprobs_come_with_their_text() -> None:
    _, results, ids = one_by_one("abSTx", stop=["STOP"])
    by_text = [(result.text, [entry.token for entry in result.logprobs]) for result in results if result.text]
    assert by_text == [("a", [ids[0]]), ("b", [ids[1]]), ("STx", ids[2:])]


def test_a_token_that_is_cut_by_a_stop_keeps_its_logprobs() -> None:
    loaded = tokenizer("byte_level")
    ids = loaded.encode(" stopping", add_special_tokens=False)
    stream = TextStream(loaded, stop=["topping"])
    logprobs = tuple(TokenLogprobs(token, -1.0) for token in ids)
    result = stream.feed(TokenEvent("r", tuple(ids), logprobs))
    assert result.text == " s"
    assert 0 < len(result.logprobs) <= len(ids)


def test_a_stop_in_the_last_event_corrects_the_usage() -> None:
    loaded = tokenizer("byte_level")
    ids = [loaded.encode(letter, add_special_tokens=False)[0] for letter in "aXbbb"]
    stream = TextStream(loaded, stop=["X"])
    usage = Usage(prompt_tokens=3, completion_tokens=6, cached_tokens=2)
    result = stream.feed(TokenEvent("r", tuple(ids), finish="length", usage=usage))
    assert result == TextEvent(
        text="a", finish="stop", stop_sequence="X", usage=replace(usage, completion_tokens=2)
    )


def test_the_engines_finish_passes_through() -> None:
    usage = Usage(prompt_tokens=3, completion_tokens=4)
    stream = TextStream(tokenizer("byte_level"), stop=["STOP"])
    ids = tokenizer("byte_level").encode("a ST", add_special_tokens=False)
    assert stream.feed(TokenEvent("r", tuple(ids))).text == "a "
    last = stream.feed(TokenEvent("r", finish="error", error="out of memory", usage=usage))
    assert last == TextEvent(text="ST", finish="error", error="out of memory", usage=usage)


def test_a_completion_keeps_its_first_space() -> None:
    loaded = tokenizer("sentencepiece")
    prompt, ids = (loaded.encode(text, add_special_tokens=False) for text in ("aab", "abcd "))
    assert fold(TextStream(loaded), events(ids, [], "length")).text == "abcd "
    assert fold(TextStream(loaded, after=prompt), events(ids, [], "length")).text == " abcd "


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(BadRequest):
        TextStream(tokenizer("byte_level"), stop=[""])
