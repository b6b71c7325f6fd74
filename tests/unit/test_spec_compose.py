from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mantou.data import Draft, DraftAsk, Request, Sampling, Speculation
from mantou.spec.compose import AdaptiveWidth, ByKind, FirstOf, expected_tokens, num_likely
from mantou.spec.cost import StepCosts
from mantou.spec.none import NoDraft


class Source(NoDraft):
    """Guesses the numbers that follow, for the requests it is given; each guess takes `cost` seconds."""

    def __init__(
        self, kind: str, chance: float = 0.9, most: int = 8, cost: float = 0.0, **only: bool
    ) -> None:
        self.kind, self.chance, self.most, self.cost, self.only = kind, chance, most, cost, only
        self.asked: list[tuple[str, int]] = []
        self.observed: list[tuple[str, int, int]] = []
        self.released: list[str] = []

    def width(self, request: Request, tokens: Sequence[int]) -> int:
        return self.most if self.only.get(request.id, True) else 0

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Draft]:
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: DraftAsk) -> Draft:
        width = ask.paid if self.cost else ask.width
        if not width or not self.only.get(ask.request.id, True):
            return Draft()
        self.asked.append((ask.request.id, width))
        return Draft(
            range(len(ask.tokens), len(ask.tokens) + width), self.kind, self.chance, free=not self.cost
        )

    def cost_s(self, request: Request, num_rows: int, width: int) -> float:
        return self.cost * width

    def observe(self, request: Request, draft: Draft, taken: Sequence[int]) -> None:
        self.observed.append((request.id, len(draft), draft.judge(taken)[0]))

    def release(self, request: Request) -> None:
        self.released.append(request.id)


def request(name: str, kind: str | None = None) -> Request:
    return Request(name, (0,), Sampling(), speculation=Speculation(kind))


def asks(*names: str, width: int = 8) -> list[DraftAsk]:
    return [DraftAsk(request(name), [0], width) for name in names]


def costs(per_token: float, rows: int = 16) -> StepCosts:
    """A step of T tokens a row takes 1 + per_token * (rows * T - rows)."""
    grid = (1, rows)
    return StepCosts(grid, (1, 16), {(r, w): 1 + per_token * r * (w - 1) for r in grid for w in (1, 16)})


def widths(drafts: Sequence[Draft]) -> list[int]:
    return [len(draft) for draft in drafts]


# ------------------------------------------------------------------ kinds
def test_each_request_gets_the_kind_it_asks_for() -> None:
    one, other = Source("one", most=1), Source("other", most=2)
    provider = ByKind({"off": NoDraft(), "one": one, "other": other}, default="one")
    rows = [request("a"), request("b", "other"), request("c", "off")]
    assert [provider.width(row, [0]) for row in rows] == [1, 2, 0]
    drafts = provider.propose([DraftAsk(row, [0], 1) for row in rows])
    assert [draft.kind for draft in drafts] == ["one", "other", ""]
    for row in rows:
        provider.release(row)
    assert (one.released, other.released) == (["a"], ["b"])


def test_the_second_provider_is_asked_only_where_the_first_has_no_guess() -> None:
    first, second = Source("first", a=True, b=False), Source("second")
    drafts = FirstOf(first, second).propose(asks("a", "b", width=3))
    assert [(draft.kind, len(draft)) for draft in drafts] == [("first", 3), ("second", 3)]
    assert second.asked == [("b", 3)]


# ------------------------------------------------------------------ width
@given(st.floats(0, 0.99), st.integers(0, 12))
def test_expected_tokens_is_the_sum_of_the_powers(acceptance: float, width: int) -> None:
    assert expected_tokens(acceptance, width) == pytest.approx(sum(acceptance**n for n in range(width + 1)))


