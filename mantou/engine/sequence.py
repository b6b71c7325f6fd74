"""A request's mutable state, all of it. Only the model thread changes one. Knows no arrays.

tokens   |p p p p p p p p|g g g g|          known to the host: prompt, then generated
num_kv   |###############|###                in the KV
pending                       |.|            to be fed: 1 while decoding, more while prefilling
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from mantou.data import FinishReason, Request, Usage
from mantou.protocols import CacheKey, Constraint, Load, Ticket


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    limit: int  # most tokens it may generate: max_tokens or the room left in the context
    tokens: list[int] = field(default_factory=list)
    num_kv: int = 0
    num_cached: int = 0
    num_inflight: int = 0  # tokens drawn on the device that the host has not read yet
    num_published: int = 0  # tokens whose KV the prefix store has seen
    cache_key: CacheKey | None = None
    ticket: Ticket | None = None  # its prefix on the way from a slow tier
    slot: int = -1
    eos_token: int | None = None  # the token that ended it; not part of `tokens`
    finish: FinishReason | None = None
    ended: bool = False  # its last event is out
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        return len(self.tokens) + self.num_inflight - self.num_kv

    @property
    def num_left(self) -> int:
        return self.limit - self.num_generated - self.num_inflight

    @property
    def decoding(self) -> bool:
        return self.slot >= 0 and self.num_pending == 1

    @property
    def ready(self) -> bool:
        """Whether it may be admitted: nothing worth waiting for is on its way."""
        return self.ticket is None or self.ticket.ready

    def load(self) -> Load:
        return Load(self.id, self.slot, self.num_pending, self.num_left)

    def next_tokens(self, num_tokens: int) -> list[int]:
        """The known tokens it feeds next."""
        return self.tokens[self.num_kv : self.num_kv + num_tokens]

    @property
    def held(self) -> list[int]:
        """The tokens whose KV the row holds; the one that ended it may be among them."""
        ended = [] if self.eos_token is None else [self.eos_token]
        return [*self.tokens, *ended][: self.num_kv]

    def extend(self, drawn: Tokens[int]) -> list[int]:
        """Takes drawn tokens up to EOS or the limit; sets `finish` there. Returns the tokens to emit (no EOS)."""
        emitted: list[int] = []
        for token in drawn:
            if token in self.request.eos:
                self.eos_token = token
                self.finish = "stop"
                break
            self.tokens.append(token)
            emitted.append(token)
            if self.num_generated >= self.limit:
                self.finish = "length"
                break
        return emitted

    def close_ticket(self) -> None:
        if self.ticket is not None:
            self.ticket.close()
            self.ticket = None

    def advance_constraint(self, tokens: Tokens[int]) -> None:
        if self.constraint is not None:
            for token in tokens:
                self.constraint.advance(token)

    @property
    def num_eos(self) -> int:
        return int(self.eos_token is not None)

    def usage(self) -> Usage:
        return Usage(self.num_prompt, self.num_generated + self.num_eos, self.num_cached)
