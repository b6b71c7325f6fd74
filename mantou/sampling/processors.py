"""Logits processors in mlx-lm's order: bias, repetition, presence, frequency. A row that asks for none is unchanged."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mantou.sampling.params import RowParams


def apply_bias(logits: mx.array, params: RowParams) -> mx.array:
    """Adds each row's logit_bias. logits float32[B, T, V]."""
    rows, tokens, values = [], [], []
    for row, sampling in enumerate(params.rows):
        for token, value in sampling.logit_bias:
            rows.append(row)
            tokens.append(token)
            values.append(value)
    num_rows, _, vocab = logits.shape
    bias = np.zeros((num_rows, 1, vocab), np.float32)
    np.add.at(bias[:, 0], (rows, tokens), values)
    return logits + mx.array(bias)


History = Sequence[tuple[Sequence[int], Sequence[int]]]  # each row's tokens so far, and its draft


def _counts(history: History, sizes: Sequence[int | None], width: int, vocab: int) -> mx.array:
    """float32[B, width, V]: how often each token stands in the last `size` tokens before each draw (0 = all)."""
    counts = np.zeros((len(history), width, vocab), np.float32)
    for row, size in enumerate(sizes):
        if size is None:
            continue
        tokens, draft = history[row]
        for t in range(len(draft) + 1):
            seen = [*(tokens if not size else tokens[-size:]), *draft[:t]]
            np.add.at(counts[row, t], np.asarray(seen[-size:] if size else seen, np.int64), 1)
    return mx.array(counts)


def apply_penalties(logits: mx.array, params: RowParams, history: History) -> mx.array:
    """Position t of a row draws after its tokens and t draft tokens. logits float32[B, T, V]."""
    vocab = logits.shape[-1]
    rows = params.rows

    def stage(penalty: str, window: str) -> tuple[mx.array, mx.array] | None:
        values = [getattr(s, penalty) for s in rows]
        if not any(values):
            return None
        sizes = [getattr(s, window) if v else None for s, v in zip(rows, values, strict=True)]
        return _counts(history, sizes, logits.shape[1], vocab), mx.array(values, dtype=mx.float32).reshape(
            -1, 1, 1
        )

    if found := stage("repetition_penalty", "repetition_context_size"):
        counts, penalty = found
        logits = mx.where(counts > 0, mx.where(logits < 0, logits * penalty, logits / penalty), logits)
    if found := stage("presence_penalty", "presence_context_size"):
        counts, penalty = found
        logits = logits - mx.where(counts > 0, penalty, 0.0)
    if found := stage("frequency_penalty", "frequency_context_size"):
        counts, penalty = found
        logits = logits - counts * penalty
    return logits
