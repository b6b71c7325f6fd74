"""Drafts over the KV of the model itself: what is lent is what attention reads, and no answer depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from mantou.data import Draft, DraftAsk, Sampling
from mantou.kv.batch import KVBatch
from mantou.kv.lending import Seen
from mantou.models.runner import Runner
from mantou.protocols import Group
from mantou.spec.compose import AdaptiveWidth
from mantou.spec.heads.assistant import Assistant, Context
from mantou.spec.heads.donors import DonorDraft
from tests.compose.axes import wishes
from tests.compose.drafts import flat_costs
from tests.compose.harness import Case, model, own_model, requests, run, scheme
from tests.compose.heads import head_draft
from tests.compose.test_matrix import (
    ARRIVALS,
    NUM_TOKENS,
    check,
    constraints,
    make_store,
    num_hits,
    reference,
    second_turn,
)

GREEDY = Sampling()
FAMILY = "gemma4_text"
WINDOW = 16


class Checked(DonorDraft):
    """Compares every guess with those over the KV of mlx-lm's own caches after they read the row at once."""

    family: str
    faults: list[tuple[list[int], list[int]]]
    num_checked: int

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Draft]:
        drafts = super().propose(asks)
        for ask, draft in zip(asks, drafts, strict=True):
            if draft:
                self.num_checked += 1
                expected = from_scratch(self.family, list(ask.tokens), len(draft))
                if list(draft.tokens) != expected:  # the engine would not let an error through
                    self.faults.append((list(draft.tokens), expected))
        return drafts


def checked(family: str = FAMILY, **more: Any) -> Checked:
    provider: Any = head_draft("assistant", family, **more)
    provider.__class__ = Checked
    provider.family, provider.faults, provider.num_checked = family, [], 0
    return provider


@cache
def other_graph(family: str) -> Assistant:
    return cast(DonorDraft, head_draft("assistant", family)).graph


@cache
def reader(family: str) -> Runner:
    runner = Runner(own_model(family), scheme("off"))
    runner.capture_hidden()
    return runner


def from_scratch(family: str, tokens: list[int], count: int) -> list[int]:
    from mlx_lm.models.cache import KVCache

    from mantou.models.load import make_caches

    runner, graph = reader(family), other_graph(family)
    module: Any = runner.model.module
    caches: list[Any] = [
        KVCache() for _ in make_caches(module)
    ]  # whole rows, where the model would keep a window
    module(mx.array([tokens[:-1]]), cache=caches)
    captured = runner.take_captured()
    assert captured is not None
    hidden, held = captured[:, -1:], len(tokens) - 1
    seen = []
    for place in graph.donors:
        keys, values = caches[place].keys, caches[place].values
        first = max(held - WINDOW, 0) if runner.model.shapes[place].layout == "window" else 0
        seen.append(Seen(keys[:, :, first:held], values[:, :, first:held], None))
    context, said = Context(seen, mx.array([held], mx.int32)), list[int]()
    for _ in range(count):
        features, hidden = graph(mx.array([[*tokens, *said][-1:]]), hidden, context)
        said.append(int(mx.argmax(graph.logits(features)).item()))
    return said


@pytest.mark.parametrize("family", [FAMILY, "gemma3_text"])
@pytest.mark.parametrize("changes", [{}, {"block": 16}, {"ring_slack": 16}])
def test_an_assistant_guesses_as_if_it_had_read_the_row_at_once(family: str, changes: dict[str, Any]) -> None:
    """Whatever was rejected, however rows join, leave and move, in a ring that wraps and in shared blocks."""
    wanted = requests(GREEDY, 12)[:4]
    provider = checked(family, num_tokens=3)
    case = Case(family, rows=3, chunk=16, provider=provider, **changes)
    outcome = run(case, wanted, {"r3": 3})
    assert outcome.tokens == run(Case(family), wanted).tokens
    assert not provider.faults
    assert provider.num_checked > 12
    assert not provider._rows


