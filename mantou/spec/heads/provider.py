"""A draft head for all rows at once, with its own KV batch. Knows token ids and hidden states; no head by name.

Place i of a row's KV is the pair of token t[i + 1] and the hidden state h[i] from which the model drew it. Only pairs
with true hidden states stay: what the head made of its own estimates is cut off before the next draft.

true pairs   |##########|              in the KV
sources                 |..|           hidden states that came since, to be fed with the next draft
draft                      |~~~|       pairs of guessed tokens and estimated states, forgotten afterwards

A restored prefix brings no hidden states. Its pairs are a companion in the same prefix store. The last of them may
be missing, because it needs the token that comes after the prefix: then the next hidden state stands in for its own.
Without a companion the row's first pair is where its prompt went on. Both cost acceptance, never a token.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, cast

import mlx.core as mx
import numpy as np

from mantou.data import Draft, DraftAsk, Request
from mantou.kv.batch import KVBatch, RowView
from mantou.kv.pieces import Stack, State
from mantou.protocols import CacheKey, Forwarded, Group, Ticket
from mantou.spec.heads.drawing import GraphDraft
from mantou.spec.slots import leave_slot, take_slot

_WIDE = 16  # a row with more pairs to feed than this feeds them alone, so that others are not padded to it
_BEHIND = 64  # pairs after which a row that is not asked feeds them
_GAP = 8  # missing pairs that are made up


class HeadGraph(Protocol):
    """What a kind of head computes. `features` are hidden states as the head gives and takes them."""

    kind: str
    kv: KVBatch
    vocab_size: int  # of the model that it helps
    ids: mx.array | None  # int32[N], the token of each logit; None = they are the tokens

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers whose outputs, side by side, are its hidden states; () = what the vocabulary head sees."""
        ...

    def __call__(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        """int32[B, T], [B, T, D] -> [B, T, D]: the hidden states after those tokens, over `kv.begin`'s group."""
        ...

    def logits(self, features: mx.array) -> mx.array:
        """[B, T, D] -> [B, T, N]."""
        ...


@dataclass(frozen=True, slots=True)
class _Source:
    """Hidden states [row, :count] of a forward."""

    hidden: mx.array
    row: int
    count: int

    def array(self) -> mx.array:
        return self.hidden[self.row : self.row + 1, : self.count]


@dataclass(slots=True)
class _Row:
    request: Request
    slot: int
    base: int  # position of its first pair
    num_true: int = 0  # pairs in the KV
    sources: list[_Source] = field(default_factory=list[_Source])
    num_waiting: int = 0  # pairs that these are
    num_published: int = 0
    ticket: Ticket | None = None
    tokens: Sequence[int] = ()  # as last seen

    @property
    def end(self) -> int:
        """Position of the next hidden state."""
        return self.base + self.num_true + self.num_waiting


Graph = TypeVar("Graph", bound=HeadGraph)


class HeadDraft(GraphDraft[Graph, _Row]):
    """The provider."""

    wants_hidden = True

    @classmethod
    def link_s(cls, graph: Graph, rows: int, pairs: int, width: int) -> float:
        """Seconds of one link of a chain for so many pairs of each row. Leaves no row."""
        graph.kv.resize(rows)
        hidden = mx.zeros((rows, pairs, width))
        mx.eval(hidden)
        started = time.perf_counter()
        graph.kv.begin(Group(0, pairs, (pairs,) * rows))
        features = cls._linked(graph, graph(mx.zeros((rows, pairs), mx.int32), hidden), rows)
        best = mx.argmax(graph.logits(features), axis=-1)
        mx.eval(best if graph.ids is None else graph.ids[best], graph.kv.arrays())
        graph.kv.abort()
        spent = time.perf_counter() - started
        graph.kv.resize(0)
        return spent

    @classmethod
    def _linked(cls, graph: Graph, features: mx.array, rows: int) -> mx.array:
        """What a guess is drawn from, after a forward of pairs that is still open."""
        return features[:, -1:]

    # ------------------------------------------------------------------ what the engine asks
    def absorb(self, forwarded: Forwarded) -> None:
        for i, request in enumerate(forwarded.requests):
            if request is None or not forwarded.kept[i] or not self.width(request, ()):
                continue
            row = self._rows.get(request.id) or self._join(request, forwarded.starts[i])
            if row.end != forwarded.starts[i]:  # it went on elsewhere: what is held is not what came before
                self._begin(row, forwarded.starts[i])
            row.sources.append(_Source(forwarded.hidden, i, forwarded.kept[i]))
            row.num_waiting += forwarded.kept[i]
            if row.num_waiting > _BEHIND:
                self._feed(row, request.prompt)

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Draft]:
        ready: list[tuple[_Row, DraftAsk]] = []
        try:
            for ask in asks:
                row = self._rows.get(ask.request.id)
                if row is None or row.end != len(ask.tokens) - 1 or not row.num_waiting:
                    continue
                row.tokens = ask.tokens
                if not self._settled(row):
                    continue
                if row.num_waiting > (_WIDE if ask.paid else _BEHIND):
                    self._feed(row, ask.tokens[:-1])
                if ask.paid:
                    ready.append((row, ask))
            found = self._drafts(ready) if ready else {}
        except BaseException:
            self.graph.kv.abort()
            for row in self._rows.values():
                self.graph.kv.shorten(row.slot, row.num_true)
            raise
        return [found.get(ask.request.id, Draft()) for ask in asks]

    def release(self, request: Request) -> None:
        row = self._rows.pop(request.id, None)
        if row is None:
            return
        if self._store.wants:
            self._feed(row, row.tokens)
            self._publish(row)
        if row.ticket is not None:
            row.ticket.close()
        leave_slot(self.graph.kv, row.slot, self._rows.values())

    # ------------------------------------------------------------------ rows
    def _join(self, request: Request, start: int) -> _Row:
        row = _Row(request, take_slot(self.graph.kv, self._rows.values()), start, tokens=request.prompt)
        if start:  # its prefix was restored
            row.ticket = self._store.prefetch(
                self._key_of(row), request.prompt[1:], request.session, lambda: None
            )
        self._rows[request.id] = row
        return row

    def _begin(self, row: _Row, start: int) -> None:
        """An empty row whose first pair is at `start`."""
        self.graph.kv.clear(row.slot)
        row.base, row.num_true, row.num_waiting, row.num_published = start, 0, 0, 0
        row.sources.clear()

    def _key_of(self, row: _Row) -> CacheKey:
        """A pair depends on the tokens up to its own, which is the one after it: the first is in the key."""
        return replace(self._key, model=f"{self._key.model} after {row.tokens[0]}")

    def _settled(self, row: _Row) -> bool:
        """Whether nothing is on its way to the row any more. Takes what has come."""
        if row.ticket is None:
            return True
        if not row.ticket.ready:
            return False
        # The tokens that were asked for: what a slow tier has brought for these is kept until the ticket is closed.
        hit = self._store.match(self._key_of(row), row.request.prompt[1:], row.request.session)
        row.ticket.close()
        row.ticket = None
        gap = row.base - min(hit.num_tokens, row.base) if hit is not None else row.base
        if hit is None or gap > _GAP or row.num_true or not row.sources:
            return True
        self.graph.kv.fill(row.slot, hit)
        row.num_true = row.num_published = row.base - gap
        self.graph.kv.shorten(row.slot, row.num_true)
        if gap:
            hidden = row.sources[0].array()[:, :1]
            row.sources.insert(0, _Source(mx.repeat(hidden, gap, axis=1), 0, gap))
            row.num_waiting += gap
        row.base = 0
        return True

    def _publish(self, row: _Row) -> None:
        """Offers the pairs of a row that begins at the beginning."""
        if row.base or row.ticket is not None or row.num_true <= row.num_published:
            return
        tokens = row.tokens[1 : row.num_true + 1]
        self.graph.kv.shorten(row.slot, row.num_true)
        self._store.put(self._key_of(row), tokens, _Pairs(self.graph.kv, row.slot), row.request.session)
        row.num_published = row.num_true

    def _feed(self, row: _Row, tokens: Sequence[int]) -> None:
        """Takes the row's waiting pairs into its KV, as far as `tokens` go."""
        if not self._settled(row):
            return
        first = row.base + row.num_true
        count = min(row.num_waiting, len(tokens) - 1 - first)
        if count <= 0:
            return
        hidden = _joined(row.sources)
        group = Group(row.slot, count, (count,))
        kv = self.graph.kv
        kv.shorten(row.slot, row.num_true)
        kv.begin(group)
        self.graph(mx.array([list(tokens[first + 1 : first + 1 + count])], mx.int32), hidden[:, :count])
        kv.commit(group, group.num_tokens)
        mx.async_eval(kv.arrays())
        row.num_true += count
        row.num_waiting -= count
        row.sources = [_Source(hidden[:, count:], 0, row.num_waiting)] if row.num_waiting else []

    # ------------------------------------------------------------------ drafts
    def _drafts(self, ready: Sequence[tuple[_Row, DraftAsk]]) -> Mapping[str, Draft]:
        started = time.perf_counter()
        found = self._chain(ready)
        self._learn_cost([ask for _, ask in ready], started)
        return found

    def _chain(self, ready: Sequence[tuple[_Row, DraftAsk]]) -> dict[str, Draft]:
        """One chain of forwards for all rows: what is true, then one guess each, on the device."""
        kv = self.graph.kv
        lo, hi = min(row.slot for row, _ in ready), max(row.slot for row, _ in ready) + 1
        by_slot: list[tuple[_Row, DraftAsk] | None] = [None] * (hi - lo)
        for row, ask in ready:
            by_slot[row.slot - lo] = (row, ask)
            kv.shorten(row.slot, row.num_true)
        counts = tuple(one[0].num_waiting if one else 0 for one in by_slot)
        group = Group(lo, max(counts), counts)
        tokens, hidden = _first_pairs(by_slot, group.width)
        kv.begin(group)
        features = self.graph(tokens, hidden)
        kv.commit(group, counts)
        last = mx.array([[[max(n - 1, 0)]] for n in counts])
        features = mx.take_along_axis(features, last, axis=1) if group.width > 1 else features
        for one in by_slot:
            if one is not None:
                row, _ = one
                row.num_true, row.num_waiting = row.num_true + row.num_waiting, 0
                row.sources.clear()
        guesses, chances, sources = self._guess(by_slot, lo, features)
        drafts: dict[str, Draft] = {}
        for i, one in enumerate(by_slot):
            if one is not None:
                row, ask = one
                kv.shorten(row.slot, row.num_true)
                drafts[row.request.id] = self._draft(ask, guesses[i], chances[i], sources, i)
        return drafts

    def _guess(
        self, by_slot: Sequence[tuple[_Row, DraftAsk] | None], lo: int, features: mx.array
    ) -> tuple[list[list[int]], list[list[float]], mx.array | None]:
        kv = self.graph.kv
        drawn: list[mx.array] = []
        sure: list[mx.array] = []
        sources: list[mx.array] = []
        for step in range(max(one[1].paid for one in by_slot if one)):
            if drawn:
                group = Group(lo, 1, tuple(int(one is not None and one[1].paid > step) for one in by_slot))
                kv.begin(group)
                features = self.graph(drawn[-1], features)
                kv.commit(group, group.num_tokens)
            logits = self.graph.logits(features)
            token, source = self._draw(logits, by_slot, step)
            drawn.append(token)
            sure.append(mx.exp(mx.max(logits, axis=-1) - mx.logsumexp(logits, axis=-1)).astype(mx.float32))
            sources += [] if source is None else [source]
        tokens, chances = mx.concatenate(drawn, axis=1), mx.concatenate(sure, axis=1)
        mx.eval(tokens, chances, kv.arrays())
        guesses: Any = tokens.tolist()
        return guesses, cast(Any, chances.tolist()), mx.concatenate(sources, axis=1) if sources else None


