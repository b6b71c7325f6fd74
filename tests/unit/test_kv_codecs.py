from __future__ import annotations

import importlib

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mantou.errors import ConfigError
from mantou.kv.batch import capacity_bucket
from mantou.kv.codecs import Affine, Native, make_scheme
from mantou.models.load import enter_mlx_lm

PLAIN = settings(deadline=None, max_examples=40)


@PLAIN
@given(
    bits=st.sampled_from([4, 8]),
    head_dim=st.sampled_from([32, 64, 96, 128, 256]),
    dtype=st.sampled_from([mx.float32, mx.float16, mx.bfloat16]),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
    seed=st.integers(0, 99),
)
def test_an_affine_round_trip_errs_by_half_a_step_at_most(
    bits: int, head_dim: int, dtype: mx.Dtype, scale: float, seed: int
) -> None:
    codec = Affine(bits)
    x = (scale * mx.random.normal((2, 3, 5, head_dim), key=mx.random.key(seed))).astype(dtype)
    parts = codec.pack(x)
    assert all(part.shape[:3] == (2, 3, 5) for part in parts)
    back = codec.unpack(parts, dtype)
    assert back.dtype == dtype
    group = 64 if head_dim % 64 == 0 else 32
    grouped = np.array(x.astype(mx.float32)).reshape(2, 3, 5, -1, group)
    error = np.abs(np.array(back.astype(mx.float32)).reshape(grouped.shape) - grouped)
    largest = np.abs(grouped).max(axis=-1, keepdims=True)
    span = grouped.max(axis=-1, keepdims=True) - grouped.min(axis=-1, keepdims=True)
    # MLX moves the grid so that 0 or an end is hit exactly, which may cost up to one more step; scale, bias and result
    # are rounded to the dtype.
    rounding = {mx.float32: 2**-22, mx.float16: 2**-9, mx.bfloat16: 2**-6}[dtype]
    step = span / (2**bits - 1)
    assert (error <= 1.01 * step + 2 * rounding * largest).all()
    assert error.mean() <= 0.5 * step.mean() + rounding * largest.mean()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_token_is_packed_the_same_in_any_batch_and_chunk(bits: int) -> None:
    codec = Affine(bits)
    x = mx.random.normal((3, 2, 7, 64), key=mx.random.key(0))
    together = codec.pack(x)
    alone = codec.pack(x[1:2, :, 4:5])
    for whole, part in zip(together, alone, strict=True):
        assert mx.array_equal(whole[1:2, :, 4:5], part)


@pytest.mark.parametrize("name", ["off", "8", "4"])
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 64), (8, 128), (1, 96)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_bytes_per_token_are_those_of_the_arrays(
    name: str, heads: int, head_dim: int, dtype: mx.Dtype
) -> None:
    codec = make_scheme(name).codec
    parts = codec.pack(mx.zeros((1, heads, 16, head_dim), dtype))
    assert codec.bytes_per_token(heads, head_dim, dtype.size) == sum(part.nbytes for part in parts) / 16


def test_the_native_codec_changes_nothing() -> None:
    x = mx.random.normal((1, 2, 3, 7)).astype(mx.bfloat16)
    assert mx.array_equal(Native().unpack(Native().pack(x), mx.bfloat16), x)


def test_each_scheme_has_its_own_name() -> None:
    assert [make_scheme(name).name for name in ("off", "8", "4")] == ["native", "kv8", "kv4"]


def test_an_unknown_scheme_and_an_odd_head_dimension_are_one_sentence() -> None:
    with pytest.raises(
        ConfigError, match=r"--kv-quant takes off, 8, 4, turbo, turbo-k4v2, config, not '6'\."
    ):
        make_scheme("6")
    with pytest.raises(ConfigError, match="need a head dimension divisible by 32, this model has 80"):
        Affine(4).pack(mx.zeros((1, 1, 1, 80)))


@PLAIN
@given(num_tokens=st.integers(1, 1_000_000), step=st.sampled_from([64, 256]))
def test_a_capacity_holds_its_rows_wastes_at_most_a_quarter_and_comes_in_few_sizes(
    num_tokens: int, step: int
) -> None:
    capacity = capacity_bucket(num_tokens, step)
    assert num_tokens <= capacity
    assert capacity % step == 0
    assert capacity <= max(step, num_tokens + step, 1.25 * num_tokens)
    assert capacity_bucket(capacity, step) == capacity
    assert capacity <= capacity_bucket(num_tokens + 1, step)


def test_a_row_that_grows_to_a_million_tokens_meets_few_capacities() -> None:
    sizes = set()
    length = 1
    while length < 1_000_000:
        sizes.add(capacity_bucket(length))
        length = capacity_bucket(length) + 1
    assert len(sizes) < 60


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group_size", [32, 64])
def test_uniform_groups_are_those_of_mlx_lms_own_quantised_cache(bits: int, group_size: int) -> None:
    enter_mlx_lm()
    oracle = importlib.import_module("mlx_lm.models.cache").QuantizedKVCache(group_size=group_size, bits=bits)
    keys, values = (mx.random.normal((1, 2, 9, 64), key=mx.random.key(i)) for i in (0, 1))
    expected = [
        oracle.update_and_fetch(keys[:, :, lo:hi], values[:, :, lo:hi]) for lo, hi in ((0, 5), (5, 9))
    ][-1]
    codec = make_scheme(str(bits), group_size=group_size).codec
    for x, packed in zip((keys, values), expected, strict=True):
        for part, other in zip(codec.pack(x), packed, strict=True):
            assert mx.array_equal(part, other)
        assert mx.array_equal(
            codec.unpack(codec.pack(x), mx.float32), mx.dequantize(*packed, group_size=group_size, bits=bits)
        )
