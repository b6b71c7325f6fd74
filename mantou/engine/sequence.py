"""A request's mutable state, all of it. Only the model thread changes one. Knows no arrays.

tokens   |p p p p p p p p|g g g g|          known to the host: prompt, then generated
num_kv   |###############|###                in the KV
pending                       |.|            to be fed: 1 while decoding, more while prefilling
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace

from mantou.data import (
    Draft,
    FillUsage,
    FinishReason,
    GenerationCheckpoint,
    Request,
    SpeculationUsage,
    TokenLogprobs,
    Usage,
)
from mantou.protocols import CacheKey, Claim, Constraint, Load, Ticket

FILLS = ("strict", "echo")  # drafts of these kinds are counted as fill


@dataclass(slots=True, eq=False)
class DraftCounts:
    """What drafts did for one row. `histogram[n]`: rounds of which n tokens stayed."""

    target_calls: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: list[int] = field(default_factory=list)
    injected: int = 0
    fill_calls: int = 0
    fill_accepted: int = 0
    fill_rejected: int = 0

    def add(self, draft: Draft, num_right: int) -> None:
        """One round: of the draft, `num_right` tokens stayed."""
        self.target_calls += 1
        self.tokens += num_right + 1
        if draft.kind in FILLS:
            self.fill_calls += 1
            self.injected += num_right
            if not draft.num_sure:
                self.fill_accepted += num_right
                self.fill_rejected += len(draft) - num_right
        elif draft:
            self.drafted += len(draft)
            self.accepted += num_right
            self.histogram += [0] * (num_right + 1 - len(self.histogram))
            self.histogram[num_right] += 1

    def speculation(self) -> SpeculationUsage | None:
        if not self.drafted and not self.fill_accepted:
            return None
        return SpeculationUsage(
            self.drafted, self.accepted, tuple(self.histogram), self.target_calls, self.tokens
        )

    def fill(self) -> FillUsage:
        steps = self.tokens - self.injected
        return FillUsage(self.injected, steps, self.fill_accepted, self.fill_rejected)


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    limit: int  # most tokens it may generate: max_tokens or the room left in the context
    tokens: list[int] = field(default_factory=list)
    num_kv: int = 0
    num_cached: int = 0
    num_inflight: int = 0  # tokens drawn on the device that the host has not read yet
    num_published: int = 0  # tokens whose KV the prefix store has seen
    marks: tuple[int, ...] = ()  # positions after which the store is to have the recurrent state
    cache_key: CacheKey | None = None
    ticket: Ticket | None = None  # its prefix on the way from a slow tier
    copying: Iterator[None] | None = None  # its next columns on the way to the prefix store, in parts of work
    restoring: Iterator[None] | None = (
        None  # its prefix on the way into the KV, where num_kv counts it already
    )
    slot: int = -1
    eos_token: int | None = None  # the token that ended it; not part of `tokens`
    finish: FinishReason | None = None
    ended: bool = False  # its last event is out
    constraint: Constraint | None = None
    claim: Claim | None = None  # where its answer is saved on the way
    identity: bytes = b""  # of the request that the claim was made for
    num_saved: int = 0  # generated tokens that the claim's store has seen
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of all generated tokens, if asked for
    drafts: DraftCounts = field(default_factory=DraftCounts)
    fills: bool = False  # whether fill is on, so that its usage shows

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
    def num_most(self) -> int:
        return self.num_prompt + self.limit

    @property
    def decoding(self) -> bool:
        return self.slot >= 0 and self.num_pending == 1 and self.restoring is None

    @property
    def prefilling(self) -> bool:
        return self.slot >= 0 and self.num_pending > 1 and self.restoring is None

    @property
    def ready(self) -> bool:
        """Whether it may be admitted: nothing worth waiting for is on its way."""
        return self.ticket is None or self.ticket.ready

    def load(self) -> Load:
        """While its prefix is on the way it holds its place and feeds nothing."""
        if self.restoring is not None:
            return Load(self.id, self.slot, 1, 0, self.num_most)
        return Load(self.id, self.slot, self.num_pending, self.num_left, self.num_most)

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

    def take_up(self, saved: GenerationCheckpoint) -> None:
        """Goes on from an interrupted answer, with its seed unless the caller chose one. One token is left to draw."""
        if not self.request.seeded:
            sampling = replace(self.request.sampling, seed=saved.seed)
            self.request = replace(self.request, sampling=sampling)
        self.tokens += saved.tokens[: self.limit - 1]
        self.num_saved = self.num_generated

    def forget_answer(self) -> None:
        """The answer so far was not this request's; nothing of it was said yet."""
        self.tokens, self.num_saved = list(self.request.prompt), 0

    def release_claim(self) -> None:
        if self.claim is not None:
            self.claim.release(done=self.finish in ("stop", "length"))
            self.claim = None

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
        return Usage(
            self.num_prompt,
            self.num_generated + self.num_eos,
            self.num_cached,
            speculation=self.drafts.speculation(),
            fill=self.drafts.fill() if self.fills else None,
        )
