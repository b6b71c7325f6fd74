"""Keys and values of a token in one run of words, for a device whose kernels read them there. Knows no device.

    update_and_fetch --> unpacked keys and values, lazily --> graph --> attention(q, keys, values)
                    `--> Fetched: the same, still packed  ---------------^ if these are they, nothing is unpacked

A graph that does anything else with what it fetched computes with the unpacked arrays and is as right as before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mantou.kv.geometry import Geometry


@dataclass(slots=True, eq=False)
class Place:
    """What a layer gives to read: the first `span` columns of the forward's rows."""

    geometry: Geometry
    span: int
    ring: int = 0  # position p is in column p % ring; 0 = in column p
    at: mx.array | None = None  # for the codec to keep what it makes of it

    def window_of(self, mask: Any, width: int) -> int | None:
        """The window that the layer's own mask draws (0 = causal only); None for a mask that somebody else made."""
        if isinstance(mask, mx.array):
            return self.geometry.window_of(mask, ring=bool(self.ring))
        known = mask == "causal" or (mask is None and width == 1)
        return 0 if known and self.geometry.uniform and not self.ring else None


def place_of(geometry: Geometry, span: int, ring: int) -> Place:
    """One object for all layers of a forward that read alike."""
    key = span, ring
    if key not in geometry.places:
        geometry.places[key] = Place(geometry, span, ring)
    return geometry.places[key]


class RecordCodec(ABC):
    """A codec of both keys and values: one part, which holds records. The values' codec beside it stores nothing."""

    raw = False
    affine = None
    packing = None
    num_parts = 1

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def pack_both(self, keys: mx.array, values: mx.array) -> mx.array:
        """[B, H, T, D] twice -> records uint32[B, H, T, words]."""
        ...

    @abstractmethod
    def fetch(self, records: mx.array, place: Place, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Keys and values [B, H, span, D] of a layer's buffer, lazily, and remembers where they come from."""
        ...

    @abstractmethod
    def attend(
        self, records: mx.array, place: Place, q: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array | None:
        """Attention over a layer's buffer; None where only the unpacked values will do."""
        ...

    @abstractmethod
    def bytes_per_token(self, num_heads: int, head_dim: int, itemsize: int) -> float: ...

    def check(self, head_dim: int) -> None:  # noqa: B027 (nothing to do is an answer)
        pass  # the codecs that the records stand for were checked

    def pack(self, x: mx.array) -> tuple[mx.array, ...]:
        raise TypeError("records hold keys and values together")

    def unpack(self, parts: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        raise TypeError("records hold keys and values together")


@dataclass(slots=True, eq=False)
class Fetched:
    """What a layer fetched last, and where from."""

    keys: mx.array
    values: mx.array
    codec: RecordCodec
    records: mx.array
    place: Place

    def attend(self, q: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array | None:
        if q.dtype != self.keys.dtype:
            return None
        return self.codec.attend(self.records, self.place, q, scale, mask, sinks)


# It holds a buffer, and a buffer that is held is copied when it is written: it lives from a fetch to its attention.
_fetched: list[Fetched | None] = [None]


def set_fetched(fetched: Fetched | None) -> None:
    _fetched[0] = fetched


def take_fetched(keys: mx.array, values: mx.array) -> Fetched | None:
    """What the last fetch gave, if these are its arrays; from then on it is forgotten."""
    fetched, _fetched[0] = _fetched[0], None
    return fetched if fetched is not None and fetched.keys is keys and fetched.values is values else None
