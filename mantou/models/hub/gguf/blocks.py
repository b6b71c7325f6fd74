"""ggml blocks as numpy arrays: dequantised, or repacked without loss into MLX's affine form. Knows no files."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mantou.models.hub.gguf.reader import TensorType

GROUP_SIZE = 32  # a ggml block and an MLX group hold the same 32 values

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Packed:
    """MLX's affine form: value = scales * q + biases for each group of 32 values in a row.

    `weight` uint32[rows, columns * bits / 32], first value in the lowest bits; `scales` and `biases`
    float32[rows, columns / 32]. Never float16: on a CPU without float16 arithmetic MLX converts each scale inside
    its innermost loop, which makes a 4-bit matmul about 32 times slower; float32 also holds the biases exactly.
    """

    weight: npt.NDArray[np.uint32]
    scales: Floats
    biases: Floats
    bits: int


def dequantize(blocks: Bytes, kind: TensorType) -> Floats:
    """uint8[rows, blocks, block bytes] -> float32[rows, columns], the values ggml computes with."""
    return _values(blocks, kind).reshape(blocks.shape[0], -1)


def _values(blocks: Bytes, kind: TensorType) -> Floats:
    match kind:
        case TensorType.F32:
            return np.ascontiguousarray(blocks).view(np.float32)
        case TensorType.F16:
            return _half(blocks)
        case TensorType.BF16:
            return (bfloat16_bits(blocks).astype(np.uint32) << 16).view(np.float32)
        case TensorType.Q4_0:
            return _half(blocks[..., :2]) * (_nibbles(blocks[..., 2:]).astype(np.float32) - 8)
        case TensorType.Q4_1:
            return _half(blocks[..., :2]) * _nibbles(blocks[..., 4:]) + _half(blocks[..., 2:4])
        case TensorType.Q8_0:
            return _half(blocks[..., :2]) * _signed(blocks[..., 2:])


def repack(blocks: Bytes, kind: TensorType) -> Packed:
    """Q4_0, Q4_1 or Q8_0 blocks [rows, blocks, block bytes] -> the same numbers in MLX's form.

    Q4_0 is d * (q - 8) = d * q + (-8 d), Q8_0 is d * q = d * (q + 128) + (-128 d): in float32 both sides are
    exact, because d has 11 significant bits. Raises ValueError for a type that has no such form.
    """
    rows = blocks.shape[0]
    scales = _half(blocks[..., :2])[..., 0]
    if kind is TensorType.Q8_0:
        codes = np.ascontiguousarray(blocks[..., 2:]) ^ np.uint8(0x80)  # two's complement + 128
        return Packed(codes.reshape(rows, -1).view(np.uint32), scales, scales * np.float32(-128), 8)
    if kind is TensorType.Q4_0:
        codes, biases = _nibbles(blocks[..., 2:]), scales * np.float32(-8)
    elif kind is TensorType.Q4_1:
        codes, biases = _nibbles(blocks[..., 4:]), _half(blocks[..., 2:4])[..., 0]
    else:
        raise ValueError(f"{kind.name} has no lossless affine form")
    pairs = np.ascontiguousarray(codes[..., 0::2] | (codes[..., 1::2] << 4))
    return Packed(pairs.reshape(rows, -1).view(np.uint32), scales, biases, 4)


def bfloat16_bits(blocks: Bytes) -> npt.NDArray[np.uint16]:
    """The raw bits of BF16 values, uint16[rows, columns]; numpy has no bfloat16."""
    return np.ascontiguousarray(blocks).view(np.uint16).reshape(blocks.shape[0], -1)


def float16_values(blocks: Bytes) -> npt.NDArray[np.float16]:
    """F16 values as they are, float16[rows, columns]."""
    return np.ascontiguousarray(blocks).view(np.float16).reshape(blocks.shape[0], -1)


def _half(data: Bytes) -> Floats:
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _nibbles(data: Bytes) -> Bytes:
    """ggml keeps values 0..15 of a block in the low halves of its 16 bytes and 16..31 in the high halves."""
    return np.concatenate([data & np.uint8(15), data >> np.uint8(4)], axis=-1)


def _signed(data: Bytes) -> npt.NDArray[np.int8]:
    return np.ascontiguousarray(data).view(np.int8)
