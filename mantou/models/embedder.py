"""A loaded graph that turns token rows into vectors or scores. Runs on the model thread; knows no text, no requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mantou.data import TokenRow
from mantou.errors import ConfigError, ModelError
from mantou.models import encoders
from mantou.models.checkpoint import read_config, weight_files
from mantou.models.embedder_recipe import Pooling, Recipe, read_recipe
from mantou.models.load import DTYPES, choose_dtype, load, read_weights
from mantou.protocols import DeviceOps

# (tokens, types int32[B, T], lengths int32[B], ragged) -> hidden [B, T, D]
Forward = Callable[[mx.array, mx.array, mx.array, bool], mx.array]


@dataclass(frozen=True, slots=True)
class Embedder:
    """One embedding model or cross-encoder. `num_dims` is 0 for the latter."""

    recipe: Recipe
    num_dims: int
    dtype: str
    weights_bytes: int
    vocab_size: int
    notes: tuple[str, ...]
    module: Any
    forward: Forward

    def run(self, rows: Sequence[TokenRow]) -> np.ndarray:
        """One forward of non-empty rows, padded to the longest -> f32 [B, num_dims], or [B] scores."""
        lengths = np.array([len(row.tokens) for row in rows], np.int32)
        tokens = np.zeros((len(rows), int(lengths.max())), np.int32)
        types = np.zeros_like(tokens)
        for index, row in enumerate(rows):
            tokens[index, : len(row.tokens)] = row.tokens
            if row.second is not None:
                types[index, row.second : len(row.tokens)] = 1
        sizes = mx.array(lengths)
        hidden = self.forward(
            mx.array(tokens), mx.array(types), sizes, int(lengths.min()) < tokens.shape[1]
        ).astype(mx.float32)
        if self.recipe.scores:
            logits = self.module.score(hidden, sizes)
            found = mx.sigmoid(logits) if self.recipe.sigmoid else logits
        else:
            found = mx.concatenate([pool(hidden, sizes, mode) for mode in self.recipe.pooling], axis=-1)
            if self.recipe.normalize:
                found = found / mx.maximum(mx.linalg.norm(found, axis=-1, keepdims=True), 1e-12)
        return np.array(found.astype(mx.float32))


def pool(hidden: mx.array, lengths: mx.array, mode: Pooling) -> mx.array:
    """hidden [B, T, D], lengths int32[B] -> [B, D]. Padding never counts."""
    if mode == "cls":
        return hidden[:, 0]
    if mode == "last":
        return mx.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    inside = (mx.arange(hidden.shape[1]) < lengths[:, None])[..., None]
    if mode == "max":
        return mx.where(inside, hidden, -mx.inf).max(axis=1)
    return mx.where(inside, hidden, 0).sum(axis=1) / lengths[:, None]


def load_embedder(folder: Path, ops: DeviceOps, *, dtype: str | None = None) -> Embedder:
    """Loads and evaluates on the calling thread, which must be the one that runs it.

    Raises ModelError in one sentence for a folder that does not embed, and ConfigError for an unknown `dtype`.
    """
    recipe = read_recipe(folder)
    module, forward, config, notes = (
        _decoder(folder, dtype) if recipe.graph == "decoder" else _encoder(folder, recipe, dtype)
    )
    arrays: list[mx.array] = list(dict(tree_flatten(module.parameters())).values())
    floating = [a for a in arrays if mx.issubdtype(a.dtype, mx.floating)]
    num_bytes, largest = sum(a.nbytes for a in arrays), max(floating, key=lambda a: a.size).dtype
    del arrays, floating
    return Embedder(
        recipe=recipe,
        num_dims=int(config["hidden_size"]) * len(recipe.pooling),
        dtype=str(largest).rsplit(".", 1)[-1],
        weights_bytes=num_bytes,
        vocab_size=int(config["vocab_size"]),
        notes=(*recipe.notes, *notes, *ops.install(module)),
        module=module,
        forward=forward,
    )


Graph = tuple[Any, Forward, Mapping[str, Any], tuple[str, ...]]


def _decoder(folder: Path, dtype: str | None) -> Graph:
    """A language model's graph without its head. Causal, so what pads a row on the right is never seen."""
    loaded = load(folder, dtype=dtype, headless=True)
    body = getattr(loaded.module, "model", None)
    if not isinstance(body, nn.Module):
        raise ModelError(f"mlx-lm's {loaded.family.name} graph shows no hidden states; choose another model.")

    def forward(tokens: mx.array, types: mx.array, lengths: mx.array, ragged: bool) -> mx.array:
        return body(tokens)

    return loaded.module, forward, loaded.config, loaded.notes


def _encoder(folder: Path, recipe: Recipe, dtype: str | None) -> Graph:
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype takes {', '.join(DTYPES)}, not {dtype!r}.")
    config = read_config(folder)
    module = encoders.make(recipe.graph, config, ranks=recipe.scores)
    weights = read_weights(weight_files(folder))
    try:
        module.load_weights(list(module.renamed(weights).items()), strict=True)
    except (ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelError(f"The weights in {folder} do not fit its config.json ({reason}).") from None
    stored = {a.dtype for a in weights.values() if mx.issubdtype(a.dtype, mx.floating)}
    del weights
    target = choose_dtype(dtype, quantized=False, stored=stored, on_cpu=mx.default_device() == mx.cpu)
    if target is not None:
        module.set_dtype(target)
    module.eval()
    mx.eval(module.parameters())

    def forward(tokens: mx.array, types: mx.array, lengths: mx.array, ragged: bool) -> mx.array:
        return module(tokens, types, lengths, ragged=ragged)

    return module, forward, config, ()
