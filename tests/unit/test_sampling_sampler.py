from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mantou.data import Sampling, ToneCurve
from mantou.sampling.params import make_params
from mantou.sampling.sampler import DeviceSampler, _tone_curve
from mantou.sampling.verify import agree
from tests.compose.axes import MIXED
from tests.fakes import packed

VOCAB = 60
SAMPLER = DeviceSampler()
PLAIN = settings(deadline=None, max_examples=30)
WISHES = (
    *MIXED,
    Sampling(),
    Sampling(temperature=2.0, tone_curve=ToneCurve(1.0, 0.0, 2.0)),
    Sampling(temperature=0.5, top_k=5, logprobs=True, top_logprobs=5),
    Sampling(temperature=1.0, top_p=0.3, seed=-7),
    Sampling(frequency_penalty=0.7, logit_bias=((1, 3.0),)),
)


def logits_of(seed: int, rows: int, width: int = 1) -> mx.array:
    return 3.0 * mx.random.normal((rows, width, VOCAB), key=mx.random.key(seed))


def draw(
    logits: mx.array, wishes: list[Sampling | None], positions: Any, history: Any = None, **kwargs: Any
) -> Any:
    history = history or [((1, 2, 3, 2), (0,) * (logits.shape[1] - 1))] * len(wishes)
    return SAMPLER.draw(logits, SAMPLER.prepare(wishes), positions, history=history, **kwargs)


def tokens(*args: Any, **kwargs: Any) -> list[list[int]]:
    return draw(*args, **kwargs).tokens.tolist()


@PLAIN
@given(
    wishes=st.lists(st.sampled_from(WISHES), min_size=1, max_size=6),
    seed=st.integers(0, 999),
    width=st.integers(1, 3),
)
def test_a_row_draws_what_it_would_draw_alone_bit_for_bit(
    wishes: list[Sampling], seed: int, width: int
) -> None:
    wishes = [replace(wish, seed=wish.seed + row) for row, wish in enumerate(wishes)]
    logits = logits_of(seed, len(wishes), width)
    positions = [range(row * 10, row * 10 + width) for row in range(len(wishes))]
    together = draw(logits, list(wishes), positions)
    for row, wish in enumerate(wishes):
        alone = draw(logits[row : row + 1], [wish], positions[row : row + 1])
        assert alone.tokens.tolist()[0] == together.tokens.tolist()[row]
        if wish.logprobs or wish.top_logprobs:
            assert alone.logprobs.tolist()[0] == together.logprobs.tolist()[row]
        for t in range(width):
            count = wish.top_logprobs
            for name in ("top_tokens", "top_logprobs") if count else ():
                mine = getattr(alone, name).tolist()[0][t]
                assert mine[:count] == getattr(together, name).tolist()[row][t][:count]


def test_a_position_draws_the_same_in_any_chunk() -> None:
    wish = Sampling(temperature=1.0, seed=3)
    logits = logits_of(1, 1, 8)
    whole = tokens(logits, [wish], [range(5, 13)])
    single = [tokens(logits[:, t : t + 1], [wish], [(5 + t,)])[0][0] for t in range(8)]
    assert whole == [single]
    assert tokens(logits, [wish], [range(6, 14)]) != whole, "another position is another draw"


def test_idle_rows_change_nothing() -> None:
    wish = Sampling(temperature=1.0, top_k=9)
    logits = logits_of(2, 3)
    alone = tokens(logits[1:2], [wish], [(4,)])
    assert tokens(logits, [None, wish, None], [(0,), (4,), (0,)])[1] == alone[0]


def test_greedy_takes_the_most_likely_token() -> None:
    logits = logits_of(3, 2, 4)
    assert tokens(logits, [Sampling(seed=1), Sampling(seed=2)], [range(4)] * 2) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_logits_of_any_float_dtype_are_drawn_in_float32(dtype: mx.Dtype) -> None:
    logits = logits_of(4, 1).astype(dtype)
    wish = Sampling(temperature=0.7, logprobs=True)
    found = draw(logits, [wish], [(9,)])
    assert found.tokens.tolist() == tokens(logits.astype(mx.float32), [wish], [(9,)])
    assert found.logprobs.dtype == mx.float32


@PLAIN
@given(wish=st.sampled_from(WISHES), seed=st.integers(0, 200))
def test_a_forbidden_token_is_never_drawn(wish: Sampling, seed: int) -> None:
    allowed = packed(np.isin(np.arange(VOCAB), [7, 11, 30]))
    logits = logits_of(seed, 2, 2)
    found = tokens(
        logits,
        [wish, wish],
        [(seed, seed + 1)] * 2,
        allowed=[(0, 0, allowed), (0, 1, allowed), (1, 1, allowed)],
    )
    free = tokens(logits, [wish, wish], [(seed, seed + 1)] * 2)
    assert {found[0][0], found[0][1], found[1][1]} <= {7, 11, 30}
    assert found[1][0] == free[1][0], "a position without a mask is free"


@pytest.mark.parametrize("wish", WISHES)
def test_a_token_with_a_logit_of_minus_infinity_stays_out(wish: Sampling) -> None:
    logits = mx.where(mx.arange(VOCAB) == 13, logits_of(5, 1, 50), -mx.inf)
    history = [((1, 2), (13,) * 49)]
    assert tokens(logits, [wish], [range(50)], history) == [[13] * 50]


