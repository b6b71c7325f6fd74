"""The table of blocks: none is lost, none has two owners, and rows that do not fit wait instead of failing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mantou.config import Config
from mantou.data import Sampling
from mantou.engine.scheduler import FairScheduler
from mantou.engine.shapes import Shapes
from mantou.errors import ConfigError
from mantou.kv import pages as pages_module
from mantou.kv.batch import KVBatch
from mantou.kv.blocks import blocks_for, pool_bucket, pool_columns
from mantou.kv.budget import KVBudget
from mantou.kv.codecs import Native
from mantou.kv.geometry import Geometry
from mantou.kv.paged import PagedRows, fetched
from mantou.kv.pages import SINK, ZEROS, Pages
from mantou.kv.plan import alike
from mantou.models.runner import Runner
from mantou.protocols import Group
from tests.compose.harness import Case, model, requests, run, scheme

BLOCK, LIMIT = 4, 9


class Table(RuleBasedStateMachine):
    """Rows come, grow, change places and go, in the table and in one that follows it up to a limit."""

    @initialize(slots=st.integers(1, 4))
    def start(self, slots: int) -> None:
        self.pages = Pages(BLOCK)
        self.below = self.pages.below(LIMIT)
        self.pages.resize(slots)
        self.held = [0] * slots

    @rule(slot=st.integers(0, 4), more=st.integers(0, 30))
    def grow(self, slot: int, more: int) -> None:
        if slot < len(self.held):
            before = self.pages.blocks(slot)
            self.pages.hold(slot, self.held[slot], self.held[slot] + more)
            self.held[slot] += more
            assert self.pages.blocks(slot)[: len(before)] == before, "what a row holds stays where it is"

    @rule(slot=st.integers(0, 4))
    def leave(self, slot: int) -> None:
        if slot < len(self.held):
            self.pages.release(slot)
            self.held[slot] = 0

    @rule(one=st.integers(0, 4), other=st.integers(0, 4))
    def swap(self, one: int, other: int) -> None:
        if max(one, other) < len(self.held):
            self.pages.swap(one, other)
            self.held[one], self.held[other] = self.held[other], self.held[one]

    @rule(source=st.integers(0, 4), to=st.integers(0, 4))
    def move(self, source: int, to: int) -> None:
        if max(source, to) < len(self.held) and source != to:
            self.pages.move(source, to)
            self.held[to], self.held[source] = self.held[source], 0

    @rule(slots=st.integers(0, 5))
    def resize(self, slots: int) -> None:
        self.pages.resize(slots)
        self.held = (self.held + [0] * slots)[:slots]

    @invariant()
    def every_block_has_one_place(self) -> None:
        if hasattr(self, "pages"):
            self.pages.check_integrity()
            for slot, held in enumerate(self.held):
                assert len(self.pages.blocks(slot)) >= blocks_for(held, BLOCK)
            total = sum(blocks_for(held, BLOCK) for held in self.held)
            assert self.pages.num_held == total, "no row holds more than its tokens need"
            if not self.held:
                assert self.pages.num_blocks == 0


TestTable = Table.TestCase
TestTable.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)


def _come_back_elsewhere(pages: Pages) -> None:
    pages.release(0)
    pages.hold(2, 0, 1)  # takes the block that was given back
    pages.hold(0, 0, 1)


def _begin_anew(pages: Pages) -> None:
    pages.resize(0)
    pages.resize(2)
    pages.hold(1, 0, 1)
    pages.hold(0, 0, 1)


@pytest.mark.parametrize(
    "change",
    [lambda pages: pages.swap(0, 1), lambda pages: pages.move(1, 0), _come_back_elsewhere, _begin_anew],
    ids=["swap", "move", "come back", "begin anew"],
)
def test_runs_and_tables_of_a_forward_are_right_after_each_change(change: Callable[[Pages], None]) -> None:
    """They are remembered, because every layer and many a forward ask for the same ones."""
    pages = Pages(BLOCK)
    pages.resize(3)
    for slot in range(2):
        pages.hold(slot, 0, 1)
    before, geometry = pages.runs(0, 0, 1), Geometry(Group(0, 1, (1,)), [0])
    assert int(pages.placed(geometry).table[0, 0]) * BLOCK == before[0][0]
    change(pages)
    pages.forget()
    block = pages.blocks(0)[0]
    assert before != pages.runs(0, 0, 1) == [(block * BLOCK, block * BLOCK + 1)]
    assert int(pages.placed(geometry).table[0, 0]) == block


def test_a_pool_is_at_most_an_eighth_larger_than_what_its_rows_hold() -> None:
    for count in range(1, 5000):
        assert count <= pool_bucket(count, 512) <= count * 9 / 8
        assert count <= pool_bucket(count, 64) <= max(count * 9 / 8, min(count + 7, 2 * count - 1))


def test_eight_rows_that_need_their_second_block_grow_the_pool_once() -> None:
    assert len({pool_bucket(count, 64) for count in range(9, 17)}) == 1


def test_one_long_row_among_short_ones_reserves_no_length_for_them() -> None:
    lengths = [32_000, *[200] * 15]
    assert pool_columns(lengths, 64) < 1.2 * sum(lengths)
    assert pool_columns(lengths, 64) < 16 * 32_000 / 12


# ------------------------------------------------------------------ what is read and written
def begun(starts: list[int], num_tokens: tuple[int, ...]) -> tuple[Pages, Geometry]:
    pages = Pages(BLOCK)
    pages.resize(len(starts))
    for slot, (start, count) in enumerate(zip(starts, num_tokens, strict=True)):
        pages.hold(slot, start, start + count)
    return pages, Geometry(Group(0, max(num_tokens), num_tokens), starts)


def test_padding_and_idle_rows_write_where_nobody_reads() -> None:
    pages, geometry = begun([5, 3, 9], (2, 1, 0))
    written = pages.placed(geometry).written.tolist()
    own = [{b * BLOCK + i for b in pages.blocks(slot) for i in range(BLOCK)} for slot in range(3)]
    assert set(written[0]) <= own[0]
    assert written[1][0] in own[1]
    sink = range(SINK * BLOCK, (SINK + 1) * BLOCK)
    assert {written[1][1], *written[2]} <= set(sink)
    read = pages.placed(geometry).read(12)[:, 0, :, 0].tolist()
    assert all(column // BLOCK == ZEROS or column in own[slot] for slot in range(3) for column in read[slot])


def test_rows_part_where_that_spares_enough_and_idle_ones_go_with_the_shortest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages_module, "MIN_SPARED", 100)
    pages, geometry = begun([7, 200, 190, 6, 5000], (1, 1, 1, 1, 0))
    placed = pages.placed(geometry)
    assert placed.parties == ((1, 2), (0, 3, 4))
    assert [placed.span_of(party) for party in placed.parties] == [201, 8]
    monkeypatch.setattr(pages_module, "MIN_SPARED", 1000)
    assert begun([7, 200], (1, 1))[0].placed(begun([7, 200], (1, 1))[1]).parties == ((0, 1),)


def test_a_decode_step_writes_into_the_pool_in_place() -> None:
    """A second holder of the pool, such as a fetch that is remembered, would have it copied whole."""
    pages = Pages(64)
    kv = KVBatch(lambda num_slots: [PagedRows(alike(Native()), pages)], pages=pages)
    kv.resize(2)

    def step(width: int) -> None:
        group = Group(0, width, (width, 1))
        kv.begin(group)
        x = mx.ones((2, 4, width, 64))
        keys, _ = kv.layers[0].update_and_fetch(x, x)
        assert fetched(keys) is not None
        del keys, _, x
        mx.eval(kv.arrays())
        kv.commit(group, group.num_tokens)

    for _ in range(4):
        step(1000)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    step(1)
    assert mx.get_peak_memory() - before < kv.nbytes / 8


# ------------------------------------------------------------------ what it costs
@pytest.mark.parametrize(("family", "codec"), [("llama", "off"), ("gemma3_text", "8"), ("llama", "4@64")])
def test_bytes_of_ragged_rows_are_those_of_the_arrays(family: str, codec: str) -> None:
    lengths = (1500, 70, 33, 200)
    runner = Runner(model(family), scheme(codec), max_width=64, ring_slack=64, block=16)
    budget = KVBudget(runner.plan, None, lambda count: count, runner.ring_slack, 16)
    runner.kv.resize(4)
    for slot, length in enumerate(lengths):
        while (left := length - runner.kv.lengths[slot]) > 0:
            count = min(64, left, runner.kv.room(runner.kv.lengths[slot]))
            group = Group(slot, 64, (count,))
            runner.forward(group, [[1] * count], None)
            runner.launch(None)
            runner.kv.commit(group, (count,))
    runner.wait()
    assert runner.kv.nbytes == pytest.approx(budget.bytes_of(lengths), rel=0.02)


def test_rows_beyond_the_pool_wait_and_get_the_same_tokens() -> None:
    wanted = requests(Sampling(), 14)
    expected = run(Case("llama"), wanted).tokens
    plan = Runner(model("llama"), scheme("off")).plan
    limit = plan.pool_bytes([84, 16], 16)
    budget = KVBudget(plan, limit, Shapes(False).slots, 0, 16)
    seen: list[int] = []

    def fits(lengths: Any) -> bool:
        seen.append(len(lengths))
        return budget.fits(lengths)

    outcome = run(Case("llama", scheduler=FairScheduler(6, fits), block=16), wanted)
    assert outcome.tokens == expected
    assert 1 < max(seen) <= 4
    assert KVBudget(plan, limit, Shapes(False).slots, 0).longest(4096) < budget.longest(4096) + 64


# ------------------------------------------------------------------ what is asked for
@pytest.mark.parametrize(
    ("options", "reads", "block"),
    [
        ({}, True, 64),
        ({}, False, None),
        ({"kv_quant": "8"}, True, None),
        ({"paged_kv": "off"}, True, None),
        ({"paged_kv": "on", "paged_kv_block_size": 128}, False, 128),
    ],
)
def test_what_is_in_force_is_what_was_asked_for_or_what_costs_nothing(
    options: dict[str, Any], reads: bool, block: int | None
) -> None:
    from mantou.build_facts import choose_paging

    assert choose_paging(Config(**options), reads)[0] == block


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"paged_kv": "yes"}, "takes auto, on, off, not 'yes'"),
        ({"paged_kv_block_size": 48}, "takes 16, 32, .*, not 48"),
    ],
)
def test_a_value_that_does_not_exist_is_refused_with_those_that_do(
    options: dict[str, Any], sentence: str
) -> None:
    from mantou.build_facts import choose_paging

    with pytest.raises(ConfigError, match=sentence):
        choose_paging(Config(**options), True)
