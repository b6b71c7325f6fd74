"""A small model that guesses for all rows at once, from its own KV batch. Knows token ids; not whose model it helps.

Its KV only ever holds a prefix of a row's real tokens once `propose` begins: what was guessed wrong is cut off there.
Recurrent layers cannot cut, so they go back to the state after the real tokens each time, which is a reference.
It draws with the row's own sampler and noise, at the same absolute positions, so that it agrees with the model it helps
far more often than an independent draw would.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mantou.data import Draft, DraftAsk, Request
from mantou.kv.batch import RowView
from mantou.models.runner import Runner
from mantou.protocols import CacheKey, Group, PrefixStore, Ticket
from mantou.spec.chained import ChainDraft, DraftSampler
from mantou.spec.cost import StepCosts
from mantou.spec.slots import leave_slot, take_slot

_CATCH_UP = 32  # a row that lacks more tokens than this takes them as a prompt, in a step of its own
_READ_BACK = 64  # steps over which reading a prompt has to pay
_CHANCE = 0.7  # that a guess is right, before any was seen


@dataclass(slots=True)
class _Row:
    request: Request
    slot: int
    held: list[int] = field(default_factory=list[int])  # tokens whose KV the row holds
    num_known: int = 0  # of them, tokens that are not guesses
    num_published: int = 0
    ticket: Ticket | None = None
    asked: Sequence[int] = ()  # the tokens that it is for


class ModelDraft(ChainDraft):
    """The provider."""

    def __init__(
        self,
        runner: Runner,
        sampler: DraftSampler,
        store: PrefixStore,
        key: CacheKey,
        costs: StepCosts,
        *,
        num_tokens: int = 4,
        vocab_size: int,
    ) -> None:
        super().__init__(sampler, store, key, costs, num_tokens)
        self.runner = runner
        self._vocab_size = vocab_size
        self._rows: dict[str, _Row] = {}

    # ------------------------------------------------------------------ what the engine asks
    def cost_s(self, request: Request, num_rows: int, width: int) -> float:
        """A row whose prompt was not read yet pays for that over its next steps."""
        if not width:
            return 0.0
        row = self._rows.get(request.id)
        behind = 0 if row is not None and row.held else len(request.prompt)
        reading = behind * self._costs.seconds(1, 16) / 16 / _READ_BACK
        return reading + super().cost_s(request, num_rows, width)

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Draft]:
        ready: list[tuple[_Row, DraftAsk]] = []
        behind: list[tuple[_Row, DraftAsk]] = []
        for ask in asks:
            row = self._row(ask) if ask.paid > 0 else None
            if row is not None and row.ticket is None:  # else its prompt is on the way from a slow tier
                self._cut(row, ask.tokens)
                (ready if len(ask.tokens) - len(row.held) <= _CATCH_UP else behind).append((row, ask))
        try:
            if behind:  # one chunk a step: rows that decode do not wait for more
                self._catch_up(*behind[0])
            drafts = self._drafts(ready)
        except BaseException:
            self.runner.abort()
            raise
        found = {ask.request.id: draft for (_, ask), draft in zip(ready, drafts, strict=True)}
        return [found.get(ask.request.id, Draft()) for ask in asks]

    def release(self, request: Request) -> None:
        row = self._rows.pop(request.id, None)
        if row is None:
            return
        if row.ticket is not None:
            row.ticket.close()
        self._publish(row)
        leave_slot(self.runner.kv, row.slot, self._rows.values())

    # ------------------------------------------------------------------ rows
    def _row(self, ask: DraftAsk) -> _Row:
        row = self._rows.get(ask.request.id)
        if row is None:
            row = self._join(ask)
        if row.ticket is not None and row.ticket.ready:
            # What a slow tier has brought is kept for the tokens that were asked for, until the ticket is closed.
            hit = self._store.match(self._key, row.asked, ask.request.session)
            row.ticket.close()
            row.ticket = None
            if hit is not None:
                self.runner.kv.fill(row.slot, hit)
                row.held = list(ask.tokens[: hit.num_tokens])
                row.num_known = row.num_published = hit.num_tokens
        return row

    def _join(self, ask: DraftAsk) -> _Row:
        row = _Row(ask.request, take_slot(self.runner.kv, self._rows.values()))
        row.asked = tuple(ask.tokens)
        row.ticket = self._store.prefetch(self._key, row.asked, ask.request.session, lambda: None)
        self._rows[ask.request.id] = row
        return row

    def _cut(self, row: _Row, tokens: Sequence[int]) -> None:
        """Forgets guesses that came out otherwise, and leaves at least one token to run."""
        kv = self.runner.kv
        if kv.lengths[row.slot] != len(row.held):  # a forward raised half way
            row.num_known = min(row.num_known, len(row.held))
            self._shorten(row, row.num_known)
        most = min(len(row.held), len(tokens) - 1)
        same = min(row.num_known, most)
        while same < most and row.held[same] == tokens[same]:
            same += 1
        if same < len(row.held):
            self._shorten(row, same)
        row.num_known = len(row.held)

    def _shorten(self, row: _Row, num_tokens: int) -> None:
        """A recurrent state cannot be shortened: such a row begins anew."""
        kv = self.runner.kv
        if self.runner.recurrent:
            kv.clear(row.slot)
            row.held.clear()
        else:
            kv.shorten(row.slot, num_tokens)
            del row.held[num_tokens:]

    def _catch_up(self, row: _Row, ask: DraftAsk) -> None:
        """A chunk of the row's known tokens, without a draw."""
        lo = len(row.held)
        chunk = list(ask.tokens[lo : min(lo + self.runner.max_width, len(ask.tokens) - 1)])
        group = Group(row.slot, len(chunk), (len(chunk),))
        self.runner.forward(group, [chunk], [[len(chunk) - 1]])
        self.runner.launch(None)
        self.runner.kv.commit(group, group.num_tokens)
        row.held += chunk
        row.num_known = len(row.held)
        if len(row.held) == len(ask.tokens) - 1:
            self._publish(row)

    def _publish(self, row: _Row) -> None:
        if self._store.wants and row.num_known > row.num_published:
            if len(row.held) > row.num_known:
                self._shorten(row, row.num_known)
            self._store.put(self._key, row.held, RowView(self.runner.kv, row.slot), row.request.session)
            row.num_published = row.num_known

    # ------------------------------------------------------------------ drafts
    def _drafts(self, ready: Sequence[tuple[_Row, DraftAsk]]) -> list[Draft]:
        """One chain of forwards for all rows: their pending tokens, then one guess each, on the device."""
        if not ready:
            return []
        started = time.perf_counter()
        found: dict[str, Draft] = {}
        for part in self._alike(ready):
            found |= self._chain(part)
        self._learn_cost([ask for _, ask in ready], started)
        return [found[row.request.id] for row, _ in ready]

    def _alike(self, ready: Sequence[tuple[_Row, DraftAsk]]) -> list[list[tuple[_Row, DraftAsk]]]:
        """Rows that one forward can hold: all of them, or each alone for graphs that cannot mix lengths."""
        if self.runner.ragged_offsets and self.runner.ragged_widths:
            return [list(ready)]
        return [[one] for one in ready]

    def _chain(self, ready: Sequence[tuple[_Row, DraftAsk]]) -> dict[str, Draft]:
        kv = self.runner.kv
        lo, hi = min(row.slot for row, _ in ready), max(row.slot for row, _ in ready) + 1
        by_slot: list[tuple[_Row, DraftAsk] | None] = [None] * (hi - lo)
        for row, ask in ready:
            by_slot[row.slot - lo] = (row, ask)
        fed = [list(one[1].tokens[len(one[0].held) :]) if one else [] for one in by_slot]
        counts = tuple(len(tokens) for tokens in fed)
        group = Group(lo, max(counts), counts)
        wanted: list[list[int]] | None = [[max(n - 1, 0)] for n in counts]
        params = self._params([one and one[1] for one in by_slot])
        draws: list[mx.array] = []
        sources: list[mx.array] = []
        mark: Any = None
        for step in range(max(ask.paid for _, ask in ready)):
            _, logits = self.runner.forward(group, draws[-1] if draws else fed, wanted)
            kv.commit(group, group.num_tokens)
            positions = [[len(one[1].tokens) + step] if one else [0] for one in by_slot]
            drawn, source = self._sampler.propose(logits, params, positions)
            draws.append(drawn)
            sources += [] if source is None else [source]
            mark = kv.hold() if step == 0 else mark
            mx.async_eval(drawn, kv.arrays())
            group = Group(lo, 1, tuple(int(one is not None and one[1].paid > step + 1) for one in by_slot))
            wanted = None
        guesses: Any = mx.concatenate(draws, axis=1).tolist()
        if self.runner.recurrent:
            kv.give_back(mark)
        chances = mx.concatenate(sources, axis=1) if sources else None
        return {
            one[0].request.id: self._draft(*one, guesses[i], None if chances is None else chances[i])
            for i, one in enumerate(by_slot)
            if one is not None
        }

    def _draft(self, row: _Row, ask: DraftAsk, guess: list[int], chances: mx.array | None) -> Draft:
        """The row's draft; what it was fed for that is in its KV."""
        row.held += ask.tokens[len(row.held) :]
        row.num_known = len(row.held)
        if not self.runner.recurrent:  # all but the last guess were fed
            row.held += guess[: ask.paid - 1]
        return Draft(self._known(guess[: ask.paid]), "model", _CHANCE, chances=chances)

    def _known(self, guess: Sequence[int]) -> list[int]:
        """Up to the first token that the target's vocabulary lacks."""
        unknown = (i for i, token in enumerate(guess) if token >= self._vocab_size)
        return list(guess[: next(unknown, len(guess))])
