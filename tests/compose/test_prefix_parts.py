"""Copies between steps: with no time for them at all, every step does one part, and nobody's tokens change."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from mantou.cache.ram import RamStore
from mantou.cache.ssd import SsdStore
from mantou.cache.tiered import Tiered
from mantou.data import Request, Sampling
from mantou.engine.step import Step
from mantou.kv.batch import KVBatch
from mantou.kv.pieces import Packing
from tests.compose.harness import Case, make_step, run
from tests.compose.test_prefix_ram import (
    FAMILIES,
    cached_tokens,
    cold,
    new_store,
    serve,
    small_rings,
    turn,
    words,
)

__all__ = ["small_rings"]  # a fixture that every test here uses


@pytest.fixture(autouse=True)
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that decodes lets copies have one part a step."""
    decode_time = Step._decode_time
    monkeypatch.setattr(Step, "_decode_time", lambda step: None if decode_time(step) is None else 0.0)


@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_decode_while_a_known_prompt_comes_in(family: str, bucketed: bool) -> None:
    store, known = new_store(family), turn("known", words(70, 300))
    serve(family, store, known)
    others = [turn("a", words(71, 20)), turn("b", words(72, 30))]
    case = Case(family, rows=3, chunk=64, store=store, bucketed=bucketed)
    outcome = run(case, [*others, known], {"b": 1, "known": 4})
    for request in (*others, known):
        assert outcome.tokens[request.id] == cold(family, request)
    assert cached_tokens(outcome, "known") == 299
    store.check_integrity()


def test_a_known_prompt_does_not_stop_its_neighbour() -> None:
    store, known = new_store("llama"), turn("known", words(70, 300))
    serve("llama", store, known)
    step = make_step(Case("llama", rows=2, chunk=64, store=store))
    step.submit(turn("a", words(71, 20)))
    while not any(row.decoding for row in step.running):
        step.advance()
    step.submit(known)
    while len(step.running) < 2:
        step.advance()
    [row] = [row for row in step.running if row.id == "known"]
    [neighbour] = [row for row in step.running if row.id == "a"]
    parts = 0
    while row.restoring is not None:
        before = len(neighbour.tokens) + neighbour.num_inflight
        step.advance()
        parts += 1
        assert len(neighbour.tokens) + neighbour.num_inflight > before, "one token a step, whatever is copied"
        step.check_integrity()
    assert parts >= len(step.runner.kv.layers)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", FAMILIES)
def test_random_arrivals_and_departures_while_copies_are_on_their_way(family: str, seed: int) -> None:
    dice = random.Random(seed)
    store = new_store(family, dice.choice([200_000, 1 << 30]))
    shared = words(73, 280)
    wanted = [
        turn(f"r{i}", (*shared[: dice.choice([0, 20, 256, 280])], *words(74 + i, 15))) for i in range(6)
    ]
    for _ in range(2):
        arrivals = {request.id: dice.randrange(30) for request in wanted}
        gone = {f"r{dice.randrange(6)}": dice.randrange(5, 40)}
        case = Case(family, rows=dice.choice([2, 3, 6]), chunk=64, store=store, pipelined=dice.random() < 0.5)
        outcome = run(case, wanted, arrivals, gone)
        store.check_integrity()
        for request in wanted:
            if request.id not in gone:
                assert outcome.tokens[request.id] == cold(family, request)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_turn_finds_all_that_an_ended_row_still_had_to_store(family: str) -> None:
    store, first = new_store(family), turn("t0", words(80, 120))
    case = Case(family, rows=4, chunk=64, store=store)
    background = turn("x", words(82, 400))  # decodes while t0 ends and t1 begins
    answer = cold(family, first)
    second = turn("t1", (*first.prompt, *answer, *words(81, 9)))
    outcome = run(case, [first, background, second], {"x": 1, "t1": 15})
    assert outcome.tokens["t1"] == cold(family, second)
    held = len(first.prompt) + len(answer) - 1
    assert cached_tokens(outcome, "t1") == held


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_rows_that_decode_store_what_they_generate_on_the_way(family: str) -> None:
    store = new_store(family)
    step = make_step(Case(family, rows=2, chunk=64, store=store))
    for number in range(2):
        step.submit(Request(f"r{number}", words(84 + number, 20), Sampling(), max_tokens=420))
    while step.counters.steps < 400:
        step.advance()
    for row in step.running:
        assert row.cache_key is not None and row.num_published >= 256
        assert store.reach(row.cache_key, row.held) == row.num_published
    store.check_integrity()


