"""Speculation in the batch: what any pattern of acceptance leaves behind, hidden states, draft models, faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mantou.cache.ram import RamStore
from mantou.data import Draft, DraftAsk, Request, Sampling, Speculation
from mantou.kv.batch import RowView
from mantou.kv.codecs import make_scheme
from mantou.kv.pieces import Stack
from mantou.models.runner import Runner
from mantou.protocols import Forwarded, Group
from mantou.spec.compose import ByKind
from mantou.spec.model import ModelDraft
from mantou.spec.ngram import NGram
from mantou.spec.none import NoDraft
from tests.compose.drafts import flat_costs, make_provider, model_draft
from tests.compose.harness import VOCAB, Case, Outcome, make_step, model, prompts, requests, run
from tests.compose.restarts import InOrder, Restartable
from tests.fakes import ConstraintsFor, DictStore, Forced, NoisyOracle

GREEDY = Sampling()
FAMILIES = ("llama", "gemma3_text", "qwen3_5", "mamba2")
PROMPT = prompts()[1]


class Planned(NoDraft):
    """Each round of a row: so many right tokens, then so many wrong ones."""

    def __init__(self, answers: dict[str, Sequence[int]], rounds: Sequence[tuple[int, int]]) -> None:
        self.answers = answers
        self.rounds = {name: list(rounds[i:]) + list(rounds[:i]) for i, name in enumerate(answers)}

    def width(self, request: Request, tokens: Sequence[int]) -> int:
        return 8

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Draft]:
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: DraftAsk) -> Draft:
        done = len(ask.tokens) - len(ask.request.prompt)
        rounds = self.rounds[ask.request.id]
        right, wrong = rounds.pop(0) if rounds else (0, 0)
        known = list(self.answers[ask.request.id][done : done + right + wrong])
        return Draft([t if i < right else (t + 1) % VOCAB for i, t in enumerate(known)], "planned")


def stacks_of(outcome: Any, slot: int, num_tokens: int) -> list[np.ndarray]:
    view = RowView(outcome.runner.kv, slot)
    state = view.state()
    found: list[Stack] = [*view.columns(0, num_tokens).stacks, *(state.stacks if state else ())]
    return [stack.data.astype(np.float32) for stack in found]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6, deadline=None)
@given(rounds=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=3, max_size=7))
def test_any_pattern_of_acceptance_leaves_the_kv_of_a_fresh_prompt(
    family: str, rounds: list[tuple[int, int]]
) -> None:
    wanted = [Request(f"r{i}", prompt, GREEDY, max_tokens=40) for i, prompt in enumerate(prompts()[:3])]
    answers = answers_of(family)
    step = make_step(Case(family, rows=3, chunk=64, provider=Planned(dict(answers), rounds), pipelined=False))
    for request in wanted:
        step.submit(request)
    for _ in range(len(rounds) + 3):
        step.advance()
    for row in step.running:
        assert row.tokens[row.num_prompt :] == answers[row.id][: row.num_generated]
        fresh = make_step(Case(family, rows=1, chunk=4096, pipelined=False))
        fresh.submit(Request("fresh", tuple(row.tokens[: row.num_kv]), GREEDY, max_tokens=9))
        fresh.advance()
        (other,) = fresh.running
        assert other.num_kv == row.num_kv
        pairs = zip(stacks_of(step, row.slot, row.num_kv), stacks_of(fresh, 0, row.num_kv), strict=True)
        for got, expected in pairs:
            # A recurrent graph sums a chunk in another order than single tokens.
            np.testing.assert_allclose(got, expected, atol=2e-4 if step.runner.recurrent else 1e-5)


_ANSWERS: dict[str, dict[str, list[int]]] = {}


def answers_of(family: str) -> dict[str, list[int]]:
    if family not in _ANSWERS:
        wanted = [Request(f"r{i}", prompt, GREEDY, max_tokens=40) for i, prompt in enumerate(prompts()[:3])]
        _ANSWERS[family] = run(Case(family), wanted).tokens
    return _ANSWERS[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_that_ends_inside_an_accepted_draft_leaves_what_its_tokens_say(family: str) -> None:
    """What was drafted beyond the end must not be kept, or the next turn would go on from it."""
    first = Request("r0", PROMPT, GREEDY, max_tokens=12)
    (whole,) = run(Case(family), [first]).tokens.values()
    ends = replace(first, eos=frozenset({whole[7]}))
    (said,) = run(Case(family), [ends]).tokens.values()
    store = DictStore()
    beyond = NoisyOracle({"r0": whole, "t0": []}, 1.0, VOCAB, width=9)
    beyond._guess = lambda request, n, width: Draft(
        whole[n - len(PROMPT) : n - len(PROMPT) + width], "beyond"
    )
    assert run(Case(family, store=store, provider=beyond), [ends]).tokens["r0"] == said
    following = Request("t0", (*PROMPT, *said, whole[len(said)], 4, 5, 6), GREEDY, max_tokens=12)
    expected = run(Case(family), [following]).tokens
    assert run(Case(family, store=store), [following]).tokens == expected
    assert store.hits


# ------------------------------------------------------------------ hidden states
class Watcher(NoisyOracle):
    """A provider that reads hidden states and only keeps them, by request and position."""

    wants_hidden = True

    def __init__(self, answers: dict[str, Sequence[int]]) -> None:
        super().__init__(answers, 0.6, VOCAB)
        self.seen: dict[str, dict[int, tuple[int, np.ndarray]]] = {name: {} for name in answers}

    def absorb(self, forwarded: Forwarded) -> None:
        tokens, hidden = np.array(forwarded.tokens), np.array(forwarded.hidden.astype(mx.float32))
        for i, request in enumerate(forwarded.requests):
            if request is not None:
                for t in range(forwarded.kept[i]):
                    assert forwarded.starts[i] + t not in self.seen[request.id], "a position came twice"
                    self.seen[request.id][forwarded.starts[i] + t] = int(tokens[i, t]), hidden[i, t]


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])
def test_a_provider_sees_the_hidden_state_of_every_kept_token_once(family: str, pipelined: bool) -> None:
    wanted = requests(GREEDY, 16)[:4]
    expected = run(Case(family), wanted).tokens
    watcher = Watcher(dict(expected))
    outcome = run(Case(family, rows=3, chunk=16, provider=watcher, pipelined=pipelined), wanted, {"r3": 3})
    assert outcome.tokens == expected
    runner = Runner(model(family), make_scheme("off"), max_width=512)
    runner.capture_hidden()
    for request in wanted:
        tokens = [*request.prompt, *expected[request.id]][:-1]
        seen = watcher.seen[request.id]
        assert [seen[p][0] for p in sorted(seen)][: len(tokens)] == tokens
        assert sorted(seen) == list(range(len(seen)))
        runner.kv.resize(1)
        runner.kv.clear(0)
        runner.forward(Group(0, len(tokens), (len(tokens),)), [tokens], [[0]])
        hidden = np.array(runner.take_hidden().astype(mx.float32))[0]
        runner.abort()
        np.testing.assert_allclose(np.stack([seen[p][1] for p in range(len(tokens))]), hidden, atol=2e-4)


# ------------------------------------------------------------------ a draft model
def accepted(outcome: Outcome) -> float:
    counters = outcome.step.counters
    return counters.accepted_tokens / max(counters.drafted_tokens, 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_model_with_the_same_weights_is_always_right(family: str, temperature: float) -> None:
    """It draws with the row's own noise, so that holds for sampled rows as well."""
    wanted = requests(Sampling(temperature=temperature), 20)
    expected = run(Case(family), wanted)
    outcome = run(Case(family, rows=3, chunk=16, provider=model_draft(family, noise=0.0)), wanted, {"r4": 3})
    assert outcome.tokens == expected.tokens
    assert accepted(outcome) > 0.97  # mamba2's graph sums chunks in another order
    assert outcome.step.counters.steps < expected.step.counters.steps / 2


