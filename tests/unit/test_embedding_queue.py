"""Batches of many callers: like lengths together, nobody forgotten, the engine's steps in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mantou.data import TokenRow
from mantou.engine.calls import CallEngine
from mantou.engine.embedding_queue import EmbeddingQueue, choose
from mantou.errors import BadRequest, EngineStopped, MantouError, ModelError, QueueFull


class Steps:
    """An engine that makes one call a step, when the test says so."""

    def __init__(self) -> None:
        self.calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.stopped = False

    def call(self, fn: Callable[[], Any]) -> Future[Any]:
        if self.stopped:
            raise EngineStopped("The server is shutting down.")
        self.calls.append((fn, Future()))
        return self.calls[-1][1]

    def step(self) -> None:
        fn, future = self.calls.popleft()
        try:
            future.set_result(fn())
        except (ValueError, MantouError) as error:
            future.set_exception(error)

    def run(self) -> int:
        count = 0
        while self.calls:
            self.step()
            count += 1
        return count


class Recorder:
    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __call__(self, rows: Sequence[TokenRow]) -> list[int]:
        self.batches.append([len(row.tokens) for row in rows])
        return [sum(row.tokens) for row in rows]


def row(length: int, value: int = 1) -> TokenRow:
    return TokenRow((value,) * length)


def make(
    steps: Steps, run: Callable[..., Any], *, max_tokens: int = 100, max_waiting: int = 8, **more: Any
) -> EmbeddingQueue[int]:
    return EmbeddingQueue(steps, run, max_tokens=max_tokens, max_waiting=max_waiting, **more)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 600))
def test_a_batch_holds_the_first_row_and_stays_within_the_budget(lengths: list[int], budget: int) -> None:
    chosen = choose(lengths, budget)
    widths = [lengths[index] for index in chosen]
    assert chosen[0] == 0
    assert len(set(chosen)) == len(chosen)
    assert len(chosen) == 1 or max(widths) * len(chosen) <= budget
    assert len(chosen) == 1 or sum(widths) >= 0.5 * max(widths) * len(chosen) - 16 * len(chosen)


def test_every_caller_gets_its_own_results_in_its_own_order() -> None:
    steps, run = Steps(), Recorder()
    queue = make(steps, run)
    one = queue.submit([row(3), row(40, 2), row(4)])
    other = queue.submit([row(5), row(41)])
    steps.run()
    assert one.result(0) == [3, 80, 4]
    assert other.result(0) == [5, 41]
    assert run.batches == [[3, 4, 5], [40, 41]]  # both callers in each batch
    stats = queue.stats()
    assert (stats["requests"], stats["rows"], stats["batches"], stats["waiting_rows"]) == (2, 5, 2, 0)


def test_one_batch_a_step() -> None:
    steps = Steps()
    queue = make(steps, Recorder(), max_tokens=10)
    queue.submit([row(10)] * 5)
    assert len(steps.calls) == 1  # however much waits, the engine sees one call at a time
    assert steps.run() == 5


def test_answers_that_are_generated_make_batches_small() -> None:
    steps, run, busy = Steps(), Recorder(), [False]
    queue = make(steps, run, max_tokens=64, busy=lambda: busy[0])
    queue.submit([row(8)] * 8)
    steps.run()
    busy[0] = True
    queue._token_s = 0.05 / 16  # a token takes as long as 16 of them may
    queue.submit([row(8)] * 4)
    steps.step()
    assert run.batches == [[8] * 8, [8, 8]]
    steps.run()
    assert queue.submit([row(60)]) is not None  # a row that is longer than that runs all the same
    steps.run()
    assert run.batches[-1] == [60]


def test_a_full_queue_says_so_and_forgets_what_is_done() -> None:
    steps = Steps()
    queue = make(steps, Recorder(), max_waiting=2)
    queue.submit([row(1)])
    queue.submit([row(1)])
    with pytest.raises(QueueFull):
        queue.submit([row(1)])
    steps.run()
    assert queue.submit([row(1)]) is not None


def test_a_caller_that_gives_up_costs_no_forward() -> None:
    steps, run = Steps(), Recorder()
    queue = make(steps, run)
    gone, stays = queue.submit([row(9), row(9)]), queue.submit([row(7)])
    assert gone.cancel()
    steps.run()
    assert stays.result(0) == [7]
    assert run.batches == [[7]]


def test_a_failed_batch_ends_its_callers_and_no_others() -> None:
    steps = Steps()

    def run(rows: Sequence[TokenRow]) -> list[int]:
        if len(rows[0].tokens) > 20:
            raise ValueError("no such kernel")
        return [0] * len(rows)

    queue = make(steps, run)
    good, bad = queue.submit([row(3)]), queue.submit([row(3), row(50)])
    steps.run()
    assert good.result(0) == [0]
    assert isinstance(bad.exception(0), ModelError)
    assert steps.run() == 0


def test_an_engine_that_stops_ends_every_caller() -> None:
    steps = Steps()
    queue = make(steps, Recorder(), max_tokens=5)
    future = queue.submit([row(5), row(5), row(5)])
    steps.step()  # the engine has taken the next call already; the one after that it refuses
    steps.stopped = True
    assert steps.run() == 1
    assert isinstance(future.exception(0), EngineStopped)
    assert isinstance(queue.submit([row(1)]).exception(0), EngineStopped)


# ------------------------------------------------------------------ the engine without rows
def test_the_engine_without_rows_runs_calls_in_order_and_refuses_answers() -> None:
    order: list[str] = []
    engine = CallEngine(
        lambda: order.append("load"), refusal="embeds only", release=lambda: order.append("release")
    )
    engine.start()
    assert engine.call(lambda: order.append("one")).result(10) is None
    failing: Future[float] = engine.call(lambda: 1 / 0)
    assert isinstance(failing.exception(10), ZeroDivisionError)
    with pytest.raises(BadRequest, match="embeds only"):
        engine.submit(None)  # pyright: ignore[reportArgumentType]
    engine.close()
    assert order == ["load", "one", "release"]
    with pytest.raises(EngineStopped):
        engine.call(lambda: None)


@pytest.mark.parametrize("error", [ModelError("corrupt"), ValueError("odd")])
def test_a_failed_load_becomes_a_sentence(error: Exception) -> None:
    failures: Future[MantouError] = Future()

    def load() -> None:
        raise error

    engine = CallEngine(load, refusal="", on_failed=failures.set_result)
    engine.start()
    assert str(error) in failures.result(10).message
    engine.close()
