"""Which slot of a provider's own KV batch a row has: side by side, because an idle slot costs as much as a row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from mantou.kv.batch import KVBatch


class Slotted(Protocol):
    slot: int


def slots_for(num_rows: int) -> int:
    """Slots that are allocated for rows that join one by one."""
    return 1 << max(num_rows - 1, 0).bit_length()


def take_slot(kv: KVBatch, rows: Iterable[Slotted]) -> int:
    """An empty slot beside those of `rows`."""
    taken = {row.slot for row in rows}
    slot = next(i for i in range(len(taken) + 1) if i not in taken)
    if slot >= kv.num_slots:
        kv.resize(slots_for(slot + 1))
    kv.clear(slot)
    return slot


def leave_slot(kv: KVBatch, slot: int, rows: Iterable[Slotted]) -> None:
    """Frees a slot; the last of the other `rows` moves into the gap."""
    kv.release(slot)
    last = max(rows, key=lambda other: other.slot, default=None)
    if last is None:
        kv.resize(0)
    elif last.slot > slot:
        kv.move(last.slot, slot)
        last.slot = slot
