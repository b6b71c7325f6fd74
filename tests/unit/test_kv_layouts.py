"""The layouts against a numpy oracle: whatever joins, leaves, moves and rewinds, attention sees a row's own tokens."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mantou.kv.batch import KVBatch, RowSnapshot
from mantou.kv.codecs import Affine, Native
from mantou.kv.layouts import FullRows
from mantou.kv.pages import Pages
from mantou.kv.pieces import Piece
from mantou.kv.plan import alike
from mantou.kv.recurrent import RecurrentState
from mantou.protocols import Group, Hit, KVCodec
from tests.unit.kv_oracle import (
    DIM,
    HEADS,
    SLACK,
    WINDOW,
    Row,
    advance,
    attention_sees,
    layouts,
    paged_layouts,
)


class Batch(RuleBasedStateMachine):
    """Random joins, leaves, moves, swaps, copies and forwards."""

    @initialize(slots=st.integers(1, 4), span_step=st.sampled_from([1, 8, 256]))
    def start(self, slots: int, span_step: int) -> None:
        self.kv = self.make(span_step)
        self.kv.resize(slots)
        self.rows: list[Row | None] = [None] * slots  # None: nobody's slot
        self.saved: list[tuple[Row, RowSnapshot]] = []
        self.hits: list[tuple[Row, Hit]] = []
        self.counter = 0

    def make(self, span_step: int) -> KVBatch:
        return KVBatch(lambda num_slots: layouts(Native(), num_slots), span_step=span_step)

    def slot(self, data: st.DataObject, *, alive: bool) -> int | None:
        found = [i for i, row in enumerate(self.rows) if (row is not None) == alive]
        return data.draw(st.sampled_from(found)) if found else None

    # -- rows come and go
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        if (slot := self.slot(data, alive=False)) is not None:
            self.kv.clear(slot)
            self.rows[slot] = Row()

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if (slot := self.slot(data, alive=True)) is not None:
            self.kv.release(slot)
            self.rows[slot] = None

    @rule(num_slots=st.integers(0, 5))
    def resize(self, num_slots: int) -> None:
        self.kv.resize(num_slots)
        self.rows = (self.rows + [None] * num_slots)[:num_slots]
        if not num_slots:
            assert self.kv.nbytes == 0, "an empty batch holds no memory"

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        source, target = self.slot(data, alive=True), self.slot(data, alive=False)
        if source is not None and target is not None:
            self.kv.move(source, target)
            self.rows[target], self.rows[source] = self.rows[source], None

    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        one, other = self.slot(data, alive=True), self.slot(data, alive=True)
        if one is not None and other is not None and one != other:
            self.kv.swap(one, other)
            self.rows[one], self.rows[other] = self.rows[other], self.rows[one]

    # -- copies
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        if (slot := self.slot(data, alive=True)) is not None:
            row, taken = self.rows[slot], self.kv.snapshot(slot)
            assert row is not None
            assert taken.num_tokens == len(row.tokens)
            self.saved.append((row.copy(), taken))

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        if (slot := self.slot(data, alive=False)) is not None:
            row, taken = data.draw(st.sampled_from(self.saved))
            self.kv.restore(slot, taken)
            self.rows[slot] = row.copy()

    @rule(data=st.data())
    def copy_to_host(self, data: st.DataObject) -> None:
        """A store copies what is new in a row. It keeps the row only if no ring had lost a part of that."""
        slot = self.slot(data, alive=True)
        if slot is None or not (row := self.rows[slot]) or row.num_copied == len(row.tokens):
            return
        lo, hi = row.num_copied, len(row.tokens)
        piece = self.kv.columns(slot, lo, hi)
        assert lo <= piece.lo <= piece.hi == hi
        assert piece.lo <= max(lo, hi - WINDOW + 1), "what a live window sees is never lost"
        if piece.lo == lo:
            row.pieces, row.num_copied = (*row.pieces, piece), hi
            self.hits.append((row.copy(), Hit(hi, row.pieces, self.kv.state(slot))))

    @precondition(lambda self: self.hits)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        if (slot := self.slot(data, alive=False)) is not None:
            row, hit = data.draw(st.sampled_from(self.hits))
            self.kv.fill(slot, hit)
            self.rows[slot] = row.copy()

    # -- forwards
    def feed(self, group: Group, tokens: np.ndarray) -> None:
        """Runs the layers over a begun group and compares what its valid queries see."""
        full, ring, recurrent, delayed, delayed_ring = self.kv.layers
        seen_full, seen_ring = attention_sees(full, tokens), attention_sees(ring, tokens)
        seen_delayed = attention_sees(delayed, tokens), attention_sees(delayed_ring, tokens)
        advance(recurrent, tokens)
        for i, num_tokens in enumerate(group.num_tokens):
            row = self.rows[group.lo + i]
            for t in range(num_tokens):
                assert row is not None
                known = sorted(float(x) for x in (*row.tokens, *tokens[i, : t + 1]))
                assert seen_full[i][t] == seen_delayed[0][i][t] == known
                newest = [*row.tokens, *tokens[i, : t + 1]][-WINDOW:]
                assert seen_ring[i][t] == seen_delayed[1][i][t] == sorted(float(x) for x in newest)

    def group(self, data: st.DataObject) -> tuple[Group, np.ndarray] | None:
        alive = [i for i, row in enumerate(self.rows) if row is not None]
        if not alive:
            return None
        lo = data.draw(st.integers(0, alive[-1]))
        hi = data.draw(st.integers(max(lo, next(i for i in alive if i >= lo)), len(self.rows) - 1)) + 1
        width = data.draw(st.sampled_from([1, 2, 5, SLACK, SLACK + 1]))
        uniform = data.draw(st.booleans())
        counts = [
            (width if uniform else data.draw(st.integers(0, width))) if self.rows[i] is not None else 0
            for i in range(lo, hi)
        ]
        tokens = np.zeros((hi - lo, width), np.float32)
        for i, count in enumerate(counts):
            for t in range(width):
                self.counter += 1  # the padding is different from everything, too
                tokens[i, t] = self.counter if t < count else -self.counter
        return Group(lo, width, tuple(counts)), tokens

    @rule(data=st.data(), rewinds=st.booleans())
    def forward(self, data: st.DataObject, rewinds: bool) -> None:
        if (made := self.group(data)) is None:
            return
        group, tokens = made
        self.kv.begin(group)
        self.feed(group, tokens)
        kept = [data.draw(st.integers(0, n)) if rewinds else n for n in group.num_tokens]
        if not self.kv.commit(group, kept):
            masked = Group(group.lo, group.width, tuple(kept))
            self.kv.begin(masked)
            self.feed(masked, tokens)
            assert self.kv.commit(masked, kept)
        for i, count in enumerate(kept):
            if (row := self.rows[group.lo + i]) is not None:
                row.tokens += [int(x) for x in tokens[i, :count]]

    @rule(data=st.data(), num_layers=st.integers(0, 3))
    def forward_that_fails(self, data: st.DataObject, num_layers: int) -> None:
        """The graph raises after some layers have run."""
        if (made := self.group(data)) is None:
            return
        group, tokens = made
        self.kv.begin(group)
        for layer in self.kv.layers[:num_layers]:
            if isinstance(layer, RecurrentState):
                advance(layer, tokens)
            else:
                attention_sees(layer, tokens)
        self.kv.abort()

    @invariant()
    def states_and_lengths_are_the_oracles(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity()
        assert self.kv.lengths == [len(row.tokens) if row else 0 for row in self.rows]
        state = self.kv.layers[2].cache[0]
        for slot, row in enumerate(self.rows):
            if row is not None and row.tokens:
                assert state[slot].item() == row.state
            elif row is not None and state is not None:
                assert state[slot].item() == 0


TestBatch = Batch.TestCase
TestBatch.settings = settings(deadline=None, max_examples=80, stateful_step_count=50)


class PagedBatch(Batch):
    """The same, where full rows share pools of blocks; after each rule no block is lost and none has two owners."""

    def make(self, span_step: int) -> KVBatch:
        pages = Pages(4)
        return KVBatch(
            lambda num_slots: paged_layouts(Native(), num_slots, pages), span_step=span_step, pages=pages
        )


TestPagedBatch = PagedBatch.TestCase
TestPagedBatch.settings = settings(deadline=None, max_examples=40, stateful_step_count=50)


# ------------------------------------------------------------------ single properties
def batch(*rows: Row | None) -> Batch:
    made = Batch()
    made.kv, made.rows, made.counter = KVBatch(lambda n: layouts(Native(), n)), list(rows), 0
    made.kv.resize(len(rows))
    return made


def feed(made: Batch, lo: int, width: int, *counts: int) -> None:
    group = Group(lo, width, counts)
    tokens = np.arange(made.counter + 1, made.counter + 1 + width * len(counts), dtype=np.float32)
    made.counter += tokens.size
    made.kv.begin(group)
    made.feed(group, tokens.reshape(len(counts), width))
    made.kv.commit(group, counts)
    for i, count in enumerate(counts):
        if (row := made.rows[lo + i]) is not None:
            row.tokens += [int(x) for x in tokens.reshape(len(counts), width)[i, :count]]


def test_a_forward_beside_an_idle_row_that_has_wrapped_its_ring_keeps_that_rows_keys() -> None:
    made = batch(Row(), Row())
    for _ in range(4):
        feed(made, 1, SLACK, SLACK)
    for _ in range(3):
        feed(made, 0, 1, 1, 0)
    feed(made, 0, 1, 0, 1)
    feed(made, 0, 1, 1, 1)


def test_a_row_whose_last_forward_crossed_the_threshold_moves_whole() -> None:
    """It is packed at its next forward only; what lies beyond the threshold is native until then."""
    made = batch(Row(), None)
    feed(made, 0, SLACK, SLACK)
    made.kv.move(0, 1)
    made.rows.reverse()
    feed(made, 1, 2, 2)


@pytest.mark.parametrize("num_tokens", [3, WINDOW + SLACK - 1, WINDOW + SLACK, WINDOW + SLACK + 1, 60])
def test_a_row_that_left_piece_by_piece_goes_on_in_another_batch(num_tokens: int) -> None:
    first, second = batch(Row()), batch(None, Row())
    pieces: list[Piece] = []
    for done in range(num_tokens):
        feed(first, 0, 1, 1)
        pieces.append(first.kv.columns(0, done, done + 1))
    feed(second, 1, 2, 2)
    second.kv.fill(0, Hit(num_tokens, tuple(pieces), first.kv.state(0)))
    second.rows[0], second.counter = first.rows[0], first.counter
    for _ in range(WINDOW + SLACK):
        feed(second, 0, 1, 1, 1)


def test_rows_grow_through_several_capacities_and_keep_their_keys() -> None:
    made = batch(Row(), Row())
    capacities = set()
    while len(made.rows[0].tokens) < 600:
        feed(made, 0, SLACK, SLACK, 1)
        capacities.add(made.kv.layers[0].capacity)
    assert capacities == {64, 128, 192, 256, 320, 384, 448, 512, 640}


@pytest.mark.parametrize("codec", [Native(), Affine(8), Affine(4)], ids=lambda codec: codec.name)
@settings(deadline=None, max_examples=20)
@given(widths=st.lists(st.integers(1, 20), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_attention_sees_what_the_codec_gives_back_whatever_the_chunks_and_neighbours(
    codec: KVCodec, widths: list[int], seed: int
) -> None:
    total = sum(widths)
    keys = mx.random.normal((3, HEADS, total, DIM), key=mx.random.key(seed)).astype(mx.bfloat16)
    expected = codec.unpack(codec.pack(keys[1:2]), mx.bfloat16)
    kv = KVBatch(lambda num_slots: [FullRows(alike(codec), num_slots)])
    kv.resize(3)
    done = 0
    for i, width in enumerate(widths):
        chunk = keys[:, :, done : done + width]
        group = Group(0, width, (width, width, width if i % 2 else 0))  # the third row lags behind
        kv.begin(group)
        found, _ = kv.layers[0].update_and_fetch(chunk, chunk)
        kv.commit(group, group.num_tokens)
        done += width
        assert found.dtype == mx.bfloat16
        assert mx.array_equal(found[1, :, :done], expected[0, :, :done])


@settings(deadline=None, max_examples=20)
@given(fed=st.integers(1, 120), forgotten=st.integers(0, SLACK))
def test_a_full_row_and_a_ring_forget_by_length_alone(fed: int, forgotten: int) -> None:
    kv = KVBatch(lambda num_slots: layouts(Native(), num_slots)[:2])
    kv.resize(1)
    row = Row()

    def feed(first: int, count: int) -> None:
        for token in range(first, first + count):
            group = Group(0, 1, (1,))
            kv.begin(group)
            tokens = np.array([[token]], np.float32)
            row.tokens.append(token)
            assert attention_sees(kv.layers[0], tokens) == [[[float(x) for x in row.tokens]]]
            newest = sorted(float(x) for x in row.tokens[-WINDOW:])
            assert attention_sees(kv.layers[1], tokens) == [[newest]]
            kv.commit(group, (1,))

    feed(1, fed)
    gone = min(forgotten, fed)
    kv.lengths[0] -= gone  # what a commit that keeps fewer tokens comes to
    del row.tokens[fed - gone :]
    row.tokens = row.tokens[: fed - gone]
    feed(1000, 3)


def test_a_forward_wider_than_a_ring_has_room_for_is_refused() -> None:
    kv = KVBatch(lambda num_slots: layouts(Native(), num_slots))
    kv.resize(1)
    with pytest.raises(AssertionError, match="may not outrun the ring"):
        kv.begin(Group(0, SLACK + 2, (1,)))


def test_the_first_token_finds_no_recurrent_state() -> None:
    """Some graphs treat the first token in another way, so zeros will not do."""
    kv = KVBatch(lambda num_slots: [RecurrentState(1, num_slots)])
    kv.resize(2)
    (layer,) = kv.layers
    kv.begin(Group(0, 1, (1, 1)))
    assert layer[0] is None
    layer[0] = mx.ones((2, 3))
    kv.commit(Group(0, 1, (1, 1)), (1, 1))
    kv.begin(Group(0, 1, (1, 1)))
    assert layer[0].shape == (2, 3)
    kv.commit(Group(0, 1, (1, 1)), (1, 1))
    kv.clear(1)
    kv.begin(Group(1, 1, (1,)))
    assert layer[0] is None


def test_buffers_are_lent_alike_while_a_prefix_is_copied_in() -> None:
    """Other rows run between the growth of the keys and that of the values."""
    layer = FullRows(alike(Native()), 2)
    kv = KVBatch(lambda num_slots: [layer])
    layer.resize(2)
    kv.lengths, kv._first_columns = [0, 0], [0, 0]
    kv.begin(Group(0, 3, (3, 3)))
    x = mx.zeros((2, HEADS, 3, DIM))
    layer.update_and_fetch(x, x)
    kv.commit(Group(0, 3, (3, 3)), (3, 3))
    growing = layer.reserve(4 * layer.capacity)
    next(growing)
    kv.begin(Group(0, 1, (1, 1)))
    loan = layer.lend(mx.zeros((2, 1, DIM)), None, HEADS, DIM)
    assert [part.shape for part in loan.keys] == [part.shape for part in loan.values]
    assert list(growing) == []
