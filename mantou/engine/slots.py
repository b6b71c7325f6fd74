"""Which sequence sits in which slot. Pure bookkeeping: it says which rows must move, the executor moves them.

Decoding rows are kept at the front, so that their forward is one slice of the KV:

    slot   0 1 2 3 | 4 5
           d d d d | p .        d = decoding, p = prefilling, . = free
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from itertools import groupby
from typing import NamedTuple

from mantou.engine.sequence import Sequence
from mantou.engine.shapes import Shapes


class Move(NamedTuple):
    source: int
    target: int
    swap: bool  # the target holds a row as well, which goes to the source


class Slots:
    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self.rows: list[Sequence | None] = []  # index = slot

    def __iter__(self) -> Iterator[Sequence]:
        return (row for row in self.rows if row is not None)

    def __len__(self) -> int:
        return sum(row is not None for row in self.rows)

    @property
    def num_wanted(self) -> int:
        """Slots to allocate: enough for the highest occupied one and for the decode slice's bucket."""
        top = max((row.slot + 1 for row in self), default=0)
        return self._shapes.slots(max(top, self.decode_span)) if top else 0

    @property
    def decode_span(self) -> int:
        """End of the slice that holds all decoding rows, as a bucket."""
        return self._shapes.rows(max((row.slot + 1 for row in self if row.decoding), default=0))

    def join(self, sequence: Sequence) -> int:
        """Takes the lowest free slot."""
        slot = next((i for i, row in enumerate(self.rows) if row is None), len(self.rows))
        if slot == len(self.rows):
            self.rows.append(None)
        self.rows[slot] = sequence
        sequence.slot = slot
        return slot

    def leave(self, sequence: Sequence) -> None:
        self.rows[sequence.slot] = None
        sequence.slot = -1
        while self.rows and self.rows[-1] is None:
            self.rows.pop()

    def settle(self) -> list[Move]:
        """Brings decoding rows to the front if that makes their slice's bucket smaller.

        Returns the moves of their KV, in order.
        """
        decoding = [row for row in self if row.decoding]
        span = self._shapes.rows(len(decoding))
        if self.decode_span <= span:
            return []
        inside = {row.slot for row in decoding if row.slot < span}
        holes = [slot for slot in range(span) if slot not in inside]
        moves: list[Move] = []
        for row in (row for row in decoding if row.slot >= span):
            target, source = holes.pop(0), row.slot
            other = self.rows[target]
            self.rows[target], self.rows[source] = row, other
            row.slot = target
            if other is not None:
                other.slot = source
            moves.append(Move(source, target, other is not None))
        while self.rows and self.rows[-1] is None:
            self.rows.pop()
        return moves


def runs(
    rows: Rows[Sequence | None], likeness: Callable[[Sequence | None], object]
) -> list[tuple[int, list[Sequence | None]]]:
    """(first slot, rows) of each stretch of neighbours that are alike."""
    found: list[tuple[int, list[Sequence | None]]] = []
    lo = 0
    for _, part in groupby(rows, likeness):
        found.append((lo, list(part)))
        lo += len(found[-1][1])
    return found
