"""What each cache of a model holds a token and a row: plain numbers. Knows no arrays and no graph."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ALL = sys.maxsize


@dataclass(frozen=True, slots=True)
class Packing:
    """How a codec's bits say a value: by groups with a scale and a bias, or by levels of a scale for the vector."""

    bits: int
    group_size: int = 0  # at most; 0 where levels say the values
    levels: tuple[float, ...] = ()
    edges: tuple[float, ...] = ()  # between the levels
    signs: Callable[[int], Any] | None = (
        None  # head dimension -> float32[D] before Hadamard's transform, if rotated
    )


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One cache of the graph, as found by running the graph once on shapes alone.

    `layer` is its place in the graph's list of caches; a place that lists several caches gives several shapes.
    """

    layer: int
    layout: str  # full, window, chunked, keys, recurrent
    keys: tuple[int, int] = (0, 0)  # heads, head dimension; (0, 0) where the graph never used the cache
    values: tuple[int, int] = (0, 0)
    itemsize: int = 4
    num_columns: int = ALL  # tokens that it shows at most
    state_bytes: int = 0  # of one row, whatever its length
    num_arrays: int = 0  # that the state consists of
    listed: bool = False  # whether its place in the graph's list is itself a list

    @property
    def has_columns(self) -> bool:
        return self.keys != (0, 0)
