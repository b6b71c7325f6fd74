"""Attention over packed keys and values on a GPU: which kernels run, over which blocks. Knows no rows and no graph.

Plain unpacking and MLX's fused attention are the oracle, and what runs where no kernel fits or wins: many queries a row,
masks of a graph's own, head dimensions other than 64, 128, 256 and 512.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from mantou.kv.plan import LayerCodec
from mantou.kv.records import Fetched, Place, RecordCodec, set_fetched, take_fetched
from mantou.kv.shapes import LayerShape, Packing
from mantou.models.ops import records_source as source

HEAD_DIMS = (64, 128, 256, 512)
LOG2_E = 1.4426950408889634
_WARP = 32
_UNPACK_COLUMNS = 4  # a block


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the attention kernel is cut up. The order of its sums depends on `run` and `warps` and on nothing else."""

    run: int = 256  # columns a block
    warps: int = 8  # of a block; fewer for wide heads, whose sums fill the shared memory
    dims: int = 16  # of a head that a lane holds
    rows: int = 4  # query rows a warp
    unroll: int = 2  # columns that a lane loads at once
    max_width: int = 8  # queries a row; beyond, unpacking once is cheaper


KernelMaker = Callable[..., Callable[..., Sequence[mx.array]]]  # mx.fast.cuda_kernel and its like


class RecordKernels:
    """The four kernels, for one device. `make` and `header` are the device's."""

    def __init__(self, make: KernelMaker, header: str, *, note: str = "", tuning: Tuning | None = None) -> None:
        self.tuning = tuning or Tuning()

        def kernel(name: str, inputs: str, outputs: str, body: str, contiguous: bool = True) -> Any:
            return make(
                name=f"mantou_kv_{name}",
                input_names=inputs.split(),
                output_names=outputs.split(),
                source=note + body,
                header=header + source.HELPERS,
                ensure_row_contiguous=contiguous,
            )

        self.attend = kernel("attend", "q kv at signs consts", "parts sums", source.ATTEND)
        self.merge = kernel("merge", "q parts sums at signs sinks", "out", source.MERGE)
        self.pack = kernel("pack", "k v signs consts", "out", source.PACK, contiguous=False)
        self.unpack = kernel("unpack", "kv at signs consts", "keys values", source.UNPACK)


def cuda_kernels(tuning: Tuning | None = None) -> RecordKernels:
    return RecordKernels(mx.fast.cuda_kernel, source.CUDA_HEADER, tuning=tuning)


