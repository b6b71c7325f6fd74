"""Linear layers, embeddings, experts, heads and adapter rows against float64, on every instruction set."""

from __future__ import annotations

from contextlib import suppress

import mantou_kernels as kernels
import mlx.core as mx
import numpy as np
import pytest

from tests.kernels import reference as ref

FLOATS = (mx.float32, mx.bfloat16, mx.float16)
BITS = (2, 3, 4, 5, 6, 8)


def quantised(
    rows: int, k: int, bits: int, group: int, scales: mx.Dtype = mx.float32
) -> tuple[kernels.Packed, np.ndarray, tuple[mx.array, mx.array, mx.array]]:
    w, s, b = mx.quantize(ref.normal(rows, k, seed=bits), group_size=group, bits=bits)
    s, b = s.astype(scales), b.astype(scales)
    (packed,) = kernels.pack_affine([w], [s], [b], group_size=group, bits=bits)
    return packed, ref.dequantised(w, s, b, group, bits), (w, s, b)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_affine(isa: str, bits: int, group: int) -> None:
    for rows, k, scales in ((16, 128, mx.float32), (100, 384, mx.bfloat16), (1, 640, mx.float16)):
        packed, dense, _ = quantised(rows, k, bits, group, scales)
        for m in (1, 3, 17):
            x = ref.normal(m, k)
            assert ref.product_error(kernels.linear(x, packed), ref.f64(x), dense) < ref.QUANTISED
            assert ref.product_error(kernels.linear(x, packed, planes=1), ref.f64(x), dense) < ref.INT8


@pytest.mark.parametrize("bits", BITS)
def test_centred_weights_give_the_same_bits_without_their_biases(isa: str, bits: int) -> None:
    w, s, _ = mx.quantize(ref.normal(32, 128, seed=bits), group_size=64, bits=bits)
    b = -(2.0 ** (bits - 1)) * s
    last = mx.arange(32)[:, None] == 31
    packings = [kernels.pack_affine([w], [s], [x], group_size=64, bits=bits)[0] for x in (b, b + last)]
    assert packings[0].nbytes < packings[1].nbytes
    for m in (1, 5):
        short, full = (kernels.linear(ref.normal(m, 128), packed) for packed in packings)
        assert mx.array_equal(short[:, :31], full[:, :31])
    short, full = (kernels.embed(mx.arange(31), packed, mx.float32) for packed in packings)
    assert mx.array_equal(short, full)


def test_every_tile_size(isa: str, threads: int) -> None:
    packed, dense, _ = quantised(200, 576 - 64, 4, 64)
    for m in range(1, 36):
        x = ref.normal(m, 512, seed=m)
        assert ref.product_error(kernels.linear(x, packed), ref.f64(x), dense) < ref.QUANTISED


@pytest.mark.parametrize("dtype", FLOATS)
def test_dense(isa: str, threads: int, dtype: mx.Dtype) -> None:
    for rows, k in ((16, 16), (33, 1), (100, 250), (1, 77), (700, 131)):
        w = ref.normal(rows, k, dtype=dtype)
        (packed,) = kernels.pack_dense([w])
        for m in (1, 2, 5, 19):
            x = ref.normal(m, k)
            assert ref.error(kernels.linear(x, packed), ref.f64(x) @ ref.f64(w).T) < ref.EXACT


@pytest.mark.parametrize("dtype", FLOATS)
def test_activation_types_and_leading_axes(isa: str, dtype: mx.Dtype) -> None:
    packed, dense, _ = quantised(48, 128, 4, 32, mx.float16)
    x = ref.normal(2, 3, 128, dtype=dtype)
    y = kernels.linear(x, packed)
    assert y.shape == (2, 3, 48)
    assert y.dtype == (mx.float16 if dtype == mx.float16 else mx.float32)
    assert ref.product_error(y, ref.f64(x), dense) < ref.QUANTISED + ref.ROUNDING[y.dtype]
    narrow = kernels.linear(x, packed, dtype=mx.bfloat16)
    assert narrow.dtype == mx.bfloat16
    assert ref.product_error(narrow, ref.f64(x), dense) < ref.QUANTISED + ref.ROUNDING[mx.bfloat16]


def test_strided_input(isa: str) -> None:
    packed, dense, _ = quantised(48, 128, 8, 32)
    x = ref.normal(2, 5, 4, 32).transpose(0, 2, 1, 3).reshape(2, 4, 160)[..., :128][:, ::2]
    assert ref.product_error(kernels.linear(x, packed), ref.f64(x), dense) < ref.QUANTISED


