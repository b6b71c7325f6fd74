"""A family's own graph with other inputs: its embedding gives way to a mix of a token's embedding and a hidden state.

So a multi-token-prediction layer is run by the code of the model that it belongs to: attention of any sort, experts,
masks, packed weights. Knows mlx-lm graphs by structure, no head's layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mantou.errors import ModelError
from mantou.kv.batch import KVBatch
from mantou.kv.recurrent import RecurrentState
from mantou.models.families import Family
from mantou.models.layouts import arrange, make_layouts, measure
from mantou.models.load import build, make_caches, quantize
from mantou.spec.heads.parts import Target

_NO_WEIGHTS = ("embed_tokens", "lm_head")


class _Given(nn.Module):
    """In the place of an embedding: what was set beforehand, whatever the tokens are."""

    def __init__(self, value: mx.array) -> None:
        super().__init__()
        self._value = value

    def set(self, value: mx.array) -> None:
        self._value = value

    def __call__(self, tokens: mx.array) -> mx.array:
        return self._value


@dataclass(frozen=True, slots=True)
class Graft:
    """The graph, and an empty KV batch for it."""

    graph: Any
    given: _Given
    kv: KVBatch

    def __call__(self, mixed: mx.array, tokens: mx.array) -> mx.array:
        """[B, T, D] in the place of the embeddings of int32[B, T] -> [B, T, D]."""
        self.given.set(mixed)
        return _run(self.graph, tokens, self.kv.caches)


def graft(
    folder: Path, family: Family, config: Mapping[str, Any], weights: Mapping[str, mx.array], target: Target
) -> Graft:
    """The graph that `config` describes, with these weights under its checkpoints' names. Raises ModelError."""
    module = build(family.name, config)
    module.eval()
    given = _Given(mx.zeros((1, 1, target.hidden_size), target.dtype))
    graph: Any = module.model
    graph.embed_tokens = given
    for _, part in module.named_modules():
        part.pop("lm_head", None)
    load(folder, module, module.sanitize(dict(weights)), config)
    module.set_dtype(target.dtype)
    if hasattr(graph, "ssm_idx"):  # where a hybrid graph finds its recurrent cache: the layer is none
        graph.ssm_idx = 1
    shapes = measure(lambda tokens, cache: _run(graph, tokens, cache), make_caches(module))
    mx.eval(module.parameters())
    target.install(module)
    plan = target.plan(shapes)
    kv = KVBatch(
        lambda num_slots: make_layouts(plan, num_slots, 1, RecurrentState),
        array_offsets=family.ragged_offsets,
        mask_axes=family.mask_axes,
        span_step=target.span_step,
        arrange=lambda layouts: arrange(shapes, layouts),
        write_rows=target.write_rows,
    )
    return Graft(graph, given, kv)


def _run(graph: Any, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
    return graph(tokens, cache=[*caches, None])


def load(folder: Path, module: nn.Module, weights: Mapping[str, mx.array], config: Mapping[str, Any]) -> None:
    """All weights of a module, packed ones as they are. Raises ModelError."""
    kept = {name: a for name, a in weights.items() if not any(part in name for part in _NO_WEIGHTS)}
    try:
        if any(name.endswith(".scales") for name in kept):
            packing = config.get("quantization") or {"group_size": 64, "bits": 4}
            quantize(module, {"quantization": packing}, kept)
        module.load_weights(list(kept.items()), strict=True)
    except (ValueError, KeyError, IndexError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelError(
            f"The prediction layer in {folder} does not fit its config.json ({reason})."
        ) from None


class Mix(nn.Module):
    """projection([norm(embedding); norm(hidden state)]); the names are a layout's."""

    def __init__(self, width: int, eps: float, names: Sequence[str], *, bias: bool = False) -> None:
        super().__init__()
        self._names = tuple(names)
        projection, of_embedding, of_hidden = names
        self[projection] = nn.Linear(2 * width, width, bias=bias)
        self[of_embedding], self[of_hidden] = nn.RMSNorm(width, eps=eps), nn.RMSNorm(width, eps=eps)

    def __call__(self, embedding: mx.array, hidden: mx.array) -> mx.array:
        projection, of_embedding, of_hidden = (self[name] for name in self._names)
        hidden = hidden.astype(embedding.dtype)
        return projection(mx.concatenate([of_embedding(embedding), of_hidden(hidden)], axis=-1))
