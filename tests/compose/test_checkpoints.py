"""An answer that was interrupted and is asked for again is the uninterrupted one, and costs only what is new."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mantou.cache.checkpoints import SsdCheckpoints
from mantou.cache.ram import RamStore
from mantou.cache.ssd import SsdStore
from mantou.cache.tiered import Tiered
from mantou.data import GenerationCheckpoint, Request, Sampling, TokenEvent
from mantou.engine.checkpoints import Checkpoints
from tests.compose.axes import MIXED
from tests.compose.harness import VOCAB, Case, Outcome, make_step, requests, run
from tests.fakes import ConstraintsFor, Modulo, NoisyOracle

RECURRENT = ("qwen3_5", "mamba2")
EVERY = 4
NUM_SAID = 9  # tokens after which the first run is interrupted: two checkpoints, and one token that is lost
# family, sampler, constraint, provider, codec, rows, how it ends
CELLS = [
    ("llama", "greedy", "none", "none", "off", 1, "restart"),
    ("llama", "mixed", "modulo", "oracle", "8", 3, "restart"),
    ("llama", "mixed", "none", "oracle", "4", 6, "cancel"),
    ("gemma3_text", "mixed", "none", "none", "off", 3, "restart"),
    ("gemma3_text", "greedy", "modulo", "oracle", "8", 6, "restart"),
    ("gemma4_text", "mixed", "modulo", "none", "off", 6, "cancel"),
    ("qwen3_5", "mixed", "none", "oracle", "off", 3, "restart"),
    ("qwen3_5", "mixed", "modulo", "none", "4", 1, "cancel"),
    ("mamba2", "greedy", "modulo", "oracle", "off", 6, "restart"),
    ("mamba2", "mixed", "none", "none", "off", 1, "restart"),
]


class Restarts:
    """Opens stores and checkpoints on one folder, anew each time: what memory held is gone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints: Any = None
        self.store: Any = None

    def __call__(self, family: str, **changes: Any) -> Case:
        self.close()
        recurrent = family in RECURRENT
        disk = SsdStore(self.folder, 1 << 30, recurrent=recurrent)
        self.store = Tiered(RamStore(1 << 30, recurrent=recurrent), disk)
        self.checkpoints = SsdCheckpoints(self.folder, EVERY)
        return Case(family, store=self.store, checkpoints=self.checkpoints, **changes)

    def close(self) -> None:
        if self.store is not None:
            self.checkpoints.check_integrity()
            self.checkpoints.close()
            self.store.check_integrity()
            self.store.close()
            self.store = None


@pytest.fixture
def restart(tmp_path: Path) -> Iterator[Restarts]:
    opened = Restarts(tmp_path / "cache")
    yield opened
    opened.close()


def say(case: Case, wanted: Sequence[Request], num_tokens: int = NUM_SAID) -> list[TokenEvent]:
    """Runs until each request has said so many tokens, then ends all of them: a cancel, or a server that goes down."""
    step, events = make_step(case), []
    for request in wanted:
        step.submit(request)
    said = dict.fromkeys([request.id for request in wanted], 0)
    while said and min(said.values()) < num_tokens:
        step.advance()
        fresh = step.take_events()
        events += fresh
        for event in fresh:
            said[event.request_id] += len(event.tokens)
            if said[event.request_id] >= num_tokens and event.finish is None:
                step.cancel(event.request_id)  # its place is for those who wait
    events += step.take_events()
    step.check_integrity()
    return events


def logprobs(outcome: Outcome, name: str) -> list[Any]:
    return [entry for event in outcome.events if event.request_id == name for entry in event.logprobs]


def usage(outcome: Outcome, name: str) -> Any:
    return next(e.usage for e in outcome.events if e.request_id == name and e.usage)


def check(expected: Outcome, resumed: Outcome, wanted: Sequence[Request]) -> None:
    assert not [event.error for event in resumed.events if event.error]
    assert resumed.tokens == expected.tokens
    for request in wanted:
        pairs = zip(logprobs(resumed, request.id), logprobs(expected, request.id), strict=True)
        for got, full in pairs:
            assert got.token == full.token and got.logprob == pytest.approx(full.logprob, abs=1e-4)
        assert usage(resumed, request.id).completion_tokens == usage(expected, request.id).completion_tokens
        assert usage(resumed, request.id).cached_tokens <= len(request.prompt)