def test_prologue_and_epilogue(isa: str, threads: int) -> None:
    k, width = 192, 96
    parts = [mx.quantize(ref.normal(width, k, seed=i), group_size=64, bits=4) for i in range(2)]
    whole, first, second = kernels.pack_affine(
        *map(list, zip(*parts, strict=True)), group_size=64, bits=4, interleave=True
    )
    dense = [ref.dequantised(*p, 64, 4) for p in parts]
    norm, bias = ref.normal(k, seed=5), ref.normal(2 * width, seed=6)
    for m in (1, 7, 20):
        x, residual = ref.normal(m, k), ref.normal(m, width, seed=7)
        n = ref.rms_norm(ref.f64(x), ref.f64(norm), 1e-5)
        for view, matrix in ((first, dense[0]), (second, dense[1])):
            assert ref.error(kernels.linear(x, view, norm=norm), n @ matrix.T) < 1e-4
        y = kernels.linear(x, whole, norm=norm, gate="silu", residual=residual)
        want = ref.silu(n @ dense[0].T) * (n @ dense[1].T) + ref.f64(residual)
        assert ref.error(y, want) < 1e-4
        y = kernels.linear(x, first, bias=bias[:width])
        assert ref.error(y, ref.f64(x) @ dense[0].T + ref.f64(bias[:width])) < 1e-4


def test_joined_matrices(isa: str) -> None:
    parts = [ref.normal(r, 80, seed=r, dtype=mx.bfloat16) for r in (64, 16, 16)]
    whole, *views = kernels.pack_dense(parts)
    x = ref.normal(3, 80)
    want = [ref.f64(x) @ ref.f64(p).T for p in parts]
    assert ref.error(kernels.linear(x, whole), np.concatenate(want, -1)) < ref.EXACT
    for view, one in zip(views, want, strict=True):
        assert ref.error(kernels.linear(x, view), one) < ref.EXACT


@pytest.mark.parametrize("bits", BITS)
def test_embedding_is_what_mlx_dequantises(bits: int) -> None:
    for scales in FLOATS:
        packed, _, (w, s, b) = quantised(37, 128, bits, 32, scales)
        ids = mx.array([[0, 36], [17, 0]])
        rows = mx.dequantize(w, s, b, group_size=32, bits=bits)
        assert mx.array_equal(kernels.embed(ids, packed, scales), rows[ids])


def test_dense_embedding() -> None:
    for dtype in FLOATS:
        table = ref.normal(37, 70, dtype=dtype)
        (packed,) = kernels.pack_dense([table])
        assert mx.array_equal(kernels.embed(mx.array([36, 0, 5]), packed, dtype), table[mx.array([36, 0, 5])])


@pytest.mark.parametrize("bits", [0, 4])
def test_experts(isa: str, threads: int, bits: int) -> None:
    stack = ref.normal(5, 40, 64)
    if bits:
        w, s, b = mx.quantize(stack, group_size=32, bits=bits)
        (packed,) = kernels.pack_affine([w], [s], [b], group_size=32, bits=bits)
        dense = np.stack([ref.dequantised(w[i], s[i], b[i], 32, bits) for i in range(5)])
    else:
        (packed,) = kernels.pack_dense([stack])
        dense = ref.f64(stack)
    bias, x = ref.normal(5, 40, seed=1), ref.normal(9, 64)
    generator = np.random.default_rng(0)
    for m in (1, 6, 90):
        source, expert = generator.integers(0, 9, m), generator.integers(0, 5, m)
        y = kernels.gather_linear(x, packed, mx.array(source), mx.array(expert), bias=bias)
        want = np.einsum("mk,mnk->mn", ref.f64(x)[source], dense[expert]) + ref.f64(bias)[expert]
        assert ref.error(y, want) < 1e-4


def test_head_top(isa: str, threads: int) -> None:
    w = ref.normal(1000, 64)
    w[500] = w[20]  # a tie: the lower index comes first
    (packed,) = kernels.pack_dense([w])
    x = ref.normal(2, 19, 64)
    logits = kernels.linear(x, packed)
    values, indices = kernels.linear_top(x, packed, 8)
    order = np.argsort(-np.array(logits), axis=-1, kind="stable")[..., :8]
    assert np.array_equal(np.array(indices), order)
    assert np.array_equal(np.array(values), np.take_along_axis(np.array(logits), order, -1))


