"""A KV codec on the CPU kernels: the same parts with the same bits, packed, written and read by one node each."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mantou.models.ops.extension import kernels
from mantou.protocols import KVCodec, Packing

_FLOATS = (mx.float32, mx.bfloat16, mx.float16)


class CpuCodec:
    """Whatever it does not know itself is left to the codec that it wraps."""

    def __init__(self, codec: KVCodec) -> None:
        self._codec = codec
        self.name = codec.name

    def packing(self, head_dim: int) -> Packing | None:
        return self._codec.packing(head_dim)

    def bytes_per_token(self, num_heads: int, head_dim: int, itemsize: int) -> float:
        return self._codec.bytes_per_token(num_heads, head_dim, itemsize)

    def pack(self, x: mx.array) -> tuple[mx.array, ...]:
        packing = self.packing(x.shape[-1])
        if packing is None or not packing.bits or x.ndim != 4 or x.dtype not in _FLOATS or not x.size:
            return self._codec.pack(x)
        return tuple(kernels.pack_rows(x, bits=packing.bits, group=packing.group_size))

    def unpack(self, parts: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        """Nothing is unpacked if all that is done with the result is attention: the kernel then reads the parts."""
        packing = self._packing_of(parts)
        if packing is None:
            return self._codec.unpack(parts, dtype)
        return kernels.unpack_rows(*parts, bits=packing.bits, group=packing.group_size).astype(dtype)

    def _packing_of(self, parts: Sequence[mx.array]) -> Packing | None:
        """The packing with which three parts of these shapes belong together."""
        if len(parts) != 3 or parts[0].ndim != 4 or parts[0].dtype != mx.uint32:
            return None
        for bits in (4, 8):
            head_dim = parts[0].shape[-1] * 32 // bits
            packing = self.packing(head_dim)
            fits = packing is not None and packing.bits == bits
            if packing is not None and fits and parts[1].shape[-1] * packing.group_size == head_dim:
                return packing
        return None

    def write(
        self,
        buffer: mx.array,
        rows: mx.array,
        start: mx.array,
        count: mx.array | None,
        first_slot: int,
        ring: int,
    ) -> mx.array:
        rows = rows.astype(buffer.dtype)
        return kernels.kv_write(buffer, rows, start, count, first_slot=first_slot, ring=ring)
