"""Proof that the matrix can fail: each planted fault must change some request's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from mantou.data import Sampling
from mantou.engine import flight as flight_module
from mantou.engine.groups import Feed
from mantou.kv.batch import KVBatch
from mantou.kv.geometry import Geometry
from mantou.kv.pages import Pages, Placement
from mantou.kv.recurrent import RecurrentState
from mantou.kv.tape import Tape
from mantou.models.runner import Runner
from mantou.sampling import noise, sampler
from tests.compose.harness import VOCAB, Case, requests, run
from tests.fakes import ConstraintsFor, Forced, NoisyOracle

GREEDY = Sampling()
STAGGERED = {"r1": 2, "r2": 3, "r3": 9, "r4": 11}


def differs(family: str = "llama", sampling: Sampling = GREEDY, *, plant: Any, **changes: Any) -> bool:
    """Whether the combined run differs from the plain one once `plant()` was called."""
    wanted = requests(sampling)
    expected = run(Case(family, **changes), wanted)
    oracle = NoisyOracle(expected.tokens, 0.6, VOCAB)
    case = Case(family, rows=4, provider=oracle, **{"chunk": 16, **changes})
    assert run(case, wanted, STAGGERED).tokens == expected.tokens
    plant()
    try:
        return run(case, wanted, STAGGERED).tokens != expected.tokens
    except AssertionError:
        return True


def test_accepting_every_draft_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def accept_all(draft: Sequence[int], drawn: Sequence[int]) -> list[int]:
        return [*draft, drawn[len(draft)]]

    assert differs(plant=lambda: monkeypatch.setattr(flight_module, "agree", accept_all))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])
def test_keeping_rejected_tokens_in_the_kv_is_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = KVBatch.commit
    assert differs(
        family,
        plant=lambda: monkeypatch.setattr(KVBatch, "commit", lambda s, g, kept: commit(s, g, g.num_tokens)),
    )


@pytest.mark.parametrize("codec", ["off", "8@20"])
def test_a_wrong_entry_in_the_table_of_blocks_is_noticed(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that reads the blocks of its neighbour."""
    placed = Pages.placed

    def crossed(pages: Pages, geometry: Geometry) -> Placement:
        found = placed(pages, geometry)
        if geometry.num_rows > 1 and geometry.starts[0]:
            found._rows[1, 0] = found._rows[0, 0]
        return found

    plant = lambda: monkeypatch.setattr(Pages, "placed", crossed)  # noqa: E731
    assert differs(plant=plant, codec=codec, block=16)


def test_blocks_that_go_to_two_rows_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps(pages: Pages, slot: int) -> None:
        pages._free = [*pages.blocks(slot), *pages._free]  # free, and still in the row's table

    assert differs(plant=lambda: monkeypatch.setattr(Pages, "release", keeps), block=16)


def test_recurrent_state_that_is_not_restored_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert differs(
        "mamba2", plant=lambda: monkeypatch.setattr(RecurrentState, "rewind", lambda s, g, kept: True)
    )


def test_skipping_the_replay_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def skip(runner: Runner, group: Any, tokens: Any, kept: Sequence[int]) -> None:
        runner.kv.commit(group, group.num_tokens)

    assert differs("jamba", plant=lambda: monkeypatch.setattr(Runner, "replay", skip))


@pytest.mark.parametrize("family", ["qwen3_5", "mamba2"])
def test_a_tape_that_stops_a_token_late_is_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rewound = Tape.rewound
    late = lambda tape, kept: rewound(tape, kept + 1)  # noqa: E731
    assert differs(family, plant=lambda: monkeypatch.setattr(Tape, "rewound", late))


def test_sure_tokens_that_are_drawn_at_their_first_place_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def everywhere(feed: Feed) -> None:
        return None

    constraints = ConstraintsFor({"r1": lambda: Forced(VOCAB)})
    plant = lambda: monkeypatch.setattr(Feed, "wanted", property(everywhere))  # noqa: E731
    assert differs(constraints=constraints, fill=True, plant=plant)


def test_a_mask_that_shows_other_rows_garbage_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def everything(geometry: Geometry, span: int, window: int) -> mx.array:
        return mx.ones((geometry.num_rows, 1, geometry.width, span), mx.bool_)

    assert differs(plant=lambda: monkeypatch.setattr(Geometry, "causal_mask", everything))


def test_a_window_one_token_too_wide_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    causal_mask = Geometry.causal_mask
    wider = lambda s, span, w: causal_mask(s, span, w + 1 if w else 0)  # noqa: E731
    assert differs("gemma3_text", plant=lambda: monkeypatch.setattr(Geometry, "causal_mask", wider))


@pytest.mark.parametrize(("size", "window"), [(0, 1), (1, 0)])
def test_a_wrapped_ring_that_shows_the_wrong_slots_is_noticed(
    size: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring_mask = Geometry.ring_mask
    wrong = lambda s, n, w: ring_mask(s, n, w + window) if not size else mx.roll(ring_mask(s, n, w), 1, -1)  # noqa: E731
    assert differs(
        "gemma3_text",
        plant=lambda: monkeypatch.setattr(Geometry, "ring_mask", wrong),
        chunk=16,
        ring_slack=16,
    )


def test_noise_keyed_by_the_row_instead_of_the_position_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    uniform = noise.uniform

    def by_row(words: mx.array, positions: mx.array, size: int, stream: int) -> mx.array:
        return uniform(
            words, mx.arange(positions.size, dtype=mx.uint32).reshape(positions.shape), size, stream
        )

    assert differs(
        sampling=Sampling(temperature=0.9),
        plant=lambda: monkeypatch.setattr(sampler.noise, "uniform", by_row),
    )


def test_a_slot_that_moves_without_its_kv_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(batch: KVBatch, source: int, target: int) -> None:
        batch.lengths[target], batch.lengths[source] = batch.lengths[source], 0

    assert differs(plant=lambda: monkeypatch.setattr(KVBatch, "move", forget))