@pytest.mark.parametrize("cell", CELLS, ids=["-".join(map(str, cell)) for cell in CELLS])
def test_a_repeat_goes_on_where_the_run_before_was_interrupted(cell: Any, restart: Restarts) -> None:
    family, sampler, constraint, provider, codec, rows, end = cell
    wanted = requests(Sampling() if sampler == "greedy" else MIXED)
    limited = ConstraintsFor(
        {} if constraint == "none" else {name: lambda: Modulo(VOCAB) for name in ("r1", "r3")}
    )
    expected = run(Case(family, codec=codec, constraints=limited), wanted)
    axes: dict[str, Any] = {"rows": rows, "chunk": 16, "codec": codec, "constraints": limited}
    if provider == "oracle":
        axes["provider"] = NoisyOracle(expected.tokens, 0.7, VOCAB)
    case = restart(family, **axes)
    say(case, wanted)
    if end == "restart":
        case = restart(family, **axes)
    resumed = run(case, wanted)
    check(expected, resumed, wanted)
    counts = restart.checkpoints.counts
    assert counts.resumed == len(wanted)
    assert counts.replayed_tokens >= len(wanted) * 2 * EVERY
    total = sum(len(tokens) for tokens in expected.tokens.values())
    assert resumed.step.counters.generation_tokens == total - counts.replayed_tokens
    for request in wanted[: 1 if end == "restart" else 0]:
        assert usage(resumed, request.id).cached_tokens == len(request.prompt)
    restart.checkpoints.check_integrity()
    assert not list(restart.checkpoints.directory.iterdir()), "an answer that is complete needs no checkpoint"


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_an_answer_that_is_interrupted_again_and_again(family: str, restart: Restarts) -> None:
    (request, *_) = requests(Sampling(temperature=0.9, logprobs=True, top_logprobs=2))
    expected = run(Case(family), [request])
    for num_said in (5, 9, 13, 17):
        say(restart(family), [request], num_said)
    check(expected, run(restart(family), [request]), [request])
    assert restart.checkpoints.counts.replayed_tokens == 16


def test_a_server_that_goes_down_keeps_what_was_saved(restart: Restarts) -> None:
    step = make_step(restart("llama"))
    step.submit(BASE)
    while not restart.checkpoints.stats()["generation_checkpoints"]["entries"]:
        step.advance()
    step.fail_all("the server is shutting down")
    check(run(Case("llama"), [BASE]), run(restart("llama"), [BASE]), [BASE])
    assert restart.checkpoints.counts.resumed == 1


def test_lost_kv_is_computed_again(restart: Restarts) -> None:
    (request, *_) = requests(Sampling(temperature=0.9))
    expected = run(Case("llama"), [request])
    say(restart("llama"), [request])
    restart.close()
    for path in (restart.folder / "blocks").iterdir():
        path.unlink()
    resumed = run(restart("llama"), [request])
    check(expected, resumed, [request])
    assert usage(resumed, request.id).cached_tokens == 0
    assert restart.checkpoints.counts.resumed == 1


def test_a_drawn_seed_is_taken_up_and_a_finished_answer_is_not_repeated(restart: Restarts) -> None:
    request = replace(requests(Sampling(temperature=1.0))[0], seeded=False)
    again = replace(request, id="again", sampling=replace(request.sampling, seed=999))
    expected = run(Case("llama"), [request]).tokens["r0"]
    other = run(Case("llama"), [again]).tokens["again"]
    assert expected != other
    say(restart("llama"), [request])
    case = restart("llama")
    assert run(case, [again]).tokens["again"] == expected
    assert run(case, [again]).tokens["again"] == other


def test_equal_requests_at_once_stay_apart(restart: Restarts) -> None:
    """Whoever asks for another answer while one is being made gets another one; both can be taken up."""
    request = replace(requests(Sampling(temperature=1.0))[0], seeded=False)
    both = [replace(request, id=f"r{i}", sampling=replace(request.sampling, seed=i)) for i in range(2)]
    expected = run(Case("llama"), both).tokens
    say(restart("llama", rows=2), both)
    assert restart.checkpoints.counts.resumed == 0
    later = [replace(r, id=f"x{i}", sampling=replace(r.sampling, seed=50 + i)) for i, r in enumerate(both)]
    resumed = run(restart("llama", rows=2), later).tokens
    assert sorted(resumed.values()) == sorted(expected.values())


