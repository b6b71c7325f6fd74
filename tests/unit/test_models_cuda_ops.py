"""The CUDA operations compute what plain MLX computes; on the CPU the formula can be checked, the speed cannot."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

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


class Attention(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, n, bias=bias) for n in (96, 32, 32))

    def __call__(self, x: mx.array) -> tuple[mx.array, ...]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


class Half(Attention):
    def __call__(self, x: mx.array) -> tuple[mx.array, ...]:
        return (self.q_proj(x),)


def installed(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Joins the model's layers. Returns the list that gets how many outputs each product has."""
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", mx.fast.scaled_dot_product_attention)
    CudaOps().install(model)
    sizes: list[int] = []
    for kind in (nn.Linear, nn.QuantizedLinear):

        def counted(self: nn.Module, x: mx.array, plain: Any = kind.__call__) -> mx.array:
            sizes.append(self["weight"].shape[0])
            return plain(self, x)

        monkeypatch.setattr(kind, "__call__", counted)
    return sizes


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_one_input_share_one_product(
    bits: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.Sequential(Attention(bias)), mx.random.normal((3, 2, 64))
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
    attention = model.layers[0]
    names = sorted(name for name, _ in tree_flatten(model.parameters()))
    want = [np.array(part) for part in attention(x)]
    sizes = installed(model, monkeypatch)
    for _ in range(2):
        for got, part in zip(attention(x), want, strict=True):
            assert np.allclose(np.array(got), part, atol=1e-5)
    assert sizes == [160, 160]
    assert sorted(name for name, _ in tree_flatten(model.parameters())) == names


def test_a_layer_with_new_weights_does_not_answer_with_the_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(Attention()), mx.random.normal((3, 2, 64))
    installed(model, monkeypatch)
    attention = model.layers[0]
    attention(x)
    attention.k_proj.weight = attention.k_proj.weight * 2
    q, k, v = attention(x)
    assert np.allclose(np.array(k), np.array(x @ attention.k_proj.weight.T), atol=1e-5)
    assert np.allclose(np.array(q), np.array(x @ attention.q_proj.weight.T), atol=1e-5)
    assert v.shape == (3, 2, 32)


def test_a_graph_that_calls_one_layer_of_three_stops_paying_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Half())
    sizes = installed(model, monkeypatch)
    for _ in range(5):
        model(mx.random.normal((3, 2, 64)))
    assert sizes == [160, 160, 160, 96, 96]
