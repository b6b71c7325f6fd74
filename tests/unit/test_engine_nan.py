"""A model that gives no number ends the row that it gave none for; nobody else notices, not even who gets its slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from mantou.data import Request, Sampling
from mantou.engine.step import Step
from mantou.models.load import describe
from mantou.sampling.rejection import RejectionSampler
from mantou.sampling.sampler import DeviceSampler
from tests.compose import harness
from tests.compose.axes import MIXED
from tests.compose.families import FAMILIES, tiny
from tests.compose.harness import VOCAB, Case, capabilities, make_step, requests
from tests.fakes import ConstraintsFor, Modulo, NoisyOracle
from tests.unit.test_engine_step import drive, errors, finishes

NAN_TOKEN = 96
HEALTHY = Sampling(logit_bias=((NAN_TOKEN, -1e9),))  # never says it
LONG = (*range(1, 40), NAN_TOKEN, *range(40, 60))


@cache
def spoilt(family: str) -> Any:
    """The family's tiny model, in which the embedding of one token is NaN."""
    module = tiny(family)
    table = module.model.embed_tokens
    table.weight = mx.where(mx.arange(table.weight.shape[0])[:, None] == NAN_TOKEN, mx.nan, table.weight)
    return describe(module, FAMILIES[family], capabilities(family))


@pytest.fixture(autouse=True)
def the_spoilt_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "model", lambda family, seed=0: spoilt(family))


def neighbours(wish: Sampling | None = None) -> list[Request]:
    found = [r for r in requests(wish or MIXED, 12) if NAN_TOKEN not in r.prompt]
    return [replace(r, sampling=replace(r.sampling, logit_bias=HEALTHY.logit_bias)) for r in found]


def poisonous(name: str, prompt: Sequence[int] = LONG, wish: Sampling | None = None) -> Request:
    return Request(name, tuple(prompt), wish or Sampling(), max_tokens=9)


def assert_only(
    step: Step, wanted: list[Request], at_fault: set[str], expected: dict[str, list[int]]
) -> None:
    tokens, events = drive(step, wanted)
    found = errors(events)
    assert set(found) == at_fault
    for request in wanted:
        assert len(finishes(events, request.id)) == 1
        if request.id in at_fault:
            assert "NaN" in found[request.id]
            assert not tokens[request.id]
        else:
            assert tokens[request.id] == expected[request.id]
    assert step.runner.kv.num_slots == 0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pipelined": False},
        {"chunk": 16},
        {"chunk": 16, "bucketed": True},
        {"chunk": 16, "codec": "8@24"},
        {"codec": "8"},
        {"codec": "turbo"},
        {"block": 16},
        {"block": 16, "codec": "8@24", "bucketed": True},
        {"bucketed": True},
        {"family": "qwen3_5"},
        {"family": "gemma3_text"},
    ],
    ids=str,
)
def test_a_row_without_numbers_ends_and_its_neighbours_go_on(changes: dict[str, Any]) -> None:
    wanted = neighbours()
    expected = drive(make_step(Case(**changes)), wanted)[0]
    step = make_step(Case(rows=4, **changes))
    sick = [
        poisonous("x0"),
        poisonous("x1", [NAN_TOKEN], Sampling(temperature=1.0, top_p=0.9, top_logprobs=2)),
    ]
    assert_only(step, [*sick, *wanted], {"x0", "x1"}, expected)
    assert_only(step, wanted, set(), expected)


@pytest.mark.parametrize("codec", ["off", "8", "8@8"])
def test_a_row_that_takes_the_place_of_one_without_numbers_finds_none_of_it_there(codec: str) -> None:
    """The other came from the prefix store, so it has KV before its first draw."""
    step = make_step(Case(codec=codec, rows=2))
    for name, length in (("a", 5), ("b", 30)):
        step.submit(Request(name, tuple(range(1, length)), HEALTHY, max_tokens=20))
    for _ in range(9):
        step.advance()
    step.land()
    kv = step.runner.kv
    for array in kv.arrays():
        if mx.issubdtype(array.dtype, mx.floating):
            array[1, :, : kv.lengths[1]] = mx.nan
    kv.swap(0, 1)
    assert kv.lengths[0] > kv.lengths[1] > 0, kv.lengths
    for array in kv.arrays():
        assert not mx.any(mx.isnan(array[1])).item()


@pytest.mark.parametrize("rejects", [False, True])
def test_drafts_and_grammars_of_a_row_without_numbers_end_with_it(rejects: bool) -> None:
    wanted = neighbours(Sampling())
    expected = drive(make_step(Case()), wanted)[0]
    guesses = {**expected, "x0": [0, 0, 0, 0], "x1": [5, 6, 7]}
    case = Case(
        rows=4,
        provider=NoisyOracle(guesses, 0.8, VOCAB),
        sampler=(RejectionSampler if rejects else DeviceSampler)(),
        constraints=ConstraintsFor({"x1": lambda: Modulo(VOCAB)}),
    )
    assert_only(make_step(case), [*wanted, poisonous("x0"), poisonous("x1")], {"x0", "x1"}, expected)


def test_a_row_that_loses_its_numbers_on_the_way_keeps_what_it_said() -> None:
    wanted = neighbours()
    expected = drive(make_step(Case()), wanted)[0]
    # Nothing but the poisonous token, from the third on.
    forced = replace(wanted[0], id="x0", sampling=Sampling(logit_bias=((NAN_TOKEN, 1e4),)))
    tokens, events = drive(make_step(Case(rows=3)), [forced, *wanted])
    assert tokens.pop("x0") == [NAN_TOKEN]
    assert set(errors(events)) == {"x0"}
    assert tokens == expected


@pytest.mark.parametrize("wish", MIXED)
def test_every_kind_of_draw_shows_that_there_was_no_number(wish: Sampling) -> None:
    logits = mx.concatenate([mx.full((1, 2, 50), mx.nan), mx.random.normal((1, 2, 50))]).astype(mx.bfloat16)
    for sampler in (DeviceSampler(), RejectionSampler()):
        history = [((1, 2), (3,))] * 2
        drawn = sampler.draw(logits, sampler.prepare([wish, wish]), [(4, 5), (4, 5)], history=history)
        assert [[x != x for x in row] for row in drawn.scores.tolist()] == [[True] * 2, [False] * 2]
