from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mantou.models.hub.gguf.blocks import GROUP_SIZE, dequantize, repack
from mantou.models.hub.gguf.reader import BLOCKS, TensorType
from tests.unit import gguf_files as files

QUANTISED = [TensorType.Q4_0, TensorType.Q4_1, TensorType.Q8_0]


def as_blocks(data: bytes, rows: int, kind: TensorType) -> np.ndarray:
    return np.frombuffer(data, np.uint8).reshape(rows, -1, BLOCKS[kind][1])


@pytest.mark.parametrize("kind", list(TensorType))
def test_dequantised_values_equal_the_definition(kind: TensorType) -> None:
    data = files.random_blocks(np.random.default_rng(1), (3, 64), kind)
    assert np.array_equal(dequantize(as_blocks(data, 3, kind), kind), files.formula(data, (3, 64), kind))


@pytest.mark.parametrize("kind", QUANTISED)
@given(st.data())
@settings(max_examples=40, deadline=None)
def test_mlx_form_equals_the_definition_for_any_block(kind: TensorType, data: st.DataObject) -> None:
    half = st.builds(lambda size, sign: size | sign, st.integers(0, 0x7BFF), st.sampled_from([0, 0x8000]))
    blocks = b""
    for _ in range(4):
        scales = data.draw(st.tuples(half, half))[: 2 if kind is TensorType.Q4_1 else 1]
        blocks += np.array(scales, np.uint16).tobytes()  # the bits of any finite float16
        size = BLOCKS[kind][1] - 2 * len(scales)
        blocks += data.draw(st.binary(min_size=size, max_size=size))
    packed = repack(as_blocks(blocks, 2, kind), kind)
    got = mx.dequantize(
        mx.array(packed.weight), mx.array(packed.scales), mx.array(packed.biases), GROUP_SIZE, packed.bits
    )
    assert packed.scales.dtype == packed.biases.dtype == np.float32
    assert np.array_equal(np.array(got), files.formula(blocks, (2, 64), kind))


def test_a_type_without_an_affine_form_is_refused() -> None:
    with pytest.raises(ValueError, match="F16"):
        repack(np.zeros((1, 32, 2), np.uint8), TensorType.F16)
