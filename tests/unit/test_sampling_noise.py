from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mantou.data import Sampling
from mantou.sampling import noise
from mantou.sampling.sampler import DeviceSampler

NUM_DRAWS = 20_000


def words(*seeds: int) -> mx.array:
    return mx.array([noise.seed_words(seed) for seed in seeds], dtype=mx.uint32)


def positions(*rows: list[int]) -> mx.array:
    return mx.array(list(rows), dtype=mx.uint32)


def uniforms(seed: int, first: int, count: int, stream: int = noise.CATEGORICAL) -> np.ndarray:
    """One number a position."""
    where = positions(list(range(first, first + count)))
    return np.array(noise.uniform(words(seed), where, 1, stream))[0, :, 0]


def chi_square_is_plausible(observed: np.ndarray, expected: np.ndarray) -> bool:
    """Within five standard deviations of a chi-square variable; cells that expect less than 5 are merged."""
    small = expected < 5
    observed = np.append(observed[~small], observed[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    kept = expected > 0
    degrees = int(kept.sum()) - 1
    statistic = float(((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    return abs(statistic - degrees) < 5 * math.sqrt(2 * degrees)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """In standard deviations of the correlation of independent numbers."""
    return float(np.corrcoef(a, b)[0, 1]) * math.sqrt(len(a))


@settings(deadline=None, max_examples=40)
@given(
    seeds=st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=4),
    where=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3),
    size=st.integers(1, 200),
    smaller=st.integers(1, 200),
)
def test_a_number_depends_on_seed_position_and_index_alone(
    seeds: list[int], where: list[int], size: int, smaller: int
) -> None:
    """Any batch, any neighbours, any longer vocabulary: the same numbers."""
    together = np.array(noise.uniform(words(*seeds), positions(*[where] * len(seeds)), size, 0))
    for row, seed in enumerate(seeds):
        for t, position in enumerate(where):
            alone = np.array(noise.uniform(words(seed), positions([position]), min(size, smaller), 0))
            assert (alone[0, 0] == together[row, t, : min(size, smaller)]).all()
    assert ((together > 0) & (together < 1)).all()


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**64 - 1, 2**64, 2**200 + 17])
def test_huge_and_negative_seeds_are_seeds_by_their_low_64_bits(seed: int) -> None:
    assert noise.seed_words(seed) == noise.seed_words(seed % 2**64)
    assert noise.seed_words(seed) != noise.seed_words(seed + 1)
    assert all(0 <= word < 2**32 for word in noise.seed_words(seed))


def test_noise_is_finite_for_every_possible_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """An infinite value would beat every logit: a random token would come out once in 2**24 numbers."""
    for bits in (0, 1, 0xFF, 0x1FF, 0x7FFFFFFF, 0xFFFFFE00, 0xFFFFFF00, 0xFFFFFFFF):
        monkeypatch.setattr(noise, "_mix", lambda x, bits=bits: mx.full(x.shape, bits, mx.uint32))
        value = noise.uniform(words(1), positions([0]), 1, 0).item()
        assert 0 < value < 1
        assert math.isfinite(noise.gumbel(words(1), positions([0]), 1).item())


def test_numbers_are_uniform() -> None:
    for seed in (0, 1, -5, 2**63):
        counts, _ = np.histogram(uniforms(seed, 0, NUM_DRAWS), bins=50, range=(0, 1))
        assert chi_square_is_plausible(counts, np.full(50, NUM_DRAWS / 50))
    row = np.array(noise.uniform(words(3), positions([7]), NUM_DRAWS, 0)).ravel()
    counts, _ = np.histogram(row, bins=50, range=(0, 1))
    assert chi_square_is_plausible(counts, np.full(50, NUM_DRAWS / 50))


def test_neighbouring_positions_seeds_streams_and_indices_are_independent() -> None:
    base = uniforms(0, 0, NUM_DRAWS)
    assert abs(correlation(base[:-1], base[1:])) < 5
    assert abs(correlation(base, uniforms(1, 0, NUM_DRAWS))) < 5
    assert abs(correlation(base, uniforms(2**32, 0, NUM_DRAWS))) < 5
    assert abs(correlation(base, uniforms(0, 0, NUM_DRAWS, noise.XTC))) < 5
    rows = np.array(noise.uniform(words(9), positions([0, 1, 2]), NUM_DRAWS, 0))[0]
    assert abs(correlation(rows[0], rows[1])) < 5
    assert abs(correlation(rows[0][:-1], rows[1][1:])) < 5, "the next position is no shifted copy"


def test_positions_share_no_shifted_copy_of_their_numbers() -> None:
    """Close key words would start overlapping index sequences; the second word must tell them apart."""
    rows = np.array(noise.uniform(words(9), positions(list(range(64))), 512, 0))[0]
    assert len(np.unique(rows)) > 0.99 * rows.size


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, 1.9], np.float32)
    scaled = logits / temperature
    expected = np.exp(scaled - scaled.max())
    expected /= expected.sum()
    sampler = DeviceSampler()
    params = sampler.prepare([Sampling(temperature=temperature, seed=5)])
    tiled = mx.broadcast_to(mx.array(logits), (1, NUM_DRAWS, 8))
    tokens = np.array(sampler.draw(tiled, params, [range(NUM_DRAWS)]).tokens).ravel()
    assert chi_square_is_plausible(np.bincount(tokens, minlength=8), expected * NUM_DRAWS)


def test_draws_follow_the_softmax_across_seeds_at_one_position() -> None:
    """Requests with the same prompt and seeds 0, 1, 2, ... must not be alike."""
    logits = np.array([1.0, 0.5, 0.0, -0.5], np.float32)
    expected = np.exp(logits) / np.exp(logits).sum()
    sampler = DeviceSampler()
    num_rows = 4000
    params = sampler.prepare([Sampling(temperature=1.0, seed=seed) for seed in range(num_rows)])
    tiled = mx.broadcast_to(mx.array(logits), (num_rows, 1, 4))
    tokens = np.array(sampler.draw(tiled, params, [(12,)] * num_rows).tokens).ravel()
    assert chi_square_is_plausible(np.bincount(tokens, minlength=4), expected * num_rows)
