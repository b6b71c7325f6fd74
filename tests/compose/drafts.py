"""Draft providers of every sort for the tiny models of the matrix. Knows the harness, no test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from mantou.cache.none import NoStore
from mantou.kv.codecs import make_scheme
from mantou.models.load import LoadedModel, describe
from mantou.models.runner import Runner
from mantou.protocols import CacheKey, DraftProvider
from mantou.sampling.sampler import DeviceSampler
from mantou.spec.compose import AdaptiveWidth, FirstOf
from mantou.spec.cost import StepCosts
from mantou.spec.model import ModelDraft
from mantou.spec.ngram import NGram
from mantou.spec.none import NoDraft
from tests.fakes import NoisyOracle

from .families import FAMILIES, tiny
from .harness import VOCAB, capabilities
from .heads import head_draft

KINDS = ("none", "oracle", "ngram", "model", "eagle")


def flat_costs(width_costs: float = 0.1, padding: float = 1.0) -> StepCosts:
    """A machine on which a step of 1 + n tokens takes 1 + n * width_costs."""
    table = {(r, w): 1 + width_costs * (w - 1) for r in (1, 8) for w in (1, 9)}
    return StepCosts((1, 8), (1, 9), table, padding=padding)


@cache
def draft_model(family: str, noise: float = 0.03) -> LoadedModel:
    """The family's tiny model with weights a little off: it guesses right now and then."""
    module = tiny(family)
    weights = tree_flatten(module.parameters())
    keys = mx.random.split(mx.random.key(5), len(weights))
    off = [
        (
            name,
            w * (1 + noise * mx.random.normal(w.shape, key=key))
            if w.ndim > 1 and w.dtype != mx.uint32
            else w,
        )
        for (name, w), key in zip(weights, keys, strict=True)
    ]
    module.update(tree_unflatten(off))
    mx.eval(module.parameters())
    return describe(module, FAMILIES[family], capabilities(family))


def model_draft(family: str, store: Any = None, noise: float = 0.03, **changes: Any) -> ModelDraft:
    runner = Runner(draft_model(family, noise), make_scheme("off"), max_width=32)
    settings: dict[str, Any] = {"num_tokens": 4, "vocab_size": VOCAB} | changes
    key = CacheKey(f"draft {family}", (), "off", "none")
    sampler = settings.pop("sampler", None) or DeviceSampler()
    return ModelDraft(runner, sampler, store or NoStore(), key, flat_costs(), **settings)


def make_provider(
    kind: str, family: str, answers: Mapping[str, Sequence[int]], store: Any = None
) -> DraftProvider:
    """`oracle` is right most of the time; the others really look."""
    if kind == "oracle":
        return NoisyOracle(dict(answers), 0.7, VOCAB)
    if kind == "ngram":
        copies = FirstOf(NGram(3, 8, 4, kind="echo"), NGram(1, 4, 5))
        return AdaptiveWidth(copies, flat_costs(padding=0.0))  # each row as wide as its own guess is good
    if kind == "model":
        return model_draft(family, store, num_tokens=2)  # each guess is a forward as large as the target's
    if kind == "eagle":
        return AdaptiveWidth(head_draft(kind, family, store, num_tokens=3), flat_costs())
    return NoDraft()
