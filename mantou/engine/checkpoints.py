"""When an answer in progress is saved, and how a repeat of its request takes it up. Knows no files and no scheduling.

A repeat waits until the store has said what is left of the run before it, and then for the KV of prompt and answer. The
saved tokens become known tokens of the row, so it goes on at the same position with the same noise, and whatever KV is
missing is computed like a prompt's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, fields, is_dataclass
from typing import Any

import numpy as np

from mantou import __version__
from mantou.data import GenerationCheckpoint, Request
from mantou.engine.prefix import Prefix
from mantou.engine.roster import Roster
from mantou.engine.sequence import Sequence
from mantou.protocols import CacheKey, CheckpointStore, Claim, Ticket

_NOT_ASKED = ("id", "session", "boundaries")  # who asks, and what follows from the prompt
_MASK64 = (1 << 64) - 1


def identity(request: Request, key: CacheKey) -> bytes:
    """Equal for requests of which one's answer may stand for the other's: all that was asked, under one CacheKey."""
    asked = {
        f.name: getattr(request, f.name) for f in fields(request) if f.name not in (*_NOT_ASKED, "prompt")
    }
    asked["sampling"] = asdict(request.sampling)
    if not request.seeded:
        del asked["sampling"]["seed"]
    text = json.dumps([_plain(asked), asdict(key)])
    # Another version may draw, or read a grammar, in another way.
    digest = hashlib.sha256(f"mantou {__version__} generation\n{text}\n".encode())
    digest.update(np.asarray(request.prompt, "<i8").tobytes())
    return digest.digest()


def _plain(value: Any) -> Any:
    """JSON types, the same in every process."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, AbstractSet):
        return sorted(_plain(item) for item in value)
    if isinstance(value, Mapping):
        return [[_plain(name), _plain(item)] for name, item in value.items()]
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value


class _Chain:
    """`Ticket`: first the claim's answer, then what `follow` starts on the model thread, which asks for `ready`."""

    def __init__(self, claim: Claim, follow: Callable[[], Ticket | None]) -> None:
        self._claim = claim
        self._follow = follow
        self._followed = False
        self._next: Ticket | None = None

    @property
    def ready(self) -> bool:
        if not self._claim.ready:
            return False
        if not self._followed:
            self._followed = True
            self._next = self._follow()
        return self._next is None or self._next.ready

    def close(self) -> None:
        self._followed = True
        if self._next is not None:
            self._next.close()


class Checkpoints:
    def __init__(self, store: CheckpointStore, prefix: Prefix, roster: Roster) -> None:
        self._store = store
        self._prefix = prefix
        self._roster = roster

    def find(self, sequence: Sequence, wake: Callable[[], None]) -> None:
        """Starts to look for an interrupted run of the request, and for the KV, while it waits."""
        if not self._store.every:
            sequence.ticket = self._prefix.prefetch(sequence, wake)
            return
        request = sequence.request
        sequence.identity = identity(request, self._prefix.key(request))
        sequence.claim = claim = self._store.claim(sequence.identity, request.sampling.seed, wake)
        sequence.ticket = _Chain(claim, lambda: self._follow(sequence, claim, wake))

    def _follow(self, sequence: Sequence, claim: Claim, wake: Callable[[], None]) -> Ticket | None:
        tickets: list[Ticket] = []

        def begin() -> None:
            if claim.found is not None:
                sequence.take_up(claim.found)
            tickets.append(self._prefix.prefetch(sequence, wake))

        self._roster.own_fault(sequence, begin)
        return tickets[0] if tickets else None

    def admit(self, sequence: Sequence) -> None:
        """The row begins: says again what the interrupted run had said."""
        if sequence.claim is None:
            return
        if sequence.identity != identity(sequence.request, self._prefix.key(sequence.request)):
            # An adapter's content has changed while the request waited. What was found is another request's now, and
            # so would be what is saved.
            sequence.release_claim()
            sequence.forget_answer()
        elif sequence.claim.found is not None:
            tokens = tuple(sequence.tokens[sequence.num_prompt :])
            sequence.advance_constraint(tokens)
            self._roster.emit(sequence, tokens, sequence.claim.found.logprobs[: len(tokens)], None)

    def save_progress(self, running: Iterable[Sequence]) -> None:
        """Saves the rows that have come far enough since the last time, their KV first."""
        every = self._store.every
        if not every:
            return
        for row in running:
            if row.finish is None and row.claim is not None and row.num_generated - row.num_saved >= every:
                self._prefix.publish_little(row)
                seed, tokens = row.request.sampling.seed & _MASK64, tuple(row.tokens[row.num_prompt :])
                row.claim.save(GenerationCheckpoint(seed, tokens, tuple(row.logprobs)))
                row.num_saved = row.num_generated
