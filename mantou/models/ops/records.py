"""Attention over packed keys and values on a GPU: which kernels run, over which blocks. Knows no rows and no graph.

Plain unpacking and MLX's fused attention are the oracle, and what runs where no kernel fits or wins: many queries a
row, masks of a graph's own, head dimensions other than 64, 128, 256 and 512.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mantou.kv.records import Fetched, Place, RecordCodec, set_fetched
from mantou.models.ops import records_source as source
from mantou.models.ops import records_store as store
from mantou.models.ops.records_format import RecordFormat
from mantou.models.ops.records_headers import CUDA_HEADER, METAL_ATTRIBUTES, METAL_HEADER
from mantou.models.ops.records_mma import ATTEND_MMA

LOG2_E = 1.4426950408889634
_WARP = 32
_UNPACK_COLUMNS = 4  # a block


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the attention kernel is cut up. The order of its sums depends on `run` and `warps` and on nothing else."""

    run: int = 512  # columns a block
    warps: int = 4  # of a block; fewer for wide heads, whose sums fill the shared memory
    dims: int = 8  # of a head that a lane holds
    rows: int = 4  # query rows a warp
    unroll: int = 2  # columns that a lane loads at once
    max_width: int = 8  # queries a row; beyond, unpacking once is cheaper
    mma: bool = False  # matrix products of 16-bit floats, where the device has them and the model is 16 bit
    mma_warps: int = 4


KernelMaker = Callable[..., Any]  # mx.fast.cuda_kernel and its like: a function of inputs, grid, shapes
Compiler = Callable[[Callable[..., mx.array]], Callable[..., mx.array]]
Constants = Mapping[str, int | bool]


class _Source(NamedTuple):
    inputs: str
    outputs: str
    body: str
    contiguous: bool = True  # copies inputs that are not


_SOURCES: Mapping[str, _Source] = {
    "attend": _Source("q kv at signs consts", "parts sums", source.ATTEND),
    "attend_mma": _Source("q kv at signs consts", "parts sums", ATTEND_MMA),
    "merge": _Source("q parts sums at signs sinks", "out", source.MERGE),
    "pack": _Source("k v signs consts", "out", store.PACK, contiguous=False),
    "unpack": _Source("kv at signs consts", "keys values", store.UNPACK),
}


class RecordKernels:
    """The four kernels, for one device. `make` and `header` are the device's.

    Constants stand in the source and not among template arguments: those would be converted at every call.
    """

    def __init__(
        self,
        make: KernelMaker,
        header: str,
        *,
        note: str = "",
        tuning: Tuning | None = None,
        compiled: Compiler = lambda function: function,
    ) -> None:
        self.tuning = tuning or Tuning()
        self.compiled = compiled  # mx.compile, which makes a node of a graph without a call from Python
        self._make = make
        self._header = header + source.HELPERS
        self._note = note
        self._made: dict[str, Callable[..., Sequence[mx.array]]] = {}

    def kernel(self, which: str, constants: Constants) -> Callable[..., Sequence[mx.array]]:
        """The kernel's name tells its constants: MLX keeps what it compiled by name."""
        name = "_".join(["mantou_kv", which, *(str(int(value)) for value in constants.values())])
        if name not in self._made:
            self._made[name] = self._compiled(name, which, constants)
        return self._made[name]

    def _compiled(self, name: str, which: str, constants: Constants) -> Callable[..., Sequence[mx.array]]:
        inputs, outputs, body, contiguous = _SOURCES[which]
        lines = [
            f"  constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {int(value)};"
            for name, value in constants.items()
        ]
        return self._make(
            name=name,
            input_names=inputs.split(),
            output_names=outputs.split(),
            source="\n".join([*lines, self._note + body]),
            header=self._header,
            ensure_row_contiguous=contiguous,
        )


def cuda_kernels(tuning: Tuning | None = None) -> RecordKernels:
    tuning = tuning or Tuning(mma=True, run=1024)  # see docs/adr/015
    return RecordKernels(mx.fast.cuda_kernel, CUDA_HEADER, tuning=tuning, compiled=mx.compile)


