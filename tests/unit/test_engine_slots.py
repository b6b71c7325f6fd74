from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mantou.data import Request, Sampling
from mantou.engine.sequence import Sequence
from mantou.engine.shapes import Shapes
from mantou.engine.slots import Slots, runs

NO_CLOCK = settings(deadline=None)


def sequence(name: str = "r", prompt: int = 4, limit: int = 5, **changes: object) -> Sequence:
    request = Request(name, tuple(range(10, 10 + prompt)), Sampling(), **changes)
    return Sequence(request, limit)


class Places(RuleBasedStateMachine):
    """A model of the KV follows the moves; every row must always find its own content."""

    @initialize(bucketed=st.booleans())
    def start(self, bucketed: bool) -> None:
        self.shapes = Shapes(bucketed)
        self.slots = Slots(self.shapes)
        self.kv: dict[int, str] = {}  # slot -> whose content it holds
        self.alive: list[Sequence] = []
        self.num_made = 0

    @rule(decoding=st.booleans())
    def join(self, decoding: bool) -> None:
        row = sequence(f"r{self.num_made}")
        self.num_made += 1
        row.num_kv = 3 if decoding else 0
        slot = self.slots.join(row)
        assert slot not in self.kv, "the slot was taken"
        self.kv[slot] = row.id
        self.alive.append(row)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def prefill_ends(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.alive)).num_kv = 3

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.alive))
        del self.kv[row.slot]
        self.slots.leave(row)
        self.alive.remove(row)
        assert row.slot == -1

    @rule()
    def settle(self) -> None:
        before = self.slots.decode_span
        for source, target, swap in self.slots.settle():
            held, other = self.kv.pop(source), self.kv.pop(target, None)
            assert (other is not None) == swap
            self.kv[target] = held
            if other is not None:
                self.kv[source] = other
        decoding = [row for row in self.alive if row.decoding]
        span = self.slots.decode_span
        assert span <= before
        assert span == self.shapes.rows(len(decoding)), "the decode slice is as small as its bucket allows"
        assert not self.slots.settle(), "settled rows stay where they are"

    @invariant()
    def every_row_finds_its_own_kv(self) -> None:
        if not hasattr(self, "slots"):
            return
        assert {row.slot: row.id for row in self.alive} == self.kv
        assert {row.id for row in self.slots} == {row.id for row in self.alive}
        assert len(self.slots) == len(self.alive)
        assert self.slots.num_wanted > max(self.kv, default=-1)
        assert not self.alive or self.slots.num_wanted >= self.slots.decode_span
        assert all(row.slot < self.slots.decode_span for row in self.alive if row.decoding)


TestPlaces = Places.TestCase
TestPlaces.settings = NO_CLOCK


def test_exact_shapes_give_a_decode_slice_without_holes() -> None:
    slots = Slots(Shapes(bucketed=False))
    rows = [sequence(f"r{i}") for i in range(6)]
    for i, row in enumerate(rows):
        row.num_kv = 3 if i % 2 else 0  # every second one decodes
        slots.join(row)
    slots.settle()
    assert sorted(row.slot for row in rows if row.decoding) == [0, 1, 2]
    assert sorted(row.slot for row in rows) == list(range(6))


def test_runs_are_maximal_stretches_of_like_neighbours() -> None:
    a, b, c = sequence("a"), sequence("b"), sequence("c")
    found = runs([a, b, None, None, c], lambda row: row and row.id in "ab")
    assert [(lo, len(part)) for lo, part in found] == [(0, 2), (2, 2), (4, 1)]


# ------------------------------------------------------------------ sequence
@NO_CLOCK
@given(
    drawn=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=8),
    limit=st.integers(1, 12),
    eos=st.frozensets(st.integers(0, 9), max_size=2),
)
def test_a_sequence_stops_at_eos_or_its_limit_and_counts_eos(
    drawn: list[list[int]], limit: int, eos: frozenset[int]
) -> None:
    row = sequence(limit=limit, eos=eos)
    emitted: list[int] = []
    for tokens in drawn:
        if row.finish is None:
            emitted += row.extend(tokens)
    flat = [token for tokens in drawn for token in tokens]
    stop = next((i for i, token in enumerate(flat) if token in eos), len(flat))
    expected = flat[: min(stop, limit)]
    assert emitted == expected == row.tokens[row.num_prompt :]
    if len(expected) == limit:
        assert (row.finish, row.num_eos) == ("length", 0)
    elif stop < len(flat):
        assert (row.finish, row.eos_token) == ("stop", flat[stop])
    else:
        assert row.finish is None
    assert row.usage().completion_tokens == len(expected) + row.num_eos
    assert row.num_left == limit - len(expected)


def test_tokens_in_flight_are_pending_but_not_known() -> None:
    row = sequence(prompt=4, limit=5)
    row.slot, row.num_kv, row.num_inflight = 0, 4, 1
    assert (row.num_pending, row.num_left, row.decoding) == (1, 4, True)
    assert row.next_tokens(1) == []
    row.extend([3])
    row.num_inflight = 0
    assert (row.num_pending, row.num_left, row.next_tokens(1)) == (1, 4, [3])


@pytest.mark.parametrize(("num_kv", "count", "expected"), [(0, 3, [10, 11, 12]), (2, 9, [12, 13])])
def test_next_tokens_are_the_known_ones_behind_the_kv(num_kv: int, count: int, expected: list[int]) -> None:
    row = sequence()
    row.num_kv = num_kv
    assert row.next_tokens(count) == expected


def test_what_the_kv_holds_includes_the_token_that_ended_the_row() -> None:
    row = sequence(eos=frozenset({1}))
    row.extend([7, 1])
    row.num_kv = 6
    assert row.held == [10, 11, 12, 13, 7, 1]
