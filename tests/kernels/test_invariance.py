"""A row's bits depend on the row alone: not on other rows, tokens per row, threads, padding or how a mask is said."""

from __future__ import annotations

import mantou_kernels as kernels
import mlx.core as mx
import numpy as np
import pytest

from tests.kernels import reference as ref


def same(a: mx.array, b: mx.array) -> bool:
    return np.array_equal(np.array(a.astype(mx.float32)), np.array(b.astype(mx.float32)))


def weights(bits: int, rows: int = 200, k: int = 256) -> kernels.Packed:
    w = ref.normal(rows, k)
    if bits in (16, 32):
        return kernels.pack_dense([w.astype(mx.bfloat16 if bits == 16 else mx.float32)])[0]
    q, s, b = mx.quantize(w, group_size=64, bits=bits)
    return kernels.pack_affine([q], [s], [b], group_size=64, bits=bits)[0]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8, 16, 32])
@pytest.mark.parametrize("planes", [1, 2])
def test_linear_across_rows(isa: str, bits: int, planes: int) -> None:
    packed, x, norm = weights(bits), ref.normal(70, 256), ref.normal(256, seed=1)
    alone = mx.concatenate(
        [kernels.linear(x[i : i + 1], packed, norm=norm, planes=planes) for i in range(70)]
    )
    for m in (2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 25, 31, 33, 48, 49, 70):
        assert same(kernels.linear(x[:m], packed, norm=norm, planes=planes), alone[:m]), m


def test_linear_across_threads(isa: str) -> None:
    before = kernels.threads()
    for bits in (4, 8, 16, 32):
        packed = weights(bits, 1000, 512)
        for m in (1, 5, 64):
            x, results = ref.normal(m, 512), []
            for n in (1, 2, 3, 8):
                kernels.set_threads(n)
                results.append(kernels.linear(x, packed))
                mx.eval(results)
            assert all(same(r, results[0]) for r in results)
    kernels.set_threads(before)


def test_fused_steps_equal_separate_ones(isa: str) -> None:
    for dtype in (mx.float32, mx.bfloat16):
        parts = [ref.normal(64, 96, seed=i, dtype=dtype) for i in range(2)]
        whole, gate, up = kernels.pack_dense(parts, interleave=True)
        x, norm = ref.normal(5, 96, dtype=dtype), ref.normal(96, seed=3, dtype=dtype)
        residual, bias = ref.normal(5, 64, seed=4, dtype=dtype), ref.normal(64, seed=5, dtype=dtype)
        n = kernels.rms_norm(x, norm, 1e-5)
        g, u = kernels.linear(n, gate), kernels.linear(n, up)
        fused = kernels.linear(x, whole, norm=norm, gate="silu", residual=residual)
        assert same(fused, residual + kernels.gate("silu", g, u))
        assert same(kernels.linear(n, gate, bias=bias), g + bias)


def test_experts_across_batches(isa: str) -> None:
    stack = ref.normal(4, 48, 64)
    (packed,) = kernels.pack_dense([stack])
    x = ref.normal(40, 64)
    expert = np.random.default_rng(0).integers(0, 4, 40)
    rows = mx.arange(40, dtype=mx.int32)
    together = kernels.gather_linear(x, packed, rows, mx.array(expert))
    alone = [
        kernels.gather_linear(x, packed, rows[i : i + 1], mx.array(expert[i : i + 1])) for i in range(40)
    ]
    assert same(together, mx.concatenate(alone))
    for e in range(4):
        single = kernels.pack_dense([stack[e]])[0]
        chosen = np.flatnonzero(expert == e)
        assert same(kernels.linear(x[mx.array(chosen)], single), together[mx.array(chosen)])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (8, 1)])
def test_attention_across_tokens_and_rows(isa: str, dtype: mx.Dtype, heads: tuple[int, int]) -> None:
    h, hk = heads
    total, d = 45, 40
    q = ref.normal(2, h, total, d, dtype=dtype)
    k, v = (ref.normal(2, hk, 64, d, seed=s, dtype=dtype) for s in (1, 2))
    zero = mx.zeros(2, mx.int32)
    whole = kernels.attention(q, k, v, scale=0.2, start=zero)
    for lo, hi in ((0, 1), (1, 3), (3, 10), (10, 31), (31, 32), (32, 45)):
        piece = kernels.attention(q[:, :, lo:hi], k, v, scale=0.2, start=zero + lo)
        assert same(piece, whole[:, :, lo:hi]), (lo, hi)
    for b in range(2):
        row = kernels.attention(*(a[b : b + 1] for a in (q, k, v)), scale=0.2, start=zero[:1])
        assert same(row, whole[b : b + 1])


def test_attention_across_padding_and_masks(isa: str) -> None:
    q = ref.normal(1, 6, 4, 32)
    k, v = ref.normal(1, 2, 300, 32, seed=1), ref.normal(1, 2, 300, 32, seed=2)
    start, end = 50, 54
    columns, queries = mx.arange(300)[None], start + mx.arange(4)[:, None]
    seen = columns <= queries
    want = kernels.attention(q, k[:, :, :end], v[:, :, :end], scale=0.2, causal=True)
    for s in (end, 64, 65, 128, 300):
        keys, values, mask = k[:, :, :s], v[:, :, :s], seen[:, :s]
        assert same(kernels.attention(q, keys, values, scale=0.2, start=mx.array([start])), want)
        assert same(kernels.attention(q, keys, values, scale=0.2, mask=mask), want)
        assert same(kernels.attention(q, keys, values, scale=0.2, mask=mx.where(mask, 0.0, -mx.inf)), want)
        assert same(kernels.attention(q, keys, values, scale=0.2, mask=mx.where(mask, 0.0, -1e9)), want)
    window = seen & (columns > queries - 20)
    want = kernels.attention(q, k, v, scale=0.2, start=mx.array([start]), window=20)
    assert same(kernels.attention(q, k, v, scale=0.2, mask=window), want)
    assert same(
        kernels.attention(q, k[:, :, :end], v[:, :, :end], scale=0.2, causal=True, mask=window[:, :end]), want
    )


def test_norms_and_rope_across_rows() -> None:
    x, w = ref.normal(33, 100), ref.normal(100, seed=1)
    together = kernels.rms_norm(x, w, 1e-5)
    assert same(mx.concatenate([kernels.rms_norm(x[i : i + 1], w, 1e-5) for i in range(33)]), together)
    heads = ref.normal(2, 3, 9, 64)
    way = {"traditional": False, "base": 1e4, "scale": 1.0}
    whole = kernels.rope(heads, 64, offset=mx.array([4, 7]), **way)
    for b, offset in enumerate((4, 7)):
        for t in range(9):
            one = kernels.rope(heads[b : b + 1, :, t : t + 1], 64, offset=mx.array(offset + t), **way)
            assert same(one, whole[b : b + 1, :, t : t + 1])
