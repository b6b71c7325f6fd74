"""The axes of the matrix and a covering set of their combinations. Knows no model."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Mapping, Sequence

from mantou.data import Sampling, ToneCurve

# Six wishes for six requests: in one batch each row must still get what it gets alone.
MIXED = (
    Sampling(logprobs=True, top_logprobs=3),
    Sampling(temperature=0.8),
    Sampling(temperature=1.1, top_p=0.8, top_k=20, logprobs=True),
    Sampling(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    Sampling(
        temperature=1.0, min_p=0.05, xtc_probability=0.5, xtc_threshold=0.1, logit_bias=((3, 2.0), (5, -4.0))
    ),
    Sampling(temperature=0.9, tone_curve=ToneCurve(width=2.0)),
)

AXES: Mapping[str, Sequence[object]] = {
    "sampler": ("greedy", "mixed"),
    "codec": ("off", "8", "4", "turbo", "turbo-k4v2@20", "mixed"),
    "block": (None, 16),
    "provider": ("none", "oracle", "ngram", "model", "eagle"),
    "store": ("none", "dict", "ram", "restart"),
    "constraint": ("none", "modulo", "forced"),
    "rows": (1, 3, 6),
    "chunk": (7, 16, 512),
    "order": ("together", "staggered", "leavers"),
    "shapes": ("exact", "bucketed"),
    "steps": ("pipelined", "in turn"),
}


def wishes(sampler: str) -> Sequence[Sampling]:
    return [Sampling()] * 6 if sampler == "greedy" else MIXED


def combinations(seed: int) -> list[dict[str, object]]:
    """Combinations that hold every pair of values of two axes at least once; all of them if MANTOU_FULL_MATRIX is set.

    Greedy all-pairs construction: each new combination takes, axis by axis, the value that covers most open pairs.
    """
    names = list(AXES)
    if os.environ.get("MANTOU_FULL_MATRIX"):
        return [dict(zip(names, values, strict=True)) for values in itertools.product(*AXES.values())]
    dice = random.Random(seed)
    open_pairs = {
        ((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in AXES[a] for y in AXES[b]
    }
    chosen: list[dict[str, object]] = []
    while open_pairs:
        (first, second) = min(open_pairs, key=str)
        combination = dict([first, second])
        for name in dice.sample(names, len(names)):
            if name not in combination:
                combination[name] = max(
                    AXES[name], key=lambda value: _gain(open_pairs, combination, name, value)
                )
        open_pairs -= _pairs(combination, names)
        chosen.append({name: combination[name] for name in names})
    return chosen


def _pairs(combination: Mapping[str, object], names: Sequence[str]) -> set[tuple[tuple[str, object], ...]]:
    known = [(name, combination[name]) for name in names if name in combination]
    return set(itertools.combinations(known, 2))


def _gain(
    open_pairs: set[tuple[tuple[str, object], ...]],
    combination: Mapping[str, object],
    name: str,
    value: object,
) -> int:
    names = list(AXES)
    extended = {**combination, name: value}
    return len(open_pairs & _pairs(extended, names))
