"""Providers made of providers: the kind a request asks for, the first that has a guess, only as wide as pays.

Knows no model and no way to guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from math import log

from mantou.data import Draft, DraftAsk, Request
from mantou.protocols import DraftProvider, Forwarded
from mantou.spec.cost import StepCosts

OFF = "off"
_PRIOR_WEIGHT = 1.5  # right tokens' worth of trust in a provider's own estimate
_FADE = 0.92  # of what a row's earlier rounds weigh
_MOST_CHANCE = 0.98
_LEAST_GAIN = 1.02  # what a draft must promise over none: estimates are noisy, and a rejected draft is a loss
_LEAST_KEPT = 0.8  # of its speed without drafts, that no row must be expected to fall below for others
_LONGEST_REST = 64  # steps
_PAID_CHANCE = 0.7  # of a paid guess, before any was seen
_GOOD_CHANCE = 0.9
_DEAR_PADDING = 0.5  # of a token's cost
_CHANCES = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)  # that a draft's last token is right
_NO_DRAFT = Draft()


def _wants_hidden(providers: Sequence[DraftProvider]) -> bool:
    return any(provider.wants_hidden for provider in providers)


class ByKind:
    """Each request's own kind of draft, or the server's."""

    def __init__(self, kinds: Mapping[str, DraftProvider], default: str) -> None:
        self._kinds = dict(kinds)
        self._default = default
        self.wants_hidden = _wants_hidden(list(kinds.values()))

    def _of(self, request: Request) -> DraftProvider:
        kind = request.speculation.kind
        return self._kinds[self._default if kind is None else kind]

    def width(self, request: Request, tokens: Sequence[int]) -> int:
        return self._of(request).width(request, tokens)

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Draft]:
        drafts: list[Draft] = [_NO_DRAFT] * len(asks)
        for provider in self._kinds.values():
            mine = [i for i, ask in enumerate(asks) if self._of(ask.request) is provider]
            if mine:
                for i, draft in zip(mine, provider.propose([asks[i] for i in mine]), strict=True):
                    drafts[i] = draft
        return drafts

    def cost_s(self, request: Request, num_rows: int, width: int) -> float:
        return self._of(request).cost_s(request, num_rows, width)

    def observe(self, request: Request, draft: Draft, taken: Sequence[int]) -> None:
        self._of(request).observe(request, draft, taken)

    def absorb(self, forwarded: Forwarded) -> None:
        """Shows each provider its own rows."""
        for provider in self._kinds.values():
            if provider.wants_hidden:
                mine = [r if r is not None and self._of(r) is provider else None for r in forwarded.requests]
                if any(mine):
                    provider.absorb(replace(forwarded, requests=mine))

    def timed(self, num_tokens: Sequence[int], num_held: int, seconds: float) -> None:
        for provider in self._kinds.values():
            provider.timed(num_tokens, num_held, seconds)

    def release(self, request: Request) -> None:
        self._of(request).release(request)


class FirstOf:
    """The first provider that has a guess for a row; the later ones are only asked for the rows that are left."""

    def __init__(self, *providers: DraftProvider) -> None:
        self._providers = providers
        self.wants_hidden = _wants_hidden(providers)

    def width(self, request: Request, tokens: Sequence[int]) -> int:
        return max(provider.width(request, tokens) for provider in self._providers)

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Draft]:
        drafts: list[Draft] = [_NO_DRAFT] * len(asks)
        left = list(range(len(asks)))
        for provider in self._providers:
            mine: list[int] = []
            narrowed: list[DraftAsk] = []
            for i in left:
                width = min(asks[i].width, provider.width(asks[i].request, asks[i].tokens))
                if width > 0:
                    mine.append(i)
                    narrowed.append(replace(asks[i], width=width))
            if narrowed:
                for i, draft in zip(mine, provider.propose(narrowed), strict=True):
                    drafts[i] = draft
            left = [i for i in left if not drafts[i]]
        return drafts

    def cost_s(self, request: Request, num_rows: int, width: int) -> float:
        return sum(provider.cost_s(request, num_rows, width) for provider in self._providers)

    def observe(self, request: Request, draft: Draft, taken: Sequence[int]) -> None:
        for provider in self._providers:
            provider.observe(request, draft, taken)

    def absorb(self, forwarded: Forwarded) -> None:
        for provider in self._providers:
            if provider.wants_hidden:
                provider.absorb(forwarded)

    def timed(self, num_tokens: Sequence[int], num_held: int, seconds: float) -> None:
        for provider in self._providers:
            provider.timed(num_tokens, num_held, seconds)

    def release(self, request: Request) -> None:
        for provider in self._providers:
            provider.release(request)


@dataclass(slots=True)
class _Counts:
    """How the guesses of one sort fared for a row, against what the one who guessed thought; faded round by round."""

    right: float = 0.0
    expected: float = 0.0

    def acceptance(self, chance: float) -> float:
        """The guesser's `chance`, corrected by how it was mistaken for this row so far."""
        return min(chance * (self.right + _PRIOR_WEIGHT) / (self.expected + _PRIOR_WEIGHT), _MOST_CHANCE)

    def judge(self, right: int, wrong: int, chance: float) -> None:
        if right + wrong:
            self.right = self.right * _FADE + right
            self.expected = self.expected * _FADE + chance * (right + wrong)


