"""BERT's layers as one primitive. Knows that one graph of ours by its class; decoders are fused by structure.

A thread takes some of the texts through all layers, so that their values stay in its cache and the threads meet once.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mantou.models.encoders.bert import Layer
from mantou.models.ops import modules
from mantou.models.ops.extension import kernels

_PRODUCTS = {"qkv": "qkv", "out": "attention_out", "up": "up", "down": "down"}


class FusedEncoder(nn.Module):
    """Layers that run as one primitive where the input has the weights' type. The layers stay for the rest."""

    def __init__(self, blocks: list[Layer], fused: list[Any], dtype: mx.Dtype) -> None:
        super().__init__()
        self.blocks = blocks
        self._fused = fused
        self._dtype = dtype

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        """x [B, T, D], mask as of `Layer` -> like x; behind a row's tokens it is 0."""
        if x.dtype != self._dtype:
            for block in self.blocks:
                x = block(x, mask)
            return x
        # The mask says how many tokens a row has (layers.py `key_mask`).
        lengths = None if mask is None else mask[:, 0, 0].sum(axis=-1).astype(mx.int32)
        return kernels.encoder(x, self._fused, lengths)


def fuse_encoder_layers(model: nn.Module) -> int:
    """Replaces lists of layers that can all be fused, after the weights are packed. Returns how many layers."""
    count = 0
    for _, module in model.named_modules():
        for child in module.values():
            if isinstance(child, list) and child and all(type(block) is Layer for block in child):
                fused = _fused(child[:])
                count += len(child) if fused is not None else 0
                child[:] = child if fused is None else [fused]
    return count


def _fused(blocks: list[Layer]) -> FusedEncoder | None:
    layers = [layer for layer in map(_fused_layer, blocks) if layer is not None]
    dtypes = {dtype for _, dtype in layers}
    if len(layers) < len(blocks) or len(dtypes) != 1:
        return None
    return FusedEncoder(blocks, [layer for layer, _ in layers], dtypes.pop())


def _fused_layer(block: Layer) -> tuple[Any, mx.Dtype] | None:
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
    return fused, dtype