class Work:
    """Counts what goes to a store: layers that are copied, and offers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done = 0
        take, put = Packing.take, RamStore.put

        def counted_take(packing: Packing, layer: int, parts: Any) -> None:
            self.done += 1
            take(packing, layer, parts)

        def counted_put(store: RamStore, *args: Any) -> None:
            self.done += 1
            put(store, *args)

        monkeypatch.setattr(Packing, "take", counted_take)
        monkeypatch.setattr(RamStore, "put", counted_put)

    def of(self, step: Step) -> int:
        before = self.done
        step.advance()
        return self.done - before


def long_answers(step: Step, count: int, num_tokens: int) -> dict[str, Any]:
    """Rows by id, all of them decoding, beside one that goes on for longer."""
    for number in range(count + 1):
        limit = num_tokens if number < count else 5 * num_tokens
        step.submit(Request(f"r{number}", words(90 + number, 20), Sampling(), max_tokens=limit))
    while not (len(step.running) == count + 1 and all(row.decoding for row in step.running)):
        step.advance()
    return {row.id: row for row in step.running}


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_rows_that_end_at_once_are_stored_by_one_part_a_step(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store(family)
    step = make_step(Case(family, rows=4, chunk=64, store=store))
    rows = long_answers(step, 3, 40)
    work = Work(monkeypatch)
    while len(step.running) > 1:
        assert work.of(step) <= 1
    for row in list(rows.values())[:3]:
        assert store.reach(row.cache_key, row.held) == row.num_kv == 59


@pytest.mark.parametrize("every", [1, 25, 1000])
def test_what_a_full_store_has_given_up_of_a_row_it_gets_again_in_parts(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`every`: steps between two losses of everything. A row ends however often that is."""
    store = new_store("llama")
    step = make_step(Case("llama", rows=3, chunk=64, store=store))
    rows = long_answers(step, 2, 420)
    while any(row.num_published < 256 for row in rows.values()):
        step.advance()
    work, num_steps = Work(monkeypatch), 0
    store.shrink(1 << 40)
    while len(step.running) > 1:
        assert work.of(step) <= 1
        num_steps += 1
        assert num_steps < 420 + 100
        if num_steps % every == 0:
            store.shrink(1 << 40)
    if every == 1000:
        for row in (rows["r0"], rows["r1"]):
            assert store.reach(row.cache_key, row.held) == row.num_kv == 439
    store.check_integrity()


@pytest.mark.parametrize("memory_bytes", [0, 1, 150_000], ids=["none", "no room", "little room"])
def test_the_disk_gets_all_of_a_row_although_memory_does_not(
    memory_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SsdStore(tmp_path, 1 << 30)
    store = Tiered(RamStore(memory_bytes), disk) if memory_bytes else disk
    step = make_step(Case("llama", rows=3, chunk=64, store=store))
    rows = long_answers(step, 2, 300)
    monkeypatch.setattr(KVBatch, "columns", None)  # nobody copies in one go
    while len(step.running) > 1:
        step.advance()
    disk.flush()
    for row in (rows["r0"], rows["r1"]):
        assert disk.reach(row.cache_key, row.held) == row.num_kv == 319
    store.check_integrity()
    store.close()


def test_a_row_that_runs_before_its_prompt_is_complete_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proof that the tests above can fail."""
    store, known = new_store("llama"), turn("known", words(70, 300))
    serve("llama", store, known)
    filling = KVBatch.filling

    def half(batch: KVBatch, slot: Any, hit: Any) -> Any:
        parts = filling(batch, slot, hit)
        return (next(parts, None) for _ in range(1))

    monkeypatch.setattr(KVBatch, "filling", half)
    outcome = run(Case("llama", chunk=64, store=store), [known])
    assert outcome.tokens["known"] != cold("llama", known)
