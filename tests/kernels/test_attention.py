"""Attention and key-value writes against float64: masks of every kind, windows, sinks, types, strides."""

from __future__ import annotations

import mantou_kernels as kernels
import mlx.core as mx
import numpy as np
import pytest

from mantou.models.ops.fast import PLAIN
from tests.kernels import reference as ref

# batch, heads, key-value heads, tokens, keys, head dimension, value dimension
SHAPES = (
    (1, 1, 1, 1, 1, 8, 8),
    (2, 9, 3, 1, 37, 64, 64),
    (2, 4, 4, 5, 40, 40, 24),
    (1, 6, 2, 33, 70, 80, 80),
    (3, 8, 1, 2, 300, 128, 128),
    (1, 2, 2, 100, 100, 20, 33),
)


def inputs(shape: tuple[int, ...], dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array, mx.array]:
    b, h, hk, t, s, d, dv = shape
    q = ref.normal(b, t, h, d, dtype=dtype).transpose(0, 2, 1, 3)
    buffer = ref.normal(b, hk, s + 20, d, seed=1, dtype=dtype)
    v = ref.normal(b, hk, s, dv, seed=2, dtype=dtype)
    return q, buffer[:, :, :s], v


def triangle(t: int, s: int) -> np.ndarray:
    return np.tril(np.ones((t, s), bool), s - t)[None, None]


@pytest.mark.parametrize("shape", SHAPES)
def test_masks(isa: str, threads: int, shape: tuple[int, ...]) -> None:
    q, k, v = inputs(shape)
    b, h, _, t, s, d, _ = shape
    scale = d**-0.5
    arrays = [ref.f64(a) for a in (q, k, v)]
    everything = np.ones((1, 1, t, s), bool)
    assert (
        ref.error(kernels.attention(q, k, v, scale=scale), ref.attention(*arrays, scale, everything))
        < ref.EXACT
    )
    got = kernels.attention(q, k, v, scale=scale, causal=True)
    assert ref.error(got, ref.attention(*arrays, scale, triangle(t, s))) < ref.EXACT
    allowed = np.random.default_rng(0).random((b, 1, t, s)) > 0.4
    allowed[..., 0] = True
    got = kernels.attention(q, k, v, scale=scale, mask=mx.array(allowed))
    assert ref.error(got, ref.attention(*arrays, scale, allowed)) < ref.EXACT
    bias, sinks = ref.normal(h, t, s, seed=3), ref.normal(h, seed=4)
    got = kernels.attention(q, k, v, scale=scale, mask=bias, sinks=sinks)
    want = ref.attention(*arrays, scale, everything, ref.f64(bias), ref.f64(sinks))
    assert ref.error(got, want) < ref.EXACT


def test_starts_and_windows(isa: str) -> None:
    q, k, v = inputs((3, 4, 2, 3, 50, 32, 32))
    start = np.array([0, 20, 47])
    columns, queries = np.arange(50), start[:, None] + np.arange(3)
    for window in (0, 1, 7, 1000):
        seen = columns <= queries[..., None]
        if window:
            seen &= columns > queries[..., None] - window
        got = kernels.attention(q, k, v, scale=0.2, start=mx.array(start), window=window)
        want = ref.attention(*(ref.f64(a) for a in (q, k, v)), 0.2, seen[:, None])
        assert ref.error(got, want) < ref.EXACT


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_16_bit_types_round_as_mlx(isa: str, dtype: mx.Dtype) -> None:
    for shape in SHAPES[1:4]:
        q, k, v = inputs(shape, dtype)
        ours = kernels.attention(q, k, v, scale=shape[5] ** -0.5, causal=True)
        theirs = PLAIN.scaled_dot_product_attention(q, k, v, scale=shape[5] ** -0.5, mask="causal")
        assert ours.dtype == dtype
        assert ref.error(ours, ref.f64(theirs)) < 3 * ref.ROUNDING[dtype]


def test_mixed_types_promote(isa: str) -> None:
    q, k, v = inputs(SHAPES[1])
    half = k.astype(mx.bfloat16), v.astype(mx.bfloat16)
    got = kernels.attention(q, *half, scale=0.1)
    assert got.dtype == mx.float32
    everything = np.ones((1, 1, 1, 37), bool)
    assert ref.error(got, ref.attention(ref.f64(q), *(ref.f64(a) for a in half), 0.1, everything)) < ref.EXACT


def test_a_row_that_sees_nothing_is_zero(isa: str) -> None:
    q, k, v = inputs(SHAPES[2])
    nothing = mx.zeros((1, 1, 5, 40), mx.bool_)
    assert not np.array(kernels.attention(q, k, v, scale=0.1, mask=nothing)).any()


