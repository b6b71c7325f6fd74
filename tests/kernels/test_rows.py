"""Norms, gates and rotary embedding against float64; where MLX rounds, so do the kernels."""

from __future__ import annotations

import mantou_kernels as kernels
import mlx.core as mx
import numpy as np
import pytest

from mantou.models.ops.fast import PLAIN
from tests.kernels import reference as ref

FLOATS = (mx.float32, mx.bfloat16, mx.float16)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [1, 15, 64, 100, 576])
def test_norms(isa: str, dtype: mx.Dtype, n: int) -> None:
    x, w, b = (
        ref.normal(3, 2, n, dtype=dtype),
        ref.normal(n, seed=1, dtype=dtype),
        ref.normal(n, seed=2, dtype=dtype),
    )
    limit = ref.EXACT + 3 * ref.ROUNDING[dtype]
    got = kernels.rms_norm(x, w, 1e-5)
    assert got.dtype == dtype
    assert ref.error(got, ref.rms_norm(ref.f64(x), ref.f64(w), 1e-5)) < limit
    if n > 1:
        assert (
            ref.error(
                kernels.layer_norm(x, w, b, 1e-5), ref.layer_norm(ref.f64(x), ref.f64(w), ref.f64(b), 1e-5)
            )
            < limit
        )
        assert (
            ref.error(kernels.layer_norm(x, None, None, 1e-5), ref.layer_norm(ref.f64(x), 1, 0, 1e-5)) < limit
        )
    assert ref.error(kernels.rms_norm(x, None, 1e-5), ref.rms_norm(ref.f64(x), 1, 1e-5)) < limit


def test_layer_norm_of_a_large_mean(isa: str) -> None:
    x = ref.normal(2, 300) + 1000.0
    assert ref.error(kernels.layer_norm(x, None, None, 1e-5), ref.layer_norm(ref.f64(x), 1, 0, 1e-5)) < 1e-4


@pytest.mark.parametrize("dtype", FLOATS)
def test_gates(isa: str, dtype: mx.Dtype) -> None:
    g, u = 4 * ref.normal(5, 77, dtype=dtype), ref.normal(5, 77, seed=1, dtype=dtype)
    for kind, function in (("silu", ref.silu), ("gelu_tanh", ref.gelu_tanh), ("gelu_erf", ref.gelu_erf)):
        limit = ref.EXACT + 3 * ref.ROUNDING[dtype]
        assert ref.error(kernels.gate(kind, g, u), function(ref.f64(g)) * ref.f64(u)) < limit
        assert ref.error(kernels.gate(kind, g), function(ref.f64(g))) < limit


def test_gates_far_from_zero(isa: str) -> None:
    g = mx.array([-1e30, -200.0, -89.0, 0.0, 89.0, 200.0, 1e30])
    want = np.array([0.0, 0.0, 0.0, 0.0, 89.0, 200.0, 1e30], np.float32)
    for kind in ("silu", "gelu_tanh"):
        assert np.allclose(np.array(kernels.gate(kind, g)), want, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dims", [2, 30, 64, 80])
def test_rope(isa: str, traditional: bool, dims: int) -> None:
    x = ref.normal(2, 5, 3, 80).transpose(0, 2, 1, 3)
    frequencies = 10000.0 ** (-np.arange(dims // 2) / (dims // 2))
    for offset in (0, 41, [3, 900]):
        positions = np.broadcast_to(np.reshape(offset, (-1, 1)), (2, 1)) + np.arange(5)
        at = mx.array(offset, mx.int32)
        y = kernels.rope(x, dims, traditional=traditional, base=10000.0, scale=1.0, offset=at)
        assert (
            ref.error(y, ref.rope(ref.f64(x), dims, traditional, frequencies, positions)) < 5e-5
        )  # f32 angles
        y = kernels.rope(
            x,
            dims,
            traditional=traditional,
            base=None,
            scale=0.25,
            offset=at,
            freqs=mx.array(1 / frequencies),
        )
        assert ref.error(y, ref.rope(ref.f64(x), dims, traditional, frequencies, positions * 0.25)) < 5e-5


@pytest.mark.parametrize("dtype", FLOATS)
def test_rope_equals_mlx(dtype: mx.Dtype) -> None:
    for shape in ((2, 3, 5, 64), (2, 5, 64), (1, 2, 3, 4, 64)):
        x = ref.normal(*shape, dtype=dtype)
        for offset in (mx.array(5000), mx.array([3, -2][: shape[0]])):
            arguments = {"traditional": False, "base": 500000.0, "scale": 1.0, "offset": offset}
            assert ref.error(kernels.rope(x, 64, **arguments), ref.f64(PLAIN.rope(x, 64, **arguments))) < 1e-6


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_rounding_is_that_of_mlx(isa: str, dtype: mx.Dtype) -> None:
    """16-bit rows differ from plain MLX in few places, and there by one unit in the last place."""
    x, w = ref.normal(40, 64, dtype=dtype), ref.normal(64, seed=1, dtype=dtype)
    ours, theirs = kernels.rms_norm(x, w, 1e-6), PLAIN.rms_norm(x, w, 1e-6)
    assert float(mx.mean(ours == theirs)) > 0.999
    heads = x.reshape(1, 4, 10, 64)
    way = {"traditional": False, "base": 1e4, "scale": 1.0, "offset": mx.array(11)}
    assert float(mx.mean(kernels.rope(heads, 64, **way) == PLAIN.rope(heads, 64, **way))) > 0.999
    gate, up = ref.normal(200, 64, seed=2, dtype=dtype) * 4, ref.normal(200, 64, seed=3, dtype=dtype)
    assert float(mx.mean(kernels.gate("silu", gate, up) == gate * mx.sigmoid(gate) * up)) > 0.999


def test_wrong_shapes_are_errors() -> None:
    x = ref.normal(2, 3, 8)
    cases = [
        lambda: kernels.rms_norm(x, ref.normal(7), 1e-5),
        lambda: kernels.rms_norm(mx.array([[1, 2]]), None, 1e-5),
        lambda: kernels.gate("silu", x, ref.normal(2, 3, 7)),
        lambda: kernels.gate("relu", x, x),
        lambda: kernels.rope(x, 10, traditional=False, base=1e4, scale=1.0, offset=mx.array(0)),
        lambda: kernels.rope(x, 3, traditional=False, base=1e4, scale=1.0, offset=mx.array(0)),
        lambda: kernels.rope(x, 8, traditional=False, base=None, scale=1.0, offset=mx.array(0)),
        lambda: kernels.rope(
            x, 8, traditional=False, base=None, scale=1.0, offset=mx.array(0), freqs=ref.normal(3)
        ),
        lambda: kernels.rope(x, 8, traditional=False, base=1e4, scale=1.0, offset=mx.array([0, 1, 2])),
    ]
    for i, case in enumerate(cases):
        with pytest.raises(ValueError, match="mantou_kernels"):
            pytest.fail(f"case {i} gave {case()}")