def metal_kernels(tuning: Tuning | None = None) -> RecordKernels:
    """Never run on Metal hardware so far."""
    return RecordKernels(
        mx.fast.metal_kernel,
        METAL_HEADER,
        note=METAL_ATTRIBUTES,
        tuning=tuning,
        compiled=mx.compile,
    )


@dataclass(slots=True)
class _Launch:
    """A kernel with all of a call that does not change while shapes do not."""

    kernel: Callable[..., Sequence[mx.array]]
    fixed: dict[str, Any]

    def __call__(self, *inputs: mx.array) -> Sequence[mx.array]:
        return self.kernel(inputs=list(inputs), **self.fixed)


class Records(RecordCodec):
    """A record format on a device's kernels."""

    def __init__(self, name: str, form: RecordFormat, kernels: RecordKernels) -> None:
        super().__init__(name)
        self.format = form
        self.kernels = kernels
        self._launches: dict[Hashable, Any] = {}
        signs = form.keys.signs
        self._signs = _floats(signs(form.head_dim) if signs is not None else (0.0,))
        self._no_sinks = _floats((0.0,))
        self._scaled: dict[float, mx.array] = {}

    def bytes_per_token(self, num_heads: int, head_dim: int, itemsize: int) -> float:
        return num_heads * self.format.words(itemsize) * 4

    def _constants(self, dtype: mx.Dtype) -> dict[str, int | bool]:
        form = self.format
        return {
            "D": form.head_dim,
            "KB": form.keys.bits,
            "VB": form.values.bits,
            "GS": form.group,
            "BOOK": bool(form.values.levels),
            "TURBO": form.rotated,
            "REC": form.words(dtype.size),
        }

    def _consts(self, scale: float) -> mx.array:
        if scale not in self._scaled:
            values = self.format.values
            levels = (*values.levels, *[0.0] * 16)[:16]
            self._scaled[scale] = _floats((scale * LOG2_E, *levels, *(*values.edges, *[0.0] * 15)[:15]))
        return self._scaled[scale]

    # -- packing
    def pack_both(self, keys: mx.array, values: mx.array) -> mx.array:
        key = "pack", keys.shape, keys.dtype
        if key not in self._launches:
            batch, heads, width, _ = keys.shape
            launch = _Launch(
                self.kernels.kernel("pack", self._constants(keys.dtype)),
                {
                    "template": [("T", keys.dtype)],
                    "grid": (batch * heads * width * _WARP, 2, 1),
                    "threadgroup": (_WARP, 1, 1),
                    "output_shapes": [(batch, heads, width, self.format.words(keys.dtype.size))],
                    "output_dtypes": [mx.uint32],
                },
            )

            def run(keys: mx.array, values: mx.array, signs: mx.array, consts: mx.array) -> mx.array:
                return launch(keys, values, signs, consts)[0]

            self._launches[key] = self.kernels.compiled(run)
        if values.dtype != keys.dtype:
            values = values.astype(keys.dtype)
        return self._launches[key](keys, values, self._signs, self._consts(1.0))

    def fetch(self, records: mx.array, place: Place, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        rows, heads, span = place.geometry.num_rows, records.shape[1], place.span
        key = "unpack", rows, heads, dtype
        if key not in self._launches:
            self._launches[key] = self.kernels.kernel("unpack", self._constants(dtype))
        shape = (rows, heads, span, self.format.head_dim)
        keys, values = self._launches[key](
            inputs=[records, _columns(place), self._signs, self._consts(1.0)],
            template=[("T", dtype)],
            grid=(-(-span // _UNPACK_COLUMNS) * _UNPACK_COLUMNS * _WARP, rows * heads, 2),
            threadgroup=(_UNPACK_COLUMNS * _WARP, 1, 1),
            output_shapes=[shape, shape],
            output_dtypes=[dtype, dtype],
        )
        set_fetched(Fetched(keys, values, self, records, place))
        return keys, values

    # -- attention
    def attend(
        self, records: mx.array, place: Place, q: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array | None:
        _, heads, width, _ = q.shape
        if width > self.kernels.tuning.max_width or heads % records.shape[1]:
            return None
        window = place.window_of(mask, width)
        return None if window is None else self.attention(records, place, q, scale, window, sinks)

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
        runs = -(-(place.ring or place.span) // self.kernels.tuning.run)
        key = q.shape, q.dtype, records.shape[1], runs, place.ring, window, sinks is not None
        if key not in self._launches:
            attend, merge = self._attention_launches(*key)

            def run(
                q: mx.array,
                records: mx.array,
                at: mx.array,
                signs: mx.array,
                consts: mx.array,
                extra: mx.array,
            ) -> mx.array:
                parts, sums = attend(q, records, at, signs, consts)
                return merge(q, parts, sums, at, signs, extra)[0]

            self._launches[key] = self.kernels.compiled(run)
        extra = self._no_sinks if sinks is None else sinks.astype(mx.float32) * LOG2_E
        return self._launches[key](q, records, _columns(place), self._signs, self._consts(scale), extra)

    def _attention_launches(
        self,
        shape: tuple[int, ...],
        dtype: mx.Dtype,
        kv_heads: int,
        runs: int,
        ring: int,
        window: int,
        sinks: bool,
    ) -> tuple[_Launch, _Launch]:
        tuning, head_dim = self.kernels.tuning, self.format.head_dim
        batch, heads, width, _ = shape
        num_rows, results = heads // kv_heads * width, batch * heads * width
        where: dict[str, int | bool] = {"RING": ring, "WINDOW": window, "CPS": tuning.run}
        which, cut, chunks = self._cut(num_rows, dtype)
        threads = _WARP * cut["CW"] * cut.get("RC", 1)
        constants = {**self._constants(dtype), **where, **cut}
        attend = _Launch(
            self.kernels.kernel(which, constants),
            {
                "template": [("T", dtype)],
                "grid": (runs * threads, kv_heads * chunks, batch),
                "threadgroup": (threads, 1, 1),
                "output_shapes": [(results, runs, head_dim), (results, runs, 2)],
                "output_dtypes": [mx.float32, mx.float32],
            },
        )
        merged = {"D": head_dim, "TURBO": self.format.rotated, "SINKS": sinks, **where}
        merge = _Launch(
            self.kernels.kernel("merge", merged),
            {
                "template": [("T", dtype)],
                "grid": (results * head_dim, 1, 1),
                "threadgroup": (head_dim, 1, 1),
                "output_shapes": [shape],
                "output_dtypes": [dtype],
            },
        )
        return attend, merge

    def _cut(self, num_rows: int, dtype: mx.Dtype) -> tuple[str, dict[str, int], int]:
        """Which kernel, its constants, and into how many blocks the query rows of a KV head go."""
        tuning, head_dim = self.kernels.tuning, self.format.head_dim
        if (
            tuning.mma
            and head_dim <= 256
            and dtype.size == 2
            and not (self.format.values.levels and self.format.values.bits > 3)
        ):
            tile = 16 if num_rows > 8 and head_dim <= 128 else 8
            return "attend_mma", {"MR": tile, "CW": tuning.mma_warps}, -(-num_rows // tile)
        rows = min(tuning.rows, num_rows)
        warps = min(tuning.warps, 1024 // head_dim)
        chunks = -(-num_rows // rows)
        row_warps = min(1 << (chunks - 1).bit_length(), warps)
        dims = max(tuning.dims, head_dim // _WARP)
        cut = {"DPL": dims, "R": rows, "RC": row_warps, "CW": warps // row_warps, "U": tuning.unroll}
        return "attend", cut, -(-chunks // row_warps)


def _floats(values: Any) -> mx.array:
    return mx.array(np.array(values, np.float32))


def _columns(place: Place) -> mx.array:
    """int32 [span, slot 0, start 0, slot 1, start 1, ..]. Of the geometry's own array, which may be an input."""
    if place.at is None:
        group, starts = place.geometry.group, place.geometry.offsets
        pairs = mx.stack([mx.arange(group.lo, group.hi, dtype=mx.int32), starts], axis=1)
        place.at = mx.concatenate([mx.array([place.span], dtype=mx.int32), pairs.reshape(-1)])
    return place.at
