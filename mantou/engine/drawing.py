"""From logits to a draw: the rows' sampling wishes, histories and constraints. Knows no scheduling and no KV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mantou.data import Draft
from mantou.engine.groups import Feed
from mantou.engine.roster import Roster
from mantou.engine.sequence import Sequence
from mantou.protocols import Sampler

Allowed = tuple[int, int, Any]  # row, position, mask of a Constraint


class Drawing:
    """Keeps the wishes of the last composition as device arrays: they change only when rows come or go."""

    def __init__(self, sampler: Sampler, roster: Roster, start: Callable[[Any], None] | None) -> None:
        """`start` sets the device to work on logits, so that masks are made meanwhile.

        None where the device is the CPU: masks would take a core from the kernels (ADR 012 has the numbers).
        """
        self._start = start
        self._sampler = sampler
        self._roster = roster
        self._prepared: tuple[tuple[str, ...], Any] = ((), None)

    def draw(self, logits: Any, feed: Feed) -> Any:
        ids = tuple(row.id if row else "" for row in feed.rows)
        if self._prepared[0] != ids:
            wishes = [row.request.sampling if row else None for row in feed.rows]
            self._prepared = (ids, self._sampler.prepare(wishes))
        history = [
            (
                [*row.tokens, *d.tokens[: d.num_sure]] if row and d.num_sure else row.tokens if row else (),
                d.tokens[d.num_sure :],
            )
            for row, d in zip(feed.rows, feed.drafts, strict=True)
        ]
        allowed: list[Allowed] = []
        if self._start and any(row is not None and row.constraint is not None for row in feed.rows):
            self._start(logits)
        for i, row in enumerate(feed.rows):
            if row is not None and row.constraint is not None:
                draft = feed.drafts[i]
                self._roster.own_fault(row, lambda i=i, row=row, d=draft: allowed.extend(_allowed(i, row, d)))
        return self._sampler.draw(
            logits,
            self._prepared[1],
            feed.positions(),
            history=history,
            allowed=allowed,
            drafts=feed.drafts,
        )


def _forbids(mask: Any | None, token: int) -> bool:
    return mask is not None and (token // 8 >= len(mask) or not mask[token // 8] >> token % 8 & 1)


def _allowed(index: int, row: Sequence, draft: Draft) -> list[Allowed]:
    """What the row's constraint allows at each drawn position that it restricts."""
    constraint = row.constraint
    assert constraint is not None
    found: list[Allowed] = []
    advanced = 0
    for t in range(len(draft) + 1):
        if t >= draft.num_sure:
            mask = constraint.mask()
            if mask is not None:
                found.append((index, t - draft.num_sure, mask))
            if t == len(draft) or _forbids(mask, draft.tokens[t]):
                break  # a forbidden draft token cannot be drawn, so what follows it does not matter
        constraint.advance(draft.tokens[t])
        advanced += 1
    constraint.rewind(advanced)
    return found
