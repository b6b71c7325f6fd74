"""Which rows guess what in a step, and what became of it. Knows no provider by name, no arrays and no KV."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import replace

from mantou.data import Draft, DraftAsk
from mantou.engine.counters import Counters
from mantou.engine.groups import Drafts
from mantou.engine.roster import Roster
from mantou.engine.sequence import Sequence
from mantou.protocols import DraftProvider, Forwarded


class Drafting:
    """Asks the provider for all rows at once. With `fill`, what a constraint forces goes before any guess."""

    def __init__(
        self,
        provider: DraftProvider,
        roster: Roster,
        counters: Counters,
        room: Callable[[Sequence], int],
        *,
        fill: bool,
    ) -> None:
        self._provider = provider
        self._roster = roster
        self._counters = counters
        self._room = room  # tokens that a row may feed at once
        self._fill = fill

    @property
    def wants_hidden(self) -> bool:
        return self._provider.wants_hidden

    def width(self, row: Sequence) -> int:
        """Most tokens that the row may guess now; 0 if it need not be asked."""
        found = [0]
        self._roster.own_fault(row, lambda: found.append(self._provider.width(row.request, row.tokens)))
        return min(found[-1], self._most(row))

    def _most(self, row: Sequence) -> int:
        """One position is the row's known token, and one that it may generate comes after the draft."""
        return max(min(row.num_left, self._room(row)) - 1, 0)

    def drafts(self, rows: Rows[Sequence]) -> Drafts:
        """A draft for each of these decoding rows that has one."""
        found: dict[str, Draft] = {}
        asks: list[tuple[Sequence, DraftAsk]] = []
        for row in rows:
            forced = self._forced(row)
            if forced:
                found[row.id] = forced
            elif row.finish is None and (width := self.width(row)) > 0:
                asks.append((row, DraftAsk(row.request, row.tokens, width, slot=row.slot)))
        for (row, ask), draft in zip(asks, self._proposals(asks), strict=True):
            if len(draft) and row.finish is None:
                kept = draft if len(draft) <= ask.width else replace(draft, tokens=draft.tokens[: ask.width])
                found[row.id] = kept
        return found

    def _forced(self, row: Sequence) -> Draft | None:
        """Tokens that are certain. A row that wants log-probabilities takes them as a guess, because they have none
        unless the vocabulary head sees them."""
        if not self._fill or row.constraint is None or row.finish is not None:
            return None
        found: list[int] = []
        constraint = row.constraint
        self._roster.own_fault(row, lambda: found.extend(constraint.forced()))
        found = found[: self._most(row)]
        if not found:
            return None
        wish = row.request.sampling
        sure = 0 if wish.logprobs or wish.top_logprobs else len(found)
        return Draft(found, "strict", 1.0, sure)

    def _proposals(self, asks: Rows[tuple[Sequence, DraftAsk]]) -> Rows[Draft]:
        """All at once; if that raises, one by one, so that only the row at fault ends."""
        if not asks:
            return ()
        try:
            return self._provider.propose([ask for _, ask in asks])
        except Exception:  # the boundary: whose fault it is shows when each row asks alone
            found: list[Draft] = []
            for row, ask in asks:
                drafts = [Draft()]
                self._roster.own_fault(row, lambda ask=ask, d=drafts: d.extend(self._provider.propose([ask])))
                found.append(drafts[-1])
            return found

    def observe(self, row: Sequence, draft: Draft, taken: Rows[int]) -> None:
        """Tells the provider what the row took, and keeps the books."""
        num_right, _ = draft.judge(taken)
        row.drafts.add(draft, num_right)
        self._count(draft, num_right)
        self._roster.own_fault(row, lambda: self._provider.observe(row.request, draft, taken))

    def _count(self, draft: Draft, num_right: int) -> None:
        if draft.num_sure:
            self._counters.injected_tokens += draft.num_sure
        elif draft:
            self._counters.drafts += 1
            self._counters.drafted_tokens += len(draft)
            self._counters.accepted_tokens += num_right
            places = self._counters.accepted_per_position
            places += [0] * (num_right - len(places))
            for position in range(num_right):
                places[position] += 1

    def absorb(self, forwarded: Forwarded) -> None:
        self._provider.absorb(forwarded)

    def timed(self, num_tokens: Rows[int], num_held: int, seconds: float) -> None:
        self._provider.timed(num_tokens, num_held, seconds)

    def release(self, row: Sequence) -> None:
        self._roster.own_fault(row, lambda: self._provider.release(row.request))