def test_hidden_garbage_is_never_used(isa: str) -> None:
    q, k, v = inputs((1, 4, 2, 3, 40, 32, 32))
    k[:, :, 30:] = float("nan")
    v[:, :, 30:] = float("nan")
    start = mx.array([27])
    mask = mx.arange(40)[None] <= 27 + mx.arange(3)[:, None]
    for got in (
        kernels.attention(q, k, v, scale=0.2, start=start),
        kernels.attention(q, k, v, scale=0.2, mask=mask),
    ):
        assert np.isfinite(np.array(got)).all()


def test_kv_write_donates_and_checks() -> None:
    buffer = ref.normal(3, 2, 16, 8)
    rows = ref.normal(3, 4, 2, 8, seed=1).transpose(0, 2, 1, 3)
    want = np.array(buffer)
    for b, (p, n) in enumerate(((0, 4), (12, 4), (5, 0))):
        want[b, :, p : p + n] = np.array(rows)[b, :, :n]
    got = kernels.kv_write(buffer, rows, mx.array([0, 12, 5]), mx.array([4, 4, 0]))
    assert np.array_equal(np.array(got), want)
    assert not np.array_equal(np.array(buffer), want)  # we still hold it, so it was copied
    for position, count in (
        ([0, 13, 0], None),
        ([0, -1, 0], None),
        ([0, 0, 16], [4, 4, 1]),
        ([0, 0, 0], [5, 0, 0]),
    ):
        with pytest.raises(RuntimeError, match="kv_write"):
            mx.eval(
                kernels.kv_write(buffer, rows, mx.array(position), None if count is None else mx.array(count))
            )


def test_a_table_that_leads_out_of_its_pool_is_an_error_and_not_read() -> None:
    pool, rows = ref.normal(1, 2, 64, 8), ref.normal(2, 2, 4, 8, seed=1)
    where = {"block": 16, "table": mx.array([[1, 3], [2, 4]])}  # block 4 begins behind the last column
    mx.eval(kernels.kv_write(pool, rows, mx.array([14, 0]), **where))
    with pytest.raises(RuntimeError, match="kv_write"):
        mx.eval(kernels.kv_write(pool, rows, mx.array([14, 13]), **where))
    with pytest.raises(RuntimeError, match="kv_write"):
        mx.eval(kernels.kv_write(pool, rows, mx.array([0, 29]), **where))
    mx.eval(kernels.attention(rows, pool, pool, scale=1.0, columns=16, **where))
    with pytest.raises(RuntimeError, match="a block outside the pool"):
        mx.eval(kernels.attention(rows, pool, pool, scale=1.0, columns=17, **where))
    for wrong in ({"block": 24}, {"block": 8}, {"table": mx.array([[1, 3]])}, {"columns": 33}):
        with pytest.raises(ValueError, match="attention"):
            kernels.attention(rows, pool, pool, scale=1.0, **{"columns": 16, **where, **wrong})


def test_kv_write_finds_slots_and_goes_round_rings() -> None:
    for dtype in (mx.float32, mx.bfloat16, mx.uint32):
        buffer, rows = mx.zeros((4, 2, 10, 8), dtype), (mx.arange(96) + 1).reshape(2, 2, 3, 8).astype(dtype)
        got = kernels.kv_write(buffer, rows, mx.array([17, 3]), mx.array([3, 2]), first_slot=1, ring=9)
        want = np.zeros((4, 2, 10, 8), np.float32)
        for b, t, column in ((0, 0, 8), (0, 1, 0), (0, 2, 1), (1, 0, 3), (1, 1, 4)):
            want[1 + b, :, column] = np.array(rows.astype(mx.float32))[b, :, t]
        assert np.array_equal(np.array(got.astype(mx.float32)), want)
    for more in ({"first_slot": 3}, {"first_slot": -1}, {"ring": 11}, {"ring": 2}):
        with pytest.raises(ValueError, match="kv_write"):
            kernels.kv_write(buffer, rows, mx.array([0, 0]), **more)


def test_wrong_shapes_are_errors() -> None:
    q, k, v = inputs(SHAPES[1])
    cases = [
        lambda: kernels.attention(q, k[:, :2], v, scale=1.0),
        lambda: kernels.attention(q[..., :60], k, v, scale=1.0),
        lambda: kernels.attention(q[:, :8], k, v, scale=1.0),
        lambda: kernels.attention(q, k, v, scale=1.0, mask=mx.ones((1, 1, 1, 36), mx.bool_)),
        lambda: kernels.attention(q, k, v, scale=1.0, sinks=ref.normal(3)),
        lambda: kernels.attention(q, k, v, scale=1.0, start=mx.array([1])),
        lambda: kernels.attention(q, k, v, scale=1.0, window=-1),
        lambda: kernels.kv_write(k, v[:, :, :1].astype(mx.float16), mx.array([0, 0])),
        lambda: kernels.kv_write(k, v[:, :, :1, :32], mx.array([0, 0])),
        lambda: kernels.kv_write(k, v[:, :, :1], mx.array([0])),
    ]
    for i, case in enumerate(cases):
        with pytest.raises(ValueError, match=r"mantou_kernels|broadcast"):
            pytest.fail(f"case {i} gave {case()}")
