from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mantou.errors import ConfigError
from mantou.kv.codecs import Affine, Codebook, Rotated
from mantou.kv.codecs.schemes import Turbo
from mantou.kv.codecs.turbo import HEAD_DIMS, _pack_bits, _unpack_bits, normal_codebook, rotate, rotate_back
from mantou.kv.shapes import LayerShape

PLAIN = settings(deadline=None, max_examples=25)
# Mean square error of the best quantiser of a normal value (Max 1960).
LLOYD_MAX = {2: 0.1175, 3: 0.03454, 4: 0.009497}


def relative_error(back: mx.array, x: mx.array) -> np.ndarray:
    """Squared, by vector."""
    x32, back32 = np.array(x.astype(mx.float32)), np.array(back.astype(mx.float32))
    return ((back32 - x32) ** 2).sum(-1) / np.maximum((x32**2).sum(-1), 1e-30)


def outliers(seed: int, head_dim: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Keys as models make them: a few channels are far larger than the rest."""
    x = mx.random.normal((1, 2, 40, head_dim), key=mx.random.key(seed))
    return (x * mx.where(mx.arange(head_dim) % 29 == 3, 40.0, 1.0)).astype(dtype)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_rotation_keeps_lengths_and_products_and_undoes_itself(head_dim: int) -> None:
    x, y = (mx.random.normal((3, head_dim), key=mx.random.key(i)) for i in (1, 2))
    assert np.allclose(np.array(rotate_back(rotate(x))), np.array(x), atol=1e-5)
    assert np.allclose(
        np.array(mx.sum(rotate(x) * rotate(y), -1)), np.array(mx.sum(x * y, -1)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_codebook_is_the_best_one_for_a_normal_value(bits: int) -> None:
    levels, edges = normal_codebook(bits)
    assert list(levels) == pytest.approx([-level for level in reversed(levels)], abs=1e-9)
    x = np.random.default_rng(0).standard_normal(200_000)
    error = np.mean((np.array(levels)[np.searchsorted(np.array(edges), x)] - x) ** 2)
    assert error == pytest.approx(LLOYD_MAX[bits], rel=0.02)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("head_dim", [32, *HEAD_DIMS])
def test_indices_come_back_as_they_were_packed(bits: int, head_dim: int) -> None:
    index = mx.array(
        np.random.default_rng(bits).integers(0, 1 << bits, (1, 2, 3, head_dim)).astype(np.uint32)
    )
    words = _pack_bits(index, bits)
    assert words.dtype == mx.uint32
    assert words.shape == (1, 2, 3, head_dim * bits // 32)
    assert mx.array_equal(_unpack_bits(words, bits), index)


@PLAIN
@given(
    head_dim=st.sampled_from(HEAD_DIMS),
    dtype=st.sampled_from([mx.float32, mx.float16, mx.bfloat16]),
    seed=st.integers(0, 99),
)
def test_outliers_cost_rotated_values_nothing(head_dim: int, dtype: mx.Dtype, seed: int) -> None:
    x = outliers(seed, head_dim, dtype)
    for codec, bound in (
        (Rotated(Affine(8)), 1e-4),
        (Rotated(Codebook(3)), 1.3 * LLOYD_MAX[3]),
        (Rotated(Affine(4)), 0.03),
        (Rotated(Codebook(2)), 1.3 * LLOYD_MAX[2]),
    ):
        parts = codec.pack(x)
        assert all(part.shape[:3] == x.shape[:3] for part in parts)
        back = codec.unpack(parts, dtype)
        assert back.dtype == dtype
        assert relative_error(back, x).mean() < bound, codec.name


def test_rotated_four_bits_err_less_than_plain_ones_where_channels_differ() -> None:
    """Where a group has an outlier, the small channels of plain groups are lost."""
    x = outliers(0, 128)
    small = np.arange(128) % 29 != 3
    rotated, plain = Rotated(Codebook(4)), Affine(4, 64)
    errors = [
        np.abs(np.array(codec.unpack(codec.pack(x), mx.float32) - x))[..., small].max()
        for codec in (rotated, plain)
    ]
    assert errors[1] > 0.9  # a whole channel's size
    assert relative_error(rotated.unpack(rotated.pack(x), mx.float32), x).mean() < 0.012


@pytest.mark.parametrize(
    "inner", [Affine(8), Affine(4), Codebook(3), Codebook(2)], ids=lambda codec: codec.name
)
def test_a_rotated_token_is_packed_the_same_in_any_batch_and_chunk(inner: Affine | Codebook) -> None:
    codec = Rotated(inner)
    x = mx.random.normal((3, 2, 7, 64), key=mx.random.key(0))
    alone = codec.pack(x[1:2, :, 4:5])
    for whole, part in zip(codec.pack(x), alone, strict=True):
        assert mx.array_equal(whole[1:2, :, 4:5], part)
    together = codec.unpack(codec.pack(x), mx.float32)
    assert mx.array_equal(together[1:2, :, 4:5], codec.unpack(alone, mx.float32))


def test_a_vector_of_zeros_stays_one() -> None:
    for codec in (Rotated(Affine(8)), Rotated(Codebook(3))):
        zeros = mx.zeros((1, 1, 2, 64))
        assert mx.array_equal(codec.unpack(codec.pack(zeros), mx.float32), zeros)


@pytest.mark.parametrize("head_dim", [80, 96, 192])
def test_other_head_dimensions_are_refused_before_the_model_serves(head_dim: int) -> None:
    shape = LayerShape(0, "full", (2, head_dim), (2, head_dim))
    with pytest.raises(
        ConfigError, match=f"needs a head dimension of 64, 128, 256, 512, this model has {head_dim}"
    ):
        Turbo(8, 3).plan([shape])


def test_windows_and_indices_stay_native_and_latent_keys_are_no_values() -> None:
    plan = Turbo(8, 3).plan(
        [
            LayerShape(0, "full", (4, 64), (4, 64)),
            LayerShape(1, "window", (4, 64), (4, 64), num_columns=128),
            LayerShape(2, "full", (1, 512), (1, 64), listed=True),
            LayerShape(2, "keys", (1, 128), listed=True),
            LayerShape(3, "recurrent", state_bytes=100),
        ]
    )
    assert [codec.name for codec in plan.codecs[:4]] == ["turbo-k8v3", "native", "turbo-k8", "native"]
    assert plan.counts == {"turbo-k8v3": 1, "native": 2, "turbo-k8": 1}
