from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mantou.cache.ram import RamStore
from mantou.cache.spool import Spool
from mantou.cache.ssd import SsdStore
from mantou.cache.tiered import Tiered
from tests.unit.cache_rows import KEY, Row, check

ROOMY = 1 << 30


def words(seed: int, count: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(50_000) for _ in range(count)]


@pytest.fixture
def open_tiers(tmp_path: Path) -> Iterator[Any]:
    opened: list[Tiered] = []

    def open_(memory_bytes: int = ROOMY, *, recurrent: bool = False, **changes: Any) -> Tiered:
        for store in opened:
            store.close()
        disk = SsdStore(tmp_path / "cache", ROOMY, recurrent=recurrent, **changes)
        opened[:] = [Tiered(RamStore(memory_bytes, recurrent=recurrent), disk)]
        return opened[0]

    yield open_
    for store in opened:
        store.close()


def put(store: Tiered, tokens: list[int], session: str | None = None) -> Row:
    row = Row(tokens, recurrent=store.memory.recurrent)
    store.put(KEY, tokens, row, session)
    store.check_integrity()
    return row


def found(store: Tiered, tokens: list[int], session: str | None = None) -> int:
    ticket = store.prefetch(KEY, tokens, session)
    assert ticket.wait(10)
    hit = store.match(KEY, tokens, session)
    store.check_integrity()
    if hit is None:
        return 0
    check(hit, tokens, recurrent=store.memory.recurrent)
    return hit.num_tokens


def ssd(store: Tiered, name: str) -> Any:
    return store.stats()["ssd_cache"][name]


@pytest.mark.parametrize("recurrent", [False, True])
def test_after_a_restart_the_disk_fills_the_memory(open_tiers: Any, recurrent: bool) -> None:
    tokens = words(0, 900)
    put(open_tiers(recurrent=recurrent), tokens, "s")
    store = open_tiers(recurrent=recurrent)
    assert found(store, [*tokens, 1]) == 900
    assert ssd(store, "restores") == 1
    assert found(store, [*tokens, 1]) == 900
    assert ssd(store, "restores") == 1 and ssd(store, "prefetches") == 1, "memory has it now"


def test_columns_leave_the_device_once(open_tiers: Any) -> None:
    row = put(open_tiers(), words(1, 700))
    assert row.copied == [(0, 256), (256, 512), (512, 700)]


@pytest.mark.parametrize("shared", [100, 256, 600])
def test_only_what_memory_lacks_is_read(open_tiers: Any, shared: int) -> None:
    system, rest = words(2, shared), words(3, 600)
    put(open_tiers(), system + rest)
    store = open_tiers()
    put(store, system)
    ticket = store.prefetch(KEY, [*system, *rest, 1])
    assert ticket.wait(10) and ticket.hit is not None
    assert ticket.hit.pieces[0].lo == shared // 256 * 256
    assert found(store, [*system, *rest, 1]) == shared + 600


def test_what_memory_gives_up_is_still_on_disk(open_tiers: Any) -> None:
    store = open_tiers(40_000)
    prompts = [words(seed, 700) for seed in range(10, 20)]
    for tokens in prompts:
        put(store, tokens)
    for tokens in prompts:
        assert found(store, [*tokens, 1]) == 700
    assert ssd(store, "restores") >= 8


