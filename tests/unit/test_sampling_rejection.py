"""Rejection keeps a row's distribution whatever the draft: chi-square tests with fixed seeds."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

from mantou.data import Draft, Request, Sampling
from mantou.sampling import noise
from mantou.sampling.params import make_params
from mantou.sampling.rejection import RejectionSampler, probabilities, reject
from tests.compose.drafts import model_draft
from tests.compose.harness import Case, prompts, run

N = 20_000
WISH = Sampling(temperature=1.0, seed=3)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Normalised: about 0 by chance, beyond 4 once in ten thousand tests."""
    used = expected > 5
    value = float((((counts - expected) ** 2)[used] / expected[used]).sum())
    freedom = int(used.sum()) - 1
    return (value - freedom) / (2 * freedom) ** 0.5


def draws(p: np.ndarray, q: np.ndarray, *, own_noise: bool = True) -> tuple[np.ndarray, float]:
    """Counts of N verified tokens, and the share of drafts that stayed."""
    params = make_params([WISH])
    positions = mx.arange(N, dtype=mx.uint32)[None]
    rows = [mx.broadcast_to(mx.array(x, dtype=mx.float32), (1, N, len(x))) for x in (p, q)]
    stream = noise.DRAFT if own_noise else noise.CATEGORICAL
    noisy = mx.log(rows[1]) + noise.gumbel(params.words, positions, len(q), stream)
    draft = mx.argmax(noisy, axis=-1).astype(mx.int32)
    tokens = np.array(reject(rows[0], rows[1], draft, params, positions))[0]
    return np.bincount(tokens, minlength=len(p)), float(np.mean(tokens == np.array(draft)[0]))


@pytest.mark.parametrize("seed", range(4))
def test_verified_tokens_have_the_targets_distribution(seed: int) -> None:
    dice = np.random.default_rng(seed)
    p, q = dice.dirichlet(np.ones(12)), dice.dirichlet(np.ones(12))
    counts, stayed = draws(p, q)
    assert abs(chi_square(counts, N * p)) < 4
    assert stayed == pytest.approx(np.minimum(p, q).sum(), abs=0.02)
    assert chi_square(counts, N * q) > 4  # and not the draft's


def test_a_draft_that_is_sure_of_a_rare_token_changes_nothing() -> None:
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.0, 0.0, 1.0])
    counts, stayed = draws(p, q)
    assert abs(chi_square(counts, N * p)) < 4
    assert stayed == pytest.approx(0.1, abs=0.01)


def test_accepting_too_often_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    uniform = noise.uniform

    def lower(words: mx.array, positions: mx.array, size: int, stream: int) -> mx.array:
        return uniform(words, positions, size, stream) * (0.9 if stream == noise.ACCEPT else 1.0)

    monkeypatch.setattr(noise, "uniform", lower)
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.3, 0.5])
    assert chi_square(draws(p, q)[0], N * p) > 4


def test_a_draft_that_shares_the_verifiers_noise_would_be_noticed() -> None:
    p, q = np.array([0.4, 0.3, 0.1, 0.2]), np.array([0.1, 0.2, 0.5, 0.2])
    assert chi_square(draws(p, q, own_noise=False)[0], N * p) > 4


def test_filters_and_greedy_rows_shape_what_is_drawn_from() -> None:
    logits = mx.array([[[1.0, 3.0, 2.0, 0.0]]] * 2)
    params = make_params([Sampling(temperature=1.0, top_k=2), Sampling()])
    p = np.array(probabilities(logits, params, mx.zeros((2, 1), dtype=mx.uint32)))[:, 0]
    assert p[0] == pytest.approx([0, np.e / (1 + np.e), 1 / (1 + np.e), 0])
    assert list(p[1]) == [0, 1, 0, 0]


def test_greedy_rows_are_what_they_are_without_drafts() -> None:
    logits = mx.array(np.random.default_rng(0).normal(size=(1, 4, 9)).astype(np.float32))
    sampler = RejectionSampler()
    params = sampler.prepare([Sampling()])
    best = np.argmax(np.array(logits)[0], axis=-1)
    for guess in ([int(t) for t in best[:3]], [8, 8, 8]):
        drawn = sampler.draw(logits, params, [[5, 6, 7, 8]], drafts=[Draft(guess)])
        assert list(np.array(drawn.tokens)[0]) == list(best)


def test_answers_with_a_draft_model_have_the_distribution_of_plain_ones() -> None:
    """The third token of many sampled answers, with and without drafts."""
    wanted = [
        Request(f"r{i}", prompts()[0], Sampling(temperature=1.0, top_k=4, seed=i), max_tokens=5)
        for i in range(240)
    ]
    plain = run(Case("llama", rows=60), wanted).tokens
    provider = model_draft("llama", noise=0.3, sampler=RejectionSampler())
    outcome = run(Case("llama", rows=60, provider=provider, sampler=RejectionSampler()), wanted)
    assert 0 < outcome.step.counters.accepted_tokens < outcome.step.counters.drafted_tokens
    assert outcome.tokens != plain  # the same distribution, other tokens
    for place in (1, 2):
        one, other = (Counter(t[place] for t in run_.values()) for run_ in (plain, outcome.tokens))
        tokens = [token for token in one | other if one[token] + other[token] >= 12]
        both = np.array([[c[token] for token in tokens] for c in (one, other)], dtype=float)
        value = float(((both[0] - both[1]) ** 2 / both.sum(axis=0)).sum())
        assert value < len(tokens) + 4 * (2 * len(tokens)) ** 0.5