def test_a_draft_model_of_another_family_helps_any_target() -> None:
    wanted = requests(GREEDY, 12)[:4]
    for target, draft in (("mamba2", "llama"), ("llama", "qwen3_5"), ("gemma3_text", "mamba2")):
        provider = model_draft(draft, num_tokens=2)
        outcome = run(Case(target, rows=3, chunk=16, provider=provider), wanted, {"r3": 4})
        assert outcome.tokens == run(Case(target), wanted).tokens
        assert outcome.step.counters.drafted_tokens > 20


def test_a_draft_model_reads_a_prompt_that_it_has_seen_from_the_prefix_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, fed = RamStore(1 << 30, recurrent=False), []
    prompt = tuple(range(90)) + tuple(range(90))
    catch_up = ModelDraft._catch_up

    def counted(draft: ModelDraft, row: Any, ask: DraftAsk) -> None:
        before = len(row.held)
        catch_up(draft, row, ask)
        fed.append(len(row.held) - before)

    monkeypatch.setattr(ModelDraft, "_catch_up", counted)
    for seen_before in (False, True):
        fed.clear()
        wanted = [Request("r0", prompt, GREEDY, max_tokens=24)]
        provider = model_draft("llama", store, noise=0.0)
        outcome = run(Case("llama", store=store, provider=provider, chunk=64), wanted)
        assert outcome.tokens == run(Case("llama"), wanted).tokens
        assert accepted(outcome) == 1.0
        assert (not fed) if seen_before else sum(fed) > 100
        store.check_integrity()