class Mounted:
    """Adapters whose content can be replaced."""

    def __init__(self, revision: str) -> None:
        self.content = revision

    def bind(self, rows: Sequence[tuple[str, ...]]) -> None:
        pass

    def revision(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(f"{name}@{self.content}" for name in names)


BASE = requests(Sampling(temperature=0.9, logprobs=True))[0]
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "prompt": ({"prompt": (*BASE.prompt[:-1], BASE.prompt[-1] ^ 1)}, "v1"),
    "seed": ({"sampling": replace(BASE.sampling, seed=12)}, "v1"),
    "temperature": ({"sampling": replace(BASE.sampling, temperature=0.8)}, "v1"),
    "penalty": ({"sampling": replace(BASE.sampling, presence_penalty=0.1)}, "v1"),
    "logprobs": ({"sampling": replace(BASE.sampling, logprobs=False)}, "v1"),
    "length": ({"max_tokens": 23}, "v1"),
    "eos": ({"eos": frozenset({96})}, "v1"),
    "stop": ({"stop": ("x",)}, "v1"),
    "choice": ({"choice": 1}, "v1"),
    "drawn seed": ({"seeded": False}, "v1"),
    "no adapter": ({"adapters": ()}, "v1"),
    "other adapter": ({"adapters": ("b",)}, "v1"),
    "order of adapters": ({"adapters": ("b", "a")}, "v1"),
    "content of the adapter": ({}, "v2"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_request_does_not_go_on_from_it(what: str, restart: Restarts) -> None:
    changes, revision = OTHERS[what]
    first = replace(BASE, adapters=("a", "b") if what == "order of adapters" else ("a",))
    case = restart("llama", adapters=Mounted("v1"))
    say(case, [first])
    other = replace(first, **changes)
    outcome = run(replace(case, adapters=Mounted(revision)), [other])
    assert outcome.tokens == run(Case("llama", adapters=Mounted(revision)), [other]).tokens
    assert restart.checkpoints.counts.resumed == 0
    run(replace(case, adapters=Mounted("v1")), [first])
    assert restart.checkpoints.counts.resumed == 1, "and the one that was interrupted still does"


@pytest.mark.parametrize("finish", ["stop", "cancelled"])
def test_a_stop_string_completes_an_answer_and_a_cancel_does_not(finish: Any, restart: Restarts) -> None:
    step = make_step(restart("llama"))
    step.submit(BASE)
    while not restart.checkpoints.stats()["generation_checkpoints"]["entries"]:
        step.advance()
    step.cancel(BASE.id, finish)
    assert step.take_events()[-1].finish == finish
    restart.checkpoints.flush()
    assert len(list(restart.checkpoints.directory.iterdir())) == (finish == "cancelled")


def test_an_adapter_replaced_while_a_request_waits_keeps_its_old_answer_away(restart: Restarts) -> None:
    """Looked up under the old content, admitted under the new one; and saved under neither."""
    adapters = Mounted("v1")
    first = replace(BASE, adapters=("a",))
    case = restart("llama", adapters=adapters)
    say(case, [first])
    expected = run(Case("llama"), [BASE]).tokens
    step = make_step(case)
    step.submit(first)
    restart.checkpoints.flush()
    assert step.waiting[0].ready and step.waiting[0].num_generated
    adapters.content = "v2"
    events: list[TokenEvent] = []
    while step.busy:
        step.advance()
        events += step.take_events()
    assert [token for event in events for token in event.tokens] == expected["r0"]
    assert step.counters.generation_tokens == len(expected["r0"]), "all of it was computed"
    restart.checkpoints.check_integrity()
    assert len(list(restart.checkpoints.directory.iterdir())) == 1, "the old one is as it was"


# ------------------------------------------------------------------ planted faults: these tests can fail
FAULTS: dict[str, Callable[[GenerationCheckpoint], GenerationCheckpoint]] = {
    "a token": lambda saved: replace(saved, tokens=(*saved.tokens[:-1], saved.tokens[-1] ^ 1)),
    "one token less": lambda saved: replace(saved, tokens=saved.tokens[:-2] + saved.tokens[-1:]),
    "a log-probability": lambda saved: replace(saved, logprobs=saved.logprobs[::-1]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_says_something_else_is_noticed(fault: str, restart: Restarts) -> None:
    expected = run(Case("llama"), [BASE])
    say(restart("llama"), [BASE])
    case = restart("llama")
    claim = restart.checkpoints.claim

    def planted(*arguments: Any) -> Any:
        found = claim(*arguments)
        restart.checkpoints.flush()
        found.found = FAULTS[fault](found.found)
        return found

    restart.checkpoints.claim = planted
    with pytest.raises(AssertionError):
        check(expected, run(case, [BASE]), [BASE])


def test_a_constraint_that_does_not_hear_of_replayed_tokens_is_noticed(
    restart: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = ConstraintsFor({"r0": lambda: Modulo(VOCAB)})
    expected = run(Case("llama", constraints=limited), [BASE])
    say(restart("llama", constraints=limited), [BASE], 10)
    admit = Checkpoints.admit

    def deaf(own: Checkpoints, sequence: Any) -> None:
        constraint, sequence.constraint = sequence.constraint, None
        admit(own, sequence)
        sequence.constraint = constraint

    monkeypatch.setattr(Checkpoints, "admit", deaf)
    resumed = run(restart("llama", constraints=limited), [BASE])
    assert resumed.tokens != expected.tokens or resumed.finish("r0") == "error"
