"""Speculative sampling: a draft token stays with chance min(1, p/q), else the residual is drawn (arXiv:2211.17192).

Keeps the distribution of each answer, not its tokens: they depend on the draft. `agree` is the default because it keeps
both (ADR 002). A draft token that stays is returned as if it had been drawn, so the host compares as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mantou.data import Draft
from mantou.sampling import filters, noise
from mantou.sampling.params import RowParams
from mantou.sampling.processors import History
from mantou.sampling.sampler import (
    DeviceSampler,
    Draw,
    constraint_mask,
    finished,
    processed,
    restricted,
    sample,
    scaled_logits,
)


def probabilities(logits: mx.array, params: RowParams, positions: mx.array | None) -> mx.array:
    """float32[B, T, V]: what a row draws from. A greedy row has all of it on one token."""
    best = mx.argmax(logits, axis=-1, keepdims=True) == mx.arange(logits.shape[-1])
    if not params.any_sampled:
        return best.astype(mx.float32)
    assert positions is not None, "filters that draw are keyed by position"
    scores = scaled_logits(logits, params)
    allowed = filters.allowed(logits, params, positions)
    if allowed is not None:
        scores = mx.where(allowed, scores, -mx.inf)
    return mx.where(params.sampled, mx.softmax(scores, axis=-1), best.astype(mx.float32))


def reject(p: mx.array, q: mx.array, draft: mx.array, params: RowParams, positions: mx.array) -> mx.array:
    """Tokens int32[B, T]: the draft's where they are accepted, else one of the residual max(p - q, 0).

    p, q float32[B, T, V]; draft int32[B, T], -1 where there is none and p itself is drawn; positions uint32[B, T].
    """
    index = mx.maximum(draft, 0)[..., None]
    given = (draft >= 0)[..., None]
    chance = mx.take_along_axis(p, index, axis=-1)
    proposed = mx.take_along_axis(q, index, axis=-1)
    dice = noise.uniform(params.words, positions, 1, noise.ACCEPT)
    accepted = given & (dice * proposed < chance)
    left = mx.maximum(p - mx.where(given, q, 0.0), 0.0)
    # Rounding may leave nothing where p and q are equal; p is right there.
    left = mx.where(left.sum(axis=-1, keepdims=True) > 0, left, p)
    drawn = mx.argmax(mx.log(left) + noise.gumbel(params.words, positions, p.shape[-1]), axis=-1)
    return mx.where(accepted[..., 0], draft, drawn).astype(mx.int32)


class RejectionSampler(DeviceSampler):
    """The Sampler seam with rejection at the positions of a draft."""

    def draw(
        self,
        logits: mx.array,
        params: RowParams,
        positions: Sequence[Sequence[int]],
        *,
        history: History = (),
        allowed: Sequence[tuple[int, int, Any]] = (),
        drafts: Sequence[Draft] = (),
    ) -> Draw:
        mask = constraint_mask(allowed, logits.shape) if allowed else None
        where = mx.array([list(row) for row in positions], dtype=mx.uint32)
        if not any(len(draft) > draft.num_sure for draft in drafts):
            return sample(logits, params, where, history, mask, self._device_draw)
        logits = restricted(processed(logits, params, history), mask)
        shape = (logits.shape[0], logits.shape[1])
        tokens = np.full(shape, -1, np.int32)
        proposed: list[mx.array] = []
        for row, draft in enumerate(drafts):
            rest = list(draft.tokens[draft.num_sure :])
            tokens[row, : len(rest)] = rest
            proposed.append(_proposed(draft, rest, shape[1], logits.shape[-1]))
        p = probabilities(logits, params, where)
        return finished(reject(p, mx.stack(proposed), mx.array(tokens), params, where), logits, params)

    def propose(
        self, logits: mx.array, params: RowParams, positions: Sequence[Sequence[int]]
    ) -> tuple[mx.array, mx.array]:
        """A draft's own draw, with noise of its own: tokens int32[B, T], and what they were drawn from."""
        where = mx.array([list(row) for row in positions], dtype=mx.uint32)
        q = probabilities(logits.astype(mx.float32), params, where)
        noisy = mx.log(q) + noise.gumbel(params.words, where, q.shape[-1], noise.DRAFT)
        return mx.argmax(noisy, axis=-1).astype(mx.int32), q


def _proposed(draft: Draft, rest: Sequence[int], width: int, vocab: int) -> mx.array:
    """[width, V]: what each draft token was drawn from; all on the token itself for a guess without chances."""
    if draft.chances is None:
        q = (
            mx.array(list(rest), dtype=mx.int32)[:, None] == mx.arange(vocab)[None]
            if rest
            else mx.zeros((0, vocab))
        )
    else:
        q = draft.chances[: len(rest), :vocab]
        # A draft with a larger vocabulary stops where it would leave ours, so its tokens are drawn from what is left.
        q = mx.pad(q / q.sum(axis=-1, keepdims=True), [(0, 0), (0, vocab - q.shape[1])])
    return mx.pad(q.astype(mx.float32), [(0, width - len(rest)), (0, 0)])