# ------------------------------------------------------------------ tone curve
@pytest.mark.parametrize("neutral", [ToneCurve(width=math.inf), ToneCurve(shoulder=0.0, toe=0.0)])
def test_a_neutral_tone_curve_is_plain_temperature_bit_for_bit(neutral: ToneCurve) -> None:
    plain = Sampling(temperature=0.8, seed=4, top_p=0.9, logprobs=True)
    curved = replace(plain, tone_curve=neutral)
    logits = logits_of(6, 1, 300)
    expected, found = (draw(logits, [wish], [range(300)]) for wish in (plain, curved))
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.logprobs.tolist() == expected.logprobs.tolist()


curves = st.builds(
    ToneCurve,
    width=st.floats(0, 20),
    shoulder=st.floats(0, 20),
    toe=st.floats(0, 20),
    pivot_offset=st.floats(0, 20),
).filter(lambda c: c.shoulder > 0 or c.toe > 0)


@PLAIN
@given(curve=curves, temperature=st.floats(0.1, 3), seed=st.integers(0, 99))
def test_a_tone_curve_is_monotone_keeps_the_most_likely_token_and_minus_infinity(
    curve: ToneCurve, temperature: float, seed: int
) -> None:
    params = make_params([Sampling(temperature=temperature, tone_curve=curve)])
    logits = mx.sort(logits_of(seed, 1) * 4)
    logits = mx.where(mx.arange(VOCAB) < 3, -mx.inf, logits)
    shaped = np.array(_tone_curve(logits, params))[0, 0]
    assert np.isneginf(shaped[:3]).all()
    assert np.isfinite(shaped[3:]).all()
    steps = np.diff(shaped[3:])
    assert (steps >= -1e-4).all()
    assert shaped[-1] == shaped.max()


def test_a_tone_curve_is_linear_inside_its_width_and_logarithmic_beyond() -> None:
    """Values of the published formula, computed by hand."""
    curve = ToneCurve(width=2.0, shoulder=1.0, toe=3.0, pivot_offset=5.0)
    params = make_params([Sampling(temperature=0.5, tone_curve=curve)])
    z = np.array([5.0, 3.0, 2.0, 0.0, -2.0, -8.0], np.float32)  # relative to the pivot: maximum - 5
    shaped = np.array(_tone_curve(mx.array(z)[None, None] + 1.5, params))[0, 0]
    expected = [
        2 * 2 + 2 * 1 * math.log1p(3 / 1),
        2 * 2 + 2 * 1 * math.log1p(1 / 1),
        4.0,
        0.0,
        -4.0,
        -(2 * 2) - 2 * 3 * math.log1p(6 / 3),
    ]
    assert shaped == pytest.approx(expected, abs=1e-4)


# ------------------------------------------------------------------ log-probabilities
@PLAIN
@given(count=st.integers(1, 20), seed=st.integers(0, 99), temperature=st.sampled_from([0.0, 1.0]))
def test_logprobs_are_the_log_softmax_and_alternatives_are_sorted(
    count: int, seed: int, temperature: float
) -> None:
    wish = Sampling(temperature=temperature, top_k=3, top_logprobs=count, logit_bias=((0, 2.0),))
    logits = logits_of(seed, 1, 3)
    biased = np.array(logits, np.float64)
    biased[..., 0] += 2.0
    expected = biased - np.log(np.exp(biased).sum(axis=-1, keepdims=True))
    found = draw(logits, [wish], [range(3)])
    for t in range(3):
        chosen = found.tokens.tolist()[0][t]
        assert found.logprobs.tolist()[0][t] == pytest.approx(expected[0, t, chosen], abs=1e-5)
        best = found.top_tokens.tolist()[0][t]
        values = found.top_logprobs.tolist()[0][t]
        assert len(best) == count
        assert values == sorted(values, reverse=True)
        assert best == np.argsort(-expected[0, t])[:count].tolist()
        assert values == pytest.approx(expected[0, t, best], abs=1e-5)


def test_logprobs_cost_nothing_unless_a_row_asks() -> None:
    found = draw(logits_of(1, 2), [Sampling(), Sampling(temperature=1.0)], [(1,), (1,)])
    assert (found.logprobs, found.top_tokens, found.top_logprobs) == (None, None, None)
    assert len(found.arrays()) == 2, "tokens and their logits"


def test_only_penalties_want_the_history() -> None:
    assert not SAMPLER.wants_history(Sampling(temperature=1.0, top_p=0.5, logit_bias=((1, 1.0),)))
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SAMPLER.wants_history(replace(Sampling(), **{name: 0.5}))


# ------------------------------------------------------------------ verify
@given(draft=st.lists(st.integers(0, 3), max_size=6), data=st.data())
def test_verified_tokens_are_what_plain_decoding_draws(draft: list[int], data: st.DataObject) -> None:
    drawn = data.draw(st.lists(st.integers(0, 3), min_size=len(draft) + 1, max_size=len(draft) + 1))
    taken = agree(draft, drawn)
    assert 1 <= len(taken) <= len(draft) + 1
    assert taken == drawn[: len(taken)]
    assert taken[:-1] == draft[: len(taken) - 1], "every token but the last confirms the draft"
    if len(taken) <= len(draft):
        assert taken[-1] != draft[len(taken) - 1], "it stops at the first that does not"
