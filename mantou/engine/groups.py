"""From rows to forwards: which slots run together, and what each row feeds. Pure; knows no arrays."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from mantou.engine.sequence import Sequence
from mantou.engine.shapes import Shapes
from mantou.engine.slots import runs
from mantou.protocols import Group

Drafts = Mapping[str, Rows[int]]  # request id -> guessed tokens; a row that is not in it guesses none


@dataclass(frozen=True, slots=True)
class Grouping:
    """What the graph can mix in one forward: rows of unlike lengths, rows that feed unlike numbers of tokens."""

    shapes: Shapes
    max_width: int
    ragged_offsets: bool
    ragged_widths: bool

    def width(self, num_tokens: int) -> int:
        if not self.ragged_widths:
            return num_tokens
        return min(self.shapes.width(num_tokens), self.max_width)  # a ring has no room for more

    def decode(
        self, rows: Rows[Sequence | None], drafts: Drafts
    ) -> list[tuple[Group, list[Sequence | None]]]:
        """One group over the decode slice, or runs of equal rows for graphs that cannot mix them."""

        def likeness(row: Sequence | None) -> object:
            if self.ragged_widths and self.ragged_offsets:
                return None
            return row and (row.num_kv, len(drafts.get(row.id, ())))

        groups: list[tuple[Group, list[Sequence | None]]] = []
        for lo, part in runs(rows, likeness):
            num_tokens = tuple(1 + len(drafts.get(row.id, ())) if row else 0 for row in part)
            if any(num_tokens):
                groups.append((Group(lo, self.width(max(num_tokens)), num_tokens), part))
        return groups

    def prompt(self, row: Sequence, num_tokens: int) -> Group:
        return Group(row.slot, self.width(num_tokens), (num_tokens,))


@dataclass(frozen=True, slots=True)
class Feed:
    """One forward's rows: `rows[i]` sits in slot group.lo + i, None for an idle one; `drafts[i]` is what it guesses."""

    group: Group
    rows: list[Sequence | None]
    drafts: list[Rows[int]]

    @property
    def drafting(self) -> bool:
        return any(self.drafts)

    @property
    def sequences(self) -> list[Sequence]:
        return [row for row in self.rows if row is not None]

    @property
    def wanted(self) -> list[int] | None:
        """The one position of each row that is drawn, or None for all of them."""
        return None if self.drafting else [max(n - 1, 0) for n in self.group.num_tokens]

    @property
    def draws(self) -> bool:
        """Whether some row gets to the end of its known tokens, so that a token has to be drawn."""
        pairs = zip(self.rows, self.group.num_tokens, strict=True)
        return any(row is not None and row.num_kv + n >= len(row.tokens) for row, n in pairs)

    def tokens(self) -> list[list[int]]:
        """What each row feeds: known tokens, then its draft."""
        return [
            [*row.next_tokens(n - len(draft)), *draft] if row else []
            for row, n, draft in zip(self.rows, self.group.num_tokens, self.drafts, strict=True)
        ]

    def positions(self) -> list[list[int]]:
        """Absolute positions of the tokens that are drawn."""
        width = range(self.group.width)
        columns = [width] * len(self.rows) if self.wanted is None else [(w,) for w in self.wanted]
        starts = [row.num_kv if row else 0 for row in self.rows]
        return [[start + c + 1 for c in cs] for start, cs in zip(starts, columns, strict=True)]

    def alone(self, index: int) -> Feed:
        """Row `index` on its own, without its draft."""
        row = self.rows[index]
        assert row is not None
        num_tokens = min(row.num_pending, self.group.num_tokens[index])
        return Feed(Group(self.group.lo + index, num_tokens, (num_tokens,)), [row], [()])
