"""How long a decode step of B rows and T tokens a row takes: a measured table, what lies between, what rows hold.

No model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_RATE = 0.1  # share of an error that a step of one token a row corrects in the whole
_CELL_RATE = 0.02  # and in the cells around it alone
_WIDE_RATE = 0.3  # share that a wider step corrects in the cells around it
_OUTLIER = 3.0  # a step that took this many times what was expected says nothing of the next,
_MOST_OUTLIERS = 8  # unless so many follow each other

Cell = tuple[int, int]  # rows, tokens a row


@dataclass(slots=True)
class StepCosts:
    """Seconds at grid points, of empty rows; bilinear between them, and along the last slope beyond. On top of that,
    `held_s` for each token that the rows of the last step held, whatever the width: attention reads them once.

    `observe` follows a machine that is shared. What plain steps show moves `held_s` and all points alike, each by its
    share in the step, because widths are compared with each other and only some are seen. What wider steps show moves
    their own points.

    `padding`: what a position costs that only fills a row up to the widest one, over what a token costs.
    """

    rows: Sequence[int]
    widths: Sequence[int]
    table: dict[Cell, float] = field(default_factory=dict)
    scale: float = 1.0
    held_s: float = 0.0
    padding: float = 1.0
    num_held: int = 0
    _num_outliers: int = 0  # in a row

    @classmethod
    def from_cells(
        cls, cells: Mapping[Cell, float], *, held_s: float = 0.0, padding: float = 1.0
    ) -> StepCosts:
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
        return cls(rows, widths, table, held_s=held_s, padding=padding)

    def seconds(self, num_rows: int, width: float) -> float:
        """`width` may lie between: see `width_of`."""
        return self._empty(num_rows, width) + self.held_s * self.num_held

    def _empty(self, num_rows: int, width: float) -> float:
        return self.scale * sum(weight * self.table[cell] for cell, weight in self._weights(num_rows, width))

    def width_of(self, num_tokens: Sequence[int]) -> float:
        """The width that would cost as much if all rows had it."""
        return self.padding * max(num_tokens) + (1 - self.padding) * sum(num_tokens) / len(num_tokens)

    def observe(self, num_tokens: Sequence[int], num_held: int, seconds: float) -> None:
        """One step's wall time. Each row fed `num_tokens`; all of them held `num_held` together."""
        num_rows, width = len(num_tokens), self.width_of(num_tokens)
        self.num_held = num_held
        expected = self.seconds(num_rows, width)
        if expected / _OUTLIER < seconds < expected * _OUTLIER:
            self._num_outliers = 0
        elif self._num_outliers < _MOST_OUTLIERS:
            self._num_outliers += 1
            return
        holding = self.held_s * num_held
        if max(num_tokens) == 1:
            error, share = _bounded(seconds / expected), holding / expected
            self.scale *= error ** (_RATE * (1 - share))
            self.held_s *= error ** (_RATE * share)
            self._correct(num_rows, width, error**_CELL_RATE)
        else:  # of the table alone: what was held costs plain steps as much
            error = _bounded((seconds - holding) / (expected - holding))
            self._correct(num_rows, width, error**_WIDE_RATE)

    def _correct(self, num_rows: int, width: float, factor: float) -> None:
        for (r, w), weight in self._weights(num_rows, width):
            if weight > 0 and (width == 1 or w > 1):  # a wide step says nothing of plain ones
                least = (
                    0.0 if w == self.widths[0] else self.table[r, self.widths[0]]
                )  # a plain step is no dearer
                self.table[r, w] = max(self.table[r, w] * factor**weight, least)

    def _weights(self, num_rows: int, width: float) -> list[tuple[Cell, float]]:
        return [
            ((r, w), x * y)
            for r, x in _between(self.rows, num_rows)
            for w, y in _between(self.widths, width)
            if x * y
        ]


def _bounded(error: float) -> float:
    return min(max(error, 1 / _OUTLIER), _OUTLIER)


def _between(points: Sequence[int], value: float) -> list[tuple[int, float]]:
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
