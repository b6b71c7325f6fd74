"""The filters and processors against mlx_lm's own, on the masked logits: mlx_lm draws from a global generator."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mantou.data import Sampling
from mantou.models.load import enter_mlx_lm
from mantou.sampling import filters
from mantou.sampling.params import make_params
from mantou.sampling.processors import apply_bias, apply_penalties

VOCAB = 40
PLAIN = settings(deadline=None, max_examples=30)


@pytest.fixture(autouse=True, scope="module")
def uncompiled() -> Iterator[None]:
    """mlx_lm's filters are compiled anew for every constant, which would take most of the time here."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def mlx_lm() -> ModuleType:
    enter_mlx_lm()
    return importlib.import_module("mlx_lm.sample_utils")


def logits_of(seed: int, rows: int = 1, width: int = 1, spread: float = 3.0) -> mx.array:
    return spread * mx.random.normal((rows, width, VOCAB), key=mx.random.key(seed))


def logprobs_of(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def kept(logits: mx.array, *wishes: Sampling) -> np.ndarray:
    """bool[B, T, V]: what each row may draw."""
    where = mx.zeros(logits.shape[:2], mx.uint32)
    found = filters.allowed(logits, make_params(wishes), where)
    return np.ones(logits.shape, np.bool_) if found is None else np.array(found)


def as_mlx_lm(logits: mx.array, wish: Sampling) -> np.ndarray:
    """bool[1, V] after mlx_lm's sampling methods, in the order of its make_sampler."""
    theirs = mlx_lm()
    x = logprobs_of(logits)[:, 0]
    if 0 < wish.top_p < 1:
        x = theirs.apply_top_p(x, wish.top_p)
    if wish.min_p:
        x = theirs.apply_min_p(x, wish.min_p)
    if wish.xtc_probability:
        x = theirs.apply_xtc(x, wish.xtc_probability, wish.xtc_threshold, list(wish.xtc_exempt))
    if wish.top_k:
        x = theirs.apply_top_k(x, wish.top_k)
    return np.array(x) > -np.inf


filter_wishes = st.builds(
    Sampling,
    temperature=st.just(0.8),
    top_p=st.sampled_from([0.0, 0.05, 0.5, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 7, VOCAB - 1]),
    min_p=st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
    xtc_probability=st.sampled_from([0.0, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.02, 0.1, 0.5]),
    xtc_exempt=st.sampled_from([(), (3,), (0, 1, 2, 39)]),
)


@PLAIN
@given(wish=filter_wishes, seed=st.integers(0, 99), spread=st.sampled_from([0.1, 3.0, 12.0]))
def test_any_combination_of_filters_keeps_what_mlx_lm_keeps(wish: Sampling, seed: int, spread: float) -> None:
    logits = logits_of(seed, spread=spread)
    assert (kept(logits, wish)[0] == as_mlx_lm(logits, wish)).all()


@PLAIN
@given(wishes=st.lists(filter_wishes, min_size=2, max_size=5), seed=st.integers(0, 99))
def test_a_row_is_filtered_as_if_it_were_alone(wishes: list[Sampling], seed: int) -> None:
    logits = logits_of(seed, len(wishes), 2)
    together = kept(logits, *wishes)
    for row, wish in enumerate(wishes):
        assert (together[row] == kept(logits[row : row + 1], wish)[0]).all()


def test_a_neighbour_that_asks_for_more_tokens_than_there_are_switches_no_top_k_off() -> None:
    logits = logits_of(1, 2)
    few, all_ = Sampling(temperature=1.0, top_k=3), Sampling(temperature=1.0, top_k=10**6)
    assert kept(logits, few, all_).sum(axis=-1).ravel().tolist() == [3, VOCAB]


def test_the_most_likely_token_always_stays() -> None:
    tight = Sampling(temperature=1.0, top_p=1e-6, min_p=1.0, top_k=1)
    logits = logits_of(2)
    assert kept(logits, tight)[0, 0].nonzero()[0].tolist() == [mx.argmax(logits).item()]


def test_tokens_that_are_already_forbidden_stay_forbidden_and_carry_no_mass() -> None:
    logits = logits_of(3)
    forbidden = mx.arange(VOCAB) % 2 == 0
    masked = mx.where(forbidden, -mx.inf, logits)
    wish = Sampling(temperature=1.0, top_p=0.9, top_k=30, min_p=0.01)
    found = kept(masked, wish)[0, 0]
    assert not found[np.array(forbidden)].any()
    assert (found == as_mlx_lm(masked, wish)[0]).all()


def test_greedy_rows_and_tone_curves_are_not_filtered() -> None:
    from mantou.data import ToneCurve

    logits = logits_of(4, 2)
    wishes = [Sampling(top_k=1, top_p=0.1), Sampling(temperature=1.0, top_k=1, tone_curve=ToneCurve())]
    assert kept(logits, *wishes).all()


def test_xtc_acts_as_often_as_asked_and_by_position() -> None:
    logits = mx.broadcast_to(logits_of(5), (1, 4000, VOCAB))
    params = make_params([Sampling(temperature=1.0, xtc_probability=0.3, xtc_threshold=0.02)])
    where = mx.arange(4000, dtype=mx.uint32)[None]
    acted = ~np.array(filters.allowed(logits, params, where)).all(axis=-1)
    assert acted.mean() == pytest.approx(0.3, abs=0.04)
    again = ~np.array(filters.allowed(logits[:, :50], params, where[:, 1000:1050])).all(axis=-1)
    assert (again == acted[:, 1000:1050]).all()


def test_an_exempt_token_beyond_the_vocabulary_is_no_error() -> None:
    """Tokenizers may know more ids than the model's head has outputs."""
    wish = Sampling(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.01, xtc_exempt=(3, VOCAB + 5))
    plain = Sampling(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.01, xtc_exempt=(3,))
    logits = logits_of(6)
    assert (kept(logits, wish) == kept(logits, plain)).all()


# ------------------------------------------------------------------ processors
penalties = st.sampled_from([0.0, 0.3, 1.0, 1.7])
sizes = st.sampled_from([1, 5, 20])
processor_wishes = st.builds(
    Sampling,
    logit_bias=st.sampled_from([(), ((2, 4.0),), ((0, -100.0), (39, 7.5))]),
    repetition_penalty=penalties,
    repetition_context_size=sizes,
    presence_penalty=penalties,
    presence_context_size=sizes,
    frequency_penalty=penalties,
    frequency_context_size=sizes,
)


def processed(logits: mx.array, histories: list[list[int]], *wishes: Sampling, draft: Any = ()) -> np.ndarray:
    params = make_params(wishes)
    if params.any_bias:
        logits = apply_bias(logits, params)
    if params.any_history:
        logits = apply_penalties(logits, params, [(tokens, draft) for tokens in histories])
    return np.array(logits)


def processed_by_mlx_lm(logits: mx.array, tokens: list[int], wish: Sampling) -> np.ndarray:
    chain = mlx_lm().make_logits_processors(
        dict(wish.logit_bias),
        wish.repetition_penalty,
        wish.repetition_context_size,
        wish.presence_penalty,
        wish.presence_context_size,
        wish.frequency_penalty,
        wish.frequency_context_size,
    )
    x = mx.array(logits)
    for processor in chain:
        x = processor(mx.array(tokens), x)
    return np.array(x)


@PLAIN
@given(
    wishes=st.lists(processor_wishes, min_size=1, max_size=3),
    tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    seed=st.integers(0, 99),
)
def test_bias_and_penalties_of_every_row_are_mlx_lms(
    wishes: list[Sampling], tokens: list[int], seed: int
) -> None:
    logits = logits_of(seed, len(wishes))
    histories = [tokens[row:] or tokens for row in range(len(wishes))]
    together = processed(logits, histories, *wishes)
    for row, wish in enumerate(wishes):
        expected = processed_by_mlx_lm(logits[row], histories[row], wish)
        assert together[row] == pytest.approx(expected, rel=1e-5, abs=1e-5)
        alone = processed(logits[row : row + 1], histories[row : row + 1], wish)
        assert (alone[0] == together[row]).all(), "bit for bit, whatever the neighbours ask"


def test_a_context_of_zero_counts_the_whole_history() -> None:
    tokens = [5] + [6] * 50
    wish = Sampling(frequency_penalty=0.5, frequency_context_size=0)
    shift = (np.array(logits_of(1)) - processed(logits_of(1), [tokens], wish))[0, 0]
    assert shift[5] == pytest.approx(0.5, abs=1e-5)
    assert shift[6] == pytest.approx(25.0, abs=1e-5)


@PLAIN
@given(
    wish=processor_wishes,
    tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    draft=st.lists(st.integers(0, VOCAB - 1), max_size=5),
)
def test_a_draft_position_is_penalised_as_if_its_draft_had_been_generated(
    wish: Sampling, tokens: list[int], draft: list[int]
) -> None:
    logits = logits_of(7, 1, len(draft) + 1)
    verified = processed(logits, [tokens], wish, draft=draft)
    for t in range(len(draft) + 1):
        plain = processed(logits[:, t : t + 1], [[*tokens, *draft[:t]]], wish)
        assert (verified[0, t] == plain[0, 0]).all()