def test_a_spill_that_was_dropped_is_made_up_for_when_memory_gives_up(
    open_tiers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tokens = open_tiers(recurrent=True), words(4, 700)
    with monkeypatch.context() as full:
        full.setattr(Spool, "put", lambda *job: False)
        put(store, tokens)
    assert ssd(store, "entries") == 0 and ssd(store, "dropped_spills")
    store.memory.shrink(1 << 40)
    store.check_integrity()
    assert ssd(store, "demotions") == 4
    assert found(store, [*tokens, 1]) == 700


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_prompt_larger_than_memory_comes_from_disk(open_tiers: Any, recurrent: bool) -> None:
    tokens = words(5, 3000)
    put(open_tiers(20_000, recurrent=recurrent), tokens)
    store = open_tiers(20_000, recurrent=recurrent)
    assert found(store, [*tokens, 1]) == 3000
    assert found(store, [*tokens, 1]) == 3000, "and again, with a part of it in memory"


def test_what_memory_lost_while_the_request_waited_is_a_miss(open_tiers: Any) -> None:
    tokens = words(6, 900)
    put(open_tiers(), tokens)
    store = open_tiers()
    put(store, tokens[:512])
    ticket = store.prefetch(KEY, [*tokens, 1])
    assert ticket.wait(10)
    store.memory.shrink(1 << 40)
    assert store.match(KEY, [*tokens, 1]) is None
    assert found(store, [*tokens, 1]) == 900


def test_a_part_that_memory_lost_while_the_request_waited_is_no_gap(open_tiers: Any) -> None:
    tokens = words(30, 900)
    put(open_tiers(), tokens)
    store = open_tiers()
    put(store, tokens[:512])
    assert store.prefetch(KEY, [*tokens, 1]).wait(10)
    store.memory.shrink(1)
    hit = store.match(KEY, [*tokens, 1])
    assert hit is not None and hit.num_tokens == 256
    check(hit, [*tokens, 1])


def test_a_state_that_memory_dropped_comes_back_alone(open_tiers: Any) -> None:
    store, tokens = open_tiers(recurrent=True), words(7, 600)
    put(store, tokens)
    node = next(node for node in store.memory._segments if node.state is not None)
    store.memory._segments.leave_behind(node)
    store.memory._segments._drop_state(store.memory._segments.of(node))
    assert found(store, [*tokens, 1]) == 600
    assert ssd(store, "restores") == 1


def test_without_a_prefetch_the_disk_is_not_asked(open_tiers: Any) -> None:
    tokens = words(8, 300)
    put(open_tiers(), tokens)
    store = open_tiers()
    assert store.match(KEY, [*tokens, 1]) is None


def test_sessions_flush_and_statistics_are_there(open_tiers: Any) -> None:
    store, tokens = open_tiers(), words(9, 300)
    put(store, tokens, "s")
    assert store.flush(10)["flushed"] is True
    assert store.close_session("s") and not store.close_session("s")
    stats = store.stats()
    assert set(stats) == {"prompt_cache", "ssd_cache"}
    names = {
        "dir", "entries", "bytes", "max_bytes", "restores", "spills", "restore_ms_last", "demotions",
        "pending_snapshots", "pending_spill_bytes", "dropped_spills", "failed_spills",
        "longest_durable_prefix_tokens",
    }  # fmt: skip
    assert names <= set(stats["ssd_cache"])
    assert ssd(store, "longest_durable_prefix_tokens") == 300
    assert store.shrink(1 << 40) > 0


@pytest.mark.parametrize("recurrent", [False, True])
def test_random_conversations_through_restarts(open_tiers: Any, recurrent: bool) -> None:
    """Whatever was put is found again as far as it was put, since the disk is large and every write is waited for."""
    dice = random.Random(5)
    known: list[list[int]] = [[]]
    store = open_tiers(30_000, recurrent=recurrent)
    for step in range(60):
        base = dice.choice(known)
        tokens = base[: dice.choice([len(base), dice.randrange(len(base) + 1)])] + words(step, 40)
        best = longest(known, tokens, recurrent=recurrent)
        assert found(store, tokens, dice.choice([None, "a", "b"])) == best
        put(store, tokens, dice.choice([None, "a", "b"]))
        known.append(tokens)
        if dice.random() < 0.1:
            store = open_tiers(30_000, recurrent=recurrent)


def longest(known: list[list[int]], tokens: list[int], *, recurrent: bool) -> int:
    best = 0
    for prompt in known:
        pairs = enumerate(zip(prompt, tokens[:-1], strict=False))
        shared = next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(tokens) - 1))
        if not recurrent or shared == len(prompt):
            best = max(best, shared)
    return best
