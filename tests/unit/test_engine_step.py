from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from mantou.cache.none import NoStore
from mantou.data import Draft, DraftAsk, Request, Sampling, TokenEvent
from mantou.engine.flight import Drawn, Flight
from mantou.engine.step import Step
from mantou.errors import BadRequest
from mantou.spec.none import NoDraft
from tests.compose.harness import VOCAB, Case, make_step, requests, run
from tests.fakes import ConstraintsFor, Exploding, Modulo, NoisyOracle

GREEDY = Sampling()


@cache
def solo(family: str = "llama") -> dict[str, list[int]]:
    return run(Case(family), requests(GREEDY)).tokens


def finishes(events: Sequence[TokenEvent], request_id: str) -> list[str]:
    return [e.finish for e in events if e.request_id == request_id and e.finish]


def errors(events: Sequence[TokenEvent]) -> dict[str, str]:
    return {event.request_id: event.error for event in events if event.error}


def assert_only_ended(outcome: Any, at_fault: str) -> None:
    """The row at fault ended with an error, its neighbours with their own tokens, and everything was freed."""
    assert set(errors(outcome.events)) == {at_fault}
    for name, tokens in solo().items():
        assert len(finishes(outcome.events, name)) == 1
        if name != at_fault:
            assert outcome.tokens[name] == tokens
    assert solo()[at_fault][: len(outcome.tokens[at_fault])] == outcome.tokens[at_fault]
    assert outcome.step.runner.kv.num_slots == 0


# ------------------------------------------------------------------ a row's own hooks
class Faulty(NoDraft):
    """A provider whose hook `name` raises for one request."""

    def __init__(self, name: str, at_fault: str) -> None:
        self.name, self.at_fault = name, at_fault

    def _check(self, name: str, request: Request) -> None:
        if (name, request.id) == (self.name, self.at_fault):
            raise RuntimeError("planted fault")

    def width(self, request: Request, tokens: Sequence[int]) -> int:
        self._check("width", request)
        return 2

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Draft]:
        for ask in asks:
            self._check("propose", ask.request)
        return super().propose(asks)

    def observe(self, request: Request, draft: Draft, taken: Sequence[int]) -> None:
        self._check("observe", request)

    def release(self, request: Request) -> None:
        self._check("release", request)


class FaultyStore(NoStore):
    wants = True

    def __init__(self, name: str, at_fault: tuple[int, ...]) -> None:
        self.name, self.at_fault = name, at_fault

    def match(self, key: Any, tokens: Sequence[int], session: str | None = None) -> None:
        if self.name == "match" and tuple(tokens) == self.at_fault:
            raise RuntimeError("planted fault")

    def put(self, key: Any, tokens: Sequence[int], row: Any, session: str | None = None) -> None:
        if self.name == "put" and tuple(tokens[: len(self.at_fault)]) == self.at_fault:
            raise RuntimeError("planted fault")


def test_a_constraint_that_raises_while_it_advances_ends_its_own_row_only() -> None:
    constraints = ConstraintsFor({"r2": lambda: Exploding(after=4)})
    outcome = run(Case(rows=4, chunk=16, constraints=constraints), requests(GREEDY))
    assert_only_ended(outcome, "r2")
    assert errors(outcome.events) == {
        "r2": "This request failed inside the server; the server's log says why."
    }


def test_a_constraint_that_raises_while_it_masks_ends_its_own_row_only() -> None:
    class Masking(Exploding):
        def mask(self) -> None:
            if not self.left:
                raise RuntimeError("planted fault")

    constraints = ConstraintsFor({"r2": lambda: Masking(after=4)})
    assert_only_ended(run(Case(rows=4, chunk=16, constraints=constraints), requests(GREEDY)), "r2")


def test_a_constraint_that_cannot_be_made_ends_its_own_request_only() -> None:
    def refuse() -> None:
        raise BadRequest("no such grammar")  # an expected error keeps its own words

    outcome = run(Case(rows=4, chunk=16, constraints=ConstraintsFor({"r3": refuse})), requests(GREEDY))
    assert_only_ended(outcome, "r3")
    assert errors(outcome.events) == {"r3": "no such grammar"}


@pytest.mark.parametrize("hook", ["width", "propose", "observe"])
def test_a_draft_provider_that_raises_for_a_row_ends_that_row_only(hook: str) -> None:
    assert_only_ended(run(Case(rows=4, chunk=16, provider=Faulty(hook, "r1")), requests(GREEDY)), "r1")


def test_a_provider_that_fails_to_forget_a_row_harms_nobody() -> None:
    outcome = run(Case(rows=4, chunk=16, provider=Faulty("release", "r1")), requests(GREEDY))
    assert outcome.tokens == solo()
    assert not errors(outcome.events)


def test_a_prefix_store_that_cannot_look_up_ends_that_row_only() -> None:
    wanted = requests(GREEDY)
    outcome = run(Case(rows=4, chunk=16, store=FaultyStore("match", wanted[1].prompt)), wanted)
    assert_only_ended(outcome, "r1")


