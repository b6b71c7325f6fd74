"""BERT's layers as one primitive each. Knows that one graph of ours by its class; decoders are fused by structure.

Between the products of a layer lie sums, norms and an activation whose arrays are as large as the hidden state. As
single operations they cost a fourth of the time, most of it in pages that the system clears for every result.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mantou.models.encoders.bert import Layer
from mantou.models.ops import modules
from mantou.models.ops.extension import kernels

_PRODUCTS = {"qkv": "qkv", "out": "attention_out", "up": "up", "down": "down"}


class FusedEncoderLayer(nn.Module):
    """A layer that runs as one primitive where the input has the weights' type. The layer itself stays for the rest."""

    def __init__(self, block: Layer, fused: Any, dtype: mx.Dtype) -> None:
        super().__init__()
        self.block = block
        self._fused = fused
        self._dtype = dtype

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        if x.dtype != self._dtype:
            return self.block(x, mask)
        # The mask says how many tokens a row has (layers.py `key_mask`).
        lengths = None if mask is None else mask[:, 0, 0].sum(axis=-1).astype(mx.int32)
        return kernels.encoder_layer(x, self._fused, lengths)


def fuse_encoder_layers(model: nn.Module) -> int:
    """Replaces what can be fused, after the weights are packed. Returns how many layers became one primitive."""
    count = 0
    for _, module in model.named_modules():
        for child in module.values():
            if not isinstance(child, list):
                continue
            for index, block in enumerate(child):
                fused = _fused(block) if type(block) is Layer else None
                if fused is not None:
                    child[index] = fused
                    count += 1
    return count


def _fused(block: Layer) -> FusedEncoderLayer | None:
    products = {name: block[own] for name, own in _PRODUCTS.items()}
    norms = block.attention_norm, block.norm
    if not all(type(product) is modules.PackedLinear for product in products.values()):
        return None
    dtypes = {product.dtype for product in products.values()} | {norm["weight"].dtype for norm in norms}
    if type(block.act) is not modules.KernelGelu or len(dtypes) != 1 or norms[0].eps != norms[1].eps:
        return None
    dtype = dtypes.pop()
    fused = kernels.make_encoder_layer(
        **{name: product.packed for name, product in products.items()},
        **{f"{name}_bias": product.get("bias") for name, product in products.items()},
        attention_norm=norms[0]["weight"],
        attention_norm_bias=norms[0].get("bias"),
        norm=norms[1]["weight"],
        norm_bias=norms[1].get("bias"),
        eps=norms[1].eps,
        heads=block.num_heads,
        scale=mx.array(block.scale, dtype).item(),  # as attention by itself rounds it
        activation="gelu_erf",
    )
    return FusedEncoderLayer(block, fused, dtype)
