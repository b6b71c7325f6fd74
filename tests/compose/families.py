"""Tiny random models of every mlx-lm family, for the composition matrix. Knows no caches, engine or text."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mantou.models.load import family_module

from .family_configs.dense import DENSE
from .family_configs.experts import EXPERTS
from .family_configs.latent import LATENT
from .family_configs.limits import BROKEN, EQUAL_LENGTHS, EQUAL_WIDTHS, MASK_AXES, OWN_CACHE, RECOMPUTE
from .family_configs.recurrent import RECURRENT
from .family_configs.windows import WINDOWED
from .family_configs.wrappers import WRAPPERS

__all__ = [
    "BROKEN",
    "EQUAL_LENGTHS",
    "EQUAL_WIDTHS",
    "FAMILIES",
    "MASK_AXES",
    "OWN_CACHE",
    "RECOMPUTE",
    "tiny",
]

FAMILIES: Mapping[str, dict[str, Any]] = dict(
    sorted({**DENSE, **EXPERTS, **LATENT, **RECURRENT, **WINDOWED, **WRAPPERS}.items())
)

# Recurrent states that forget slowly: exp(-exp(A_log) * softplus(dt_bias)) is about 0.95 a token.
_DECAYS: Mapping[str, float] = {"A_log": 0.0, "dt_bias": -3.0}
# Gains of matrices and of embeddings that keep greedy outputs varied. Where embeddings are tied and large beside
# what the layers add, a graph repeats its last token for ever.
_GAIN = 2.0
_GAINS: Mapping[str, float] = {
    "exaone4": 1.0,
    "falcon_h1": 1.0,
    "gemma3n": 8.0,
    "gptj": 4.0,
    "lfm2": 1.0,
    "lfm2-vl": 1.0,
    "mamba2": 1.0,
    "nanochat": 8.0,
    "olmo2": 1.0,
}
_EMBEDDING_GAIN = 0.5
_EMBEDDING_GAINS: Mapping[str, float] = {
    "gemma3n": 0.1,
    "gemma4": 0.1,
    "gemma4_text": 0.1,
    "nanochat": 0.02,
    "prism_hadamard_qwen35": 0.1,
}


def _weight(name: str, initial: mx.array, key: mx.array, gain: float, embedding_gain: float) -> mx.array:
    """A random value for the parameter `name`: matrices from nothing, vectors near their initial value."""
    *_, module, leaf = ("", *name.split("."))
    if initial.dtype == mx.uint32:  # packed weights
        return mx.random.randint(0, 1 << 32, initial.shape, dtype=mx.uint32, key=key)
    if initial.dtype == mx.uint8:  # four weights -1, 0 or 1 in two bits each
        codes = mx.random.randint(0, 3, (4, *initial.shape), key=key)
        return mx.sum(codes << (2 * mx.arange(4)).reshape(-1, 1, 1), axis=0).astype(mx.uint8)
    noise = mx.random.normal(initial.shape, key=key)
    if leaf in _DECAYS:
        return _DECAYS[leaf] + 0.3 * noise
    if leaf == "bias" and "w_lora" in name:  # the decay of RWKV
        return -4.0 + 0.3 * noise
    if "norm" in module and leaf == "weight":  # some norms start at zero, which would hide their layer
        return mx.maximum(initial, 0.5) + 0.1 * noise
    if initial.ndim < 2:  # the initial value of a bias is random
        return 0.1 * noise if leaf == "bias" else initial + 0.1 * noise
    is_embedding = "emb" in name or "wte" in name
    return noise * (embedding_gain if is_embedding else gain) / initial.shape[-1] ** 0.5


def tiny(model_type: str, seed: int = 0, scale: float | None = None) -> nn.Module:
    """A float32 model of the family in eval mode, its weights drawn from `seed`.

    Matrices are normal with deviation `scale` / sqrt(inputs); None takes the gain that suits the family.
    """
    module = family_module(model_type)
    model = module.Model(module.ModelArgs.from_dict(copy.deepcopy(FAMILIES[model_type])))
    gain = _GAINS.get(model_type, _GAIN) if scale is None else scale
    embedding_gain = _EMBEDDING_GAINS.get(model_type, _EMBEDDING_GAIN)
    parameters = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(seed), len(parameters))
    drawn = [
        (name, _weight(name, value, key, gain, embedding_gain))
        for (name, value), key in zip(parameters, keys, strict=True)
    ]
    model.update(tree_unflatten(drawn))
    mx.eval(model.parameters())
    return model.eval()
