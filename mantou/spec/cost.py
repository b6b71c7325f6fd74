"""How long a decode step of B rows and T tokens a row takes: a measured table, and what lies between. No model."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_RATE = 0.1  # share of an error that a step of one token a row corrects in the whole table
_CELL_RATE = 0.02  # and in the cells around it alone
_WIDE_RATE = 0.3  # share that a wider step corrects in the cells around it
_OUTLIER = 3.0  # a step that took this many times what was expected says nothing of the next

Cell = tuple[int, int]  # rows, tokens a row


@dataclass(slots=True)
class StepCosts:
    """Seconds at grid points; bilinear between them, and along the last slope beyond.

    `observe` follows a machine that is shared and contexts that grow: what plain steps show moves all points alike,
    because widths are compared with each other and only some are seen; what wider steps show moves their own points.
    """

    rows: Sequence[int]
    widths: Sequence[int]
    table: dict[Cell, float] = field(default_factory=dict)
    scale: float = 1.0

    @classmethod
    def from_cells(cls, cells: Mapping[Cell, float]) -> StepCosts:
        """A table from measured cells; what is missing is filled in with a straight line over rows * tokens.

        Needs (1, 1). Costs never fall with rows or tokens. Disturbances only add time, so of two cells that say
        otherwise the larger one is right.
        """
        cells = {
            (r, w): min(seconds for (rows, width), seconds in cells.items() if rows >= r and width >= w)
            for r, w in cells
        }
        # Two points each way at least: with one, a wider step would seem to be free.
        rows, widths = (sorted(points) for points in map(set, zip(*cells, strict=True)))
        rows = rows if len(rows) > 1 else [*rows, 2 * rows[0]]
        widths = widths if len(widths) > 1 else [*widths, 2 * widths[0]]
        base, slope = _line(cells)
        table: dict[Cell, float] = {}
        for r in rows:
            for w in widths:
                least = max((table[c] for c in table if c[0] <= r and c[1] <= w), default=0.0)
                found = cells[r, w] if (r, w) in cells else base + slope * r * w
                table[r, w] = max(found, least)
        return cls(rows, widths, table)

    def seconds(self, num_rows: int, width: int) -> float:
        return self.scale * sum(weight * self.table[cell] for cell, weight in self._weights(num_rows, width))

    def observe(self, num_rows: int, width: int, seconds: float) -> None:
        """One step's wall time."""
        expected = self.seconds(num_rows, width)
        if not expected / _OUTLIER < seconds < expected * _OUTLIER:
            return
        error = seconds / expected
        rate = _CELL_RATE if width == 1 else _WIDE_RATE
        if width == 1:
            self.scale *= error**_RATE
        for cell, weight in self._weights(num_rows, width):
            if weight > 0 and (width == 1 or cell[1] > 1):  # a wide step says nothing of plain ones
                self.table[cell] *= error ** (rate * weight)

    def _weights(self, num_rows: int, width: int) -> list[tuple[Cell, float]]:
        return [
            ((r, w), x * y)
            for r, x in _between(self.rows, num_rows)
            for w, y in _between(self.widths, width)
            if x * y
        ]


def _between(points: Sequence[int], value: int) -> list[tuple[int, float]]:
    """Weights of the grid points on both sides; they sum to 1, and one is negative beyond the ends."""
    if len(points) == 1:
        return [(points[0], 1.0)]
    high = min(max(bisect_right(points, value), 1), len(points) - 1)
    lo, hi = points[high - 1], points[high]
    share = (value - lo) / (hi - lo)
    return [(lo, 1 - share), (hi, share)]


def _line(cells: Mapping[Cell, float]) -> tuple[float, float]:
    """Least squares of seconds over rows * tokens, with neither term negative."""
    if len(cells) == 1:
        (((rows, width), seconds),) = cells.items()
        return seconds / 2, seconds / (2 * rows * width)  # half of it grows
    xs = [float(r * w) for r, w in cells]
    ys = list(cells.values())
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
    slope = max(slope, 0.0)
    return max(mean_y - slope * mean_x, 0.0), slope
