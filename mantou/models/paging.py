"""Attention over paged rows: each row's own blocks and no longer neighbour's. Knows arrays, no family by name.

Graphs call `mx.fast.scaled_dot_product_attention` with what a paged layer gave them: all rows' columns up to the
longest row, not computed yet. Recognised here, rows of like lengths are fetched and attended together instead. What a
graph has changed, or masks in a way of its own, is computed as it stands. A device that reads blocks in place does so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from mantou.kv.lending import groups_of
from mantou.kv.paged import Fetched, fetched

Attention = Callable[..., mx.array]


class ReadBlocks(Protocol):
    """Attention that reads a pool through a table; None where it has no such form. See `DeviceOps.read_blocks`."""

    def __call__(
        self,
        q: mx.array,
        pools: tuple[Sequence[mx.array], Sequence[mx.array]],
        table: mx.array,
        block: int,
        span: int,
        *,
        bits: int,
        group: int,
        **options: Any,
    ) -> mx.array | None: ...


class PagedAttention:
    """Stands before whatever attention is installed for this process."""

    def __init__(self, plain: Attention, read_blocks: ReadBlocks | None) -> None:
        self.plain = plain
        self.read_blocks = read_blocks
        self._masks: tuple[mx.array, list[mx.array]] | None = (
            None  # the running forward's, and each party's part
        )

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        mask: str | mx.array | None = None,
        sinks: mx.array | None = None,
        **more: Any,
    ) -> mx.array:
        keys, values = fetched(k), fetched(v)
        if keys is not None and values is not None and q.shape[0] == k.shape[0] and not any(more.values()):
            done = self._in_place(q, keys, values, {"scale": scale, "mask": mask, "sinks": sinks})
            if done is None and isinstance(mask, mx.array) and _can_part(q, keys, mask):
                done = self._in_parties(q, keys, values, scale, mask, sinks)
            if done is not None:
                return done
        return self.plain(q, k, v, scale=scale, mask=mask, sinks=sinks, **more)

    def _in_place(
        self, q: mx.array, keys: Fetched, values: Fetched, options: dict[str, Any]
    ) -> mx.array | None:
        groups = groups_of(keys.codec, keys.array.shape[-1])
        alike = groups == groups_of(values.codec, values.array.shape[-1])
        if groups is None or not alike or self.read_blocks is None:
            return None
        placement = keys.placement
        return self.read_blocks(
            q,
            (keys.pool, values.pool),
            placement.seen,
            placement.block,
            keys.span,
            bits=groups.bits,
            group=groups.group_size,
            **options,
        )

    def _in_parties(
        self,
        q: mx.array,
        keys: Fetched,
        values: Fetched,
        scale: float,
        mask: mx.array,
        sinks: mx.array | None,
    ) -> mx.array:
        parties = keys.placement.parties
        masks = self._parts(mask, keys, parties)
        found: list[mx.array] = []
        for party, part in zip(parties, masks, strict=True):
            span = part.shape[-1]
            k, v = keys.rows(party, span), values.rows(party, span)
            found.append(self.plain(_taken(q, party), k, v, scale=scale, mask=part, sinks=sinks))
        order = [row for party in parties for row in party]
        together = mx.concatenate(found, axis=0)
        if order == sorted(order):
            return together
        return mx.take(together, mx.array([order.index(row) for row in range(len(order))]), axis=0)

    def _parts(self, mask: mx.array, keys: Fetched, parties: Sequence[Sequence[int]]) -> list[mx.array]:
        """Each party's part of the mask, the same arrays for all layers of a forward."""
        if self._masks is None or self._masks[0] is not mask:
            spans = [keys.placement.span_of(party) for party in parties]
            self._masks = mask, [_taken(mask, p)[..., :s] for p, s in zip(parties, spans, strict=True)]
        return self._masks[1]


def _can_part(q: mx.array, keys: Fetched, mask: mx.array) -> bool:
    """Rows of unlike lengths whose mask has a plane a row and reaches over all columns."""
    rows = q.shape[0]
    return (
        mask.ndim == 4
        and mask.shape[0] == rows
        and mask.shape[-1] == keys.span
        and len(keys.placement.parties) > 1
    )


def _taken(array: mx.array, party: Sequence[int]) -> mx.array:
    """These rows of an array: a slice where they are neighbours."""
    first, count = party[0], len(party)
    if tuple(party) == tuple(range(first, first + count)):
        return array[first : first + count]
    return mx.take(array, mx.array(list(party)), axis=0)


def install(read_blocks: ReadBlocks | None = None) -> None:
    """Puts it before this process's attention; what is not paged passes through. Calling it again changes nothing, and
    is needed after a device has put its own there for another model."""
    found = mx.fast.scaled_dot_product_attention
    if not isinstance(found, PagedAttention) or (found.read_blocks is None) != (read_blocks is None):
        plain = found.plain if isinstance(found, PagedAttention) else found
        mx.fast.scaled_dot_product_attention = PagedAttention(plain, read_blocks)