@pytest.mark.parametrize(
    ("per_token", "chance", "expected"),
    [
        (0.0, 0.5, 8),  # checking is free: the whole draft
        (0.1, 0.95, 8),  # cheap, and mostly right
        (0.5, 0.95, 5),
        (0.3, 0.5, 1),
        (1.0, 0.95, 0),  # each token costs a step of its own
        (0.9, 0.7, 0),
    ],
)
def test_the_width_is_what_gives_most_tokens_a_second(per_token: float, chance: float, expected: int) -> None:
    provider = AdaptiveWidth(Source("s", chance), costs(per_token))
    (width,) = widths(provider.propose(asks("a")))
    assert width == expected
    best = max(range(9), key=lambda w: expected_tokens(chance, w) / (1 + per_token * w))
    assert width == best


def test_a_full_batch_drafts_less_than_one_row() -> None:
    alone, full = AdaptiveWidth(Source("s"), costs(0.05)), AdaptiveWidth(Source("s"), costs(0.05))
    full.timed((1,) * 16, 0, 1.0)
    names = [str(i) for i in range(16)]
    assert widths(alone.propose(asks("a"))) == [8]
    assert max(widths(full.propose(asks(*names)))) < 8


def test_rows_without_a_guess_keep_the_step_narrow() -> None:
    """One row in sixteen that may win a few tokens must not make all of them wait."""
    provider = AdaptiveWidth(Source("s"), costs(0.2))
    provider.timed((1,) * 16, 0, 1.0)
    assert widths(provider.propose(asks("a"))) == [0]
    provider.timed((1,), 0, 1.0)
    assert widths(provider.propose(asks("b")))[0] > 0


def run(provider: AdaptiveWidth, right: bool, rounds: int) -> list[int]:
    found: list[int] = []
    for _ in range(rounds):
        ask = DraftAsk(request("a"), [0], provider.width(request("a"), [0]))
        (draft,) = provider.propose([ask]) if ask.width else (Draft(),)
        found.append(len(draft))
        provider.observe(ask.request, draft, [1, 2, 3, 4, 5, 6, 7, 8, 9] if right else [99])
    return found


def test_a_row_whose_guesses_are_wrong_stops_drafting() -> None:
    provider = AdaptiveWidth(Source("s", 0.9), costs(0.2))
    assert run(provider, right=False, rounds=40)[-20:] == [0] * 20


def test_guesses_that_get_better_are_used_again_although_none_was_checked_meanwhile() -> None:
    provider = AdaptiveWidth(Source("s", 0.5), costs(0.3))
    assert run(provider, right=False, rounds=40)[-1] == 0
    assert max(run(provider, right=True, rounds=40)[-8:]) > 0


def test_guesses_that_take_time_are_not_asked_for_where_they_lose() -> None:
    dear, fair = Source("s", cost=1.0), Source("s", cost=0.05)
    assert widths(AdaptiveWidth(dear, costs(0.1)).propose(asks("a"))) == [0]
    assert dear.asked == []
    assert widths(AdaptiveWidth(fair, costs(0.1)).propose(asks("a")))[0] > 0


def test_dear_guesses_that_were_wrong_are_tried_again_ever_more_seldom() -> None:
    source = Source("s", cost=0.05)
    provider = AdaptiveWidth(source, costs(0.1))
    run(provider, right=False, rounds=20)
    assert len(source.asked) < 20
    before = len(source.asked)
    run(provider, right=False, rounds=300)
    assert 0 < len(source.asked) - before < 12


def test_free_guesses_are_made_although_dear_ones_do_not_pay() -> None:
    free, dear = Source("free", a=True, b=False), Source("dear", cost=1.0)
    drafts = AdaptiveWidth(FirstOf(free, dear), costs(0.1)).propose(asks("a", "b"))
    assert [draft.kind for draft in drafts] == ["free", ""]


def test_rows_that_only_pay_together_are_asked_together() -> None:
    """Sixteen rows, each with a good guess: one of them alone would never be worth a wider step."""
    provider = AdaptiveWidth(Source("s", 0.95), costs(0.03))
    names = [str(i) for i in range(16)]
    for _ in range(3):
        for name in names:
            provider.timed((1,) * 16, 0, 1.0)
            provider.propose(asks(name))  # alone, and cut to nothing
            provider.observe(request(name), Draft(), [1])
    assert [provider.width(request(name), [0]) for name in names] == [8] * 16
    assert min(widths(provider.propose(asks(*names)))) > 0


