"""What encoders share: attention over rows of different lengths, and the activations by name. Knows no checkpoint."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mantou.errors import ModelError


def activation(name: str) -> Any:
    """A module for the activation that a config.json names."""
    match name:
        case "gelu":
            return nn.GELU()
        case "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast":
            return nn.GELU("precise")
        case "relu":
            return nn.ReLU()
        case "silu" | "swish":
            return nn.SiLU()
        case _:
            raise ModelError(f"The activation {name!r} is not known; choose a model with gelu, relu or silu.")


def key_mask(lengths: mx.array, width: int) -> mx.array:
    """lengths int32[B] -> bool [B, 1, 1, width], True where a row has a token."""
    return (mx.arange(width, dtype=mx.int32)[None, :] < lengths[:, None])[:, None, None, :]


def heads(x: mx.array, num_heads: int) -> mx.array:
    """[B, T, H * D] -> [B, H, T, D]."""
    B, T, width = x.shape
    return x.reshape(B, T, num_heads, width // num_heads).transpose(0, 2, 1, 3)


def joined(x: mx.array) -> mx.array:
    """[B, H, T, D] -> [B, T, H * D]."""
    B, H, T, D = x.shape
    return x.transpose(0, 2, 1, 3).reshape(B, T, H * D)
