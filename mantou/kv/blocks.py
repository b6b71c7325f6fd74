"""How many blocks rows of given lengths take in a pool. Pure integers; knows no arrays and no rows."""

from __future__ import annotations

from collections.abc import Iterable

NUM_SPECIAL = 2  # blocks of a pool that belong to no row; see kv/pages.py
PAGEABLE = (
    "full",
    "keys",
)  # layouts that grow with a row: a ring is bounded by its window, a state by nothing
_GROWN_AT_ONCE = 512  # tokens that a small pool grows by, or by as many as it holds
SIZES = (16, 32, 64, 128, 256, 512, 1024)  # tokens of a block; kernels take 16 columns at a time


def blocks_for(num_tokens: int, block: int) -> int:
    return -(-num_tokens // block)


def pool_bucket(num_blocks: int, block: int) -> int:
    """Blocks to allocate for so many in use: few sizes, and beyond a small pool at most an eighth too many.

    Growing copies the pool, and rows that began together need their next blocks in steps that follow each other.
    """
    step = 1
    while step * 16 < num_blocks or (step * 2 <= num_blocks and step * 2 * block <= _GROWN_AT_ONCE):
        step *= 2
    return -(-num_blocks // step) * step


def pool_columns(lengths: Iterable[int], block: int) -> int:
    """Columns of a pool that holds rows of these lengths."""
    return (NUM_SPECIAL + pool_bucket(sum(blocks_for(n, block) for n in lengths), block)) * block