def test_a_prefix_store_that_cannot_keep_a_row_does_not_spoil_its_answer() -> None:
    wanted = requests(GREEDY)
    outcome = run(Case(rows=4, chunk=16, store=FaultyStore("put", wanted[1].prompt)), wanted)
    assert outcome.tokens == solo()
    assert all(finishes(outcome.events, name) == ["length"] for name in solo())


# ------------------------------------------------------------------ the graph
def poison(step: Step, monkeypatch: pytest.MonkeyPatch, raises: Callable[[list[list[int]]], bool]) -> None:
    """The graph raises when its input tokens satisfy `raises`."""
    graph = step.runner.model.module

    def module(tokens: mx.array, cache: Any) -> mx.array:
        if raises(tokens.tolist()):
            raise ValueError("planted fault")
        return graph(tokens, cache=cache)

    # The model is shared by all tests, so the runner gets one of its own.
    monkeypatch.setattr(step.runner, "model", replace(step.runner.model, module=module))


def drive(step: Step, wanted: Sequence[Request]) -> tuple[dict[str, list[int]], list[TokenEvent]]:
    for request in wanted:
        step.submit(request)
    events = step.take_events()
    while step.busy:
        step.advance()
        events += step.take_events()
    step.check_integrity()
    tokens: dict[str, list[int]] = {request.id: [] for request in wanted}
    for event in events:
        tokens[event.request_id] += event.tokens
    return tokens, events


def unique_token(tokens: dict[str, list[int]], name: str, wanted: Sequence[Request]) -> int:
    """A token that only this row ever generates after its first one, and that nobody's prompt holds."""
    others = {t for other, made in tokens.items() if other != name for t in made}
    others |= {t for request in wanted for t in request.prompt}
    return next(t for t in tokens[name][2:-2] if t not in others)


# One token prompts: the rows are pipelined from the first step on.
SHORT = [Request(f"s{i}", (i,), GREEDY, max_tokens=20) for i in range(5)]