def metal_kernels(tuning: Tuning | None = None) -> RecordKernels:
    """Never run on Metal hardware so far."""
    return RecordKernels(
        mx.fast.metal_kernel, source.METAL_HEADER, note=source.METAL_ATTRIBUTES, tuning=tuning
    )


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """The bits of a record: keys in groups, values in groups or by levels, both rotated or neither."""

    head_dim: int
    keys: Packing
    values: Packing
    group: int

    @property
    def rotated(self) -> bool:
        return self.keys.signs is not None

    def words(self, itemsize: int) -> int:
        """Whole 16 bytes, so that a lane's codes are one load."""
        pairs = self.head_dim // self.group * (2 if itemsize == 4 else 1)
        codes = self.head_dim * (self.keys.bits + self.values.bits) // 32
        return -(-(codes + pairs + (1 if self.values.levels else pairs)) // 4) * 4


def record_format(codec: LayerCodec, shape: LayerShape) -> RecordFormat | None:
    """None where keys and values have to stay with their codec."""
    keys, values, head_dim = codec.keys.packing, codec.values.packing, shape.keys[1]
    fits = shape.layout in ("full", "window") and shape.keys == shape.values and head_dim in HEAD_DIMS
    if codec.start or keys is None or values is None or not fits:
        return None
    if keys.levels or keys.bits not in (4, 8) or keys.signs is not values.signs:
        return None
    group = _group(keys, head_dim)
    if values.levels:
        return RecordFormat(head_dim, keys, values, group) if values.bits in (2, 3, 4) else None
    same = values.bits in (4, 8) and _group(values, head_dim) == group
    return RecordFormat(head_dim, keys, values, group) if same else None


def _group(packing: Packing, head_dim: int) -> int:
    return next(size for size in (128, 64, 32) if size <= packing.group_size and head_dim % size == 0)


@dataclass(eq=False)
class _Call:
    """One attention over a layer's records."""

    codec: Records
    records: mx.array
    place: Place
    dtype: mx.Dtype

    def __call__(self, q: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array | None:
        width = q.shape[2]
        if width > self.codec.kernels.tuning.max_width or q.dtype != self.dtype or q.shape[1] % self.records.shape[1]:
            return None
        window = self.place.window_of(mask, width)
        if window is None:
            return None
        return self.codec.attention(self.records, self.place, q, scale, window, sinks)


class Records(RecordCodec):
    """A record format on a device's kernels."""

    def __init__(self, name: str, form: RecordFormat, kernels: RecordKernels) -> None:
        super().__init__(name)
        self.format = form
        self.kernels = kernels

    def bytes_per_token(self, num_heads: int, head_dim: int, itemsize: int) -> float:
        return num_heads * self.format.words(itemsize) * 4

    # -- what does not change from call to call
    def _template(self, dtype: mx.Dtype) -> list[tuple[str, Any]]:
        form = self.format
        return [
            ("T", dtype),
            ("D", form.head_dim),
            ("KB", form.keys.bits),
            ("VB", form.values.bits),
            ("GS", form.group),
            ("BOOK", bool(form.values.levels)),
            ("TURBO", form.rotated),
            ("REC", form.words(dtype.size)),
        ]

    def _signs(self) -> mx.array:
        signs = self.format.keys.signs
        return _array(tuple(float(s) for s in signs(self.format.head_dim)) if signs is not None else (1.0,))

    def _consts(self, scale: float = 1.0) -> mx.array:
        values = self.format.values
        levels = (*values.levels, *[0.0] * 8)[:8]
        return _array((scale * LOG2_E, *levels, *(*values.edges, *[0.0] * 7)[:7]))

    # -- packing
    def pack_both(self, keys: mx.array, values: mx.array) -> mx.array:
        batch, heads, width, _ = keys.shape
        (records,) = self.kernels.pack(
            inputs=[keys, values.astype(keys.dtype), self._signs(), self._consts()],
            template=self._template(keys.dtype),
            grid=(batch * heads * width * _WARP, 2, 1),
            threadgroup=(_WARP, 1, 1),
            output_shapes=[(batch, heads, width, self.format.words(keys.dtype.size))],
            output_dtypes=[mx.uint32],
        )
        return records

    def fetch(self, records: mx.array, place: Place, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        rows, heads, span = place.geometry.num_rows, records.shape[1], place.span
        shape = (rows, heads, span, self.format.head_dim)
        keys, values = self.kernels.unpack(
            inputs=[records, _columns(place), self._signs(), self._consts()],
            template=self._template(dtype),
            grid=(-(-span // _UNPACK_COLUMNS) * _UNPACK_COLUMNS * _WARP, rows * heads, 2),
            threadgroup=(_UNPACK_COLUMNS * _WARP, 1, 1),
            output_shapes=[shape, shape],
            output_dtypes=[dtype, dtype],
        )
        set_fetched(Fetched(keys, values, _Call(self, records, place, dtype)))
        return keys, values

    # -- attention
    def attention(
        self,
        records: mx.array,
        place: Place,
        q: mx.array,
        scale: float,
        window: int,
        sinks: mx.array | None,
    ) -> mx.array:
        """q [B, H, W, D] over the columns of `place`; query t of row b stands at position start[b] + t."""
        tuning, head_dim = self.kernels.tuning, self.format.head_dim
        batch, num_heads, width, _ = q.shape
        heads = records.shape[1]
        num_rows = num_heads // heads * width
        rows = min(tuning.rows, num_rows)
        warps = min(tuning.warps, 1024 // head_dim) if head_dim > 128 else tuning.warps
        chunks = -(-num_rows // rows)
        row_warps = min(1 << (chunks - 1).bit_length(), warps)
        runs = -(-(place.ring or place.span) // tuning.run)
        where = [("RING", place.ring), ("WINDOW", window), ("CPS", tuning.run)]
        at, signs, threads = _columns(place), self._signs(), warps * _WARP
        parts, sums = self.kernels.attend(
            inputs=[q, records, at, signs, self._consts(scale)],
            template=[
                *self._template(q.dtype),
                *where,
                ("G", num_heads // heads),
                ("DPL", max(tuning.dims, head_dim // _WARP)),
                ("R", rows),
                ("RC", row_warps),
                ("CW", warps // row_warps),
                ("U", tuning.unroll),
            ],
            grid=(runs * threads, heads * -(-chunks // row_warps), batch),
            threadgroup=(threads, 1, 1),
            output_shapes=[(batch * num_heads * width, runs, head_dim), (batch * num_heads * width, runs, 2)],
            output_dtypes=[mx.float32, mx.float32],
        )
        (out,) = self.kernels.merge(
            inputs=[q, parts, sums, at, signs, _no_sinks() if sinks is None else sinks.astype(mx.float32) * LOG2_E],
            template=[
                ("T", q.dtype),
                ("D", head_dim),
                ("TURBO", self.format.rotated),
                ("SINKS", sinks is not None),
                *where,
            ],
            grid=(batch * num_heads * width * head_dim, 1, 1),
            threadgroup=(head_dim, 1, 1),
            output_shapes=[q.shape],
            output_dtypes=[q.dtype],
        )
        return out


@cache
def _array(values: tuple[float, ...]) -> mx.array:
    return mx.array(np.array(values, np.float32))


def _no_sinks() -> mx.array:
    return _array((0.0,))


def _columns(place: Place) -> mx.array:
    """int32 [span, slot 0, start 0, slot 1, start 1, ..], one array for all layers of a forward with that span."""
    kept = place.geometry.columns_read
    if place.span not in kept:
        group, starts = place.geometry.group, place.geometry.starts
        pairs = np.stack([np.arange(group.lo, group.hi), np.array(starts)], axis=1)
        kept[place.span] = mx.array(np.concatenate([[place.span], pairs.ravel()]).astype(np.int32))
    return kept[place.span]


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
    """A device's kernels over records, made when the first cache takes them."""

    def __init__(self, make: Callable[[], RecordKernels]) -> None:
        self._make = make
        self._kernels: RecordKernels | None = None

    def install(self) -> None:
        """Wraps MLX's attention in this process. Calling it again changes nothing."""
        if not isinstance(mx.fast.scaled_dot_product_attention, RecordAttention):
            mx.fast.scaled_dot_product_attention = RecordAttention(mx.fast.scaled_dot_product_attention)

    def records(self, shape: LayerShape, codec: LayerCodec) -> RecordCodec | None:
        form = record_format(codec, shape)
        if form is None:
            return None
        if self._kernels is None:
            self._kernels = self._make()
        return Records(f"{codec.name} in place", form, self._kernels)