@pytest.mark.parametrize("fault", ["a neighbour's KV", "a column too few", "an old hidden state"])
def test_a_planted_fault_costs_guesses_and_no_token(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, provider = requests(GREEDY, 12)[:4], checked(num_tokens=3)
    look, absorb = KVBatch.look, DonorDraft.absorb

    def faulty(kv: KVBatch, group: Group, layers: Sequence[int]) -> list[Seen]:
        seen = look(kv, group, layers)
        if fault == "a neighbour's KV":
            return [Seen(mx.roll(s.keys, 1, 0), mx.roll(s.values, 1, 0), s.mask) for s in seen]
        return [Seen(s.keys, s.values, mx.arange(s.keys.shape[2]) < 4) for s in seen]

    def stale(draft: DonorDraft, forwarded: Any) -> None:
        absorb(draft, forwarded)
        for name, last in draft._rows.items():
            if last.column:
                draft._rows[name] = type(last)(last.forwarded, last.row, last.column - 1, last.num_held)

    if fault == "an old hidden state":
        monkeypatch.setattr(DonorDraft, "absorb", stale)
    else:
        monkeypatch.setattr(KVBatch, "look", faulty)
    outcome = run(Case(FAMILY, rows=3, chunk=16, provider=provider), wanted, {"r3": 3})
    assert outcome.tokens == run(Case(FAMILY), wanted).tokens
    assert provider.faults


@pytest.mark.parametrize("block", [None, 16])
@pytest.mark.parametrize("codec", ["off", "8", "4", "turbo", "turbo-k4v2@20", "mixed"])
def test_what_is_lent_is_what_attention_reads(
    codec: str, block: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next forward's own columns apart, bit for bit, and each row sees what it holds: all, or a window."""
    runner = Runner(model(FAMILY), scheme(codec), max_width=64, ring_slack=64, block=block)
    lengths = [70, 9, 20, 33]
    runner.kv.resize(len(lengths))
    for slot, length in enumerate(lengths):
        row = list(range(1, length + 1))
        while row:
            chunk = row[: min(64, runner.kv.room(runner.kv.lengths[slot]))]
            group = Group(slot, len(chunk), (len(chunk),))
            runner.forward(group, [chunk], [[0]])
            runner.launch(None)
            runner.kv.commit(group, group.num_tokens)
            del row[: len(chunk)]
    seen = runner.kv.look(Group(0, 1, (1, 1, 0, 1)), (0, 1))
    mx.eval([(s.keys, s.values) for s in seen])
    assert runner.kv.lengths == lengths
    fetched: dict[int, Any] = {}
    for place, layer in enumerate(runner.kv.layers):
        update: Any = cast(Any, layer).update_and_fetch

        def watched(keys: mx.array, values: mx.array, place: int = place, update: Any = update) -> Any:
            fetched[place] = update(keys, values)
            return fetched[place]

        monkeypatch.setattr(layer, "update_and_fetch", watched)
    runner.forward(Group(0, 1, (1, 1, 0, 1)), [[5], [5], [], [5]], [[0]] * 4)
    runner.launch(None)
    for place, (lent, layout) in enumerate(zip(seen, ("window", "full"), strict=True)):
        span = lent.keys.shape[2]
        mask = np.array(mx.broadcast_to(mx.array(lent.mask), (4, 1, 1, span)))[:, 0, 0]
        for slot in (0, 1, 3):
            held = np.flatnonzero(mask[slot])
            assert len(held) == (min(lengths[slot], WINDOW) if layout == "window" else lengths[slot])
            for got, expected in zip((lent.keys, lent.values), fetched[place], strict=True):
                np.testing.assert_array_equal(np.array(got)[slot][:, held], np.array(expected)[slot][:, held])


CELLS: list[dict[str, Any]] = [
    {"codec": "off", "block": None, "store": "restart", "constraint": "none", "rows": 6, "chunk": 7},
    {"codec": "8", "block": 16, "store": "ram", "constraint": "modulo", "rows": 3, "chunk": 16},
    {"codec": "4", "block": None, "store": "dict", "constraint": "none", "rows": 6, "chunk": 512},
    {"codec": "turbo", "block": 16, "store": "restart", "constraint": "none", "rows": 3, "chunk": 512},
    {"codec": "turbo-k4v2@20", "block": None, "store": "ram", "constraint": "none", "rows": 6, "chunk": 16},
    {"codec": "mixed", "block": 16, "store": "none", "constraint": "forced", "rows": 3, "chunk": 7},
]


@pytest.mark.parametrize("number", range(len(CELLS)))
def test_cells_of_the_matrix(number: int) -> None:
    cell = CELLS[number]
    sampler = ("greedy", "mixed")[number % 2]
    expected, expected_next = reference(FAMILY, sampler, cell["codec"], cell["constraint"])
    first, store = requests(wishes(sampler), NUM_TOKENS), make_store(cell["store"], FAMILY)
    case = Case(
        FAMILY,
        rows=cell["rows"],
        chunk=cell["chunk"],
        codec=cell["codec"],
        block=cell["block"],
        bucketed=number % 3 == 0,
        provider=AdaptiveWidth(head_draft("assistant", FAMILY, num_tokens=2), flat_costs()),
        fill=cell["constraint"] == "forced",
        constraints=constraints(cell["constraint"]),
        store=store,
    )
    check(FAMILY, expected, run(case, first, ARRIVALS))
    if cell["store"] == "restart":
        store.restart()
    check(FAMILY, expected_next, run(case, second_turn(first, expected.tokens), ARRIVALS))
    if store.wants:
        assert num_hits(store), "the second turn must find the first"
    if cell["store"] == "restart":
        store.close()


def test_a_row_that_goes_on_from_a_stored_prefix_guesses_from_all_of_it() -> None:
    store = make_store("ram", FAMILY)
    first = requests(GREEDY)[:4]
    answers = run(Case(FAMILY, store=store), first).tokens
    following, provider = second_turn(first, answers), checked(num_tokens=3)
    outcome = run(Case(FAMILY, rows=4, store=store, provider=provider), following)
    assert num_hits(store)
    assert outcome.tokens == run(Case(FAMILY), following).tokens
    assert not provider.faults
    assert provider.num_checked > 12
