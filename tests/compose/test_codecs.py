"""Codecs and layouts where the matrix does not reach: thresholds, rings of chunks, short beginnings, budgets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mantou.cache.ram import RamStore
from mantou.data import Sampling
from mantou.engine.scheduler import FairScheduler
from tests.compose.harness import VOCAB, Case, requests, run
from tests.compose.probe import STAGGERED, serial
from tests.fakes import NoisyOracle

WANTED = requests(Sampling(), 14)  # prompts of 5, 41, 17, 70, 9 and 1 tokens


@pytest.mark.parametrize(("family", "start"), [("llama", 20), ("gemma3_text", 48), ("deepseek_v32", 1)])
def test_a_row_is_packed_at_its_own_threshold_whatever_the_chunks_drafts_and_hits(
    family: str, start: int
) -> None:
    codec = f"4@{start}"
    alone = run(Case(family, codec=codec, ring_slack=16, chunk=16), WANTED)
    following = [replace(r, id=f"t{r.id}", prompt=(*r.prompt, *alone.tokens[r.id], 1, 2)) for r in WANTED]
    alone_again = run(Case(family, codec=codec, ring_slack=16, chunk=16), following)
    native = run(Case(family, ring_slack=16, chunk=16), WANTED)
    for request in WANTED:
        if len(request.prompt) + (request.max_tokens or 0) <= start:
            assert alone.tokens[request.id] == native.tokens[request.id], "a short row is native"
    answers = {**alone.tokens, **alone_again.tokens}
    store = RamStore(1 << 28)
    case = Case(
        family,
        rows=3,
        chunk=7,
        codec=codec,
        ring_slack=16,
        store=store,
        provider=NoisyOracle(answers, 0.7, VOCAB),
    )
    assert run(case, WANTED, STAGGERED).tokens == alone.tokens
    assert run(case, following).tokens == alone_again.tokens
    assert store.counters.hits == len(following)


def test_a_row_beyond_its_threshold_is_what_it_is_without_one() -> None:
    """Only the prompt's own forward differs, and a prompt of one token has nothing to differ in."""
    one = [replace(WANTED[5], max_tokens=24)]
    assert run(Case("llama", codec="4@1"), one).tokens == run(Case("llama", codec="4"), one).tokens


@pytest.mark.parametrize("codec", ["off", "8"])
def test_chunks_of_attention_that_wrap_their_ring_see_the_same(codec: str) -> None:
    """llama4 of chunks of 16 tokens, in rings of 32."""
    if codec == "off":
        expected = {request.id: serial("llama4", request) for request in WANTED}
    else:
        expected = run(Case("llama4", codec=codec), WANTED).tokens
    for rows, chunk in ((1, 16), (6, 7)):
        case = Case("llama4", rows=rows, chunk=chunk, codec=codec, ring_slack=16)
        assert run(case, WANTED, STAGGERED).tokens == expected


def test_a_graph_that_keeps_its_last_tokens_may_begin_with_fewer() -> None:
    few = [WANTED[0], WANTED[4], WANTED[5]]
    expected = {request.id: serial("longcat_flash_ngram", request) for request in few}
    assert run(Case("longcat_flash_ngram", rows=3, chunk=1), few, {"r4": 2}).tokens == expected


def test_rows_beyond_the_budget_wait_and_get_the_same_tokens() -> None:
    seen: list[int] = []

    def fits(lengths: object) -> bool:
        assert isinstance(lengths, list)
        seen.append(len(lengths))
        return len(lengths) * max(lengths) <= 200

    expected = run(Case("llama"), WANTED).tokens
    outcome = run(Case("llama", scheduler=FairScheduler(6, fits)), WANTED)
    assert outcome.tokens == expected
    assert 1 < max(seen) <= 4
