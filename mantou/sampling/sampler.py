"""One call draws every row's tokens of a step, on the device. A draw depends on its own row and position only.

Greedy rows and sampled rows share one formula: argmax(score), where score is the processed logits for a greedy row
and logits / temperature + Gumbel(seed, position) for a sampled one. Filters only mask scores, so that a row's numbers
are the same whichever stages its neighbours switch on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mantou.data import Draft, Sampling
from mantou.sampling import filters, noise
from mantou.sampling.params import RowParams, make_params, wants_history
from mantou.sampling.processors import History, apply_bias, apply_penalties


@dataclass(frozen=True, slots=True)
class Draw:
    """Lazy device arrays: tokens int32[B, T]; log-probabilities if some row asked, else None.

    `scores` [B, T]: each token's own logit. Where the model gave no number for any token, none is larger than another,
    and a draw falls on the first: so it is NaN there. One value a draw tells what a search of all V would.
    """

    tokens: mx.array
    scores: mx.array
    logprobs: mx.array | None = None  # float32[B, T]
    top_tokens: mx.array | None = None  # int32[B, T, K], most likely first
    top_logprobs: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        found = (self.tokens, self.scores, self.logprobs, self.top_tokens, self.top_logprobs)
        return [array for array in found if array is not None]


DeviceDraw = Callable[[mx.array, RowParams, mx.array | None, mx.array | None], Sequence[mx.array] | None]


def no_device_draw(
    logits: mx.array, params: RowParams, positions: mx.array | None, allowed: mx.array | None
) -> None:
    """See DeviceOps.draw."""


def _tone_curve(logits: mx.array, params: RowParams) -> mx.array:
    """The HLG curve around a pivot below the most likely token: linear inside `width`, logarithmic beyond (spec B5)."""
    width, shoulder, toe, pivot = params.curve
    gain = params.inverse_temperature
    z = logits - (logits.max(axis=-1, keepdims=True) - pivot)
    soft = mx.maximum(shoulder, 1e-9)
    hard = mx.maximum(toe, 1e-9)
    high = gain * width + gain * soft * mx.log1p(mx.maximum(z - width, 0) / soft)
    low = -gain * width - gain * hard * mx.log1p(mx.maximum(-z - width, 0) / hard)
    linear = gain * z
    out = mx.where((z > width) & (shoulder > 0), high, linear)
    out = mx.where((z < -width) & (toe > 0), low, out)
    return mx.where(mx.isinf(logits), logits, out)


def scaled_logits(logits: mx.array, params: RowParams) -> mx.array:
    """Logits whose softmax a sampled row draws from, before filters."""
    scores = logits * params.inverse_temperature
    if params.any_curve:
        scores = mx.where(mx.isinf(params.curve[0]), scores, _tone_curve(logits, params))
    return scores


def _scores(logits: mx.array, params: RowParams, positions: mx.array) -> mx.array:
    scores = scaled_logits(logits, params) + noise.gumbel(params.words, positions, logits.shape[-1])
    allowed = filters.allowed(logits, params, positions)
    if allowed is not None:
        scores = mx.where(allowed, scores, -mx.inf)
    return mx.where(params.sampled, scores, logits)


def constraint_mask(allowed: Sequence[tuple[int, int, Any]], shape: Sequence[int]) -> mx.array:
    """uint8[B, T, V / 8 rounded up] from entries of `Sampler.draw`, for logits [B, T, V]; other positions are free."""
    num_rows, width, vocab = shape
    mask = np.full((num_rows, width, -(-vocab // 8)), 255, np.uint8)
    for row, position, bits in allowed:
        known = min(len(bits), mask.shape[-1])
        mask[row, position, :known] = bits[:known]
        mask[row, position, known:] = 0
    return mx.array(mask)


class DeviceSampler:
    """The Sampler seam over `make_params` and `sample`; `device_draw` is the device's own last stage, if it has one."""

    def __init__(self, device_draw: DeviceDraw = no_device_draw) -> None:
        self._device_draw = device_draw

    def wants_history(self, sampling: Sampling) -> bool:
        return wants_history(sampling)

    def prepare(self, rows: Sequence[Sampling | None]) -> RowParams:
        return make_params(rows)

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
        where = mx.array([list(row) for row in positions], dtype=mx.uint32) if params.any_sampled else None
        mask = constraint_mask(allowed, logits.shape) if allowed else None
        if drafts and logits.shape[1] > 1:
            params = replace(params, num_draws=tuple(1 + len(draft) - draft.num_sure for draft in drafts))
        return sample(logits, params, where, history, mask, self._device_draw)

    def propose(
        self, logits: mx.array, params: RowParams, positions: Sequence[Sequence[int]]
    ) -> tuple[mx.array, mx.array | None]:
        """A draft's draw, with the noise that will verify it; and what it was drawn from, if that will be asked."""
        return self.draw(logits, params, positions).tokens, None


def sample(
    logits: mx.array,
    params: RowParams,
    positions: mx.array | None,
    history: History = (),
    mask: mx.array | None = None,
    device_draw: DeviceDraw = no_device_draw,
) -> Draw:
    """Draws one token for each row and position.

    logits [B, T, V] in any float dtype; positions uint32[B, T]: absolute position of the token that is drawn, needed if
    some row samples; history: each row's tokens and draft, needed if some row has penalties; mask: see
    `constraint_mask`.
    """
    logits = processed(logits, params, history)
    drawn = device_draw(logits, params, positions, mask)
    if drawn is not None:
        return Draw(*drawn)
    logits = scores = restricted(logits, mask)
    if params.any_sampled:
        assert positions is not None, "a sampled row's noise is keyed by position"
        scores = _scores(logits, params, positions)
    return finished(mx.argmax(scores, axis=-1).astype(mx.int32), logits, params)


def processed(logits: mx.array, params: RowParams, history: History) -> mx.array:
    """Logits after bias and penalties, float32 where there are any."""
    if params.any_bias or params.any_history:
        logits = logits.astype(mx.float32)
    if params.any_bias:
        logits = apply_bias(logits, params)
    if params.any_history:
        logits = apply_penalties(logits, params, history)
    return logits


# What each byte of a mask adds to the logits of its eight tokens: 0 where one is allowed, else -inf.
_PENALTIES = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf
)


def restricted(logits: mx.array, mask: mx.array | None) -> mx.array:
    """Logits in float32 after constraints: what log-probabilities are of."""
    logits = logits.astype(mx.float32)
    if mask is None:
        return logits
    return logits + mx.array(_PENALTIES, dtype=mx.float32)[mask].flatten(-2)[..., : logits.shape[-1]]


def _at(values: mx.array, tokens: mx.array) -> mx.array:
    return mx.take_along_axis(values, tokens[..., None], axis=-1)[..., 0]


def finished(tokens: mx.array, logits: mx.array, params: RowParams) -> Draw:
    """A draw of `tokens`, with the log-probabilities that some row asked for."""
    scores = _at(logits, tokens)
    if params.max_logprobs < 0:
        return Draw(tokens, scores)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = _at(logprobs, tokens)
    if not params.max_logprobs:
        return Draw(tokens, scores, chosen)
    best = mx.argpartition(-logprobs, kth=params.max_logprobs - 1, axis=-1)[..., : params.max_logprobs]
    best = mx.sort(best, axis=-1)  # so that ties stand in the order of their tokens
    values = mx.take_along_axis(logprobs, best, axis=-1)
    order = mx.argsort(-values, axis=-1)
    top = mx.take_along_axis(best, order, axis=-1).astype(mx.int32)
    return Draw(tokens, scores, chosen, top, mx.take_along_axis(values, order, axis=-1))
