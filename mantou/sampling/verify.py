"""Which draft tokens stay: the ones the row's own sampler would have drawn. Host integers only."""

from __future__ import annotations

from collections.abc import Sequence


def agree(draft: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """The tokens this step emits: drawn tokens while they equal the draft, and the first that does not.

    `drawn` has one token more than `draft`: position i was drawn after draft[:i]. Because the noise of a draw is keyed
    by (seed, position), the result is what plain decoding would have produced (ADR 002).
    """
    num_kept = 0
    while num_kept < len(draft) and draft[num_kept] == drawn[num_kept]:
        num_kept += 1
    return list(drawn[: num_kept + 1])