@dataclass(slots=True)
class _Rest:
    """Steps without an attempt, twice as many after each that did not pay."""

    left: int = 0
    following: int = 1

    def begin(self) -> None:
        self.left = self.following
        self.following = min(self.following * 2, _LONGEST_REST)

    def step(self) -> None:
        self.left = max(self.left - 1, 0)


@dataclass(slots=True)
class _Row:
    free: _Counts = field(default_factory=_Counts)
    paid: _Counts = field(default_factory=_Counts)
    whole: Draft = _NO_DRAFT  # its last guess before it was cut
    paid_rest: _Rest = field(default_factory=_Rest)  # from guesses that take time

    @property
    def acceptance(self) -> float:
        """Of `whole`."""
        counts = self.free if self.whole.free else self.paid
        return counts.acceptance(self.whole.chance)


def expected_tokens(acceptance: float, width: int) -> float:
    """Tokens that a row with a draft of `width` takes in a step: 1 + a + a^2 + ... + a^width."""
    if acceptance >= 1:
        return width + 1.0
    return (1 - acceptance ** (width + 1)) / (1 - acceptance)


def num_likely(acceptance: float, chance: float) -> int:
    """How many tokens of a guess are all right with a probability of at least `chance`; acceptance < 1."""
    return int(log(chance) / log(acceptance)) if acceptance >= chance else 0