class _Pairs(RowView):
    """A row as a store sees it. The store of a hybrid model only goes on from where it has a state, so a row has one:
    a single zero, which no layer reads."""

    def state(self) -> State:
        zero = Stack(np.zeros((1, 1, 1), np.float32), "float32", ((0, 0),))
        return State(self.batch.lengths[self.slot], (zero,))


def _joined(sources: Sequence[_Source]) -> mx.array:
    parts = [source.array() for source in sources]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def _first_pairs(by_slot: Sequence[tuple[_Row, DraftAsk] | None], width: int) -> tuple[mx.array, mx.array]:
    """(tokens int32[B, width], hidden states [B, width, D]) of the rows' waiting pairs, padded with anything."""
    rows = [one[0] for one in by_slot if one]
    fed: list[list[int]] = []
    for one in by_slot:
        pairs = list(one[1].tokens[-one[0].num_waiting :]) if one else []
        fed.append(pairs + [0] * (width - len(pairs)))
    tokens = mx.array(fed, mx.int32)
    forward = rows[0].sources[0].hidden
    if all(len(row.sources) == 1 and row.sources[0].hidden is forward for row in rows):
        index = [one[0].sources[0].row if one else 0 for one in by_slot]
        hidden = forward[:, :width]
        return tokens, hidden if index == list(range(forward.shape[0])) else hidden[mx.array(index)]
    empty = mx.zeros((1, width, forward.shape[-1]), forward.dtype)
    padded = [_padded(_joined(one[0].sources), width) if one else empty for one in by_slot]
    return tokens, mx.concatenate(padded, axis=0)


def _padded(hidden: mx.array, width: int) -> mx.array:
    return mx.pad(hidden, [(0, 0), (0, width - hidden.shape[1]), (0, 0)])