def test_adapter_rows(isa: str) -> None:
    base, x = ref.normal(5, 48), ref.normal(5, 32, seed=1)
    a, b, scale = ref.normal(3, 4, 32, seed=2), ref.normal(3, 48, 4, seed=3), mx.array([1.0, 0.5, 2.0])
    slot = np.array([2, -1, 0, 2, 1])
    y = kernels.adapter_rows(base, x, a, b, scale, mx.array(slot))
    want = ref.f64(base)
    for i, s in enumerate(slot):
        if s >= 0:
            want[i] += ref.f64(scale)[s] * (ref.f64(b)[s] @ (ref.f64(a)[s] @ ref.f64(x)[i]))
    assert ref.error(y, want) < ref.EXACT
    assert mx.array_equal(y[1], base[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_visible(isa: str, bad: float) -> None:
    packed, _, _ = quantised(32, 64, 4, 32)
    x = ref.normal(2, 64)
    x[1, 5] = bad
    y = np.array(kernels.linear(x, packed))
    assert np.isfinite(y[0]).all()
    assert not np.isfinite(y[1]).any()


def test_zero_and_tiny_rows(isa: str) -> None:
    packed, dense, _ = quantised(32, 64, 4, 32)
    x = mx.zeros((3, 64))
    x[1] = 1e-38
    x[2] = 1e30 * ref.normal(64)
    y = kernels.linear(x, packed)
    assert not np.array(y[0]).any()
    assert np.abs(np.array(y[1])).max() < 1e-30
    assert ref.product_error(y[2:], ref.f64(x[2:]), dense) < ref.QUANTISED


def test_wrong_shapes_are_errors() -> None:
    packed, _, (w, s, b) = quantised(32, 64, 4, 32)
    stack = kernels.pack_dense([ref.normal(2, 16, 16)])[0]
    cases = [
        lambda: kernels.linear(ref.normal(2, 65), packed),
        lambda: kernels.linear(ref.normal(2, 64), packed, norm=ref.normal(63)),
        lambda: kernels.linear(ref.normal(2, 64), packed, bias=ref.normal(31)),
        lambda: kernels.linear(ref.normal(2, 64), packed, residual=ref.normal(2, 31)),
        lambda: kernels.linear(ref.normal(2, 64), packed, gate="tanh"),
        lambda: kernels.linear(ref.normal(2, 64), packed, planes=3),
        lambda: kernels.linear(ref.normal(2, 16), stack),
        lambda: kernels.pack_affine([w], [s], [b], group_size=64, bits=4),
        lambda: kernels.pack_affine([w], [s], [b], group_size=32, bits=7),
        lambda: kernels.pack_affine([w], [s[:, :1]], [b], group_size=32, bits=4),
        lambda: kernels.pack_affine([w], [s.astype(mx.float16)], [b], group_size=32, bits=4),
        lambda: kernels.pack_dense([mx.zeros((2, (1 << 20) + 1))]),
        lambda: kernels.pack_dense([mx.zeros((10, 16)), mx.zeros((16, 16))]),
        lambda: kernels.linear_top(ref.normal(2, 64), packed, 33),
    ]
    for i, case in enumerate(cases):
        with pytest.raises(ValueError, match="mantou_kernels"):
            pytest.fail(f"case {i} gave {case()}")


def test_wrong_values_are_errors_at_evaluation() -> None:
    packed = kernels.pack_dense([ref.normal(2, 16, 16)])[0]
    table = kernels.pack_dense([ref.normal(10, 16)])[0]
    a, b, one = ref.normal(1, 2, 16), ref.normal(1, 16, 2), mx.array([1.0])
    cases = [
        lambda: kernels.embed(mx.array([10]), table, mx.float32),
        lambda: kernels.embed(mx.array([-1]), table, mx.float32),
        lambda: kernels.gather_linear(ref.normal(2, 16), packed, mx.array([2]), mx.array([0])),
        lambda: kernels.gather_linear(ref.normal(2, 16), packed, mx.array([0]), mx.array([2])),
        lambda: kernels.adapter_rows(ref.normal(1, 16), ref.normal(1, 16), a, b, one, mx.array([1])),
    ]
    for case in cases:
        with pytest.raises(RuntimeError, match="mantou_kernels"):
            mx.eval(case())
    assert mx.array_equal(mx.array([1]) + 1, mx.array([2]))  # the stream still works


@pytest.mark.parametrize("bits", BITS)
def test_avx_vnni_has_the_bits_of_avx2(bits: int) -> None:
    """Both add the same integers, in other instructions; where the chip has no AVX-VNNI both runs are AVX2."""
    best, found = kernels.select_kernels(), []
    packed, _, _ = quantised(48, 256, bits, 64)
    try:
        for name in ("avx2", "avx_vnni"):
            with suppress(ValueError):
                kernels.select_kernels(name)
            found.append(
                [kernels.linear(ref.normal(m, 256), packed, planes=p) for m in (1, 5, 16) for p in (1, 2)]
            )
            mx.eval(found[-1])
    finally:
        kernels.select_kernels(best)
    for one, other in zip(*found, strict=True):
        assert mx.array_equal(one, other)


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_highest_of_a_product_is_the_highest_of_its_logits(
    isa: str, threads: int, bits: int, dtype: mx.Dtype
) -> None:
    """Ties too: bfloat16 logits have many, and the lower token wins."""
    if bits == 16:
        (packed,) = kernels.pack_dense([ref.normal(1003, 128).astype(mx.bfloat16)])
    else:
        packed, _, _ = quantised(1003, 128, bits, 64)
    for m in (1, 5, 40):
        x = ref.normal(1, m, 128, seed=m)
        tokens, scores = kernels.highest_of_product(kernels.linear(x, packed, dtype=dtype))
        logits = kernels.linear(x, packed, dtype=dtype)
        assert mx.array_equal(tokens, mx.argmax(logits, axis=-1))
        assert mx.array_equal(scores, logits.max(axis=-1).astype(mx.float32))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_highest_of_what_is_allowed(isa: str, threads: int, share: float, dtype: mx.Dtype) -> None:
    """Whole blocks of outputs are left out, for all rows or for some."""
    packed, _, _ = quantised(1003, 128, 4, 64)
    for m in (1, 5, 40):
        x = ref.normal(2, m, 128, seed=m)
        allowed = np.random.default_rng(m).random((2, m, 1003)) < share
        allowed[0, :, 1002] = True
        allowed[1, :, 517] = True
        bits = mx.array(np.packbits(allowed, axis=-1, bitorder="little"))
        tokens, scores = kernels.highest_of_product(kernels.linear(x, packed, dtype=dtype), bits)
        logits = mx.where(
            mx.array(allowed), kernels.linear(x, packed, dtype=dtype).astype(mx.float32), -mx.inf
        )
        assert mx.array_equal(tokens, mx.argmax(logits, axis=-1))
        assert mx.array_equal(scores, logits.max(axis=-1))
    with pytest.raises(ValueError, match="what is allowed"):
        kernels.highest_of_product(kernels.linear(x, packed), bits[:1])


def test_the_highest_of_no_number_is_the_first_and_says_so(isa: str, threads: int) -> None:
    weight = ref.normal(200, 32)
    (packed,) = kernels.pack_dense([weight])
    nothing = kernels.linear(mx.full((2, 32), mx.nan), packed)
    tokens, scores = kernels.highest_of_product(nothing)
    assert tokens.tolist() == [0, 0]
    assert bool(mx.all(mx.isnan(scores)))
    bits = mx.array(np.packbits(np.arange(200) == 77, bitorder="little"))
    _, scores = kernels.highest_of_product(kernels.linear(mx.full((1, 32), mx.nan), packed), bits[None])
    assert bool(mx.isnan(scores[0])), "a model that gave no number shows, whatever was allowed"
    (packed,) = kernels.pack_dense([mx.where(mx.arange(200)[:, None] == 7, weight, mx.nan)])
    tokens, _ = kernels.highest_of_product(kernels.linear(mx.ones((1, 32)), packed))
    assert tokens.tolist() == [7]


def test_logits_that_are_no_bare_product_are_not_taken_for_one() -> None:
    packed, _, _ = quantised(48, 64, 4, 64)
    x = ref.normal(2, 64)
    logits = kernels.linear(x, packed)
    mx.eval(logits)
    for other in (logits, kernels.linear(x, packed) * 2, kernels.linear(x, packed, bias=mx.ones(48))):
        assert kernels.highest_of_product(other) is None


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_rows_of_zeros_have_products_of_zeros_and_leave_the_others_alone(
    isa: str, threads: int, dtype: mx.Dtype
) -> None:
    (packed,) = kernels.pack_dense([ref.normal(200, 48)])
    filled = [False, True, False, True, True, False]
    x = mx.where(mx.array(filled)[:, None], ref.normal(6, 48, seed=1), -0.0).astype(dtype)
    bits = mx.array(np.random.default_rng(0).integers(1, 255, (6, 25), dtype=np.uint8))
    y = kernels.linear(x, packed, dtype=dtype)
    for allowed in (None, bits):
        best = kernels.highest_of_product(kernels.linear(x, packed, dtype=dtype), allowed)
        for row in range(6):
            alone = kernels.linear(x[row : row + 1], packed, dtype=dtype)
            assert mx.array_equal(y[row], alone[0])
            assert bool(mx.any(y[row] != 0)) == filled[row]
            mine = None if allowed is None else allowed[row : row + 1]
            found = kernels.highest_of_product(kernels.linear(x[row : row + 1], packed, dtype=dtype), mine)
            for one, many in zip(found, best, strict=True):
                assert mx.array_equal(one[0], many[row])
    biased = kernels.linear(x, packed, bias=mx.ones(200), dtype=dtype)
    assert np.array(biased[0].astype(mx.float32)).tolist() == [1.0] * 200