class AdaptiveWidth:
    """Cuts drafts to the widths that give most tokens a second, 0 where every width loses, and where a row that guesses
    nothing would wait much longer for its token than on its own.

    A forward is as wide as its widest row, so the widths are chosen for all rows together, from the measured cost of a
    step and each row's acceptance. What was guessed but cut still teaches how good the guesses are. Guesses that take
    time are only asked for where they would pay, and tried again now and then where good ones would.

    `pause`: steps without any guess after one in which none paid, for devices whose pipeline a guess interrupts. It is
    one for all rows, because many of them together may pay where one does not.
    """

    def __init__(self, inner: DraftProvider, costs: StepCosts, *, pause: int = 0) -> None:
        self._inner = inner
        self._pause = pause
        self._paused = 0  # steps left
        self._costs = costs
        self._rows: dict[str, _Row] = {}
        self._num_rows = 1  # of the last decode step
        self.wants_hidden = inner.wants_hidden

    def width(self, request: Request, tokens: Sequence[int]) -> int:
        return 0 if self._paused else self._inner.width(request, tokens)

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Draft]:
        rows = [self._rows.setdefault(ask.request.id, _Row()) for ask in asks]
        paid = self._paid_widths(asks, rows)
        priced = [replace(ask, paid_width=width) for ask, width in zip(asks, paid, strict=True)]
        for row, draft in zip(rows, self._inner.propose(priced), strict=True):
            row.whole = draft
        widths = self._best_widths(rows)
        self._paused = 0 if any(widths) else self._pause
        return [
            replace(row.whole, tokens=row.whole.tokens[:width]) if width else _NO_DRAFT
            for row, width in zip(rows, widths, strict=True)
        ]

    def _paid_widths(self, asks: Sequence[DraftAsk], rows: Sequence[_Row]) -> Sequence[int]:
        """How far guesses that take time are to go: as far as pays for all rows that may have them, since one more row
        costs a guess little, and a guess for few rows is dear."""
        able = [self._inner.cost_s(ask.request, 1, ask.width) > 0 for ask in asks]
        asking, theirs = list(compress(asks, able)), list(compress(rows, able))
        if not any(row.paid_rest.left == 0 for row in theirs):
            return [0] * len(asks)
        best = self._paying(asking, [row.paid.acceptance(_PAID_CHANCE) for row in theirs])
        if not best:
            for row in theirs:
                row.paid_rest.begin()
            # One guess shows whether they have become better; it pays where good ones would.
            best = min(self._paying(asking, [_GOOD_CHANCE] * len(theirs)), 1)
        return [min(best, ask.width) if one else 0 for ask, one in zip(asks, able, strict=True)]

    def _paying(self, asks: Sequence[DraftAsk], acceptances: Sequence[float]) -> int:
        num_rows = max(self._num_rows, len(asks))
        plain_s = self._costs.seconds(num_rows, 1)
        best, rate = 0, num_rows * _LEAST_GAIN / plain_s
        for width in range(1, max(ask.width for ask in asks) + 1):
            guesses = [(a, min(width, ask.width)) for a, ask in zip(acceptances, asks, strict=True)]
            guessing_s = max(self._inner.cost_s(ask.request, num_rows, width) for ask in asks)
            gain = self._gain(plain_s, num_rows, guesses, guessing_s)
            if gain > rate:
                best, rate = width, gain
        return best

    def _best_widths(self, rows: Sequence[_Row]) -> Sequence[int]:
        """The cuts of this step's drafts."""
        num_rows = max(self._num_rows, len(rows))
        acceptances = [row.acceptance for row in rows]
        lengths = [len(row.whole) for row in rows]
        best: Sequence[int] = [0] * len(rows)
        plain_s = self._costs.seconds(num_rows, 1)
        rate = num_rows * _LEAST_GAIN / plain_s
        for widths in self._cuts(list(zip(lengths, acceptances, strict=True))):
            gain = self._gain(plain_s, num_rows, list(zip(acceptances, widths, strict=True)))
            if gain > rate:
                best, rate = widths, gain
        return best

    def _gain(
        self,
        plain_s: float,
        num_rows: int,
        guesses: Sequence[tuple[float, int]],
        guessing_s: float = 0.0,
    ) -> float:
        """Tokens a second of a step in which some rows have a guess of (acceptance, width); 0 where one of the rows
        would lose too much of its own speed. `plain_s`: of a step without guesses."""
        num_plain = num_rows - len(guesses)
        tokens = [1.0] * num_plain + [expected_tokens(*guess) for guess in guesses]
        fed = self._costs.width_of([1] * num_plain + [1 + width for _, width in guesses])
        seconds = self._costs.seconds(num_rows, fed) + guessing_s
        kept = min(tokens) * plain_s / seconds
        return sum(tokens) / seconds if kept > _LEAST_KEPT else 0.0

    def _cuts(self, guesses: Sequence[tuple[int, float]]) -> Iterator[Sequence[int]]:
        """Widths for guesses of (length, acceptance). Where a row costs as much as the widest one, all are cut alike.
        Where it costs what it feeds, each is cut where its next token becomes too unlikely."""
        if self._costs.padding > _DEAR_PADDING:
            for width in range(1, max((length for length, _ in guesses), default=0) + 1):
                yield [min(width, length) for length, _ in guesses]
        else:
            best = max((acceptance for _, acceptance in guesses), default=0.0)
            last: Sequence[int] = ()
            for chance in _CHANCES:
                if chance > best:
                    continue  # nobody's
                widths = [min(num_likely(acceptance, chance), length) for length, acceptance in guesses]
                if widths != last:
                    yield widths
                last = widths

    def cost_s(self, request: Request, num_rows: int, width: int) -> float:
        return self._inner.cost_s(request, num_rows, width)

    def observe(self, request: Request, draft: Draft, taken: Sequence[int]) -> None:
        row = self._rows.setdefault(request.id, _Row())
        row.paid_rest.step()
        whole, row.whole = row.whole, _NO_DRAFT
        right, wrong = whole.judge(taken)
        (row.free if whole.free else row.paid).judge(right, wrong, whole.chance)
        if right and draft:
            row.paid_rest.following = 1
        self._inner.observe(request, whole or draft, taken)

    def absorb(self, forwarded: Forwarded) -> None:
        self._inner.absorb(forwarded)

    def timed(self, num_tokens: Sequence[int], num_held: int, seconds: float) -> None:
        self._num_rows = len(num_tokens)
        self._paused = max(self._paused - 1, 0)
        self._costs.observe(num_tokens, num_held, seconds)
        self._inner.timed(num_tokens, num_held, seconds)

    def release(self, request: Request) -> None:
        self._rows.pop(request.id, None)
        self._inner.release(request)
