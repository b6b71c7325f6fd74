"""BERT's layers as one primitive: the bits of the separate operations, whatever else is in the batch."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mantou.models.encoders.bert import Bert
from mantou.models.encoders.layers import key_mask
from mantou.models.ops.cpu import CpuOps
from mantou.models.ops.encoder_layers import FusedEncoder
from mantou.models.ops.extension import kernels

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


def separately(fused: FusedEncoder, x: mx.array, mask: mx.array | None) -> mx.array:
    for block in fused.blocks:
        x = block(x, mask)
    return x


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
# Rows by the dozen: few, of which threads share the weights; in one long text; in texts enough for each thread.
@pytest.mark.parametrize("lengths", [[5, 2], [19, 3, 7, 19, 12], [70], [19, 0, 7] * 8])
def test_one_primitive_gives_the_bits_of_the_separate_operations(
    isa: str, threads: int, dtype: mx.Dtype, lengths: list[int]
) -> None:
    (layers,) = encoder(dtype).layers
    assert isinstance(layers, FusedEncoder)
    width = max(lengths)
    x = mx.random.normal((len(lengths), width, 96)).astype(dtype)
    inside = np.arange(width) < np.array(lengths)[:, None]
    for mask, chosen in ((key_mask(mx.array(lengths), width), inside), (None, np.ones_like(inside))):
        ours, theirs = layers(x, mask), separately(layers, x, mask)
        assert ours.dtype == theirs.dtype == dtype
        found, want = (np.array(a.astype(mx.float32)) for a in (ours, theirs))
        assert np.array_equal(found[chosen], want[chosen])
        assert not found[~chosen].any()


def test_a_length_beyond_the_row_and_another_width_are_refused() -> None:
    (layers,) = encoder(mx.float32).layers
    assert isinstance(layers, FusedEncoder)
    specs, x = layers._fused, mx.zeros((2, WIDTH, 96))  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(Exception, match="row 1 has 20 of 19 tokens"):
        mx.eval(kernels.encoder(x, specs, mx.array([3, 20])))
    with pytest.raises(Exception, match="another width"):
        kernels.encoder(mx.zeros((2, WIDTH, 80)), specs)
    with pytest.raises(Exception, match="one value a row"):
        kernels.encoder(x, specs, mx.array([3]))


def test_neighbours_and_padding_change_no_bit_of_a_row(isa: str) -> None:
    model = encoder(mx.float32)
    tokens = np.random.default_rng(0).integers(0, 100, (5, WIDTH))
    lengths = [19, 3, 7, 19, 12]
    together = hidden(model, tokens, lengths)
    for row, length in enumerate(lengths):
        alone = hidden(model, tokens[row : row + 1, :length], [length])
        assert np.array_equal(together[row, :length], alone[0])


def test_another_activation_and_another_dtype_keep_the_separate_operations() -> None:
    other = encoder(mx.float32, hidden_act="relu")
    assert not any(isinstance(one, FusedEncoder) for one in other.layers)
    (layers,) = encoder(mx.bfloat16).layers
    assert isinstance(layers, FusedEncoder)
    x = mx.random.normal((1, WIDTH, 96))
    assert layers(x, None).dtype == separately(layers, x, None).dtype == mx.float32
