"""Draws on the kernels: the bits of the plain sampler, whatever the filters, ties, rows, threads, instruction set."""

from __future__ import annotations

from typing import Any

import mantou_kernels as kernels
import mlx.core as mx
import numpy as np
import pytest

from mantou.data import Draft, Sampling
from mantou.models.ops.cpu import CpuOps
from mantou.sampling.sampler import DeviceSampler
from tests.fakes import packed, unpacked

PLAIN = DeviceSampler()

# A nucleus whose mass lies in the sorted head, in the tail's buckets, and in a nearly uniform row; sums of
# probabilities that pass 1 and such that do not; values with many ties; tokens that a grammar forbids.
WISHES = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.7, seed=3),
    Sampling(temperature=0.0, top_p=0.5, logprobs=True, top_logprobs=5),
    Sampling(temperature=1.0, top_p=0.9, seed=1),
    Sampling(temperature=2.0, top_p=0.99999994, seed=2),
    Sampling(temperature=0.3, top_p=1e-6, seed=4),
    Sampling(temperature=1.3, top_k=40, seed=5),
    Sampling(temperature=1.0, top_k=3, min_p=0.2, seed=6),
    Sampling(temperature=1.0, min_p=0.05, seed=7),
    Sampling(temperature=1.0, top_p=0.95, top_k=1000, min_p=0.001, seed=2**40 + 1),
    Sampling(temperature=0.01, top_p=0.999, seed=9),
)


