"""From rows to forwards: which slots run together, and what each row feeds. Pure; knows no arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from mantou.data import Draft
from mantou.engine.sequence import Sequence
from mantou.engine.shapes import Shapes
from mantou.engine.slots import runs
from mantou.protocols import Group

Drafts = Mapping[str, Draft]  # request id -> its guess; a row that is not in it guesses none
NO_DRAFT = Draft()
_MOST_PADDED = 1.5  # places of a forward over several prompts, for each of their tokens


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
            return row and (row.num_kv, len(drafts.get(row.id, NO_DRAFT)))

        groups: list[tuple[Group, list[Sequence | None]]] = []
        for lo, part in runs(rows, likeness):
            num_tokens = tuple(1 + len(drafts.get(row.id, NO_DRAFT)) if row else 0 for row in part)
            if any(num_tokens):
                groups.append((Group(lo, self.width(max(num_tokens)), num_tokens), part))
        return groups

    def prompts(self, chunks: Iterable[tuple[Sequence, int]]) -> list[tuple[Group, list[Sequence | None]]]:
        """What rows feed of their prompts: neighbours of like widths that get to their ends go together, so that the
        weights are read once for all; any other row goes alone. So does every row where forwards come in few shapes: a
        GPU's bits depend on the shape, and a prompt keeps the one that it has without neighbours."""
        parts: list[list[tuple[Sequence, int]]] = []
        for chunk in sorted(chunks, key=lambda chunk: chunk[0].slot):
            if parts and self._joins(parts[-1], *chunk):
                parts[-1].append(chunk)
            else:
                parts.append([chunk])
        groups: list[tuple[Group, list[Sequence | None]]] = []
        for part in parts:
            rows, counts = zip(*part, strict=True)
            groups.append((Group(rows[0].slot, self.width(max(counts)), counts), list(rows)))
        return groups

    def _joins(self, part: Rows[tuple[Sequence, int]], row: Sequence, num_tokens: int) -> bool:
        last, num_last = part[-1]
        mixes = self.ragged_widths and self.ragged_offsets and not self.shapes.bucketed
        if not mixes or row.slot != last.slot + 1:
            return False
        if num_last < last.num_pending or num_tokens < row.num_pending:
            return False  # a draw is for all rows of a forward, or for none
        counts = [*(count for _, count in part), num_tokens]
        return max(counts) * len(counts) <= _MOST_PADDED * sum(counts)


@dataclass(frozen=True, slots=True)
class Feed:
    """One forward's rows: `rows[i]` sits in slot group.lo + i, None for an idle one; `drafts[i]` is what it guesses."""

    group: Group
    rows: list[Sequence | None]
    drafts: list[Draft]

    @property
    def drafting(self) -> bool:
        return any(len(draft) for draft in self.drafts)

    @property
    def sequences(self) -> list[Sequence]:
        return [row for row in self.rows if row is not None]

    @property
    def wanted(self) -> list[list[int]] | None:
        """The columns of each row that are drawn, equally many; None for all of them.

        A row's known tokens need no draw but the last, and no more do those that follow it and are sure.
        """
        counts = [
            1 + len(draft) - draft.num_sure if n else 1
            for n, draft in zip(self.group.num_tokens, self.drafts, strict=True)
        ]
        most = max(counts)
        firsts = [max(n - count, 0) for n, count in zip(self.group.num_tokens, counts, strict=True)]
        if most == self.group.width and not any(firsts):
            return None
        return [[min(first + t, self.group.width - 1) for t in range(most)] for first in firsts]

    @property
    def draws(self) -> bool:
        """Whether some row gets to the end of its known tokens, so that a token has to be drawn."""
        pairs = zip(self.rows, self.group.num_tokens, strict=True)
        return any(row is not None and row.num_kv + n >= len(row.tokens) for row, n in pairs)

    def tokens(self) -> list[list[int]]:
        """What each row feeds: known tokens, then its draft."""
        return [
            [*row.next_tokens(n - len(draft)), *draft.tokens] if row else []
            for row, n, draft in zip(self.rows, self.group.num_tokens, self.drafts, strict=True)
        ]

    def positions(self) -> list[list[int]]:
        """Absolute positions of the tokens that are drawn."""
        wanted = self.wanted
        columns = [list(range(self.group.width))] * len(self.rows) if wanted is None else wanted
        starts = [row.num_kv if row else 0 for row in self.rows]
        return [[start + c + 1 for c in cs] for start, cs in zip(starts, columns, strict=True)]

    def alone(self, index: int) -> Feed:
        """Row `index` on its own, without its draft."""
        row = self.rows[index]
        assert row is not None
        num_tokens = min(row.num_pending, self.group.num_tokens[index])
        return Feed(Group(self.group.lo + index, num_tokens, (num_tokens,)), [row], [NO_DRAFT])
