"""Which tokens a draw may pick: top_p, min_p, XTC, top_k, in this order (mlx-lm's). Masks only; no logit changes.

All arrays are float32[B, T, V] unless said otherwise; a filtered token is -inf.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mantou.sampling import noise
from mantou.sampling.params import RowParams


def _log_softmax(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def keep_top_p(logprobs: mx.array, top_p: mx.array) -> mx.array:
    """Keeps the smallest set of most likely tokens whose probability reaches top_p (ties with its last one stay)."""
    ascending = mx.sort(logprobs, axis=-1)
    probs = mx.exp(ascending)
    mass_above = mx.cumsum(probs, axis=-1, reverse=True, inclusive=False)
    total = mass_above[..., :1] + probs[..., :1]
    num_dropped = (mass_above >= top_p * total).sum(axis=-1, keepdims=True)
    threshold = mx.take_along_axis(ascending, num_dropped, axis=-1)
    return mx.where((logprobs < threshold) & (top_p < 1), -mx.inf, logprobs)


def keep_min_p(logprobs: mx.array, min_p_log: mx.array) -> mx.array:
    """Drops tokens less likely than min_p times the most likely one."""
    return mx.where(logprobs < logprobs.max(axis=-1, keepdims=True) + min_p_log, -mx.inf, logprobs)


def drop_xtc(logprobs: mx.array, params: RowParams, positions: mx.array) -> mx.array:
    """With probability xtc_probability drops every token above the threshold but the least likely of those."""
    probs = mx.softmax(logprobs, axis=-1)
    above = mx.where(probs > params.xtc_threshold, probs, mx.inf)
    drop = probs > above.min(axis=-1, keepdims=True)
    exempt = np.zeros((len(params.rows), 1, logprobs.shape[-1]), np.uint8)
    for row, sampling in enumerate(params.rows):
        exempt[row, 0, [token for token in sampling.xtc_exempt if token < exempt.shape[-1]]] = 1
    chance = noise.uniform(params.words, positions, 1, noise.XTC)
    return mx.where(drop & (mx.array(exempt) == 0) & (chance <= params.xtc_probability), -mx.inf, logprobs)


def keep_top_k(logprobs: mx.array, top_k: mx.array, max_top_k: int) -> mx.array:
    """Keeps the k most likely of the tokens that are left (ties with the k-th stay)."""
    vocab = logprobs.shape[-1]
    size = min(max_top_k, vocab)  # a row that asks for more than there is must not switch off its neighbours
    best = mx.sort(mx.topk(logprobs, size, axis=-1), axis=-1)  # ascending
    index = mx.broadcast_to(mx.maximum(size - top_k, 0), (*logprobs.shape[:2], 1))
    threshold = mx.take_along_axis(best, index, axis=-1)
    return mx.where((logprobs < threshold) & (top_k < vocab), -mx.inf, logprobs)


def allowed(logits: mx.array, params: RowParams, positions: mx.array) -> mx.array | None:
    """bool[B, T, V], True where a draw may pick; None if no row filters. positions uint32[B, T]."""
    if not (params.any_top_p or params.any_min_p or params.any_xtc or params.max_top_k):
        return None
    logprobs = _log_softmax(logits)
    if params.any_top_p:
        logprobs = keep_top_p(logprobs, params.top_p)
    if params.any_min_p:
        logprobs = keep_min_p(logprobs, params.min_p_log)
    if params.any_xtc:
        logprobs = drop_xtc(logprobs, params, positions)
    if params.max_top_k:
        logprobs = keep_top_k(logprobs, params.top_k, params.max_top_k)
    return logprobs > -mx.inf
