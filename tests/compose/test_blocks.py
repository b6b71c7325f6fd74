"""Block drafters in cells of the matrix: whatever is stored, packed, constrained or sampled, no answer goes by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from mantou.data import Draft, DraftAsk, Sampling
from mantou.sampling.rejection import RejectionSampler
from mantou.spec.compose import AdaptiveWidth
from mantou.spec.heads.blocks import BlockDraft
from tests.compose.axes import wishes
from tests.compose.drafts import flat_costs
from tests.compose.harness import Case, requests, run
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

CELLS: list[dict[str, Any]] = [
    {"codec": "8", "block": 16, "store": "restart", "constraint": "none"},
    {"codec": "off", "block": None, "store": "ram", "constraint": "modulo"},
]


@pytest.mark.parametrize("number", range(len(CELLS)))
def test_cells_of_the_matrix(number: int) -> None:
    cell = CELLS[number]
    family, sampler = "llama", ("mixed", "greedy")[number % 2]
    expected, expected_next = reference(family, sampler, cell["codec"], cell["constraint"])
    first, store = requests(wishes(sampler), NUM_TOKENS), make_store(cell["store"], family)
    provider = cast(BlockDraft, head_draft("dflash2", family, store, num_tokens=3))
    case = Case(
        family,
        rows=(3, 6)[number % 2],
        chunk=(16, 7)[number % 2],
        codec=cell["codec"],
        block=cell["block"],
        provider=AdaptiveWidth(provider, flat_costs()),
        constraints=constraints(cell["constraint"]),
        store=store,
        taps=provider.graph.taps,
    )
    check(family, expected, run(case, first, ARRIVALS))
    if cell["store"] == "restart":
        store.restart()
    outcome = run(case, second_turn(first, expected.tokens), ARRIVALS)
    check(family, expected_next, outcome)
    assert outcome.step.counters.drafted_tokens > 10
    if store.wants:
        assert num_hits(store), "the second turn must find the first"
    if cell["store"] == "restart":
        store.close()


def test_a_selector_says_what_it_drew_from_to_those_who_verify_by_chances() -> None:
    """Only candidates have a chance, and a guess is one of them."""
    provider = cast(BlockDraft, head_draft("dflash2", "llama", sampler=RejectionSampler(), num_tokens=3))
    propose, seen = provider.propose, list[Draft]()

    def watched(asks: Sequence[DraftAsk]) -> Sequence[Draft]:
        drafts = propose(asks)
        seen.extend(draft for draft in drafts if draft)
        return drafts

    provider.propose = watched  # type: ignore[method-assign]  # to watch it
    wanted = requests(Sampling(temperature=1.0), 20)[:3]
    case = Case("llama", rows=3, provider=provider, sampler=RejectionSampler(), taps=provider.graph.taps)
    answers = run(case, wanted).tokens
    assert [len(answers[request.id]) for request in wanted] == [20, 19, 18]
    assert len(seen) > 12
    for draft in seen:
        assert draft.chances is not None
        chances = np.array(draft.chances)[: len(draft)]
        np.testing.assert_allclose(chances.sum(axis=-1), 1.0, atol=1e-5)
        assert (np.count_nonzero(chances, axis=-1) <= 4).all()
        assert (chances[np.arange(len(draft)), list(draft.tokens)] > 0).all()
