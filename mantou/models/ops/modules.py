"""Linear layers, embeddings and expert stacks on packed weights. Knows how MLX keeps them, not what model they form."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mantou.models.ops.extension import kernels

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


def pack(modules: list[Any], *, interleave: bool = False) -> list[Any]:
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

    def __init__(self, module: Any, packed: Any, planes: int) -> None:
        super().__init__()
        self.packed = packed
        self.planes = planes
        self.dtype = weight_dtype(module)
        if "bias" in module:
            self.bias = module["bias"]

    def __call__(self, x: mx.array) -> mx.array:
        if "weight" in self:  # the graph has set its own since
            y = x @ self["weight"].T
            return y + self["bias"] if "bias" in self else y
        dtype = result_dtype(x, self.dtype)
        return kernels.linear(x, self.packed, bias=self.get("bias"), planes=self.planes, dtype=dtype)

    def rows(self, ids: mx.array) -> mx.array:
        """Some rows of the weights, unpacked."""
        return kernels.embed(ids, self.packed, self.dtype)

    def __getattr__(self, name: str) -> Any:
        # `weight` [out, in] is unpacked on demand: a few graphs read or replace it.
        if name == "weight" and "weight" not in self:
            return kernels.embed(mx.arange(self.packed.rows, dtype=mx.int32), self.packed, self.dtype)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            self[name] = (
                value  # as an array of the module; nn.Module would first delete the attribute of that name
            )
        else:
            super().__setattr__(name, value)

    def _extra_repr(self) -> str:
        return f"input_dims={self.packed.k}, output_dims={self.packed.rows}, bits={self.packed.bits}"


class PackedEmbedding(nn.Module):
    """ids [...] -> [..., dims], and the tied head, as nn.Embedding or nn.QuantizedEmbedding."""

    def __init__(self, module: Any, packed: Any, planes: int) -> None:
        super().__init__()
        self.packed = packed
        self.planes = planes
        self.dtype = weight_dtype(module)

    def __call__(self, ids: mx.array) -> mx.array:
        return kernels.embed(ids, self.packed, self.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        return kernels.linear(x, self.packed, planes=self.planes, dtype=result_dtype(x, self.dtype))

    @property
    def weight(self) -> mx.array:
        """[rows, dims], unpacked on demand."""
        return self(mx.arange(self.packed.rows, dtype=mx.int32))


class PackedMLP(nn.Module):
    """down(gate(x Wg) * (x Wu)), gate and up in one product. The single layers stay reachable as views."""

    def __init__(self, parts: dict[str, PackedLinear], gate_up: Any, gate: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            parts[n] for n in ("gate_proj", "up_proj", "down_proj")
        )
        self.gate_up = gate_up
        self.gate = gate

    def __call__(self, x: mx.array) -> mx.array:
        first = self.gate_proj
        dtype = result_dtype(x, first.dtype)
        h = kernels.linear(x, self.gate_up, gate=self.gate, planes=first.planes, dtype=dtype)
        return self.down_proj(h)


class KernelGelu(nn.Module):
    """nn.GELU, which plain MLX puts together from scalar steps."""

    def __call__(self, x: mx.array) -> mx.array:
        return kernels.gate("gelu_erf", x) if x.dtype in _FLOATS else nn.gelu(x)


class PackedExperts(nn.Module):
    """x [..., 1, in] and expert indices -> [..., out], as mlx-lm's SwitchLinear and QuantizedSwitchLinear."""

    def __init__(self, module: Any, packed: Any, planes: int) -> None:
        super().__init__()
        self.packed = packed
        self.planes = planes
        self.dtype = weight_dtype(module)
        if "bias" in module:
            self.bias = module["bias"]

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """x [*lead, m, in]; `lead` and the shape of `indices` broadcast to the result's [*batch, m, out]."""
        lead, m = x.shape[:-2], x.shape[-2]
        batch = mx.broadcast_shapes(lead, indices.shape)
        sources = mx.arange(x.size // x.shape[-1], dtype=mx.int32).reshape(*lead, m)
        sources = mx.broadcast_to(sources, (*batch, m)).reshape(-1)
        experts = mx.broadcast_to(indices[..., None], (*batch, m)).reshape(-1)
        y = kernels.gather_linear(
            x.reshape(-1, x.shape[-1]),
            self.packed,
            sources,
            experts,
            bias=self.get("bias"),
            planes=self.planes,
        )
        return y.astype(result_dtype(x, self.dtype)).reshape(*batch, m, -1)
