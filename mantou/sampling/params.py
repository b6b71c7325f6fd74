"""The sampling wishes of a batch as arrays, made once per composition. Knows no logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mantou.data import Sampling
from mantou.sampling.noise import seed_words

GREEDY = Sampling()


def wants_history(sampling: Sampling) -> bool:
    """Whether the row's processors read the tokens so far, so that the host must know them before each draw."""
    return bool(sampling.repetition_penalty or sampling.presence_penalty or sampling.frequency_penalty)


def _curve(sampling: Sampling) -> tuple[float, float, float, float]:
    """Tone curve as (width, shoulder, toe, pivot offset); an infinite width makes it plain temperature."""
    c = sampling.tone_curve
    if c is None or not sampling.temperature or math.isinf(c.width) or (c.shoulder <= 0 and c.toe <= 0):
        return (math.inf, 1.0, 1.0, 0.0)
    return (c.width, c.shoulder, c.toe, c.pivot_offset)


@dataclass(frozen=True, slots=True)
class RowParams:
    """Column vectors [B, 1, 1] unless said otherwise. The `any_*` flags let a stage be left out for all rows.

    Leaving a stage out never changes a row's numbers: a row that does not ask for a stage passes it unchanged.
    """

    rows: tuple[Sampling, ...]
    words: mx.array  # uint32[B, 2]
    sampled: mx.array  # bool: temperature > 0
    inverse_temperature: mx.array
    top_p: mx.array  # 1 = off
    top_k: mx.array  # int32, vocabulary size or more = off
    min_p_log: mx.array  # ln(min_p), -inf = off
    xtc_probability: mx.array
    xtc_threshold: mx.array
    curve: tuple[mx.array, mx.array, mx.array, mx.array]
    any_sampled: bool
    any_top_p: bool
    any_min_p: bool
    any_xtc: bool
    max_top_k: int  # 0 = no row asks
    any_curve: bool
    any_bias: bool
    any_history: bool
    max_logprobs: int  # -1 = no row asks, else the most alternatives asked for
    num_draws: tuple[int, ...] | None = None  # how many positions of each row are read; None = all


def make_params(wishes: Sequence[Sampling | None]) -> RowParams:
    """`wishes` in batch order; an idle row is None and costs nothing."""
    rows = [wish or GREEDY for wish in wishes]

    def column(values: Sequence[float], dtype: mx.Dtype = mx.float32) -> mx.array:
        return mx.array(list(values), dtype=dtype).reshape(-1, 1, 1)

    chain = [
        s.temperature > 0 and _curve(s)[0] == math.inf for s in rows
    ]  # filters do not apply to a tone curve
    top_p = [s.top_p if on and 0 < s.top_p < 1 else 1.0 for s, on in zip(rows, chain, strict=True)]
    top_k = [s.top_k if on and s.top_k > 0 else 1 << 30 for s, on in zip(rows, chain, strict=True)]
    min_p = [
        math.log(s.min_p) if on and s.min_p > 0 else -math.inf for s, on in zip(rows, chain, strict=True)
    ]
    xtc = [s.xtc_probability if on else 0.0 for s, on in zip(rows, chain, strict=True)]
    curves = [_curve(s) for s in rows]
    asked = [s.top_logprobs for s in rows if s.logprobs or s.top_logprobs]
    limited = [k for k in top_k if k < 1 << 30]
    return RowParams(
        rows=tuple(rows),
        words=mx.array([seed_words(s.seed) for s in rows], dtype=mx.uint32),
        sampled=column([s.temperature > 0 for s in rows], mx.bool_),
        inverse_temperature=column([1 / s.temperature if s.temperature > 0 else 1.0 for s in rows]),
        top_p=column(top_p),
        top_k=column(top_k, mx.int32),
        min_p_log=column(min_p),
        xtc_probability=column(xtc),
        xtc_threshold=column([s.xtc_threshold for s in rows]),
        curve=(
            column([c[0] for c in curves]),
            column([c[1] for c in curves]),
            column([c[2] for c in curves]),
            column([c[3] for c in curves]),
        ),
        any_sampled=any(s.temperature > 0 for s in rows),
        any_top_p=any(p < 1 for p in top_p),
        any_min_p=any(p > -math.inf for p in min_p),
        any_xtc=any(p > 0 for p in xtc),
        max_top_k=max(limited, default=0),
        any_curve=any(c[0] < math.inf for c in curves),
        any_bias=any(s.logit_bias for s in rows),
        any_history=any(wants_history(s) for s in rows),
        max_logprobs=max(asked, default=-1),
    )
