"""Recurrent layers go on from a state: states lie where prompts part, and take no more of a disk than columns do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mantou.cache.ssd import SsdStore
from mantou.data import MediaSpan
from mantou.engine.media import stored_tokens
from mantou.protocols import PrefixStore
from tests.compose.harness import Case, run
from tests.compose.test_prefix_ram import (
    RECURRENT,
    cached_tokens,
    cold,
    new_store,
    serve,
    small_rings,
    turn,
    words,
)
from tests.unit.cache_rows import KEY, Row

__all__ = ["small_rings"]  # a fixture that every test here uses


@pytest.mark.parametrize("family", RECURRENT)
def test_from_the_third_prompt_on_what_prompts_share_is_computed_no_more(family: str) -> None:
    store, system = new_store(family), words(70, 200)
    cached = [serve(family, store, turn(f"r{i}", (*system, *words(71 + i, 30))))[1] for i in range(4)]
    assert cached == [0, 0, 200, 200], "the second one finds where they part, and leaves a state there"
    store.check_integrity()


@pytest.mark.parametrize("family", RECURRENT)
def test_a_prompt_whose_end_is_rewritten_goes_on_from_its_last_message(family: str) -> None:
    """As templates do that open a reasoning block for the answer, and drop it from the history."""
    store = new_store(family)
    history, opened, held = words(80, 100), (1, 2, 3, 4), 0
    for number in range(3):
        ends = len(history)
        request = replace(turn(f"t{number}", (*history, *opened)), boundaries=(40, ends))
        answer, cached = serve(family, store, request)
        assert cached == held
        held, history = ends, (*history, *answer, *words(81 + number, 20))
    store.check_integrity()


@pytest.mark.parametrize("family", RECURRENT)
def test_marks_change_no_token_whatever_runs_beside(family: str) -> None:
    store, system = new_store(family), words(90, 150)
    wanted = [
        replace(turn(f"r{i}", (*system, *words(91 + i, 20 + 9 * i))), boundaries=(7, 64, 149 + i, 400))
        for i in range(4)
    ]
    for _ in range(2):
        outcome = run(Case(family, rows=3, chunk=64, store=store), wanted, {"r1": 3, "r2": 8})
        for request in wanted:
            assert outcome.tokens[request.id] == cold(family, request)
    assert [cached_tokens(outcome, r.id) for r in wanted] == [len(r.prompt) - 1 for r in wanted]
    store.check_integrity()


# ------------------------------------------------------------------ on disk
def states_on_disk(tmp_path: Path, state_width: int) -> tuple[list[int], int]:
    """Positions of the states that a long prompt with a message end leaves on disk, and how many were left out."""
    store = SsdStore(tmp_path / str(state_width), 1 << 30, recurrent=True)
    tokens = list(words(100, 4000))
    offered = [*range(256, 3999, 256), 1500, 3999]
    before = 0
    for end in sorted(offered):
        since = None if end in (1500, 3999) else before
        row = Row(tokens[:end], recurrent=True, since=since, state_width=state_width)
        store.put(KEY, tokens[:end], row)
        store.flush(10)
        before = end
    held = sorted(e.label.hi for e in store._folder.entries() if e.label.kind == "state")
    skipped = store.stats()["ssd_cache"]["skipped_states"]
    store.check_integrity()
    store.close()
    return held, skipped


def test_small_states_are_all_kept_on_disk(tmp_path: Path) -> None:
    held, skipped = states_on_disk(tmp_path, 1)
    assert len(held) == 17 and not skipped


def test_large_states_are_kept_where_something_ends_and_as_often_as_columns_pay_for(tmp_path: Path) -> None:
    held, skipped = states_on_disk(tmp_path, 4000)  # 16 kB; a token's columns are 12 bytes
    assert held == [256, 1500, 2816, 3999] and skipped == 13


# ------------------------------------------------------------------ media
def test_pictures_are_told_apart_though_their_token_ids_are_equal() -> None:
    store: PrefixStore = new_store("llama")
    before, shown, after = words(110, 60), (5,) * 40, words(111, 20)
    prompt = (*before, *shown, *after)
    cat, dog = ((MediaSpan(60, 100, digest),) for digest in ("cat", "dog"))

    def cached(name: str, media: tuple[MediaSpan, ...], tokens: tuple[int, ...] = prompt) -> int:
        outcome = run(Case("llama", store=store), [replace(turn(name, tokens), media=media)])
        return cached_tokens(outcome, name)

    assert cached("a", cat) == 0
    assert cached("b", cat) == 119
    assert cached("c", dog) == 60, "what comes before the picture is the same"
    assert cached("d", ()) == 60
    both = (*cat, MediaSpan(140, 180, "dog"))
    assert cached("e", both, (*prompt, *words(112, 20), *shown, 1, 2)) == 120, (
        "a conversation gets another picture"
    )


def test_placeholders_become_numbers_that_no_token_has() -> None:
    tokens = list(range(20))
    named = list(stored_tokens(tokens, (MediaSpan(4, 12, "x"), MediaSpan(15, 40, "y"))))
    assert [t for t in named if t >= 0] == [0, 1, 2, 3, 12, 13, 14] and min(named) >= -(1 << 31)
    assert stored_tokens(tokens, ()) is tokens
    with pytest.raises(ValueError, match="fewer than 4"):
        stored_tokens(tokens, (MediaSpan(4, 7, "x"),))
