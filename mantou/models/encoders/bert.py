"""BERT and its RoBERTa relatives: post-norm layers over learnt positions. Knows no pooling beside its ranking head.

Devlin et al. 2019 (arXiv:1810.04805); RoBERTa's only difference here is where positions start and what ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mantou.models.encoders.layers import activation, heads, joined, key_mask

_PREFIXES = ("bert.", "roberta.", "model.")
# Heads of pre-training, and buffers that older checkpoints carry.
_UNUSED = ("cls.", "lm_head.", "embeddings.position_ids", "qa_outputs.")
_NAMES = {
    "embeddings.word_embeddings.": "words.",
    "embeddings.position_embeddings.": "positions.",
    "embeddings.token_type_embeddings.": "types.",
    "embeddings.LayerNorm.": "norm.",
    "encoder.layer.": "layers.",
    ".attention.self.": ".",
    ".attention.output.dense.": ".attention_out.",
    ".attention.output.LayerNorm.": ".attention_norm.",
    ".intermediate.dense.": ".up.",
    ".output.dense.": ".down.",
    ".output.LayerNorm.": ".norm.",
    ".gamma": ".weight",  # of checkpoints that came from TensorFlow
    ".beta": ".bias",
}


class Layer(nn.Module):
    """Attention, then two dense layers; the norm comes after each sum."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, inner = int(config["hidden_size"]), int(config["intermediate_size"])
        eps = float(config.get("layer_norm_eps", 1e-12))
        self.num_heads = int(config["num_attention_heads"])
        self.scale = (width // self.num_heads) ** -0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps)
        self.up = nn.Linear(width, inner)
        self.act = activation(str(config.get("hidden_act", "gelu")))
        self.down = nn.Linear(inner, width)
        self.norm = nn.LayerNorm(width, eps)

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        """x [B, T, D], mask bool [B, 1, 1, T] or None for rows of one length."""
        q, k, v = (heads(part, self.num_heads) for part in mx.split(self.qkv(x), 3, axis=-1))
        seen = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask)
        x = self.attention_norm(x + self.attention_out(joined(seen)))
        return self.norm(x + self.down(self.act(self.up(x))))


class Bert(nn.Module):
    """The whole encoder. With `ranks`, `score` gives one number a row."""

    def __init__(self, config: Mapping[str, Any], *, ranks: bool = False) -> None:
        super().__init__()
        width = int(config["hidden_size"])
        self.roberta = str(config["model_type"]) != "bert"
        # RoBERTa numbers its tokens from behind the padding token's id.
        self.first_position = int(config.get("pad_token_id") or 0) + 1 if self.roberta else 0
        self.words = nn.Embedding(int(config["vocab_size"]), width)
        self.positions = nn.Embedding(int(config["max_position_embeddings"]), width)
        self.types = nn.Embedding(int(config.get("type_vocab_size", 2)), width)
        self.norm = nn.LayerNorm(width, float(config.get("layer_norm_eps", 1e-12)))
        self.layers = [Layer(config) for _ in range(int(config["num_hidden_layers"]))]
        if ranks:
            self.dense = nn.Linear(width, width)
            self.classifier = nn.Linear(width, 1)

    def __call__(self, tokens: mx.array, types: mx.array, lengths: mx.array, *, ragged: bool) -> mx.array:
        """tokens, types int32[B, T], lengths int32[B]; `ragged` unless all rows are full -> hidden [B, T, D]."""
        width = tokens.shape[1]
        places = mx.arange(width, dtype=mx.int32) + self.first_position
        x = self.norm(self.words(tokens) + self.positions(places)[None] + self.types(types))
        mask = key_mask(lengths, width) if ragged else None
        for layer in self.layers:
            x = layer(x, mask)
        return x

    def score(self, hidden: mx.array, lengths: mx.array) -> mx.array:
        """hidden [B, T, D] -> logits [B], from the first token."""
        return self.classifier(mx.tanh(self.dense(hidden[:, 0])))[:, 0]

    @staticmethod
    def renamed(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """A PyTorch checkpoint's weights under this graph's names, q, k and v in one matrix."""
        found: dict[str, mx.array] = {}
        for name, value in weights.items():
            own = next((name.removeprefix(p) for p in _PREFIXES if name.startswith(p)), name)
            if own.startswith(_UNUSED):
                continue
            for old, new in _NAMES.items():
                own = own.replace(old, new)
            found[own] = value
        _rename_heads(found)
        for name in [name for name in found if name.endswith((".query.weight", ".query.bias"))]:
            parts = [found.pop(name.replace(".query.", f".{part}.")) for part in ("query", "key", "value")]
            found[name.replace(".query.", ".qkv.")] = mx.concatenate(parts)
        return found


def _rename_heads(weights: dict[str, mx.array]) -> None:
    """BERT ranks by its pooler, RoBERTa by a dense layer of the classifier; an embedding model needs neither."""
    ranks = any(name.startswith("classifier.") for name in weights)
    for part in ("weight", "bias"):
        pooler = weights.pop(f"pooler.dense.{part}", None)
        dense = weights.pop(f"classifier.dense.{part}", pooler if ranks else None)
        if dense is not None:
            weights[f"dense.{part}"] = dense
        projection = weights.pop(f"classifier.out_proj.{part}", None)
        if projection is not None:
            weights[f"classifier.{part}"] = projection