def test_a_device_with_a_pipeline_is_left_alone_for_a_while_after_guesses_that_did_not_pay() -> None:
    provider = AdaptiveWidth(Source("s", 0.3), costs(0.5), pause=3)
    assert widths(provider.propose(asks("a"))) == [0]
    found = []
    for _ in range(4):
        found.append(provider.width(request("b"), [0]))
        provider.timed((1,), 0, 1.0)
    assert found == [0, 0, 0, 8]


def test_where_padding_is_free_each_row_guesses_as_far_as_its_own_guesses_hold() -> None:
    """A step costs its tokens: a sure row takes all of its draft, a doubtful one next to nothing. Cut alike, they would
    all take the width between."""
    chances = {"sure": 0.98, "fair": 0.6, "poor": 0.05}

    class Several(Source):
        def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
            drafts = super().propose(asks)
            return [replace(d, chance=chances[a.request.id]) for a, d in zip(asks, drafts, strict=True)]

    def cut(padding: float) -> list[int]:
        table = costs(0.02)
        table.padding = padding
        provider = AdaptiveWidth(Several("s"), table)
        provider.timed((1,) * 8, 0, 1.0)
        return widths(provider.propose(asks(*chances)))

    sure, fair, poor = cut(0.0)
    assert sure == 8
    assert 0 < fair < sure
    assert poor == 0
    assert len(set(cut(1.0))) == 1


@pytest.mark.parametrize(("padding", "per_token"), [(0.0, 0.05), (1.0, 0.01)])
def test_a_row_that_guesses_nothing_keeps_four_fifths_of_its_speed(padding: float, per_token: float) -> None:
    """One row of eight is sure of eight tokens: all of them would pay for the server, and its neighbours would wait."""
    table = costs(per_token)
    table.padding = padding
    provider = AdaptiveWidth(Source("s", 0.98, other=False), table)
    provider.timed((1,) * 8, 0, 2.0)
    (width,) = widths(provider.propose(asks("sure")))
    slowed = [table.seconds(8, table.width_of([1] * 7 + [1 + w])) / table.seconds(8, 1) for w in (width, 8)]
    assert 0 < width < 8
    assert slowed[0] <= 1 / 0.8 < slowed[1]
    alone = AdaptiveWidth(Source("s", 0.98), costs(per_token))
    assert widths(alone.propose(asks("sure"))) == [8]


@given(st.floats(0.01, 0.98), st.floats(0.05, 0.95))
def test_a_cut_draft_is_right_as_often_as_it_must_be(acceptance: float, chance: float) -> None:
    width = num_likely(acceptance, chance)
    assert acceptance**width >= chance * (1 - 1e-9)
    assert acceptance ** (width + 1) < chance * (1 + 1e-9)


# ------------------------------------------------------------------ costs
def test_costs_lie_between_what_was_measured() -> None:
    table = StepCosts.from_cells({(1, 1): 1.0, (1, 4): 4.0, (4, 1): 2.0, (4, 4): 8.0})
    assert table.seconds(1, 2) == pytest.approx(2.0)
    assert table.seconds(2, 1) == pytest.approx(4 / 3)
    assert table.seconds(1, 6) == pytest.approx(6.0)  # beyond: along the last slope


def test_cells_that_were_not_measured_follow_a_line() -> None:
    table = StepCosts.from_cells({(1, 1): 2.0, (1, 2): 3.0, (2, 1): 3.0, (4, 1): 5.0})
    assert table.seconds(4, 2) == pytest.approx(9.0)


def test_a_wider_step_is_never_cheaper() -> None:
    table = StepCosts.from_cells({(1, 1): 2.0, (1, 2): 1.0, (2, 1): 3.0, (2, 2): 2.5})
    assert table.seconds(1, 1) == table.seconds(1, 2) == 1.0
    assert table.seconds(2, 1) == table.seconds(2, 2) == 2.5


