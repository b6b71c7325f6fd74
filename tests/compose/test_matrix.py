"""The composition matrix: whatever is combined, every request gets the tokens of its plain single-row run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest

from mantou.cache.none import NoStore
from mantou.cache.ram import RamStore
from mantou.data import Request
from tests.compose.axes import MIXED, combinations, wishes
from tests.compose.drafts import make_provider
from tests.compose.harness import VOCAB, Case, Outcome, requests, run
from tests.compose.restarts import Restartable
from tests.fakes import ConstraintsFor, DictStore, Forced, Modulo, NoisyOracle

FAMILIES = ("llama", "qwen3", "gemma3_text", "gemma4_text", "qwen3_5", "mamba2")
# Their graphs sum a chunk of tokens in another order than single tokens, so log-probabilities agree to 1e-4 only.
SCANS = ("mamba2",)
RECURRENT = ("qwen3_5", "mamba2")
ARRIVALS = {"r1": 2, "r2": 3, "r3": 9, "r4": 11, "r5": 11}
NUM_TOKENS = 16  # rows still meet: the last one arrives before the first has said as many
CONSTRAINED = (1, 3)  # of the six requests
# One row takes one request after the other, which is slow: such a cell has every second wish, and its neighbour in the
# list the other ones. Each half has one that is constrained.
HALVES = ((0, 1, 4), (2, 3, 5))
EVERY = tuple(range(6))
CELLS = [
    pytest.param(
        family,
        HALVES[number % 2] if cell["rows"] == 1 else EVERY,
        cell,
        id=f"{family}-" + "-".join(str(value) for value in cell.values()),
    )
    for index, family in enumerate(FAMILIES)
    for number, cell in enumerate(combinations(index))
]


def constraints(kind: str) -> ConstraintsFor:
    """For the constrained requests and their next turns; their neighbours have none."""
    makers = {"modulo": Modulo, "forced": Forced}
    return ConstraintsFor(
        {}
        if kind == "none"
        else {f"{turn}{i}": lambda: makers[kind](VOCAB) for turn in "rt" for i in CONSTRAINED}
    )


def make_store(kind: str, family: str) -> Any:
    stores = {
        "none": NoStore,
        "dict": DictStore,
        "ram": lambda: RamStore(1 << 30, recurrent=family in RECURRENT),
        "restart": lambda: Restartable(recurrent=family in RECURRENT),
    }
    return stores[kind]()


def num_hits(store: Any) -> int:
    return store.counters.hits if isinstance(store, RamStore) else store.hits


def second_turn(first: Sequence[Request], answers: dict[str, list[int]]) -> list[Request]:
    """Each conversation goes on: prompt + answer + a few new tokens."""
    return [replace(r, id=f"t{r.id[1:]}", prompt=(*r.prompt, *answers[r.id], 1, 2, 3)) for r in first]


class Answers(NamedTuple):
    """What rows say: by request id, their tokens and their log-probabilities."""

    tokens: dict[str, list[int]]
    logprobs: dict[str, list[Any]]


def answers_of(outcome: Outcome) -> Answers:
    found: dict[str, list[Any]] = {}
    for event in outcome.events:
        found.setdefault(event.request_id, []).extend(event.logprobs)
    return Answers(outcome.tokens, found)


@cache
def plain_run(family: str, sampler: str, codec: str, constraint: str, index: int) -> tuple[Answers, Answers]:
    """Request `index` in one row, no drafts, no store, whole prompts: both turns."""
    first = [requests(wishes(sampler), NUM_TOKENS)[index]]
    plain = Case(family, codec=codec, constraints=constraints(constraint))
    one = run(plain, first)
    return answers_of(one), answers_of(run(plain, second_turn(first, one.tokens)))


def reference(
    family: str, sampler: str, codec: str, constraint: str, indices: Sequence[int] = EVERY
) -> tuple[Answers, Answers]:
    """The plain runs of these requests. Only the constrained rows are run anew for every kind of constraint."""
    turns = (Answers({}, {}), Answers({}, {}))
    for index in indices:
        kind = constraint if index in CONSTRAINED else "none"
        for turn, found in zip(turns, plain_run(family, sampler, codec, kind, index), strict=True):
            turn.tokens.update(found.tokens)
            turn.logprobs.update(found.logprobs)
    return turns


def check(family: str, expected: Answers, outcome: Outcome) -> None:
    assert not [event.error for event in outcome.events if event.error]
    got = answers_of(outcome)
    assert got.tokens == expected.tokens
    if family not in SCANS:
        assert got.logprobs == expected.logprobs
    for request_id, entries in expected.logprobs.items():
        found = [entry.logprob for entry in got.logprobs[request_id]]
        assert found == pytest.approx([entry.logprob for entry in entries], abs=1e-4)


@pytest.mark.parametrize(("family", "indices", "cell"), CELLS)
def test_tokens_do_not_depend_on_neighbours_drafts_chunks_or_cache_hits(
    family: str, indices: Sequence[int], cell: dict[str, Any]
) -> None:
    sampler, codec, constraint = cell["sampler"], cell["codec"], cell["constraint"]
    expected, expected_next = reference(family, sampler, codec, constraint, indices)
    first = [requests(wishes(sampler), NUM_TOKENS)[i] for i in indices]
    answers = {**expected.tokens, **expected_next.tokens}
    store = make_store(cell["store"], family)
    case = Case(
        family,
        rows=cell["rows"],
        chunk=cell["chunk"],
        codec=codec,
        block=cell["block"],
        bucketed=cell["shapes"] == "bucketed",
        pipelined=cell["steps"] == "pipelined",
        provider=make_provider(cell["provider"], family, answers, store),
        fill=constraint == "forced",
        constraints=constraints(constraint),
        store=store,
    )
    staggered = ARRIVALS if cell["order"] == "staggered" else {}
    if cell["order"] == "leavers":
        leave = {"r0": 4, "r2": 6}
        leavers = run(case, first, staggered, cancel=leave).tokens
        assert {n: t for n, t in leavers.items() if n not in leave} == {
            n: t for n, t in expected.tokens.items() if n not in leave
        }
    check(family, expected, run(case, first, staggered))
    if isinstance(store, Restartable):
        store.restart()
    check(family, expected_next, run(case, second_turn(first, expected.tokens), staggered))
    if store.wants:
        assert num_hits(store), "the second turn must find the first"
    if isinstance(store, Restartable):
        store.close()


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text"])
@pytest.mark.parametrize("codec", ["off", "8"])
@pytest.mark.parametrize("bucketed", [False, True])
def test_rings_that_wrap_hold_the_same_window(family: str, codec: str, bucketed: bool) -> None:
    first = requests(MIXED, NUM_TOKENS)
    small = {"chunk": 16, "ring_slack": 16, "codec": codec}
    expected = answers_of(run(Case(family, **small), first))
    following = second_turn(first, expected.tokens)
    expected_next = answers_of(run(Case(family, **small), following))
    assert expected.tokens == reference(family, "mixed", codec, "none")[0].tokens  # a ring that never wraps
    answers = {**expected.tokens, **expected_next.tokens}
    case = Case(family, rows=3, bucketed=bucketed, provider=NoisyOracle(answers, 0.7, VOCAB), **small)
    check(family, expected, run(case, first, ARRIVALS))
    check(family, expected_next, run(case, following, ARRIVALS))


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_run_equals_mlx_lm_with_its_own_cache(family: str) -> None:
    import mlx.core as mx

    from mantou.models.load import make_caches
    from tests.compose.harness import model

    expected, _ = reference(family, "greedy", "off", "none")
    module = model(family).module
    for request in requests(wishes("greedy"), NUM_TOKENS):
        caches = make_caches(module)
        logits = module(mx.array([request.prompt]), cache=list(caches))
        tokens = []
        while len(tokens) < request.max_tokens:
            tokens.append(int(mx.argmax(logits[0, -1])))
            logits = module(mx.array([[tokens[-1]]]), cache=list(caches))
        assert expected.tokens[request.id] == tokens
