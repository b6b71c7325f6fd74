from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mantou.data import Draft, DraftAsk, Request, Sampling, Speculation
from mantou.spec import ngram
from mantou.spec.ngram import NGram


def request(name: str = "r", prompt: Sequence[int] = (1,), **changes: object) -> Request:
    return Request(name, tuple(prompt), Sampling(), **changes)


def guess(
    provider: NGram, tokens: Sequence[int], width: int = 5, name: str = "r", **changes: object
) -> list[int]:
    (draft,) = provider.propose([DraftAsk(request(name, **changes), tokens, width)])
    return list(draft.tokens)


def test_a_row_goes_on_as_it_did_after_the_same_tokens() -> None:
    assert guess(NGram(2, 4), [1, 2, 3, 4, 5, 6, 7, 2, 3], 3) == [4, 5, 6]


def test_fewer_equal_tokens_than_asked_for_give_no_guess() -> None:
    provider = NGram(3, 4)
    tokens = [1, 2, 3, 4, 5, 9, 2, 3]
    assert guess(provider, tokens) == []
    assert provider.width(request(), tokens) == 0


def test_the_longest_match_wins_over_a_later_one() -> None:
    tokens = [1, 2, 3, 7, 0, 2, 3, 8, 0, 1, 2, 3]
    assert guess(NGram(2, 3), tokens, 1) == [7]
    assert guess(NGram(2, 2), tokens, 1) == [8]  # from --ngram-max on, the latest place wins


def test_a_copy_that_reaches_the_end_goes_on_in_itself() -> None:
    assert guess(NGram(2, 4), [5, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_predicted_text_is_looked_up_before_any_of_it_was_said() -> None:
    tokens = [90, 91, 11, 12]
    assert guess(NGram(2, 4), tokens) == []
    assert guess(NGram(2, 4), tokens, 3, name="p", prediction=(10, 11, 12, 13, 14, 15)) == [13, 14, 15]


def test_rows_do_not_see_each_other() -> None:
    provider = NGram(2, 4)
    asks = [DraftAsk(request("a"), [1, 2, 3, 1, 2], 1), DraftAsk(request("b"), [7, 1, 2], 1)]
    assert [list(draft.tokens) for draft in provider.propose(asks)] == [[3], []]
    provider.release(asks[0].request)
    assert guess(provider, [9, 1, 2], name="a") == []


def test_a_row_that_was_taken_back_is_read_anew() -> None:
    provider = NGram(2, 4)
    assert guess(provider, [1, 2, 3, 4, 1, 2], 1) == [3]
    assert guess(provider, [1, 2, 5, 1, 2], 1) == [5]


def test_a_request_may_ask_for_another_width() -> None:
    tokens = [1, 2, 3, 1, 2]
    assert NGram(2, 4, 7).width(request(), tokens) == 7
    assert NGram(2, 4, 7).width(request(speculation=Speculation("ngram", 3)), tokens) == 3


def test_a_long_prompt_is_indexed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "INDEX_STEP", 4)
    provider, tokens = NGram(2, 4), [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    assert [provider.width(request(), tokens) > 0 for _ in range(3)] == [False, False, True]


def test_chances_follow_what_was_right() -> None:
    provider, tokens = NGram(2, 4), [1, 2, 3, 1, 2]
    (first,) = provider.propose([DraftAsk(request(), tokens, 1)])
    for _ in range(60):
        provider.observe(request(), first, [8])
    (later,) = provider.propose([DraftAsk(request(), tokens, 1)])
    assert later.chance < 0.1 < first.chance


def test_copies_of_rows_that_sample_are_judged_apart() -> None:
    provider, tokens = NGram(2, 4), [1, 2, 3, 1, 2]
    warm = Request("w", (1,), Sampling(temperature=1.0))
    (cold,) = provider.propose([DraftAsk(request(), tokens, 1)])
    (first,) = provider.propose([DraftAsk(warm, tokens, 1)])
    assert first.chance < cold.chance
    for _ in range(60):
        provider.observe(warm, first, [8])
    assert provider.propose([DraftAsk(request(), tokens, 1)])[0].chance == cold.chance
    assert provider.propose([DraftAsk(warm, tokens, 1)])[0].chance < 0.1


def test_another_providers_drafts_teach_nothing() -> None:
    provider, tokens = NGram(2, 4), [1, 2, 3, 1, 2]
    (first,) = provider.propose([DraftAsk(request(), tokens, 1)])
    provider.observe(request(), Draft([9], "model"), [8])
    assert provider.propose([DraftAsk(request(), tokens, 1)])[0].chance == first.chance


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 3), st.integers(1, 8))
def test_a_guess_is_what_followed_the_longest_equal_run(tokens: list[int], shortest: int, width: int) -> None:
    """Against a search of everything; token by token, as a row grows."""
    provider = NGram(shortest, ngram.LONGEST_SEEN)
    for length in range(1, len(tokens) + 1):
        known = tokens[:length]
        found = guess(provider, known, width)
        runs = {place: _agreeing(known, place) for place in range(1, length)}
        best = max(runs.values(), default=0)
        if best < shortest:
            assert found == []
        elif length <= ngram.NUM_PLACES:  # all places are compared
            continuations = [
                [known[place + t % (length - place)] for t in range(width)]
                for place, n in runs.items()
                if n == best
            ]
            assert found in continuations


def _agreeing(tokens: list[int], place: int) -> int:
    n = 0
    while n < min(place, ngram.LONGEST_SEEN) and tokens[place - 1 - n] == tokens[-1 - n]:
        n += 1
    return n


def test_a_lookup_takes_no_longer_in_a_long_text() -> None:
    """Counted in comparisons: the worst text repeats one token."""
    dice = random.Random(0)
    provider = NGram(2, 8)
    provider.width(request(), [0] * 4000)
    row = provider._rows["r"]
    calls = 0
    plain = type(row)._agreeing

    def counted(lookup: ngram.Lookup, place: int) -> int:
        nonlocal calls
        calls += 1
        return plain(lookup, place)

    type(row)._agreeing, kept = counted, plain
    try:
        for n in range(4001, 4021):
            provider.width(request(), [0] * (n - 1) + [dice.randrange(2)])
    finally:
        type(row)._agreeing = kept
    assert calls <= 20 * (ngram.NUM_PLACES + 1)
