"""BERT's layer as one primitive: the bits of the separate operations, whatever else is in the batch."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mantou.models.encoders.bert import Bert
from mantou.models.encoders.layers import key_mask
from mantou.models.ops.cpu import CpuOps
from mantou.models.ops.encoder_layers import FusedEncoderLayer

WIDTH = 19
CONFIG = {
    "model_type": "bert",
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


def encoder(dtype: mx.Dtype, **changes: object) -> Bert:
    mx.random.seed(1)
    model = Bert(CONFIG | changes)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    CpuOps().install(model)
    return model


def hidden(model: Bert, tokens: np.ndarray, lengths: list[int]) -> np.ndarray:
    ids = mx.array(tokens)
    ragged = min(lengths) < tokens.shape[1]
    found = model(ids, mx.zeros_like(ids), mx.array(lengths), ragged=ragged)
    return np.array(found.astype(mx.float32))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_one_primitive_gives_the_bits_of_the_separate_operations(isa: str, dtype: mx.Dtype) -> None:
    model = encoder(dtype)
    x = mx.random.normal((5, WIDTH, 96)).astype(dtype)
    lengths = mx.array([19, 3, 7, 19, 12])
    mask = key_mask(lengths, WIDTH)
    inside = np.arange(WIDTH) < np.array(lengths)[:, None]
    for layer in model.layers:
        assert isinstance(layer, FusedEncoderLayer)
        for given, chosen in ((mask, inside), (None, np.ones_like(inside))):
            ours, theirs = layer(x, given), layer.block(x, given)
            assert ours.dtype == theirs.dtype == dtype
            found, want = (np.array(a.astype(mx.float32)) for a in (ours, theirs))
            assert np.isfinite(found).all()
            assert np.array_equal(found[chosen], want[chosen])


def test_neighbours_and_padding_change_no_bit_of_a_row(isa: str) -> None:
    model = encoder(mx.float32)
    tokens = np.random.default_rng(0).integers(0, 100, (5, WIDTH))
    lengths = [19, 3, 7, 19, 12]
    together = hidden(model, tokens, lengths)
    for row, length in enumerate(lengths):
        alone = hidden(model, tokens[row : row + 1, :length], [length])
        assert np.array_equal(together[row, :length], alone[0])


def test_another_activation_and_another_dtype_keep_the_separate_operations() -> None:
    assert not any(
        isinstance(one, FusedEncoderLayer) for one in encoder(mx.float32, hidden_act="relu").layers
    )
    layer = encoder(mx.bfloat16).layers[0]
    x = mx.random.normal((1, WIDTH, 96))
    assert layer(x, None).dtype == layer.block(x, None).dtype == mx.float32
