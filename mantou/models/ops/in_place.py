"""MLX's attention over records in place: which caches take them, tried before they are trusted. Knows no graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mantou.kv.geometry import Geometry
from mantou.kv.plan import LayerCodec
from mantou.kv.records import Place, RecordCodec, set_fetched, take_fetched
from mantou.kv.shapes import LayerShape
from mantou.models.ops.records import RecordKernels, Records
from mantou.models.ops.records_format import record_format
from mantou.models.ops.stack import stands
from mantou.protocols import Group

PLAIN_ATTENTION = mx.fast.scaled_dot_product_attention

Attention = Callable[..., mx.array]


class RecordAttention:
    """Scaled dot-product attention that reads records where its keys and values are a layer's own."""

    def __init__(self, plain: Attention) -> None:
        self.plain = plain

    def __call__(
        self, q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None, **more: Any
    ) -> mx.array:
        fetched = take_fetched(k, v)
        if fetched is not None and not (more.keys() - {"sinks"}):
            out = fetched.attend(q, scale, mask, more.get("sinks"))
            if out is not None:
                return out
        return self.plain(q, k, v, scale=scale, mask=mask, **more)


class InPlace:
    """A device's kernels over records, made when the first cache takes them and tried before they are trusted."""

    def __init__(self, make: Callable[[], RecordKernels]) -> None:
        self._make = make
        self._kernels: RecordKernels | None = None
        self._failures: dict[tuple[str, LayerShape], str | None] = {}

    def install(self) -> Sequence[str]:
        """Wraps MLX's attention in this process if a cache takes records. Returns what went wrong, for the ready card.

        Calling it again changes nothing.
        """
        failed = sorted({reason for reason in self._failures.values() if reason is not None})
        if self._kernels is not None and not stands(RecordAttention):
            mx.fast.scaled_dot_product_attention = RecordAttention(mx.fast.scaled_dot_product_attention)
        return [f"keys and values are unpacked for attention: {reason}" for reason in failed]

    def records(self, shape: LayerShape, codec: LayerCodec) -> RecordCodec | None:
        form = record_format(codec, shape)
        if form is None:
            return None
        if self._kernels is None:
            self._kernels = self._make()
        records = Records(f"{codec.name} in place", form, self._kernels)
        key = records.name, replace(shape, layer=0)
        if key not in self._failures:
            self._failures[key] = failure(records, shape)
        return None if self._failures[key] else records


def failure(records: Records, shape: LayerShape) -> str | None:
    """None if the kernels compile and agree with unpacking and plain attention on a small input, else one clause."""
    heads, head_dim = shape.keys
    dtype = mx.float32 if shape.itemsize == 4 else mx.bfloat16
    keys = mx.random.key(0), mx.random.key(1), mx.random.key(2)
    k, v = (mx.random.normal((2, heads, 24, head_dim), key=key).astype(dtype) for key in keys[:2])
    q = mx.random.normal((2, heads, 1, head_dim), key=keys[2]).astype(dtype)
    geometry = Geometry(Group(0, 1, (1, 1)), (23, 5))
    place = Place(geometry, 24)
    try:
        buffer = records.pack_both(k, v)
        unpacked = records.fetch(buffer, place, dtype)
        got = records.attention(buffer, place, q, 0.1, 0, None)
        plain = PLAIN_ATTENTION(
            *(x.astype(mx.float32) for x in (q, *unpacked)), scale=0.1, mask=geometry.causal_mask(24, 0)
        )
        worst = [
            float(mx.max(mx.abs(ours.astype(mx.float32) - theirs)))
            for ours, theirs in ((got, plain), *zip(unpacked, (k, v), strict=True))
        ]
    except (RuntimeError, ValueError) as error:
        return f"the kernels of {records.name} do not run here ({str(error).strip().splitlines()[0][:200]})"
    finally:
        set_fetched(None)
    limits = (0.03, 2.0, 2.0)  # coarse values are off by whole steps
    if all(error <= limit for error, limit in zip(worst, limits, strict=True)):
        return None
    return f"the kernels of {records.name} are off by {worst[0]:.1e}"