def test_steps_that_are_slower_than_measured_move_the_whole_table() -> None:
    table = StepCosts.from_cells({(1, 1): 1.0, (1, 4): 2.0, (8, 1): 3.0, (8, 4): 9.0})
    before = table.seconds(8, 4) / table.seconds(1, 1)
    for _ in range(100):
        table.observe((1,), 0, 1.5)
    assert table.seconds(1, 1) == pytest.approx(1.5, rel=0.01)
    assert table.seconds(8, 4) / table.seconds(1, 1) == pytest.approx(before, rel=0.1)


def test_a_wider_step_that_was_not_measured_is_not_free() -> None:
    table = StepCosts.from_cells({(1, 1): 1.0})
    assert table.seconds(1, 2) == pytest.approx(1.5)
    assert table.seconds(2, 1) == pytest.approx(1.5)


def test_a_width_that_was_measured_too_cheap_is_mended_by_a_few_steps() -> None:
    """As on a machine that was busy with something else when it was measured."""
    table = StepCosts.from_cells({(1, 1): 4.0, (1, 2): 5.0, (16, 1): 40.0, (16, 2): 41.0})
    for _ in range(30):
        table.observe((1,) * 16, 0, 17.0)
    assert table.seconds(16, 2) < 21
    for _ in range(5):
        table.observe((2,) * 16, 0, 30.0)
    assert table.seconds(16, 2) > 26
    assert table.seconds(16, 1) == pytest.approx(17.0, rel=0.05)


def test_one_slow_step_says_nothing() -> None:
    table = StepCosts.from_cells({(1, 1): 1.0})
    table.observe((1,), 0, 40.0)
    assert table.seconds(1, 1) == 1.0


def test_a_slower_machine_is_believed_when_slow_steps_go_on() -> None:
    table = StepCosts.from_cells({(1, 1): 1.0})
    for _ in range(60):
        table.observe((1,), 0, 8.0)
    assert table.seconds(1, 1) == pytest.approx(8.0, rel=0.05)


def test_what_rows_hold_is_added_to_every_width_and_multiplies_none() -> None:
    """Long contexts: a step of one token a row takes three times as long, and four tokens cost no more than before."""
    table = StepCosts.from_cells({(1, 1): 4.0, (1, 4): 6.0, (8, 1): 8.0, (8, 4): 24.0}, held_s=0.001)
    for step in range(400):
        num_rows, num_held = (1, 1000) if step % 2 else (8, 8000)
        table.observe((1,) * num_rows, num_held, (4.0 if num_rows == 1 else 8.0) + 0.002 * num_held)
    table.num_held = 8000
    assert table.seconds(8, 1) == pytest.approx(24.0, rel=0.1)
    assert table.seconds(8, 4) - table.seconds(8, 1) < 24  # 48 if all had been scaled


def test_a_wide_step_costs_what_its_padding_costs() -> None:
    table = StepCosts.from_cells({(1, 1): 1.0, (4, 1): 2.0, (4, 8): 9.0}, padding=0.25)
    assert table.width_of((8, 1, 1, 2)) == pytest.approx(0.25 * 8 + 0.75 * 3)
    assert table.width_of((1, 1, 1)) == 1


def test_a_wide_step_is_never_thought_cheaper_than_a_plain_one() -> None:
    table = StepCosts.from_cells({(1, 1): 1.0, (1, 4): 2.0, (4, 1): 1.5, (4, 4): 4.0})
    for _ in range(50):
        table.observe((4,) * 4, 0, 0.7)
    assert table.seconds(4, 4) >= table.seconds(4, 1)


def test_one_row_of_eight_does_not_make_all_wait_for_its_guess() -> None:
    """A guess takes half a step, for eight rows as for one: eight gain by it, one alone among plain rows does not."""
    for names, guessed in (("abcdefgh", True), ("a", False)):
        provider = AdaptiveWidth(Source("paid", cost=0.5), costs(0.0))
        provider.timed((1,) * 8, 0, 1.0)
        assert [width > 0 for width in widths(provider.propose(asks(*names)))] == [guessed] * len(names)
