"""How keys and values are stored: native floats, or affine-quantised groups. Knows no rows and no layers."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mantou.errors import ConfigError
from mantou.protocols import KVCodec


class Native:
    """Stores what the model computes, in its own dtype."""

    name = "native"
    raw = True
    affine = None

    def pack(self, x: mx.array) -> tuple[mx.array, ...]:
        return (x,)

    def unpack(self, parts: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        return parts[0]

    def bytes_per_token(self, num_heads: int, head_dim: int, itemsize: int) -> float:
        return num_heads * head_dim * itemsize


class Affine:
    """Groups of `group_size` values along the head dimension share a scale and a bias; `bits` per value."""

    raw = False

    def __init__(self, bits: int, group_size: int = 64) -> None:
        self.bits = bits
        self.group_size = group_size
        self.name = f"kv{bits}"
        self.affine = bits, group_size

    def _group(self, head_dim: int) -> int:
        # MLX quantises along the last axis in groups of 32, 64 or 128; the largest that divides wins.
        for size in (self.group_size, 32):
            if head_dim % size == 0:
                return size
        raise ConfigError(
            f"--kv-quant {self.bits} needs a head dimension divisible by 32, this model has {head_dim}; "
            "run without --kv-quant."
        )

    def pack(self, x: mx.array) -> tuple[mx.array, ...]:
        return tuple(mx.quantize(x, group_size=self._group(x.shape[-1]), bits=self.bits))

    def unpack(self, parts: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        weight, scales, biases = parts
        group = weight.shape[-1] * 32 // self.bits // scales.shape[-1]
        return mx.dequantize(weight, scales, biases, group_size=group, bits=self.bits).astype(dtype)

    def bytes_per_token(self, num_heads: int, head_dim: int, itemsize: int) -> float:
        return num_heads * (head_dim * self.bits / 8 + 2 * itemsize * head_dim / self._group(head_dim))


def make_codec(name: str) -> KVCodec:
    """The codec behind `--kv-quant NAME`. Raises ConfigError for an unknown name."""
    codecs: dict[str, KVCodec] = {"off": Native(), "8": Affine(8), "4": Affine(4)}
    if name not in codecs:
        raise ConfigError(f"--kv-quant takes {', '.join(codecs)}, not {name!r}.")
    return codecs[name]
