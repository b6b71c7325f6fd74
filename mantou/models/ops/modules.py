"""Linear layers, embeddings and expert stacks on packed weights. Knows how MLX keeps them, not what model they form."""

from __future__ import annotations

from typing import Any

import mantou_kernels as kernels
import mlx.core as mx
import mlx.nn as nn

_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (32, 64, 128)
_FLOATS = (mx.float32, mx.bfloat16, mx.float16)


def _narrowed(scales: mx.array, biases: mx.array) -> tuple[mx.array, mx.array]:
    """float32 scales as float16 or bfloat16 where that loses nothing: a loader widened them for plain MLX."""
    if scales.dtype != mx.float32:
        return scales, biases
    for dtype in (mx.float16, mx.bfloat16):
        short = scales.astype(dtype), biases.astype(dtype)
        same = [mx.array_equal(s.astype(mx.float32), f) for s, f in zip(short, (scales, biases), strict=True)]
        if all(bool(s) for s in same):
            return short
    return scales, biases


def is_packable(module: Any) -> bool:
    """Whether the weights of a Linear, Embedding or expert stack can be packed."""
    if "scales" not in module:
        return module["weight"].dtype in _FLOATS and module["weight"].shape[-1] <= 1 << 20
    return (
        getattr(module, "mode", "affine") == "affine"
        and module.bits in _BITS
        and module.group_size in _GROUPS
        and module.get("biases") is not None
        and module["scales"].dtype in _FLOATS
        and module["weight"].shape[-1] * 32 // module.bits <= 1 << 20
    )


def pack(modules: list[Any], *, interleave: bool = False) -> list[kernels.Packed]:
    """Packs the weights of like modules into one matrix: [whole, view of each], or [whole] for one module."""
    if "scales" not in modules[0]:
        return kernels.pack_dense([m["weight"] for m in modules], interleave=interleave)
    scales, biases = [], []
    narrow = [_narrowed(m["scales"], m["biases"]) for m in modules]
    if len({s.dtype for s, _ in narrow}) > 1:
        narrow = [(m["scales"], m["biases"]) for m in modules]
    for s, b in narrow:
        scales.append(s)
        biases.append(b)
    return kernels.pack_affine(
        [m["weight"] for m in modules],
        scales,
        biases,
        group_size=modules[0].group_size,
        bits=modules[0].bits,
        interleave=interleave,
    )


def weight_dtype(module: Any) -> mx.Dtype:
    """The dtype that MLX's own result is promoted with: of the scales, or of dense weights."""
    return module["scales"].dtype if "scales" in module else module["weight"].dtype


def result_dtype(x: mx.array, weights: mx.Dtype) -> mx.Dtype:
    if x.dtype == weights:
        return weights
    return mx.float32 if x.dtype in _FLOATS else weights


class PackedLinear(nn.Module):
    """x [..., in] -> [..., out], as nn.Linear or nn.QuantizedLinear."""

    def __init__(self, module: Any, packed: kernels.Packed, planes: int) -> None:
        super().__init__()
        self._packed = packed
        self._planes = planes
        self._dtype = weight_dtype(module)
        if "bias" in module:
            self.bias = module["bias"]

    def __call__(self, x: mx.array) -> mx.array:
        dtype = result_dtype(x, self._dtype)
        return kernels.linear(x, self._packed, bias=self.get("bias"), planes=self._planes, dtype=dtype)

    @property
    def weight(self) -> mx.array:
        """[out, in], unpacked on demand: some graphs read it. Costs a copy, so not on a hot path."""
        rows = mx.arange(self._packed.rows, dtype=mx.int32)
        return kernels.embed(rows, self._packed, self._dtype)

    def _extra_repr(self) -> str:
        return f"input_dims={self._packed.k}, output_dims={self._packed.rows}, bits={self._packed.bits}"


class PackedEmbedding(nn.Module):
    """ids [...] -> [..., dims], and the tied head, as nn.Embedding or nn.QuantizedEmbedding."""

    def __init__(self, module: Any, packed: kernels.Packed, planes: int) -> None:
        super().__init__()
        self._packed = packed
        self._planes = planes
        self._dtype = weight_dtype(module)

    def __call__(self, ids: mx.array) -> mx.array:
        return kernels.embed(ids, self._packed, self._dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        return kernels.linear(x, self._packed, planes=self._planes, dtype=result_dtype(x, self._dtype))

    @property
    def weight(self) -> mx.array:
        """[rows, dims], unpacked on demand."""
        return self(mx.arange(self._packed.rows, dtype=mx.int32))


class PackedExperts(nn.Module):
    """x [..., 1, in] and expert indices -> [..., out], as mlx-lm's SwitchLinear and QuantizedSwitchLinear."""

    def __init__(self, module: Any, packed: kernels.Packed, planes: int) -> None:
        super().__init__()
        self._packed = packed
        self._planes = planes
        self._dtype = weight_dtype(module)
        if "bias" in module:
            self.bias = module["bias"]

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """x [*lead, m, in] with `lead` broadcast against `indices`; the result is [*indices.shape, m, out]."""
        lead, m = x.shape[:-2], x.shape[-2]
        sources = mx.arange(x.size // x.shape[-1], dtype=mx.int32).reshape(*lead, m)
        sources = mx.broadcast_to(sources, (*indices.shape, m)).reshape(-1)
        experts = mx.broadcast_to(indices[..., None], (*indices.shape, m)).reshape(-1)
        y = kernels.gather_linear(
            x.reshape(-1, x.shape[-1]),
            self._packed,
            sources,
            experts,
            bias=self.get("bias"),
            planes=self._planes,
        )
        return y.astype(result_dtype(x, self._dtype)).reshape(*indices.shape, m, -1)
