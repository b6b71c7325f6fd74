"""A fake for each seam of protocols.py: small, deterministic, honest about the contract."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mantou.cache.none import NoStore
from mantou.data import Draft, DraftAsk, Request, TokenEvent
from mantou.protocols import CacheKey, Hit, RowKV
from mantou.spec.none import NoDraft


class Inbox:
    """A mailbox that keeps everything."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self.wakeups = 0

    def put(self, events: Sequence[TokenEvent]) -> None:
        self.wakeups += 1
        self.events.extend(events)


class NoisyOracle(NoDraft):
    """Proposes a row's known continuation, each token right with probability `rate`: rows accept differently."""

    def __init__(
        self, continuations: dict[str, Sequence[int]], rate: float, vocab: int, width: int = 5
    ) -> None:
        self.continuations, self.rate, self.vocab, self._width = continuations, rate, vocab, width
        self.accepted: list[int] = []

    def width(self, request: Request, tokens: Sequence[int]) -> int:
        return self._width if request.id in self.continuations else 0

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Draft]:
        return [self._guess(ask.request, len(ask.tokens), ask.width) for ask in asks]

    def _guess(self, request: Request, num_tokens: int, width: int) -> Draft:
        done = num_tokens - len(request.prompt)
        dice = random.Random(f"{request.id}{done}")
        right = self.continuations[request.id][done : done + dice.randint(0, width)]
        return Draft([t if dice.random() < self.rate else (t + 1) % self.vocab for t in right], "oracle")

    def observe(self, request: Request, draft: Draft, taken: Sequence[int]) -> None:
        self.accepted.append(draft.judge(taken)[0])


class DictStore(NoStore):
    """Whole sequences in a dict; only exact stored prefixes match, so it serves every layout."""

    wants = True

    def __init__(self) -> None:
        self.entries: dict[tuple[CacheKey, tuple[int, ...]], Hit] = {}
        self.hits = 0

    def match(self, key: CacheKey, tokens: Sequence[int], session: str | None = None) -> Hit | None:
        for length in range(len(tokens) - 1, 0, -1):
            found = self.entries.get((key, tuple(tokens[:length])))
            if found is not None:
                self.hits += 1
                return found
        return None

    def put(self, key: CacheKey, tokens: Sequence[int], row: RowKV, session: str | None = None) -> None:
        size = len(tokens)
        cuts = [0, size // 2, size] if size > 1 else [0, size]  # two pieces, so that joining them is tested
        pieces = tuple(row.columns(lo, hi) for lo, hi in itertools.pairwise(cuts))
        if [piece.lo for piece in pieces] == cuts[:-1]:
            self.entries[key, tuple(tokens)] = Hit(size, pieces, row.state())

    def shrink(self, nbytes: int) -> int:
        self.entries.clear()
        return 0


def packed(allowed: Any) -> np.ndarray:
    """bool[V] -> the mask of a Constraint."""
    return np.packbits(np.asarray(allowed, bool), bitorder="little")


def unpacked(mask: Any, num_tokens: int | None = None) -> np.ndarray:
    """The mask of a Constraint -> bool[num_tokens], or of all that have a bit."""
    return np.unpackbits(mask, count=num_tokens, bitorder="little").astype(bool)


def allows(mask: Any, token: int) -> bool:
    return token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1)


class Modulo:
    """A constraint: after n tokens only tokens with token % modulus == n % modulus are allowed."""

    def __init__(self, vocab: int, modulus: int = 3) -> None:
        self.vocab, self.modulus, self.advanced = vocab, modulus, 0

    def mask(self) -> np.ndarray:
        return packed(np.arange(self.vocab) % self.modulus == self.advanced % self.modulus)

    def advance(self, token: int) -> None:
        assert token % self.modulus == self.advanced % self.modulus, "a forbidden token came through"
        self.advanced += 1

    def rewind(self, num_tokens: int) -> None:
        self.advanced -= num_tokens

    def forced(self) -> Sequence[int]:
        return ()


class Forced(Modulo):
    """A constraint that leaves a choice for four tokens in seven; the other three are certain."""

    def _certain(self, place: int) -> int | None:
        return (13 * place + 5) % self.vocab if place % 7 in (2, 3, 4) else None

    def mask(self) -> np.ndarray:
        token = self._certain(self.advanced)
        if token is None:
            return super().mask()
        return packed(np.arange(self.vocab) == token)

    def advance(self, token: int) -> None:
        assert allows(self.mask(), token), "a forbidden token came through"
        self.advanced += 1

    def forced(self) -> Sequence[int]:
        found: list[int] = []
        while (token := self._certain(self.advanced + len(found))) is not None:
            found.append(token)
        return found


class Exploding:
    """A constraint that raises after `after` tokens."""

    def __init__(self, after: int) -> None:
        self.left = after

    def mask(self) -> None:
        return None

    def advance(self, token: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("planted fault")

    def rewind(self, num_tokens: int) -> None:
        self.left += num_tokens

    def forced(self) -> Sequence[int]:
        return ()


class ConstraintsFor:
    """Makes constraints by request id."""

    def __init__(self, makers: dict[str, Callable[[], Any]]) -> None:
        self.makers = makers

    def make(self, request: Request) -> Any | None:
        maker = self.makers.get(request.id)
        return maker() if maker else None
