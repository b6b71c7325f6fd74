"""Which caches fit into records, and how many words a record takes. Knows no kernels and no arrays."""

from __future__ import annotations

from dataclasses import dataclass

from mantou.kv.plan import LayerCodec
from mantou.kv.shapes import LayerShape, Packing

HEAD_DIMS = (64, 128, 256, 512)


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
