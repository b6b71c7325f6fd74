"""Which codec each cache of a model takes, and what a row of any length then costs. Pure; knows no arrays and no graph.

The numbers here are the ones that the ready card, /stats, the row count and the KV budget use; a test compares them
with the bytes of the arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from mantou.kv.blocks import pool_columns
from mantou.kv.shapes import LayerShape
from mantou.protocols import KVCodec


@dataclass(frozen=True, slots=True)
class LayerCodec:
    """How one cache stores its keys and its values; a row of less than `start` tokens as `below` says."""

    keys: KVCodec
    values: KVCodec
    start: int = 0
    below: LayerCodec | None = None
    label: str = ""  # a shorter name for the pair

    @property
    def name(self) -> str:
        if self.label:
            return self.label
        names = [codec.name for codec in (self.keys, self.values) if codec.num_parts]
        return names[0] if len(set(names)) == 1 else "+".join(names)

    @property
    def raw(self) -> bool:
        """Whether a primitive may read and write the parts as the values themselves."""
        return self.keys.raw and self.values.raw


def alike(codec: KVCodec) -> LayerCodec:
    """Keys and values stored the same way."""
    return LayerCodec(codec, codec)


@dataclass(frozen=True, slots=True)
class KVPlan:
    """The codecs of a model's caches, in the order of its shapes. `name` is the scheme's."""

    name: str
    shapes: tuple[LayerShape, ...]
    codecs: tuple[LayerCodec, ...]
    start: int = 0

    @property
    def key(self) -> str:
        """Everything about the codecs that stored numbers depend on, for the CacheKey."""
        names = ",".join(codec.name for codec in self.codecs)
        return (
            f"{self.name}@{self.start} {names}"
            if len(self._names) > 1 or self.start
            else next(iter(self._names))
        )

    @property
    def _names(self) -> set[str]:
        return {codec.name for codec in self.codecs} or {"native"}

    @property
    def counts(self) -> Mapping[str, int]:
        """Codec name -> caches with keys and values that store by it."""
        return Counter(c.name for s, c in zip(self.shapes, self.codecs, strict=True) if s.has_columns)

    def token_bytes(self) -> float:
        """Bytes that one more token takes while no window is full."""
        return sum(self._column_bytes(s, c) for s, c in zip(self.shapes, self.codecs, strict=True))

    def row_bytes(self, num_tokens: int, slack: int = 0) -> int:
        """Bytes of a row of `num_tokens`; windows stop growing at their size plus `slack`."""
        total = 0.0
        for shape, codec in zip(self.shapes, self.codecs, strict=True):
            held = min(num_tokens, shape.num_columns + slack)
            total += shape.state_bytes + held * self._column_bytes(shape, codec)
            if codec.start:
                total += min(held, codec.start) * self._native_bytes(shape)
        return int(total)

    def split(self, layouts: Container[str]) -> tuple[KVPlan, KVPlan]:
        """The caches of these layouts, and the others."""
        pairs = list(zip(self.shapes, self.codecs, strict=True))
        inside = [pair for pair in pairs if pair[0].layout in layouts]
        outside = [pair for pair in pairs if pair[0].layout not in layouts]
        return self._of(inside), self._of(outside)

    def _of(self, pairs: Sequence[tuple[LayerShape, LayerCodec]]) -> KVPlan:
        return replace(self, shapes=tuple(s for s, _ in pairs), codecs=tuple(c for _, c in pairs))

    def pool_bytes(self, lengths: Sequence[int], block: int) -> int:
        """Bytes of rows of these lengths that share a pool of blocks in each cache."""
        total = 0.0
        for shape, codec in zip(self.shapes, self.codecs, strict=True):
            total += pool_columns(lengths, block) * self._column_bytes(shape, codec)
            if codec.start:
                below = [min(length, codec.start) for length in lengths]
                total += pool_columns(below, block) * self._native_bytes(shape)
        return int(total)

    @staticmethod
    def _native_bytes(shape: LayerShape) -> int:
        (k_heads, k_dim), (v_heads, v_dim) = shape.keys, shape.values
        return shape.itemsize * (k_heads * k_dim + v_heads * v_dim)

    @staticmethod
    def _column_bytes(shape: LayerShape, codec: LayerCodec) -> float:
        if not shape.has_columns:
            return 0.0
        keys = codec.keys.bytes_per_token(*shape.keys, shape.itemsize)
        return keys + codec.values.bytes_per_token(*shape.values, shape.itemsize)


def make_plan(
    name: str, shapes: Sequence[LayerShape], codecs: Sequence[LayerCodec], start: int = 0
) -> KVPlan:
    """Checks that every codec can store its cache. Raises ConfigError with the head dimension if not."""
    for shape, codec in zip(shapes, codecs, strict=True):
        if shape.has_columns:
            codec.keys.check(shape.keys[1])
            codec.values.check(shape.values[1])
    return KVPlan(name, tuple(shapes), tuple(codecs), start)
