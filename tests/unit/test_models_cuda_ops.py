"""The CUDA operations compute what plain MLX computes; on the CPU the formula can be checked, the speed cannot."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mantou.models.ops.cuda import CudaOps, FlatQuantizedLinear, FoldedAttention


def tensors(
    heads: int, kv_heads: int, width: int, span: int
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    mx.random.seed(heads * 100 + width)
    q = mx.random.normal((3, heads, width, 16))
    k = mx.random.normal((3, kv_heads, span, 16))
    v = mx.random.normal((3, kv_heads, span, 8))
    ends = mx.array([2, span // 2, span - width])[:, None, None, None]
    return q, k, v, mx.arange(span)[None, None, None] <= ends + mx.arange(width)[None, None, :, None]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("width", [1, 3, 8, 9])
def test_folded_attention_equals_plain_attention(heads: int, kv_heads: int, width: int) -> None:
    plain = mx.fast.scaled_dot_product_attention
    q, k, v, mask = tensors(heads, kv_heads, width, 20)
    folded = FoldedAttention(plain)
    for _ in range(2):  # the second call takes the remembered mask
        got = folded(q, k, v, scale=0.25, mask=mask)
        assert np.allclose(np.array(got), np.array(plain(q, k, v, scale=0.25, mask=mask)), atol=1e-5)


def test_a_new_mask_of_the_same_shape_is_not_confused_with_the_last_one() -> None:
    plain = mx.fast.scaled_dot_product_attention
    q, k, v, mask = tensors(4, 2, 2, 20)
    folded = FoldedAttention(plain)
    folded(q, k, v, scale=0.25, mask=mask)
    other = mx.ones_like(mask)
    got = folded(q, k, v, scale=0.25, mask=other)
    assert np.allclose(np.array(got), np.array(plain(q, k, v, scale=0.25, mask=other)), atol=1e-5)


def test_flattened_quantised_layers_equal_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", mx.fast.scaled_dot_product_attention)
    model = nn.Sequential(nn.Linear(64, 32), nn.Embedding(32, 64))
    nn.quantize(model, group_size=32, bits=4)
    x, hidden = mx.random.normal((3, 2, 64)), mx.random.normal((3, 2, 64))
    expected, logits = model.layers[0](x), model.layers[1].as_linear(hidden)
    CudaOps().install(model)
    assert isinstance(model.layers[0], FlatQuantizedLinear)
    assert np.array_equal(np.array(model.layers[0](x)), np.array(expected))
    assert np.array_equal(np.array(model.layers[1].as_linear(hidden)), np.array(logits))
