"""How many bytes rows may take together, and what fits. Pure; knows no arrays and no requests.

Counted is what the buffers take when every row has reached the length it may reach, not what they take now. A buffer a
slot is as long as the longest row; a pool of blocks holds what the rows hold together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mantou.errors import ConfigError
from mantou.kv.batch import capacity_bucket
from mantou.kv.blocks import PAGEABLE
from mantou.kv.plan import KVPlan

# Of a prompt chunk's activations, bytes a token: an estimate.
TRANSIENT_BYTES = 550_000


@dataclass(frozen=True, slots=True)
class KVBudget:
    """`slots` gives the slots that are allocated for a number of rows, `slack` the columns of a ring beyond its window.

    `limit_bytes` None fits everything. `beside` is what a drafter keeps of the same rows, within the same limit.
    """

    plan: KVPlan
    limit_bytes: int | None
    slots: Callable[[int], int]
    slack: int
    block: int | None = None  # tokens of a block where rows share pools
    beside: KVBudget | None = None

    @property
    def token_bytes(self) -> float:
        """Bytes that one more token takes while no window is full."""
        return self.plan.token_bytes() + (self.beside.token_bytes if self.beside else 0.0)

    def bytes_of(self, lengths: Sequence[int]) -> int:
        """What rows that may reach these lengths take together."""
        if not lengths:
            return 0
        paged, rest = self.plan.split(PAGEABLE if self.block else ())
        total = self.slots(len(lengths)) * rest.row_bytes(capacity_bucket(max(lengths)), self.slack)
        total += paged.pool_bytes(lengths, self.block) if self.block else 0
        return total + (self.beside.bytes_of(lengths) if self.beside else 0)

    def fits(self, lengths: Sequence[int]) -> bool:
        return self.limit_bytes is None or self.bytes_of(lengths) <= self.limit_bytes

    def longest(self, at_most: int) -> int:
        """The longest row, of `at_most` tokens, that fits alone; 0 if none does."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits([middle]) else (low, middle - 1)
        return low


def kv_limit(
    kv_budget: int | None, memory_budget: int | None, *, weights_bytes: int, chunk: int, draft_bytes: int = 0
) -> int | None:
    """Bytes for KV: what was given for it, or what the memory budget leaves beside weights and one prompt chunk.

    `draft_bytes`: weights of a draft model or head. Raises ConfigError if nothing is left.
    """
    if memory_budget is None:
        return kv_budget
    left = memory_budget - weights_bytes - draft_bytes - chunk * TRANSIENT_BYTES
    if left <= 0:
        drafts, way = "", "choose a smaller model"
        if draft_bytes:
            drafts, way = f", those that draft {draft_bytes / 1e9:.2f} GB", "serve without drafts of a model"
        raise ConfigError(
            f"--memory-budget is {memory_budget / 1e9:.2f} GB, but the weights take {weights_bytes / 1e9:.2f} GB"
            f"{drafts} and a prompt chunk about {chunk * TRANSIENT_BYTES / 1e9:.2f} GB; raise it or {way}."
        )
    return left if kv_budget is None else min(left, kv_budget)
