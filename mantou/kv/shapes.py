"""What each cache of a model holds a token and a row: plain numbers. Knows no arrays and no graph."""

from __future__ import annotations

import sys
from dataclasses import dataclass

ALL = sys.maxsize


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
