"""Stop strings: however the text is cut, the result is that of a search in the whole text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mantou.chat.stops import NoStops, StopMatcher, make_stops
from mantou.errors import BadRequest

LETTERS = st.text(alphabet="ab", min_size=1, max_size=5) | st.text(alphabet="abcé😀", min_size=1, max_size=4)
STOPS = st.lists(LETTERS, min_size=1, max_size=4)
PIECES = st.lists(st.text(alphabet="abcé😀", max_size=6), max_size=12)


def search(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The text before the first match and the match: the earliest start, then the shortest string."""
    found = [(text.find(string), len(string), string) for string in stop if string in text]
    if not found:
        return text, None
    start, _, string = min(found)
    return text[:start], string


@settings(deadline=None)
@given(PIECES, STOPS)
@example(["ab", "cx"], ["bcd", "c"])  # the later, shorter match waits for the earlier one, which fails
@example(["ab", "cd"], ["bcd", "c"])  # ... and which wins
@example(["abc"], ["bcd", "c"])  # ... and which the text leaves open
@example(["a", "a", "b"], ["ab", "aab"])
def test_equals_a_search_in_the_whole_text(pieces: list[str], stop: list[str]) -> None:
    expected, match = search("".join(pieces), stop)
    matcher = StopMatcher(stop)
    seen, fed = "", ""
    for piece in pieces:
        seen += matcher.feed(piece)
        fed += piece
        assert expected.startswith(seen)
        if matcher.matched is not None:
            break
        assert len(fed) - len(seen) < max(map(len, stop))  # no more is withheld than a match may need
    else:
        seen += matcher.flush()
    assert (seen, matcher.matched) == (expected, match)


def test_a_tail_is_withheld_only_while_it_may_become_a_stop() -> None:
    matcher = StopMatcher(["STOP"])
    assert [matcher.feed(piece) for piece in ("go S", "T", "A", "ST", "OP on")] == ["go ", "", "STA", "", ""]
    assert matcher.matched == "STOP"


def test_long_stop_strings_stay_linear() -> None:
    stop = "a" * 20_000 + "b"
    matcher = StopMatcher([stop])
    text = "".join([matcher.feed("a" * 100) for _ in range(1000)])
    assert text + matcher.flush() == "a" * 100_000


def test_no_stops() -> None:
    stops = make_stops([])
    assert isinstance(stops, NoStops)
    assert (stops.feed("abc"), stops.flush(), stops.matched) == ("abc", "", None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(BadRequest, match="empty") as caught:
        make_stops(["a", ""])
    assert caught.value.param == "stop"