@pytest.mark.parametrize("pipelined", [True, False])
def test_a_graph_that_raises_for_one_row_ends_that_row_only(
    pipelined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = drive(make_step(Case()), SHORT)
    culprit = "s2"
    poisonous = unique_token(expected, culprit, SHORT)
    # A penalty far below a logit's precision keeps the rows on the host without another effect.
    wish = GREEDY if pipelined else Sampling(presence_penalty=1e-20)
    step = make_step(Case(rows=5))
    poison(step, monkeypatch, lambda rows: any(poisonous in row for row in rows))
    tokens, events = drive(step, [replace(request, sampling=wish) for request in SHORT])
    assert bool(step.counters.pipelined_steps) == pipelined
    assert errors(events) == {culprit: "The model failed on this request; the server's log says why."}
    for name, made in expected.items():
        assert len(finishes(events, name)) == 1
        upto = made.index(poisonous) + 1 if name == culprit else len(made)
        assert tokens[name] == made[:upto]


def test_a_graph_that_raises_on_what_follows_eos_does_not_spoil_a_finished_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step that is launched on top of the one in flight feeds the EOS token of a row that has ended."""
    expected, _ = drive(make_step(Case()), SHORT[:1])
    eos = unique_token(expected, "s0", SHORT[:1])
    step = make_step(Case())
    poison(step, monkeypatch, lambda rows: any(eos in row for row in rows))
    tokens, events = drive(step, [replace(SHORT[0], eos=frozenset({eos}))])
    assert step.counters.failed_forwards == 1
    assert not errors(events)
    assert finishes(events, "s0") == ["stop"]
    assert tokens["s0"] == expected["s0"][: expected["s0"].index(eos)]


def test_a_graph_that_raises_on_a_prompt_ends_that_prompt_only(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = requests(GREEDY)
    seen = {t for r in wanted if r.id != "r3" for t in (*r.prompt, *solo()[r.id])}
    poisonous = next(token for token in wanted[3].prompt[20:] if token not in seen)
    step = make_step(Case(rows=4, chunk=16))
    poison(step, monkeypatch, lambda rows: any(poisonous in row for row in rows))
    tokens, events = drive(step, wanted)
    assert set(errors(events)) == {"r3"}
    assert {n: t for n, t in tokens.items() if n != "r3"} == {n: t for n, t in solo().items() if n != "r3"}


def test_drafts_of_a_batch_that_raises_are_dropped_and_their_rows_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = requests(GREEDY)
    step = make_step(Case(rows=3, chunk=16, provider=NoisyOracle(solo(), 0.7, VOCAB)))
    calls = iter(range(10**6))
    poison(step, monkeypatch, lambda rows: len(rows) > 1 and next(calls) % 4 == 3)
    tokens, events = drive(step, wanted)
    assert tokens == solo()
    assert not errors(events)
    assert step.counters.failed_forwards > 0


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_graph_that_always_raises_ends_all_and_the_next_request_is_served_after_repair(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = requests(GREEDY)
    step = make_step(Case(family, rows=3, chunk=16))
    healthy = step.runner.model
    poison(step, monkeypatch, lambda rows: True)
    tokens, events = drive(step, wanted)
    assert set(errors(events)) == set(tokens)
    assert not any(tokens.values())
    monkeypatch.setattr(step.runner, "model", healthy)
    tokens, events = drive(step, wanted)
    assert tokens == solo(family)
    assert not errors(events)


@cache
def solo_of(request: Request) -> list[int]:
    return drive(make_step(Case()), [request])[0][request.id]


def test_a_device_failure_gives_each_row_one_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading fails once s0 has ended, while the flight launched on top still carries it."""
    wanted = [replace(SHORT[0], eos=frozenset({solo_of(SHORT[0])[2]})), *SHORT[1:3]]
    read, reads = Flight.read, iter(range(100))

    def failing(flight: Flight) -> Drawn:
        if next(reads) == 3:
            raise RuntimeError("out of memory")
        return read(flight)

    monkeypatch.setattr(Flight, "read", failing)
    _, events = drive(make_step(Case(rows=3)), wanted)
    assert [finishes(events, name) for name in ("s0", "s1", "s2")] == [["stop"], ["error"], ["error"]]
    assert errors(events) == dict.fromkeys(
        ("s1", "s2"), "The device failed; the server's log says why. Try again."
    )


def test_ending_everything_gives_each_request_one_last_event() -> None:
    """s0 has reached EOS, but its slot is not free yet, because a step with it is in flight."""
    eos = frozenset({solo_of(SHORT[0])[2]})
    step = make_step(Case(rows=2))
    for request in (replace(SHORT[0], eos=eos), SHORT[1], SHORT[2]):
        step.submit(request)
    events: list[TokenEvent] = []
    while not finishes(events, "s0"):
        step.advance()
        events += step.take_events()
    assert any(row.id == "s0" for row in step.running)
    step.fail_all("the end")
    events += step.take_events()
    assert [finishes(events, name) for name in ("s0", "s1", "s2")] == [["stop"], ["error"], ["error"]]
    assert errors(events) == {"s1": "the end", "s2": "the end"}
    step.check_integrity()


def test_counts_that_another_thread_reads_do_not_change_under_it() -> None:
    step = make_step(Case(rows=2))
    seen = step.counters.finished
    drive(step, SHORT[:2])
    assert (seen, step.counters.finished) == ({}, {"length": 2})


# ------------------------------------------------------------------ bounds
def test_a_window_and_padded_widths_take_chunks_that_are_no_power_of_two() -> None:
    prompt = tuple(i % VOCAB for i in range(640))
    wanted = [Request("long", prompt, GREEDY, max_tokens=4)]
    expected = run(Case("gemma3_text", chunk=512), wanted).tokens
    assert run(Case("gemma3_text", chunk=600, bucketed=True), wanted).tokens == expected


def test_no_token_is_drawn_for_a_request_of_none() -> None:
    _, events = drive(make_step(Case()), [replace(SHORT[0], max_tokens=0)])
    assert [(event.finish, event.tokens) for event in events] == [("length", ())]


@pytest.mark.parametrize("length", [4096, 5000])
def test_a_prompt_that_leaves_no_room_is_refused(length: int) -> None:
    _, events = drive(make_step(Case()), [Request("r", (1,) * length, GREEDY)])
    assert errors(events) == {"r": f"a prompt of {length} tokens does not fit the context"}


def test_an_empty_prompt_is_refused() -> None:
    _, events = drive(make_step(Case()), [Request("r", (), GREEDY)])
    assert errors(events) == {"r": "the prompt holds no token"}


def test_a_sequence_ends_where_the_context_does() -> None:
    step = make_step(Case())
    step.context_length = 20
    tokens, events = drive(step, [Request("r", (1,) * 12, GREEDY)])
    assert finishes(events, "r") == ["length"]
    assert len(tokens["r"]) == 8


def test_a_running_row_waits_for_one_chunk_at_most_and_gets_its_token_every_step() -> None:
    step = make_step(Case(rows=4, chunk=16))
    first, *others = requests(GREEDY, 40)
    step.submit(first)
    for _ in range(3):
        step.advance()
    step.land()
    step.take_events()
    for request in others:
        step.submit(request)
    fed, before = step.counters.prompt_tokens, len(step.running[0].tokens)
    for num_steps in range(1, 12):
        step.advance()
        row = step.running[0]
        assert len(row.tokens) + row.num_inflight == before + num_steps
        assert step.counters.prompt_tokens - fed <= 16
        fed = step.counters.prompt_tokens
    assert step.counters.max_chunks_between_tokens == 1


def test_rows_that_leave_and_join_keep_the_others_tokens_under_constraints_and_penalties() -> None:
    wish = Sampling(temperature=0.8, repetition_penalty=1.2)
    constraints = ConstraintsFor({"r1": lambda: Modulo(VOCAB), "r4": lambda: Modulo(VOCAB)})
    wanted = requests(wish)
    alone = run(Case(constraints=constraints), wanted).tokens
    together = run(
        Case(rows=3, chunk=16, constraints=constraints), wanted, {"r3": 6, "r4": 7}, cancel={"r0": 5, "r2": 8}
    )
    for name in ("r1", "r3", "r4", "r5"):
        assert together.tokens[name] == alone[name]
    assert finishes(together.events, "r0") == ["cancelled"]
