"""Drafts over the KV of the model itself: all rows' guesses from its keys and values and each row's last hidden state.

A drafter that keeps nothing has nothing to cut, to store or to restore: a row that goes on from a stored prefix feeds
at least one token, and that forward brings its hidden state.

    tokens  t0 .. t(n-2)  t(n-1)      the KV of the model holds n - 1 tokens, h(n-2) drew t(n-1)
                          [t(n-1); h(n-2)] -> guess, h' -> [guess; h'] -> guess ...
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from mantou.data import Draft, DraftAsk, Request
from mantou.protocols import Forwarded, Group, KVLender
from mantou.spec.heads.assistant import Assistant, Context
from mantou.spec.heads.drawing import GraphDraft


@dataclass(frozen=True, slots=True)
class _Last:
    """The hidden state [row, column] of a row's newest token; `num_held` tokens are in the KV with it."""

    forwarded: Forwarded
    row: int
    column: int
    num_held: int


class DonorDraft(GraphDraft[Assistant, _Last]):
    """The provider."""

    wants_hidden = True

    @classmethod
    def link_s(cls, graph: Assistant, rows: int, pairs: int, width: int) -> float:
        """See HeadDraft. It takes one pair at a time, and keeps none."""
        return graph.link_s(rows)

    # ------------------------------------------------------------------ what the engine asks
    def absorb(self, forwarded: Forwarded) -> None:
        for i, request in enumerate(forwarded.requests):
            kept = forwarded.kept[i]
            if request is not None and kept and self.width(request, ()):
                self._rows[request.id] = _Last(forwarded, i, kept - 1, forwarded.starts[i] + kept)

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Draft]:
        ready: list[tuple[_Last, DraftAsk]] = []
        for ask in asks:
            last = self._rows.get(ask.request.id)
            if ask.paid > 0 and last is not None and last.num_held == len(ask.tokens) - 1:
                ready.append((last, ask))
        found: dict[str, Draft] = {}
        if ready:
            started = time.perf_counter()
            found = self._chain(ready, ready[0][0].forwarded.kv)
            self._learn_cost([ask for _, ask in ready], started)
        return [found.get(ask.request.id, Draft()) for ask in asks]

    def release(self, request: Request) -> None:
        self._rows.pop(request.id, None)

    def _plain_cost(self, num_rows: int, width: int) -> float:
        return width * self._costs.seconds(num_rows, 1)

    # ------------------------------------------------------------------ drafts
    def _chain(self, ready: Sequence[tuple[_Last, DraftAsk]], kv: KVLender) -> dict[str, Draft]:
        lo, hi = min(ask.slot for _, ask in ready), max(ask.slot for _, ask in ready) + 1
        by_slot: list[tuple[_Last, DraftAsk] | None] = [None] * (hi - lo)
        for last, ask in ready:
            by_slot[ask.slot - lo] = (last, ask)
        seen = kv.look(Group(lo, 1, tuple(int(one is not None) for one in by_slot)), self.graph.donors)
        context = Context(seen, mx.array(kv.lengths[lo:hi], mx.int32))
        token = mx.array([[one[1].tokens[-1] if one else 0] for one in by_slot], mx.int32)
        hidden = _hidden(by_slot)
        drawn: list[mx.array] = []
        sure: list[mx.array] = []
        sources: list[mx.array] = []
        for step in range(max(ask.paid for _, ask in ready)):
            features, hidden = self.graph(token, hidden, context)
            logits = self.graph.logits(features)
            token, source = self._draw(logits, by_slot, step)
            drawn.append(token)
            sure.append(mx.exp(mx.max(logits, axis=-1) - mx.logsumexp(logits, axis=-1)).astype(mx.float32))
            sources += [] if source is None else [source]
        tokens, chances = mx.concatenate(drawn, axis=1), mx.concatenate(sure, axis=1)
        mx.eval(tokens, chances)
        guesses, odds = cast(Any, tokens.tolist()), cast(Any, chances.tolist())
        source = mx.concatenate(sources, axis=1) if sources else None
        return {
            one[1].request.id: self._draft(one[1], guesses[i], odds[i], source, i)
            for i, one in enumerate(by_slot)
            if one is not None
        }


def _hidden(by_slot: Sequence[tuple[_Last, DraftAsk] | None]) -> mx.array:
    """[B, 1, D] of the rows' newest tokens, anything for idle slots; in one copy where one forward brought them all."""
    rows = [one[0] for one in by_slot if one]
    forwarded = rows[0].forwarded
    if all(row.forwarded is forwarded for row in rows):
        where = [(one[0].row, one[0].column) if one else (0, 0) for one in by_slot]
        index, columns = (mx.array(part, mx.int32) for part in zip(*where, strict=True))
        return forwarded.hidden[index, columns][:, None]
    empty = mx.zeros_like(forwarded.hidden[:1, :1])
    return mx.concatenate([_one(one[0]) if one else empty for one in by_slot], axis=0)


def _one(last: _Last) -> mx.array:
    return last.forwarded.hidden[last.row : last.row + 1, last.column : last.column + 1]
