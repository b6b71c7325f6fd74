from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mantou.engine.pacing import Pacer
from mantou.engine.scheduler import FairScheduler
from mantou.engine.shapes import Shapes
from mantou.protocols import Load, Plan

settings.register_profile("no_clock", deadline=None)
settings.load_profile("no_clock")


def prompt_tokens(plan: Plan, loads: dict[str, Load]) -> int:
    """Tokens of rows that are prompts: running rows with more than one pending token, and all that are admitted."""
    return sum(
        n for name, n in plan.num_tokens.items() if loads[name].slot < 0 or loads[name].num_pending > 1
    )


class Rows(RuleBasedStateMachine):
    """Plays an engine with any arrivals against the scheduler and checks each plan."""

    def __init__(self) -> None:
        super().__init__()
        self.max_rows = 3
        self.scheduler = FairScheduler(self.max_rows)
        self.waiting: list[Load] = []
        self.running: list[Load] = []
        self.arrived: list[str] = []
        self.admitted: list[str] = []

    @rule(pending=st.integers(1, 60), left=st.integers(1, 5))
    def arrive(self, pending: int, left: int) -> None:
        name = f"r{len(self.arrived)}"
        self.arrived.append(name)
        self.waiting.append(Load(name, -1, pending, left))

    @rule(index=st.integers(0, 2))
    def leave(self, index: int) -> None:
        self.running[index : index + 1] = []

    @rule(chunk=st.sampled_from([1, 4, 7, 16, 64]))
    def step(self, chunk: int) -> None:
        loads = {load.id: load for load in (*self.waiting, *self.running)}
        plan = self.scheduler.plan(self.waiting, self.running, chunk)
        self.check(plan, loads, chunk)
        self.admitted += plan.admit
        self.running += [replace(loads[name], slot=0) for name in plan.admit]
        self.waiting = [load for load in self.waiting if load.id not in plan.admit]
        self.running = [self.fed(load, plan) for load in self.running]
        self.running = [load for load in self.running if load.num_left]

    @staticmethod
    def fed(load: Load, plan: Plan) -> Load:
        left = load.num_pending - plan.num_tokens.get(load.id, 0)
        return (
            replace(load, num_pending=left)
            if left
            else replace(load, num_pending=1, num_left=load.num_left - 1)
        )

    def check(self, plan: Plan, loads: dict[str, Load], chunk: int) -> None:
        for load in self.running:
            if load.num_pending == 1:
                assert plan.num_tokens[load.id] == 1, "a decoding row gets its token in every step"
        for name, count in plan.num_tokens.items():
            assert 1 <= count <= loads[name].num_pending
        free = self.max_rows - len(self.running)
        ready = [load for load in self.running if load.num_pending > 1] + self.waiting[:free]
        assert prompt_tokens(plan, loads) == min(chunk, sum(load.num_pending for load in ready))
        assert set(plan.admit) <= set(plan.num_tokens)

    @invariant()
    def rows_are_bounded(self) -> None:
        assert len(self.running) <= self.max_rows

    @invariant()
    def admission_is_in_order_of_arrival(self) -> None:
        assert self.admitted == self.arrived[: len(self.admitted)]


TestRows = Rows.TestCase


def test_a_row_without_tokens_left_is_not_run() -> None:
    plan = FairScheduler(2).plan([], [Load("a", 0, 1, 0), Load("b", 1, 1, 1)], 16)
    assert plan.num_tokens == {"b": 1}


def test_a_plan_is_a_function_of_the_loads() -> None:
    waiting, running = [Load("c", -1, 9, 3)], [Load("a", 0, 1, 4), Load("b", 1, 30, 4)]
    scheduler = FairScheduler(4)
    assert scheduler.plan(waiting, running, 16) == scheduler.plan(waiting, running, 16)


steps = st.lists(
    st.tuples(st.floats(0, 1e9), st.integers(0, 64), st.integers(0, 8192)),
    max_size=60,
)


@given(
    largest=st.integers(1, 8192),
    seen=steps,
    num_decoding=st.integers(0, 64),
    num_prompts=st.integers(0, 2000),
)
def test_a_chunk_is_a_power_of_two_within_its_bounds(
    largest: int, seen: list[tuple[float, int, int]], num_decoding: int, num_prompts: int
) -> None:
    pacer = Pacer(largest)
    for seconds, rows, prompt in seen:
        pacer.observe(seconds, rows, prompt)
    chunk = pacer.chunk(num_decoding, num_prompts)
    if num_decoding:
        assert pacer.smallest <= chunk <= largest
        assert chunk.bit_count() == 1
    else:
        assert chunk == largest
    assert pacer.prompt_share is None or 0 <= pacer.prompt_share <= 1


def test_prompts_that_seem_to_cost_nothing_never_overflow_the_chunk() -> None:
    pacer = Pacer(512)
    pacer.observe(1.0, 1, 0)
    pacer.observe(2.0, 1, 8)
    for _ in range(
        3400
    ):  # a mixed step as fast as a decode step: the average decays below every normal float
        pacer.observe(1.0, 1, 8)
    assert pacer.chunk(1) == 512


def test_a_chunk_takes_about_as_long_as_a_decode_step() -> None:
    pacer = Pacer(512)
    for _ in range(50):
        pacer.observe(0.1, 4, 0)
        pacer.observe(0.1 + 100 * 0.001, 4, 100)
    assert pacer.chunk(4) == 64  # 100 tokens fit, rounded down
    assert pacer.prompt_share == pytest.approx(0.5)


def test_prompts_that_outnumber_the_rows_get_as_much_more_time_and_no_more_than_eight_steps() -> None:
    pacer = Pacer(4096)
    for _ in range(50):
        pacer.observe(0.1, 4, 0)
        pacer.observe(0.1 + 64 * 0.0015, 4, 64)  # 66 tokens take as long as a step
    assert [pacer.chunk(4, num_prompts) for num_prompts in (0, 1, 4, 8, 16, 400)] == [
        64,
        64,
        64,
        128,
        256,
        512,
    ]


@given(count=st.integers(0, 5000))
def test_buckets_hold_what_they_are_for(count: int) -> None:
    exact, bucketed = Shapes(bucketed=False), Shapes(bucketed=True)
    assert exact.rows(count) == exact.width(count) == count
    assert bucketed.rows(count) == bucketed.width(count)
    assert count <= bucketed.rows(count) < max(2 * count, 2)
    assert Shapes.slots(count) == (bucketed.rows(count) if count else 0)


def test_a_prompt_that_comes_with_the_first_decode_step_does_not_hide_what_that_step_costs() -> None:
    pacer = Pacer(512)
    for _ in range(50):  # rows have never decoded alone
        pacer.observe(0.100, 1, 64, decode_s=0.040)
    assert pacer.decode_s is not None and abs(pacer.decode_s - 0.040) < 1e-9
    assert pacer.chunk(1) == 32  # 40 ms at 60 ms for 64 tokens, as a power of two
    assert pacer.prompt_share is not None and abs(pacer.prompt_share - 0.6) < 1e-6
