"""What plain MLX gets wrong on CUDA at few tokens a row, mended with MLX's own operations. Knows no rows.

Measured on an H200 (mlx 0.32.4): a bool mask at one query a row leaves the fused attention (4 to 9 times slower), and a
quantised matmul takes every leading axis as a batch of single rows (2 to 5 times slower at 16 rows). Products of few
rows wait for the host, so layers that read one input share one (see `joined`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mantou.kv.plan import LayerCodec
from mantou.kv.records import RecordCodec
from mantou.kv.shapes import LayerShape
from mantou.models.ops.in_place import InPlace
from mantou.models.ops.joined import Joined, join
from mantou.models.ops.plain import PlainOps
from mantou.models.ops.records import cuda_kernels
from mantou.models.ops.stack import stands

# Queries that share a KV head are folded into one block of rows up to this many tokens a row; beyond, the fused
# kernel has enough rows as it is.
FOLD_WIDTH = 8

Attention = Callable[..., mx.array]


class FlatQuantizedLinear(nn.QuantizedLinear):
    """Multiplies all rows of all batches as one matrix."""

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


class FlatQuantizedEmbedding(nn.QuantizedEmbedding):
    """The same for a tied head."""

    def as_linear(self, x: mx.array) -> mx.array:
        return super().as_linear(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


class JoinedLinear(nn.Linear):
    """Takes its share of a product with its siblings."""

    joined: Joined
    place: int

    def __call__(self, x: mx.array) -> mx.array:
        share = self.joined.share(self.place, self, x)
        return super().__call__(x) if share is None else share


class JoinedQuantizedLinear(FlatQuantizedLinear):
    """The same on quantised weights."""

    joined: Joined
    place: int

    def __call__(self, x: mx.array) -> mx.array:
        share = self.joined.share(self.place, self, x)
        return super().__call__(x) if share is None else share


_JOINED = {nn.Linear: JoinedLinear, FlatQuantizedLinear: JoinedQuantizedLinear}


def _ask_for_share(layer: Any, joined: Joined, place: int) -> None:
    layer.__class__ = _JOINED[type(layer)]
    layer.joined, layer.place = joined, place


class FoldedAttention:
    """Scaled dot-product attention that folds the queries of a KV head into rows, with one additive mask a step.

    q [B, H, T, D] over k [B, H / G, S, D] becomes [B, H / G, G * T, D]: keys are read once a group, and the fused
    kernel takes the additive mask that it would refuse as bool.
    """

    def __init__(self, plain: Attention) -> None:
        self.plain = plain
        self._mask: mx.array | None = None  # the mask of the running forward and its folded form
        self._bias: mx.array | None = None

    def __call__(
        self, q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None, **more: Any
    ) -> mx.array:
        group = q.shape[1] // k.shape[1]
        width = q.shape[2]
        foldable = (
            isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[1] == 1 and not any(more.values())
        )
        if not foldable or width > FOLD_WIDTH or group * width == 1:
            return self.plain(q, k, v, scale=scale, mask=mask, **more)
        batch, heads, _, depth = q.shape
        folded = q.reshape(batch, k.shape[1], group * width, depth)
        out = self.plain(folded, k, v, scale=scale, mask=self._folded(mask, group, q.dtype))
        return out.reshape(batch, heads, width, -1)

    def _folded(self, mask: mx.array, group: int, dtype: mx.Dtype) -> mx.array:
        """[B, 1, T, S] -> additive [B, 1, G * T, S]; all layers of a step share one mask object, so it is made once."""
        if self._mask is not mask or self._bias is None or self._bias.shape[2] != group * mask.shape[2]:
            bias = (
                mx.where(mask, 0.0, -mx.inf).astype(dtype) if mask.dtype == mx.bool_ else mask.astype(dtype)
            )
            batch, _, width, span = mask.shape
            spread = mx.broadcast_to(bias[:, :, None], (batch, 1, group, width, span))
            self._mask, self._bias = mask, spread.reshape(batch, 1, group * width, span)
        return self._bias


class CudaOps(PlainOps):
    name = "cuda"
    compiles = True
    packs: bool | None = (
        False  # a product of packed weights is no faster at one row, slower beyond, and compiles for half a minute
    )

    def __init__(self) -> None:
        super().__init__()
        self._attention = InPlace(cuda_kernels)

    def install(self, model: Any) -> Sequence[str]:
        """Retypes quantised layers of the graph and replaces MLX's attention for this process."""
        for _, module in model.named_modules():
            if type(module) is nn.QuantizedLinear:
                module.__class__ = FlatQuantizedLinear
            elif type(module) is nn.QuantizedEmbedding:
                module.__class__ = FlatQuantizedEmbedding
        join(model, tuple(_JOINED), _ask_for_share)
        if not stands(FoldedAttention):
            mx.fast.scaled_dot_product_attention = FoldedAttention(mx.fast.scaled_dot_product_attention)
        count = sum(type(module) in _JOINED.values() for _, module in model.named_modules())
        notes = [f"CUDA: {count} linear layers share products"] if count else []
        return [*notes, *self._attention.install()]

    def records(self, shape: LayerShape, codec: LayerCodec) -> RecordCodec | None:
        return self._attention.records(shape, codec)
