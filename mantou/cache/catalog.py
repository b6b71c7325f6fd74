"""What the SSD tier holds, in memory: which files there are, how prompts reach them, which goes next. Opens no file.

Not thread-safe: its owner holds a lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mantou.cache import blocks
from mantou.cache.blocks import Span, Tokens, common_length
from mantou.cache.encoding import COLUMNS, STATE, Label


@dataclass(slots=True, eq=False)
class Entry:
    """One file. `used` orders entries by last use; it is a count and no time, so clocks may do what they like."""

    label: Label
    nbytes: int = 0
    used: int = 0

    @property
    def name(self) -> str:
        return self.label.file_name


@dataclass(frozen=True, slots=True)
class Chain:
    """The longest prefix on disk: files of contiguous columns that reach `num_tokens`, and the state there."""

    columns: tuple[Entry, ...] = ()
    state: Entry | None = None
    num_tokens: int = 0

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self.columns if self.state is None else (*self.columns, self.state)


@dataclass(slots=True)
class Catalog:
    nbytes: int = 0
    _entries: OrderedDict[str, Entry] = field(default_factory=OrderedDict)  # the least recently used first
    _children: dict[bytes, dict[str, Entry]] = field(
        default_factory=dict
    )  # parent address -> entries by name
    _clock: int = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def add(self, entry: Entry) -> None:
        """The newest. An entry of the same name is replaced."""
        self.remove(entry)
        self._entries[entry.name] = entry
        self._children.setdefault(entry.label.parent, {})[entry.name] = entry
        self.nbytes += entry.nbytes
        self._clock = max(self._clock, entry.used)

    def remove(self, entry: Entry) -> None:
        held = self._entries.pop(entry.name, None)
        if held is None:
            return
        self.nbytes -= held.nbytes
        siblings = self._children[held.label.parent]
        del siblings[held.name]
        if not siblings:
            del self._children[held.label.parent]

    def oldest(self) -> Entry | None:
        return next(iter(self._entries.values()), None)

    def touch(self, deepest_first: Iterable[Entry]) -> list[Entry]:
        """Records a use. A parent is more recent than its children, so that the oldest entry ends its prompt."""
        touched = [entry for entry in deepest_first if entry.name in self._entries]
        for entry in touched:
            self._clock += 1
            entry.used = self._clock
            self._entries.move_to_end(entry.name)
        return touched

    def above(self, entry: Entry) -> list[Entry]:
        """The entries of the whole blocks before, deepest first, as far as they are there."""
        found: list[Entry] = []
        parent = entry.label.parent
        while (held := self._entries.get(f"{parent.hex()}.{COLUMNS}.safetensors")) is not None:
            found.append(held)
            parent = held.label.parent
        return found

    def covering(self, span: Span) -> Entry | None:
        """Columns of this block that reach at least as far."""
        exact = self._entries.get(f"{span.address.hex()}.{COLUMNS}.safetensors")
        if exact is not None or len(span.tokens) == blocks.BLOCK:
            return exact
        return next((e for e in self._columns(span.parent) if begins(e.label.tokens, span.tokens)), None)

    def covered_by(self, entry: Entry) -> list[Entry]:
        """Shorter columns of the same block, which the entry makes useless."""
        return [
            other
            for other in self._columns(entry.label.parent)
            if other is not entry and begins(entry.label.tokens, other.label.tokens)
        ]

    def find(self, spans: Sequence[Span], limit: int, *, recurrent: bool) -> Chain:
        """The longest prefix of at most `limit` tokens; for recurrent models one that ends with a stored state."""
        columns: list[Entry] = []
        reached, state = 0, None
        for span in spans:
            whole = self._entries.get(f"{span.address.hex()}.{COLUMNS}.safetensors")
            best = whole or max(
                self._columns(span.parent),
                key=lambda e: common_length(e.label.tokens, span.tokens),
                default=None,
            )
            shared = common_length(best.label.tokens, span.tokens) if best else 0
            if best is None or not shared:
                break
            columns.append(best)
            reached = span.lo + shared
            deepest = self._deepest_state(span, min(reached, limit)) if recurrent else None
            state = deepest or state
            if shared < blocks.BLOCK:
                break
        num_tokens = min(reached, limit)
        if recurrent:
            num_tokens = state.label.hi if state else 0
        return Chain(tuple(e for e in columns if e.label.lo < num_tokens), state, num_tokens)

    def _columns(self, parent: bytes) -> list[Entry]:
        return [e for e in self._children.get(parent, {}).values() if e.label.kind == COLUMNS]

    def _deepest_state(self, span: Span, limit: int) -> Entry | None:
        found = [
            entry
            for entry in self._children.get(span.parent, {}).values()
            if entry.label.kind == STATE
            and entry.label.hi <= limit
            and begins(span.tokens, entry.label.tokens)
        ]
        return max(found, key=lambda entry: entry.label.hi, default=None)

    def longest(self) -> int:
        """Tokens of the longest prefix that is complete on disk."""
        by_length = sorted(
            (e for e in self._entries.values() if e.label.kind == COLUMNS), key=lambda e: -e.label.hi
        )
        complete = (e for e in by_length if sum(len(a.label.tokens) for a in self.above(e)) == e.label.lo)
        return next((entry.label.hi for entry in complete), 0)

    def check_integrity(self) -> None:
        """Raises AssertionError if the books disagree."""
        assert self.nbytes == sum(entry.nbytes for entry in self)
        listed = {name for children in self._children.values() for name in children}
        assert listed == set(self._entries)
        assert all(entry.used <= self._clock for entry in self)


def begins(tokens: Tokens, start: Tokens) -> bool:
    return len(start) <= len(tokens) and bool(np.array_equal(tokens[: len(start)], start))
