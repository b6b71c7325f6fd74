"""Draft heads in the batch: what they are fed, what stays of a row, and that no answer depends on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from mantou.cache.ram import RamStore
from mantou.data import Draft, DraftAsk, Request, Sampling, Speculation
from mantou.kv.codecs import make_scheme
from mantou.models.runner import Runner
from mantou.protocols import Group
from mantou.spec.compose import ByKind
from mantou.spec.heads.blocks import BlockDraft
from mantou.spec.heads.provider import HeadDraft, HeadGraph
from mantou.spec.none import NoDraft
from tests.compose.harness import Case, own_model, prompts, requests, run
from tests.compose.heads import (
    head_draft,
)
from tests.compose.restarts import Restartable
from tests.fakes import DictStore

GREEDY = Sampling()
KINDS = ("eagle",)
CASES = [
    ("eagle", "llama"),
    ("eagle", "gemma3_text"),
    ("eagle", "qwen3_5"),
    ("eagle3", "llama"),
    ("eagle3", "gemma3_text"),
    ("dspark", "llama"),
    ("dspark", "qwen3_5"),
    ("dflash", "gemma3_text"),
    ("dflash2", "llama"),
    ("dflash2", "qwen3_5"),
    ("mtp", "qwen3_5"),
    ("mtp", "glm_moe_dsa"),
]


class Checked(HeadDraft):
    """Compares every guess with what the head says when it is given the whole row at once."""

    kind: str
    family: str
    num_checked: int
    faults: list[tuple[list[int], list[int]]]

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Draft]:
        drafts = super().propose(asks)
        for ask, draft in zip(asks, drafts, strict=True):
            if draft:
                self.num_checked += 1
                expected = from_scratch(self, self.family, list(ask.tokens), len(draft))
                if list(draft.tokens) != expected:  # the engine would not let an error through
                    self.faults.append((list(draft.tokens), expected))
        return drafts


class CheckedBlock(Checked, BlockDraft):
    pass


@cache
def reader(family: str, taps: tuple[int, ...]) -> Runner:
    runner = Runner(own_model(family), make_scheme("off"), max_width=512)
    if taps:
        runner.tap(taps)
    runner.capture_hidden()
    return runner


@cache
def other_graph(kind: str, family: str) -> HeadGraph:
    return head_draft(kind, family).graph


def true_states(family: str, tokens: list[int], taps: tuple[int, ...]) -> mx.array:
    runner = reader(family, taps)
    runner.kv.resize(0)
    runner.kv.resize(1)
    runner.forward(Group(0, len(tokens), (len(tokens),)), [tokens], [[0]])
    hidden = runner.take_hidden()
    runner.abort()
    assert hidden is not None
    return hidden


def from_scratch(provider: HeadDraft, family: str, tokens: list[int], count: int) -> list[int]:
    """The greedy guesses after `tokens`: every link of the chain runs all pairs anew."""
    graph, said = other_graph(provider.kind, family), []
    hidden = true_states(family, tokens[:-1], graph.taps)
    width, known = hidden.shape[1], tokens
    if isinstance(provider, BlockDraft):
        return block_from_scratch(graph, hidden, tokens, count)
    for _ in range(count):
        graph.kv.resize(0)
        graph.kv.resize(1)
        graph.kv.begin(Group(0, width, (width,)))
        features = graph(mx.array([known[1:]], mx.int32), hidden)[:, -1:]
        graph.kv.commit(Group(0, width, (width,)), (width,))
        for token in said:  # its own estimates come one by one
            graph.kv.begin(Group(0, 1, (1,)))
            features = graph(mx.array([[token]], mx.int32), features)
            graph.kv.commit(Group(0, 1, (1,)), (1,))
        best = int(mx.argmax(graph.logits(features), axis=-1).item())
        token = best if graph.ids is None else int(graph.ids[best].item())
        said.append(token)
    return said


def block_from_scratch(graph: Any, hidden: mx.array, tokens: list[int], count: int) -> list[int]:
    width, said = hidden.shape[1], []
    graph.kv.resize(0)
    graph.kv.resize(1)
    graph.kv.begin(Group(0, width, (width,)))
    graph(mx.array([tokens[1:]], mx.int32), hidden)
    graph.kv.commit(Group(0, width, (width,)), (width,))
    graph.kv.begin(Group(0, graph.block_size, (graph.block_size,)))
    features = graph.block(mx.array([tokens[-1:]], mx.int32))
    graph.kv.abort()
    for place in range(count):
        before = mx.array([[*tokens, *said][-1:]], mx.int32)
        best = int(mx.argmax(graph.scores(features[:, place : place + 1], before), axis=-1).item())
        said.append(best if graph.ids is None else int(graph.ids[best].item()))
    return said


def checked(kind: str, family: str, **more: Any) -> Checked:
    provider = head_draft(kind, family, **more)
    provider.__class__ = CheckedBlock if isinstance(provider, BlockDraft) else Checked
    assert isinstance(provider, Checked)
    provider.kind = kind
    provider.family, provider.num_checked, provider.faults = family, 0, []
    return provider


@pytest.mark.parametrize(("kind", "family"), CASES)
def test_a_head_guesses_as_if_it_had_seen_the_row_at_once(kind: str, family: str) -> None:
    """Whatever was rejected, however rows join and leave: a stale pair would change what it guesses."""
    wanted = requests(GREEDY, 9)[:4]
    provider = checked(kind, family, num_tokens=3)
    taps = provider.graph.taps
    case = Case(family, rows=3, chunk=16, provider=provider, pipelined=False, taps=taps)
    outcome = run(case, wanted, {"r3": 3})
    assert outcome.tokens == run(Case(family), wanted).tokens
    assert not provider.faults
    assert provider.num_checked > 12
    assert provider.graph.kv.num_slots == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_is_asked_now_and_then_catches_up(kind: str) -> None:
    """Rows that rest from guesses that do not pay must be right again afterwards."""
    provider = checked(kind, "llama", num_tokens=3)
    propose = provider.propose

    def seldom(asks: Sequence[DraftAsk]) -> Sequence[Draft]:
        return propose([replace(ask, paid_width=3 * (len(ask.tokens) % 5 == 0)) for ask in asks])

    provider.propose = seldom  # type: ignore[method-assign]
    wanted = [Request("r0", prompts()[1], GREEDY, max_tokens=60), Request("r1", (5,), GREEDY, max_tokens=20)]
    outcome = run(Case("llama", rows=2, chunk=32, provider=provider), wanted)
    assert outcome.tokens == run(Case("llama"), wanted).tokens
    assert not provider.faults
    assert provider.num_checked > 12


@pytest.mark.parametrize(("kind", "family"), [("eagle", "llama"), ("mtp", "qwen3_5")])
@pytest.mark.parametrize("restart", [False, True])
def test_a_second_turn_finds_the_pairs_of_the_first(kind: str, family: str, restart: bool) -> None:
    """All but the last pair, whose token was not known: a guess after it may differ, the pairs themselves may not."""
    recurrent = family == "qwen3_5"
    store: Any = Restartable(recurrent=recurrent) if restart else RamStore(1 << 30, recurrent=recurrent)
    first = Request("r0", prompts()[3], GREEDY, max_tokens=30)
    plain = run(Case(family), [first]).tokens["r0"]
    provider = head_draft(kind, family, store)
    assert run(Case(family, store=store, provider=provider), [first]).tokens["r0"] == plain
    if restart:
        store.restart()
    second = Request("r1", (*first.prompt, *plain, 1, 2, 3), GREEDY, max_tokens=12)
    provider = head_draft(kind, family, store)
    begun: list[tuple[int, int]] = []
    settled = provider._settled

    def watched(row: Any) -> bool:
        waited, done = row.ticket is not None, settled(row)
        if waited and done:
            begun.append((row.base, row.num_true))
        return done

    provider._settled = watched  # type: ignore[method-assign]
    outcome = run(Case(family, store=store, provider=provider), [second])
    assert outcome.tokens == run(Case(family), [second]).tokens
    (base, num_true), *_ = begun
    assert base == 0
    assert num_true >= len(first.prompt) + len(plain) - 3
    if restart:
        store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_without_its_pairs_a_restored_row_has_a_shorter_context_and_the_same_answer(kind: str) -> None:
    store = DictStore()
    first = Request("r0", prompts()[3], GREEDY, max_tokens=20)
    plain = run(Case("llama", store=store), [first]).tokens["r0"]
    second = Request("r1", (*first.prompt, *plain, 1, 2, 3), GREEDY, max_tokens=12)
    provider = head_draft(kind, "llama")
    outcome = run(Case("llama", store=store, provider=provider), [second])
    assert store.hits
    assert outcome.tokens == run(Case("llama"), [second]).tokens
    assert outcome.step.counters.drafted_tokens > 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_raises_half_way_is_right_again_for_the_rows_that_go_on(kind: str) -> None:
    provider, wanted, calls = checked(kind, "llama", num_tokens=3), requests(GREEDY, 12)[:3], []
    graph = provider.graph
    logits = graph.logits

    def failing(features: mx.array) -> mx.array:
        calls.append(1)
        if len(calls) == 8:
            raise RuntimeError("planted fault")
        return logits(features)

    graph.logits = failing  # type: ignore[method-assign]
    outcome = run(Case("llama", rows=3, chunk=64, provider=provider), wanted)
    assert outcome.tokens == run(Case("llama"), wanted).tokens
    assert len(calls) > 8
    assert not provider.faults


def test_a_head_reads_only_the_rows_that_ask_for_it() -> None:
    """A head is fed every forward: rows of another kind would cost it time and slots."""
    wanted = [
        replace(request, speculation=Speculation(kind))
        for request, kind in zip(requests(GREEDY), ("off", "eagle", "off", None, "off", "off"), strict=True)
    ]
    head, seen = head_draft("eagle", "llama"), set[str]()
    absorb = head.absorb
    head.absorb = lambda forwarded: (seen.update(r.id for r in forwarded.requests if r), absorb(forwarded))  # type: ignore[method-assign]
    outcome = run(Case("llama", rows=6, provider=ByKind({"off": NoDraft(), "eagle": head}, "off")), wanted)
    assert outcome.tokens == run(Case("llama"), wanted).tokens
    assert seen == {"r1"}
