"""Gemma 4's assistants: layers without keys and values of their own, over those of the model that they help.

Layout of the public checkpoints (`gemma4_assistant` and `gemma4_unified_assistant`, as transformers and mlx-vlm read
them): `pre_projection` takes [embedding of a token, scaled as the model scales it; hidden state that drew it] to the
assistant's own width, `model.layers` are Gemma 4 layers with queries only, and `post_projection` gives the next hidden
state. A layer attends to the last layer of the model that keeps its kind of KV, whole or a window; in a chain of
guesses neither these columns nor the query's position move on. The vocabulary head is the assistant's own: `lm_head`,
or its embedding; with `masked_embedding` only the tokens of the likeliest groups are scored, a group being a run of
`token_ordering`. What the checkpoint holds decides, not what its configuration says of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mantou.errors import ModelError
from mantou.kv.lending import Seen
from mantou.kv.shapes import LayerShape
from mantou.models.load import family_module
from mantou.spec.heads.parts import Checkpoint, Target, finish

_LAYOUTS = {"full_attention": "full", "sliding_attention": "window"}
_TOP_GROUPS = 32  # that are scored, where the configuration does not say
_MEASURED = 256  # columns of the KV that a link is timed with


class _Groups(nn.Module):
    """Which tokens are worth a look: those whose group's centroid fits."""

    def __init__(self, width: int, num_groups: int, vocab_size: int) -> None:
        super().__init__()
        self.centroids = nn.Linear(width, num_groups, bias=False)
        self.token_ordering = mx.zeros(vocab_size, mx.int32)


class _Parts(nn.Module):
    def __init__(self, args: Any, backbone: int, weights: dict[str, mx.array]) -> None:
        super().__init__()
        gemma4 = family_module("gemma4_text")
        width = args.hidden_size
        self.pre_projection = nn.Linear(2 * backbone, width, bias=False)
        self.post_projection = nn.Linear(width, backbone, bias=False)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(args.vocab_size, width)
        self.model.layers = [gemma4.DecoderLayer(args, i) for i in range(args.num_hidden_layers)]
        self.model.norm = nn.RMSNorm(width, eps=args.rms_norm_eps)
        if "lm_head.weight" in weights:
            self.lm_head = nn.Linear(width, args.vocab_size, bias=False)
        if "masked_embedding.centroids.weight" in weights:
            num_groups = weights["masked_embedding.centroids.weight"].shape[0]
            self.masked_embedding = _Groups(width, num_groups, args.vocab_size)


@dataclass(frozen=True, slots=True)
class Context:
    """What a chain of guesses attends to: one entry a donor, and where the rows' queries stand."""

    seen: Sequence[Seen]
    positions: mx.array  # int32[rows]