@pytest.mark.parametrize(
    ("family", "order"),
    [
        ("llama", "r0, draft r0, r1, draft r1"),  # a row's draft comes before the other row's own
        ("llama", "r0, r1, draft r1, draft r0"),  # or after it, and r0 has decoded alone meanwhile
        ("qwen3_5", "r0, r1, draft r1, draft r0"),
    ],
)
def test_after_a_restart_either_ticket_may_come_back_first(
    family: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft's ticket is asked for once its own row runs, so it can only be early or late beside another row's."""
    fed: list[int] = []
    catch_up = ModelDraft._catch_up
    monkeypatch.setattr(
        ModelDraft, "_catch_up", lambda *args: (fed.append(len(args[2].tokens)), catch_up(*args))[1]
    )
    disk = Restartable(recurrent=family == "qwen3_5")
    turns = [Request(f"r{i}", prompts()[3][i:], GREEDY, max_tokens=9) for i in range(2)]
    plain = run(Case(family), turns).tokens
    first = Case(family, rows=2, store=disk, provider=model_draft(family, disk, noise=0.0), pipelined=False)
    assert run(first, turns).tokens == plain
    assert fed
    fed.clear()
    disk.restart()
    turns = [replace(turn, prompt=(*turn.prompt, *plain[turn.id], 1, 2, 3), max_tokens=24) for turn in turns]
    names = order.split(", ")
    store = InOrder(disk, {turn.id: turn.prompt for turn in turns}, names)
    provider = model_draft(family, store, noise=0.0)
    outcome = run(Case(family, rows=2, store=store, provider=provider, pipelined=False), turns)
    assert outcome.tokens == run(Case(family), turns).tokens
    assert store.used == names
    assert accepted(outcome) == 1.0
    assert outcome.step.counters.accepted_tokens > 12
    assert not fed, "what came back is not read again"
    assert disk.hits == 4
    disk.close()


def test_rows_leave_nothing_in_a_draft_model() -> None:
    provider = model_draft("llama")
    run(Case("llama", rows=4, chunk=16, provider=provider), requests(GREEDY), {"r3": 4}, cancel={"r1": 5})
    assert provider.runner.kv.num_slots == 0
    provider.runner.kv.check_integrity()


def test_a_draft_model_that_raises_half_way_is_right_again_for_the_rows_that_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provider, wanted = model_draft("llama", noise=0.0), requests(GREEDY)
    forward, calls = Runner.forward, []

    def failing(runner: Runner, *args: Any, **more: Any) -> Any:
        if runner is provider.runner:
            calls.append(1)
            if len(calls) == 9:
                raise RuntimeError("planted fault")
        return forward(runner, *args, **more)

    monkeypatch.setattr(Runner, "forward", failing)
    outcome = run(Case("llama", rows=3, chunk=64, provider=provider), wanted)
    assert outcome.tokens == run(Case("llama"), wanted).tokens
    assert accepted(outcome) > 0.97


@pytest.mark.parametrize("fault", ["keeps wrong guesses", "forgets the last tokens"])
def test_a_stale_companion_costs_acceptance_and_no_token(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = requests(GREEDY)
    expected = run(Case("llama"), wanted).tokens
    healthy = accepted(run(Case("llama", rows=3, provider=model_draft("llama")), wanted))

    def stale(draft: ModelDraft, row: Any, tokens: Sequence[int]) -> None:
        del row.held[len(tokens) - 1 :]  # the KV keeps what was guessed
        row.num_known = len(row.held)

    def forgetful(draft: ModelDraft, row: Any, tokens: Sequence[int]) -> None:
        row.held = list(tokens[:-1])  # the KV lacks what the books say
        draft.runner.kv.lengths[row.slot] = len(row.held)
        row.num_known = len(row.held)

    monkeypatch.setattr(ModelDraft, "_cut", stale if fault == "keeps wrong guesses" else forgetful)
    outcome = run(Case("llama", rows=3, provider=model_draft("llama")), wanted)
    assert outcome.tokens == expected
    assert accepted(outcome) < healthy


# ------------------------------------------------------------------ requests and their bills
def test_each_request_in_a_batch_has_its_own_kind_and_its_own_count() -> None:
    wanted = [
        replace(request, speculation=Speculation(kind))
        for request, kind in zip(
            requests(GREEDY, 30), ("off", "ngram", "model", "off", None, "model"), strict=True
        )
    ]
    provider = ByKind(
        {"off": NoDraft(), "ngram": NGram(1, 4), "model": model_draft("llama", noise=0.0)}, default="model"
    )
    outcome = run(Case("llama", rows=6, provider=provider), wanted)
    assert outcome.tokens == run(Case("llama"), wanted).tokens
    bills = {event.request_id: event.usage for event in outcome.events if event.usage}
    assert bills["r0"].speculation is None
    assert bills["r3"].speculation is None
    spent = bills["r2"].speculation
    assert spent.accepted == spent.drafted > 0
    assert spent.tokens == bills["r2"].completion_tokens
    assert spent.target_calls < spent.tokens
    assert sum(n * rounds for n, rounds in enumerate(spent.histogram)) == spent.accepted


def test_fill_injects_what_is_certain_and_says_so() -> None:
    wanted, constraints = requests(GREEDY, 30), ConstraintsFor({"r1": lambda: Forced(VOCAB)})
    expected = run(Case("llama", constraints=constraints), wanted)
    outcome = run(Case("llama", rows=6, constraints=constraints, fill=True), wanted)
    assert outcome.tokens == expected.tokens
    bills = {event.request_id: event.usage for event in outcome.events if event.usage}
    fill = bills["r1"].fill
    assert fill.injected >= 9
    assert fill.injected + fill.decode_steps == bills["r1"].completion_tokens
    assert (fill.verify_accepted, fill.verify_rejected) == (0, 0)
    assert bills["r0"].fill.injected == 0
    assert expected.events[-1].usage.fill is None


def test_spans_that_are_certain_do_not_reach_the_vocabulary_head(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    draw = type(make_step(Case("llama")).axes.sampler).draw

    def watched(sampler: Any, logits: mx.array, *args: Any, **more: Any) -> Any:
        shapes.append(logits.shape)
        return draw(sampler, logits, *args, **more)

    monkeypatch.setattr(type(make_step(Case("llama")).axes.sampler), "draw", watched)
    wanted = [requests(GREEDY, 30)[1]]
    constraints = ConstraintsFor({"r1": lambda: Forced(VOCAB)})
    outcome = run(Case("llama", constraints=constraints, fill=True), wanted)
    assert {shape[1] for shape in shapes} == {1}
    assert outcome.step.counters.injected_tokens >= 9
    assert len(shapes) < len(outcome.tokens["r1"])


def test_echo_copies_count_as_fill_and_not_as_drafts() -> None:
    wanted = [Request("r0", PROMPT, GREEDY, max_tokens=60)]
    (answer,) = run(Case("llama"), wanted).tokens.values()
    echoing = replace(wanted[0], prediction=tuple(answer))
    provider = NGram(2, 8, 6, kind="echo")
    outcome = run(Case("llama", provider=provider, fill=True), [echoing])
    assert outcome.tokens["r0"] == answer
    (usage,) = [event.usage for event in outcome.events if event.usage]
    assert usage.fill.verify_accepted == usage.fill.injected > 30
    assert usage.speculation.drafted == 0
    assert usage.speculation.target_calls < usage.speculation.tokens


def test_providers_of_the_matrix_do_guess() -> None:
    """A provider that never has a guess would pass every cell."""
    wanted = requests(GREEDY, 24)
    answers = run(Case("llama"), wanted).tokens
    for kind in ("oracle", "ngram", "model"):
        outcome = run(Case("llama", rows=3, provider=make_provider(kind, "llama", answers)), wanted)
        assert 0 < outcome.step.counters.accepted_tokens < outcome.step.counters.drafted_tokens, kind


def test_costs_of_a_flat_machine_are_flat() -> None:
    assert flat_costs(0.0).seconds(3, 5) == 1.0


def test_a_row_waits_for_the_host_only_while_it_has_a_guess() -> None:
    wanted = [Request("r0", PROMPT, GREEDY, max_tokens=40)]
    (answer,) = run(Case("llama"), wanted).tokens.values()
    # What it will say is known in the middle only.
    guessing = replace(wanted[0], prediction=(*answer[14:26],))
    outcome = run(Case("llama", provider=NGram(3, 8, 4)), [guessing])
    assert outcome.tokens["r0"] == answer
    counters = outcome.step.counters
    assert counters.accepted_tokens >= 5
    assert counters.pipelined_steps >= 20
