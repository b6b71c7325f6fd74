from __future__ import annotations

import random

import pytest

from mantou.cache.ram import RamStore
from tests.unit.cache_rows import KEY, OTHER, Row, check


def put(store: RamStore, tokens: list[int], session: str | None = None, **changes: object) -> Row:
    row = Row(tokens, recurrent=store.recurrent, **changes)
    store.put(row.key, tokens, row, session)
    store.check_integrity()
    return row


def found(store: RamStore, tokens: list[int], session: str | None = None) -> int:
    hit = store.match(KEY, tokens, session)
    store.check_integrity()
    if hit is None:
        return 0
    check(hit, tokens, recurrent=store.recurrent)
    return hit.num_tokens


def words(seed: int, count: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(50_000) for _ in range(count)]


@pytest.mark.parametrize("length", [1, 2, 255, 256, 257, 700])
def test_a_prompt_matches_itself_but_for_its_last_token(length: int) -> None:
    store, tokens = RamStore(1 << 30), words(0, length)
    put(store, tokens)
    assert found(store, tokens) == length - 1
    assert found(store, [*tokens, 1]) == length


@pytest.mark.parametrize("parts_at", [1, 100, 255, 256, 257, 511, 512, 599])
def test_a_branch_shares_everything_before_it_parts(parts_at: int) -> None:
    store, first = RamStore(1 << 30), words(1, 600)
    put(store, first)
    branch = first[:parts_at] + words(2, 300)
    assert found(store, branch) == parts_at
    before = store.stats()["prompt_cache"]["bytes"]
    row = put(store, branch)
    assert row.copied[0][0] == parts_at and sum(hi - lo for lo, hi in row.copied) == 300
    added = store.stats()["prompt_cache"]["bytes"] - before
    assert added < 300 * 24 + 4 * 1024, "what is shared is stored once"
    assert found(store, [*first, 0]) == 600
    assert found(store, [*branch, 0]) == len(branch)


@pytest.mark.parametrize(("size", "entries"), [(8, 3), (40, 20)])
def test_a_growing_conversation_copies_only_what_is_new(size: int, entries: int) -> None:
    store, tokens = RamStore(1 << 30), words(3, size)
    for turn in range(20):
        row = put(store, tokens)
        assert sum(hi - lo for lo, hi in row.copied) == size
        tokens = tokens + words(100 + turn, size)
        assert found(store, tokens) == len(tokens) - size
    held = store.stats()["prompt_cache"]["entries"]
    assert held <= entries, "small parts of a block become one; large ones are not copied again for that"


def test_nothing_is_served_under_another_key() -> None:
    store, tokens = RamStore(1 << 30), words(4, 300)
    put(store, tokens)
    assert store.match(OTHER, [*tokens, 1]) is None
    put(store, tokens, key=OTHER)
    hit = store.match(OTHER, [*tokens, 1])
    assert hit is not None
    check(hit, [*tokens, 1], OTHER)


def test_recurrent_models_match_up_to_a_kept_state_only() -> None:
    store, tokens = RamStore(1 << 30, recurrent=True), words(5, 600)
    for length in (100, 300, 600):
        put(store, tokens[:length])
    assert found(store, [*tokens, 1]) == 600
    assert found(store, tokens) == 300
    assert found(store, [*tokens[:299], 1, 2, 3]) == 100
    assert found(store, [*tokens[:99], 1, 2]) == 0


def test_models_without_columns_keep_states_alone() -> None:
    store, tokens = RamStore(1 << 30, recurrent=True), words(6, 300)
    for length in (120, 300):
        put(store, tokens[:length], has_columns=False)
    hit = store.match(KEY, [*tokens, 1])
    assert hit is not None and hit.num_tokens == 300 and hit.state is not None
    assert all(not piece.stacks for piece in hit.pieces)


def test_columns_that_a_window_has_overwritten_are_not_taken() -> None:
    store, tokens = RamStore(1 << 30), words(7, 600)
    put(store, tokens, first_column=300)
    assert found(store, [*tokens, 1]) == 0
    put(store, tokens[:300])
    put(store, tokens, first_column=300)
    assert found(store, [*tokens, 1]) == 600


def filled(store: RamStore) -> float:
    stats = store.stats()["prompt_cache"]
    return stats["bytes"] / stats["max_bytes"]


def test_a_burst_of_single_prompts_leaves_open_conversations_alone() -> None:
    store = RamStore(200_000)
    reused, held = words(8, 700), words(9, 700)
    put(store, reused)
    assert found(store, [*reused, 1]) == 700
    put(store, held, session="open")
    for seed in range(100, 200):
        put(store, words(seed, 900))
    assert found(store, [*reused, 1]) == 700
    assert found(store, [*held, 1], "open") == 700
    assert filled(store) > 0.6


def test_a_closed_session_is_no_longer_preferred() -> None:
    store, held = RamStore(200_000), words(10, 700)
    put(store, held, session="s")
    assert store.close_session("s") and not store.close_session("s") and not store.close_session("never")
    store.check_integrity()
    assert found(store, [*held, 1]) == 700, "closing drops a preference, not a checkpoint"
    store = RamStore(200_000)
    put(store, held, session="s")
    store.close_session("s")
    for seed in range(100, 200):
        put(store, words(seed, 900))
    assert found(store, [*held, 1]) == 0


def test_new_conversations_get_in_although_old_ones_are_protected() -> None:
    store = RamStore(200_000)
    for number in range(30):
        put(store, words(number, 700), session=f"s{number}")
    assert found(store, [*words(29, 700), 1], "s29") == 700
    fresh = words(500, 500)
    put(store, fresh)
    assert found(store, [*fresh, 1]) == 500


