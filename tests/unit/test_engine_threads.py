from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from mantou.data import Request, Sampling, TokenEvent
from mantou.engine.engine import Engine
from mantou.engine.step import Step
from mantou.errors import EngineStopped, MantouError, ModelError, ModelUnavailable, QueueFull
from tests.compose.harness import Case, make_step, requests, run
from tests.fakes import ConstraintsFor, Exploding

GREEDY = Sampling()
PATIENCE_S = 60


class Mail:
    """A mailbox that lets a test wait for the last events of requests."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self.wakeups = 0
        self.threads: set[int] = set()
        self._news = threading.Condition()

    def put(self, events: Sequence[TokenEvent]) -> None:
        assert events
        with self._news:
            self.wakeups += 1
            self.threads.add(threading.get_ident())
            self.events.extend(events)
            self._news.notify_all()

    def wait(self, happened: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(happened, PATIENCE_S), "the engine makes no progress"

    def last(self, request_id: str) -> TokenEvent:
        """Waits for the event that ends a request."""
        self.wait(lambda: any(e.finish for e in self.of(request_id)))
        (found,) = [event for event in self.of(request_id) if event.finish]
        return found

    def of(self, request_id: str) -> list[TokenEvent]:
        return [event for event in self.events if event.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        return [token for event in self.of(request_id) for token in event.tokens]


@contextmanager
def engine(load: Callable[[], Step], mail: Mail, **options: Any) -> Iterator[Engine]:
    steps: list[Step] = []

    def keep() -> Step:
        steps.append(load())
        return steps[0]

    made = Engine(keep, mail, **options)
    made.start()
    try:
        yield made
    finally:
        made.close(PATIENCE_S)
        assert not made._thread.is_alive()
        for step in steps:
            step.check_integrity()
            assert not step.busy
            assert step.runner.kv.num_slots == 0


def endless(name: str = "endless") -> Request:
    return Request(name, (1, 2, 3), GREEDY)


# ------------------------------------------------------------------ the plain path
def test_requests_of_many_threads_each_get_their_own_tokens() -> None:
    wanted = [replace(r, id=f"{r.id}-{copy}") for copy in range(4) for r in requests(GREEDY)]
    expected = run(Case(), requests(GREEDY)).tokens
    mail = Mail()
    with engine(lambda: make_step(Case(rows=4, chunk=16)), mail) as made:
        threads = [threading.Thread(target=made.submit, args=(request,)) for request in wanted]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for request in wanted:
            assert mail.last(request.id).finish == "length"
            assert mail.tokens(request.id) == expected[request.id.split("-")[0]]
        idle = made.call(lambda: made._step.runner.kv.num_slots).result(PATIENCE_S)
        assert idle == 0, "device memory returns when nothing runs"
        assert made.stats()["requests"] == {"length": len(wanted)}
        assert mail.wakeups <= made.stats()["steps"], "one wake-up a step at most"
        assert len(mail.threads) == 1


def test_requests_that_arrive_before_the_model_is_loaded_wait_for_it() -> None:
    mail, go = Mail(), threading.Event()

    def load() -> Step:
        assert go.wait(PATIENCE_S)
        return make_step(Case())

    ready: list[int] = []
    with engine(load, mail, on_ready=lambda: ready.append(threading.get_ident())) as made:
        made.submit(requests(GREEDY)[0])
        assert made.stats() == {"running": 0, "waiting": 1, "rows": 0}
        assert not ready
        go.set()
        assert mail.last("r0").finish == "length"
        assert ready == [made._thread.ident]


def test_the_queue_is_bounded() -> None:
    mail, go = Mail(), threading.Event()

    def load() -> Step:
        assert go.wait(PATIENCE_S)
        return make_step(Case())

    wanted = requests(GREEDY)
    with engine(load, mail, max_waiting=3) as made:
        for request in wanted[:3]:
            made.submit(request)
        with pytest.raises(QueueFull, match="3 requests are waiting already"):
            made.submit(wanted[3])
        go.set()
        for request in wanted[:3]:
            mail.last(request.id)
        made.submit(wanted[3])
        assert mail.last("r3").finish == "length"


def test_the_bound_counts_requests_that_wait_for_a_row() -> None:
    mail = Mail()
    with engine(lambda: make_step(Case(rows=1)), mail, max_waiting=2) as made:
        made.submit(endless("running"))
        mail.wait(lambda: bool(mail.of("running")))
        made.submit(endless("first"))
        made.submit(endless("second"))
        with pytest.raises(QueueFull):
            made.submit(endless("third"))


# ------------------------------------------------------------------ cancel, call, close
def test_cancelling_frees_the_row_of_a_running_and_of_a_waiting_request() -> None:
    mail = Mail()
    with engine(lambda: make_step(Case(rows=1)), mail) as made:
        made.submit(endless("running"))
        made.submit(endless("waiting"))
        mail.wait(lambda: len(mail.of("running")) > 3)
        made.cancel("waiting")
        assert mail.last("waiting").finish == "cancelled"
        made.cancel("running")
        made.cancel("running")
        made.cancel("unknown")
        last = mail.last("running")
        assert last.finish == "cancelled"
        assert last.usage is not None
        assert last.usage.completion_tokens >= len(mail.tokens("running"))
        assert made.call(lambda: made._step.runner.kv.num_slots).result(PATIENCE_S) == 0


def test_calls_run_on_the_model_thread_with_nothing_in_flight_and_return_their_errors() -> None:
    mail = Mail()
    with engine(lambda: make_step(Case(rows=2)), mail) as made:
        for name in ("a", "b"):
            made.submit(endless(name))
        mail.wait(lambda: len(mail.of("b")) > 3)

        def look() -> tuple[int, bool, int]:
            step = made._step
            step.check_integrity()
            return threading.get_ident(), bool(step._flights), len(step.running)

        for _ in range(5):
            assert made.call(look).result(PATIENCE_S) == (made._thread.ident, False, 2)
        with pytest.raises(ZeroDivisionError):
            made.call(lambda: 1 // 0).result(PATIENCE_S)
        seen = len(mail.of("a"))
        mail.wait(lambda: len(mail.of("a")) > seen + 3)
        assert not [event.error for event in mail.events if event.error]


def test_closing_ends_what_runs_and_what_waits_with_an_event_and_takes_nothing_more() -> None:
    mail = Mail()
    with engine(lambda: make_step(Case(rows=1)), mail) as made:
        made.submit(endless("running"))
        mail.wait(lambda: bool(mail.of("running")))
        made.submit(endless("waiting"))
        made.close(PATIENCE_S)
        for name in ("running", "waiting"):
            assert mail.last(name).error == "the server is shutting down"
        with pytest.raises(EngineStopped):
            made.submit(endless("late"))
        with pytest.raises(EngineStopped):
            made.call(lambda: None)


def test_what_was_queued_before_closing_is_answered() -> None:
    """The model thread leaves its loop while requests and calls still sit in its inbox."""
    mail, started, go = Mail(), threading.Event(), threading.Event()

    def hold() -> None:
        started.set()
        assert go.wait(PATIENCE_S)

    with engine(lambda: make_step(Case()), mail) as made:
        made.call(hold)
        assert started.wait(PATIENCE_S)

        def inside() -> None:
            made.submit(endless("queued"))
            answers.append(made.call(lambda: "done"))
            made.close()

        answers: list[Any] = []
        made.call(inside)
        go.set()
        assert mail.last("queued").error == "the server is shutting down"
        made.close(PATIENCE_S)
        assert answers[0].result(PATIENCE_S) == "done"


# ------------------------------------------------------------------ faults
@pytest.mark.parametrize(
    ("planted", "sentence"),
    [
        (ModelError("The folder is corrupt."), "The folder is corrupt."),
        (KeyError("scales"), "The model could not be loaded (KeyError: 'scales')."),
    ],
)
def test_a_loader_that_raises_refuses_what_waits_and_what_comes(planted: Exception, sentence: str) -> None:
    mail, go = Mail(), threading.Event()
    failures: list[MantouError] = []

    def load() -> Step:
        assert go.wait(PATIENCE_S)
        raise planted

    with engine(load, mail, on_failed=failures.append) as made:
        made.submit(requests(GREEDY)[0])
        go.set()
        last = mail.last("r0")
        assert (last.finish, last.error) == ("error", sentence)
        assert [failure.message for failure in failures] == [sentence]
        with pytest.raises(ModelUnavailable, match="No model is loaded: "):
            made.submit(requests(GREEDY)[1])
        with pytest.raises(ModelUnavailable):
            made.call(lambda: None)


def test_a_hook_that_raises_ends_only_its_own_request() -> None:
    mail, wanted = Mail(), requests(GREEDY)
    expected = run(Case(), wanted).tokens
    constraints = ConstraintsFor({"r1": lambda: Exploding(after=3)})
    with engine(lambda: make_step(Case(rows=3, chunk=16, constraints=constraints)), mail) as made:
        for request in wanted:
            made.submit(request)
        assert "server's log" in mail.last("r1").error
        for name in ("r0", "r2", "r3", "r4", "r5"):
            assert mail.last(name).finish == "length"
            assert mail.tokens(name) == expected[name]


def test_a_defect_of_the_engine_ends_what_runs_and_the_next_request_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mail, wanted = Mail(), requests(GREEDY)
    expected = run(Case(), wanted[:2]).tokens
    with engine(lambda: make_step(Case(rows=3)), mail) as made:
        made.submit(endless("a"))
        mail.wait(lambda: len(mail.of("a")) > 2)

        def plan(*_: Any) -> None:
            raise AssertionError("planted fault")

        with monkeypatch.context() as patch:
            made.call(lambda: patch.setattr(made._step.axes.scheduler, "plan", plan)).result(PATIENCE_S)
            assert mail.last("a").error == "the engine failed on this step; see the server's log"
        made.submit(wanted[0])
        mail.last("r0")
        assert mail.tokens("r0") == expected["r0"]


def test_a_defect_while_cancelling_does_not_stop_the_model_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    mail, wanted = Mail(), requests(GREEDY)
    expected = run(Case(), wanted[:2]).tokens

    def cancel(step: Step, request_id: str) -> None:
        raise AssertionError("planted fault")

    with engine(lambda: make_step(Case(rows=3)), mail) as made:
        made.submit(endless("a"))
        mail.wait(lambda: len(mail.of("a")) > 2)
        with monkeypatch.context() as patch:
            patch.setattr(Step, "cancel", cancel)
            made.cancel("a")
            assert mail.last("a").finish == "error"
        made.submit(wanted[1])
        mail.last("r1")
        assert mail.tokens("r1") == expected["r1"]