def logits(rows: int, vocab: int, spread: float, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    generator = np.random.default_rng([seed, vocab])
    return (generator.standard_normal((rows, 2, vocab)) * spread - 5).astype(np.float32)


def positions(rows: int) -> list[list[int]]:
    return [[7 * row, 2**20 + row] for row in range(rows)]


def same(ours: Any, want: Any) -> bool:
    return all(bool(mx.array_equal(a, b)) for a, b in zip(ours.arrays(), want.arrays(), strict=True))


def both(x: mx.array, wishes: Any = WISHES, **more: Any) -> tuple[Any, Any]:
    device = DeviceSampler(CpuOps(threads=kernels.threads()).draw)
    where = positions(len(wishes))
    return tuple(s.draw(x, s.prepare(wishes), where, **more) for s in (device, PLAIN))


@pytest.mark.parametrize("spread", [0.0, 0.4, 2.5, 5.0, 40.0])
@pytest.mark.parametrize("vocab", [37, 20011])
def test_draws_and_log_probabilities_are_the_plain_samplers(isa: str, vocab: int, spread: float) -> None:
    x = mx.array(logits(len(WISHES), vocab, spread))
    assert same(*both(x))
    assert same(*both(mx.round(x * 2) / 2))


def test_half_precision_and_forbidden_tokens() -> None:
    x = logits(len(WISHES), 5000, 4.0)
    x[:, :, ::3] = -np.inf
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        assert same(*both(mx.array(x).astype(dtype)))
    only = np.full_like(x, -np.inf)
    only[:, :, 4321] = 1.0
    assert set(np.array(both(mx.array(only))[0].tokens).flatten()) == {4321}


def test_host_stages_come_before_the_device() -> None:
    wishes = [
        Sampling(temperature=1.0, top_p=0.9, logit_bias=((5, 30.0), (6, 29.0)), seed=1, top_logprobs=4),
        Sampling(temperature=0.8, repetition_penalty=1.3, top_k=20, seed=2),
    ]
    x = mx.array(logits(2, 3000, 3.0))
    allowed = [(0, 1, packed(np.arange(3000) % 2 == 0))]
    ours, want = both(x, wishes, history=[((1, 2), (3,)), ((4, 5), (6,))], allowed=allowed)
    assert same(ours, want)
    assert set(np.array(ours.tokens)[0]) <= {5, 6}


@pytest.mark.parametrize("share", [0.0005, 0.5, 0.9995])
@pytest.mark.parametrize("vocab", [37, 20011])
def test_constraints_are_applied_in_the_draw(isa: str, vocab: int, share: float) -> None:
    x = mx.array(logits(len(WISHES), vocab, 2.5))
    generator = np.random.default_rng(vocab)
    free = generator.random((len(WISHES), 2, vocab)) < share
    free[..., 11] = True
    short = vocab // 16 + 1  # a mask may have no bits for the last tokens: those are forbidden
    allowed = [(row, 0, packed(free[row, 0])) for row in range(1, len(WISHES), 2)]
    allowed += [(row, 1, packed(free[row, 1])[:short]) for row in range(len(WISHES))]
    for dtype in (mx.float32, mx.bfloat16):
        ours, want = both(x.astype(dtype), allowed=allowed)
        assert same(ours, want)
        for row, position, mask in allowed:
            assert unpacked(mask)[int(ours.tokens[row, position])]


def test_positions_that_only_pad_a_row_are_not_drawn(isa: str) -> None:
    x = mx.array(logits(len(WISHES), 500, 2.5))
    drafts = [Draft((1,) * (row % 2), num_sure=0) for row in range(len(WISHES))]
    ours, want = both(x, drafts=drafts)
    for one, other in zip(ours.arrays()[:3], want.arrays()[:3], strict=True):
        assert mx.array_equal(one[1::2], other[1::2]) and mx.array_equal(one[:, 0], other[:, 0])
    assert not np.array(ours.tokens[::2, 1]).any() and not np.array(ours.logprobs[::2, 1]).any()
    sure = both(x, drafts=[Draft((1, 2), num_sure=1)] * len(WISHES))
    assert same(*sure)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_logits_that_nobody_has_computed_are_drawn_from_a_few_rows_at_a_time(dtype: mx.Dtype) -> None:
    """The same bits as from logits in memory, in several parts, with positions that are not drawn and constraints."""
    vocab = 150_000  # 13 rows of float32 are more than one part holds
    (weights,) = kernels.pack_dense([mx.array(logits(vocab // 2, 8, 3.0)).reshape(vocab, 8)])
    x = mx.random.normal((len(WISHES), 2, 8), key=mx.random.key(1)).astype(dtype)
    drafts = [Draft((1,) * (row % 3 > 0)) for row in range(len(WISHES))]
    allowed = [(row, 0, packed(np.arange(vocab) % 5 != row % 5)) for row in (1, 4)]
    product = kernels.linear(x, weights, dtype=dtype)
    device = DeviceSampler(CpuOps(threads=kernels.threads()).draw)
    where, params = positions(len(WISHES)), device.prepare(WISHES)
    waiting = device.draw(product, params, where, drafts=drafts, allowed=allowed)
    computed = kernels.linear(x, weights, dtype=dtype)
    mx.eval(computed)
    ready = device.draw(computed, params, where, drafts=drafts, allowed=allowed)
    assert same(waiting, ready)
    plain = PLAIN.draw(computed, params, where, drafts=drafts, allowed=allowed)
    assert mx.array_equal(waiting.tokens[:, 0], plain.tokens[:, 0])
    assert mx.array_equal(waiting.scores[:, 0], plain.scores[:, 0])


def test_greedy_rows_keep_to_their_constraints_with_and_without_logits_in_memory() -> None:
    ops = CpuOps(threads=kernels.threads())
    wishes = [Sampling(), Sampling()]
    (weights,) = kernels.pack_dense([mx.array(logits(2, 250, 3.0)).reshape(500, 2)])
    allowed = [(1, 0, packed(np.arange(500) == 77)), (0, 1, packed(np.arange(500) % 3 == 0))]
    product = kernels.linear(mx.array(logits(2, 2, 1.0)), weights)
    made = both(product, wishes, allowed=allowed)
    assert same(*made) and int(made[0].tokens[1, 0]) == 77
    mx.eval(product)
    assert same(*both(product, wishes, allowed=allowed))
    with pytest.raises(ValueError, match="what is allowed"):
        ops.draw(mx.zeros((2, 1, 50)), PLAIN.prepare(wishes), None, mx.zeros((2, 1, 6), mx.uint8))


def test_a_row_depends_on_no_other_row_and_no_thread(threads: int) -> None:
    x = mx.array(logits(len(WISHES), 9001, 3.0))
    device = DeviceSampler(CpuOps(threads=threads).draw)
    together = device.draw(x, device.prepare(WISHES), positions(len(WISHES)))
    for row, wish in enumerate(WISHES):
        alone = device.draw(x[row : row + 1], device.prepare([wish]), positions(len(WISHES))[row : row + 1])
        assert mx.array_equal(alone.tokens, together.tokens[row : row + 1])


def test_rare_stages_stay_with_plain_mlx() -> None:
    wishes = [Sampling(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.1, seed=1)]
    x = mx.array(logits(1, 500, 3.0))
    ops = CpuOps()
    assert ops.draw(x, PLAIN.prepare(wishes), mx.zeros((1, 2), mx.uint32), None) is None
    assert same(*both(x, wishes))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_broken_logits_still_give_tokens(isa: str, value: float) -> None:
    """A broken model must not break the process: what is drawn is a token of the vocabulary."""
    for broken in (slice(0, 1), slice(0, 90), slice(0, 100)):
        x = logits(len(WISHES), 100, 3.0)
        x[:, :, broken] = value
        drawn = both(mx.array(x))[0]
        for tokens in (drawn.tokens, drawn.top_tokens):
            assert int(tokens.min()) >= 0 and int(tokens.max()) < 100


def test_a_row_of_no_numbers_shows_and_its_neighbours_are_drawn_as_ever(isa: str) -> None:
    x = logits(len(WISHES), 100, 3.0)
    healthy = both(mx.array(x))[0]
    for dtype in (mx.float32, mx.bfloat16):
        for sick in range(len(WISHES)):
            y = x.copy()
            y[sick] = np.nan
            drawn = both(mx.array(y).astype(dtype))[0]
            broken = np.isnan(np.array(drawn.scores.astype(mx.float32)))
            assert broken[sick].all() and broken.sum() == broken[sick].size
            if dtype == mx.float32:
                same_rows = np.array(drawn.tokens == healthy.tokens)
                assert np.delete(same_rows, sick, axis=0).all()


def test_vocabularies_and_alternatives_have_limits() -> None:
    params = PLAIN.prepare([Sampling(temperature=0.0, top_logprobs=9)])
    assert CpuOps().draw(mx.zeros((1, 1, 5)), params, None, None) is None
    columns = {
        "sampled": params.sampled,
        "inverse_temperature": params.inverse_temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p_log": params.min_p_log,
        "seed_words": params.words,
        "positions": mx.zeros((1, 1), mx.uint32),
    }
    with pytest.raises(ValueError, match="num_top"):
        kernels.draw(mx.zeros((1, 1, 5)), **columns, num_top=6)
    with pytest.raises(ValueError, match="vocabulary is over"):
        kernels.draw(mx.broadcast_to(mx.zeros(1), (1, 1, (1 << 22) + 1)), **columns, num_top=-1)


def test_wrong_shapes_are_errors() -> None:
    ops, x = CpuOps(), mx.zeros((2, 1, 50))
    params = PLAIN.prepare(WISHES[:2])
    with pytest.raises(ValueError, match="positions"):
        ops.draw(x, params, mx.zeros((2, 2), mx.uint32), None)
    with pytest.raises(ValueError, match="one value a row"):
        ops.draw(mx.zeros((3, 1, 50)), params, mx.zeros((3, 1), mx.uint32), None)
    with pytest.raises(ValueError, match=r"\[B, T, V\]"):
        ops.draw(x[0], params, mx.zeros((2,), mx.uint32), None)