def test_a_prompt_larger_than_the_budget_keeps_its_beginning_and_is_not_copied_again() -> None:
    store, tokens = RamStore(60_000), words(11, 9_000)
    put(store, tokens[:3_000])
    kept = found(store, [*tokens, 1])
    assert 0 < kept < 3_000
    rows = [put(store, tokens[:length]) for length in range(3_256, 9_000, 256)]
    assert sum(hi - lo for row in rows for lo, hi in row.copied) <= 512
    assert store.stats()["prompt_cache"]["refused"] > len(rows)
    assert abs(found(store, [*tokens, 1]) - kept) <= 256


def test_states_that_were_passed_go_before_columns() -> None:
    store, tokens = RamStore(40_000, recurrent=True), words(12, 512)
    for length in range(8, 512, 8):
        put(store, tokens[:length])
    stats = store.stats()["prompt_cache"]
    assert stats["thinned_states"] > 0 and stats["evictions"] == 0
    assert found(store, [*tokens[:504], 1]) == 504, "the last state stays"


def test_shrink_frees_what_was_asked_for() -> None:
    store = RamStore(1 << 30)
    for number in range(10):
        put(store, words(number, 500), session=f"s{number}")
    before = store.stats()["prompt_cache"]["bytes"]
    freed = store.shrink(before // 2)
    store.check_integrity()
    assert before // 2 <= freed == before - store.stats()["prompt_cache"]["bytes"]
    assert store.shrink(1 << 40) == before - freed
    assert store.stats()["prompt_cache"]["entries"] == 0


def test_sessions_select_their_checkpoint_and_fall_back_to_a_scan() -> None:
    store, tokens = RamStore(1 << 30), words(13, 600)
    put(store, tokens[:400], session="s")
    assert found(store, tokens, "s") == 400
    put(store, tokens, session="s")
    assert found(store, [*tokens, 1], "s") == 600
    edited = tokens[:200] + words(14, 50)
    assert found(store, edited, "s") == 200
    assert found(store, edited, "new") == 200
    assert found(store, edited) == 200
    counters = store.counters
    assert (counters.session_hits, counters.session_misses, counters.prefix_scans) == (2, 2, 3)


def test_a_session_survives_cuts_and_evictions_on_its_path() -> None:
    store, tokens = RamStore(1 << 30), words(15, 300)
    put(store, tokens, session="s")
    put(store, tokens[:280] + words(16, 50))
    put(store, tokens[:100] + words(17, 50))
    assert found(store, [*tokens, 1], "s") == 300
    store.shrink(15_000)
    assert found(store, [*tokens, 1], "s") in (0, 100, 256, 280, 300)
    put(store, tokens, session="s")
    assert found(store, [*tokens, 1], "s") == 300


def test_a_checkpoint_inside_an_edge_is_found_after_the_edge_was_cut() -> None:
    store, tokens = RamStore(1 << 30), words(40, 200)
    put(store, tokens)
    put(store, tokens[:120], session="s")
    put(store, tokens[:120] + words(41, 30))
    assert found(store, [*tokens[:120], 1], "s") == 120
    assert store.counters.session_hits == 1


def test_eviction_hands_over_the_whole_path() -> None:
    store, tokens = RamStore(1 << 30, recurrent=True), words(18, 600)
    seen: list[int] = []

    def evicted(key: object, path: object, hit: object) -> None:
        check(hit, [*path, 0], recurrent=hit.state is not None)
        seen.append(len(path))

    store.on_evict = evicted
    put(store, tokens[:300])
    put(store, tokens)
    store.shrink(1 << 40)
    assert seen == [600, 512, 256]


@pytest.mark.parametrize("max_bytes", range(3_000, 16_000, 250))
def test_a_put_goes_on_where_it_was_although_states_on_its_way_are_dropped(max_bytes: int) -> None:
    store, tokens = RamStore(max_bytes, recurrent=True), words(19, 200)
    put(store, tokens[:100])
    put(store, tokens)
    for seed in range(3):
        branch = tokens[:100] + words(20 + seed, 60)
        put(store, branch)
        put(store, branch + words(30 + seed, 60))
        found(store, [*branch, 1])
    found(store, [*tokens, 1])


def test_what_running_rows_store_is_not_given_up_for_prompts_that_nobody_asks_for() -> None:
    """It is cheap to compute again, and where there are few leaves all of them are among the oldest."""
    store = RamStore(4_000_000)
    for seed in (40, 41):
        put(store, words(seed, 3000), width=64)
    rows = [words(50 + seed, 1100) for seed in range(4)]
    for end in range(20, 1100, 40):
        for tokens in rows:
            assert store.reach(KEY, tokens) == max(end - 40, 0), "all that was stored of it before"
            put(store, tokens[:end], width=64)
    assert store.counters.evictions > 0


def test_a_prompt_that_waits_to_be_used_is_not_given_up() -> None:
    store = RamStore(60_000)
    waiting, other = words(60, 900), words(61, 900)
    put(store, waiting)
    put(store, other)
    store.prefetch(KEY, waiting)
    for seed in (62, 63):
        put(store, words(seed, 900))
    assert store.reach(KEY, other) < 900
    assert store.reach(KEY, waiting) == 900
    store.check_integrity()


def test_of_equally_unused_prompts_the_quickest_to_compute_again_goes() -> None:
    """The end of a long prompt costs more a token than a short prompt of as many bytes, although it is older."""
    store = RamStore(1 << 20)
    long, short = list(range(6000)), [7, *range(30_000, 30_200)]
    store.put(KEY, long, Row(long))
    store.put(KEY, short, Row(short))
    before = store.reach(KEY, long)
    store.shrink(1)
    assert store.reach(KEY, short) == 0
    assert store.reach(KEY, long) == before == len(long)