class Assistant:
    """The graph. `donors`: the layers of the model whose keys and values it reads."""

    kind = "assistant"
    ids: mx.array | None = None
    taps = ()

    def __init__(self, folder: Path, target: Target) -> None:
        checkpoint = Checkpoint.read(folder)
        text = checkpoint.config.get("text_config")
        if not isinstance(text, dict) or "pre_projection.weight" not in checkpoint.weights:
            raise ModelError(
                f"{folder} holds no pre_projection.weight or no text_config; this is not a Gemma 4 assistant."
            )
        backbone = checkpoint.size("backbone_hidden_size")
        args = _arguments(text)
        Checkpoint(folder, {"hidden_size": backbone, "vocab_size": args.vocab_size}, {}).check(target)
        self.vocab_size = target.vocab_size
        weights = _weights(checkpoint, args.vocab_size)
        self._module: Any = _Parts(args, backbone, weights)
        checkpoint.load_into(self._module, weights)
        kinds = [_LAYOUTS[layer.layer_type] for layer in self._module.model.layers]
        found = {kind: _donor(folder, kind, target) for kind in dict.fromkeys(kinds)}
        for kind, layer in zip(kinds, self._module.model.layers, strict=True):
            _check_heads(folder, layer.self_attn, found[kind], target)
        self.donors = tuple(target.shapes.index(shape) for shape in found.values())
        self._donor_of = [list(found).index(kind) for kind in kinds]
        self._shapes = tuple(found.values())
        if "masked_embedding" in self._module:
            self._order = self._module.masked_embedding.pop("token_ordering")
            top = checkpoint.config.get("centroid_intermediate_top_k", _TOP_GROUPS)
            self._num_top = min(int(top), self._module.masked_embedding.centroids.weight.shape[0])
        finish(self._module, target)
        self._embed, self._embed_scale = target.vocabulary.embed, backbone**0.5
        self._backbone, self._dtype = backbone, target.dtype

    def __call__(self, tokens: mx.array, hidden: mx.array, context: Context) -> tuple[mx.array, mx.array]:
        """int32[B, 1], [B, 1, D] -> what `logits` takes, and the next hidden state [B, 1, D]."""
        module = self._module
        known = self._embed(tokens) * self._embed_scale
        x = module.pre_projection(mx.concatenate([known, hidden.astype(known.dtype)], axis=-1))
        for layer, donor in zip(module.model.layers, self._donor_of, strict=True):
            seen = context.seen[donor]
            x, _, _ = layer(x, seen.mask, shared_kv=(seen.keys, seen.values), offset=context.positions)
        features = module.model.norm(x)
        return features, module.post_projection(features)

    def logits(self, features: mx.array) -> mx.array:
        """[B, 1, D] -> [B, 1, V], -inf for tokens of other groups."""
        module = self._module
        if "masked_embedding" not in module:
            head = module.lm_head if "lm_head" in module else module.model.embed_tokens.as_linear
            return head(features)
        scores = module.masked_embedding.centroids(features)
        best = mx.argpartition(-scores, self._num_top - 1, axis=-1)[..., : self._num_top]
        tokens = self._order.reshape(scores.shape[-1], -1)[best].reshape(*features.shape[:2], -1)
        rows = module.lm_head.weight[tokens] if "lm_head" in module else module.model.embed_tokens(tokens)
        found = (rows @ features[..., None]).squeeze(-1)
        everything = mx.full((*features.shape[:2], self.vocab_size), -mx.inf, found.dtype)
        return mx.put_along_axis(everything, tokens, found, axis=-1)

    def link_s(self, rows: int) -> float:
        """Seconds of one guess of so many rows."""

        def empty(heads: int, width: int) -> mx.array:
            return mx.zeros((rows, heads, _MEASURED, width), self._dtype)

        seen = [Seen(empty(*shape.keys), empty(*shape.values), None) for shape in self._shapes]
        hidden = mx.zeros((rows, 1, self._backbone), self._dtype)
        mx.eval(hidden, *((one.keys, one.values) for one in seen))
        started = time.perf_counter()
        context = Context(seen, mx.full(rows, _MEASURED, mx.int32))
        features, hidden = self(mx.zeros((rows, 1), mx.int32), hidden, context)
        mx.eval(mx.argmax(self.logits(features), axis=-1), hidden)
        return time.perf_counter() - started


def _arguments(text: dict[str, Any]) -> Any:
    """Of Gemma 4 layers that share all KV. What an assistant never has is off whatever a configuration leaves out."""
    return family_module("gemma4_text").ModelArgs.from_dict(
        {
            **text,
            "num_kv_shared_layers": text.get("num_hidden_layers", 0),
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
        }
    )


def _weights(checkpoint: Checkpoint, vocab_size: int) -> dict[str, mx.array]:
    """Under their names. Raises ModelError for groups that do not share out the vocabulary."""
    weights = dict(checkpoint.weights)
    if weights.get("lm_head.weight") is not None and checkpoint.config.get("tie_word_embeddings", True):
        for name in [name for name in weights if name.startswith("lm_head.")]:
            del weights[name]  # a copy of the embedding
    centroids, order = (weights.get(f"masked_embedding.{n}") for n in ("centroids.weight", "token_ordering"))
    if centroids is None and order is None:
        return weights
    if centroids is None or order is None or order.shape != (vocab_size,) or vocab_size % centroids.shape[0]:
        raise ModelError(
            f"The groups of tokens in {checkpoint.folder} do not share out its {vocab_size} tokens; get it anew."
        )
    weights["masked_embedding.token_ordering"] = order.astype(mx.int32)
    return weights


def _donor(folder: Path, kind: str, target: Target) -> LayerShape:
    """The last layer of the model that keeps such KV."""
    found = next((shape for shape in reversed(target.shapes) if shape.layout == kind), None)
    if found is None:
        kept = "a window of the" if kind == "window" else "the whole"
        raise ModelError(
            f"{folder} attends to a layer that keeps {kept} context, and {target.name} has none that it could read; "
            "choose the assistant that was trained for this model."
        )
    return found


def _check_heads(folder: Path, attention: Any, donor: LayerShape, target: Target) -> None:
    heads, width = donor.keys
    if width != attention.head_dim or attention.n_heads % heads or donor.values != donor.keys:
        raise ModelError(
            f"{folder} reads keys of {attention.head_dim} numbers with {attention.n_heads} heads, and {target.name} "
            f"keeps {heads} heads of {width}; choose the assistant that was trained for this model."
        )
