"""ModernBERT: pre-norm layers with rotary positions, most of which see a window only. Knows no pooling of embeddings.

Warner et al. 2024 (arXiv:2412.13663). The first layer has no norm before attention; every third sees the whole text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mantou.models.encoders.layers import activation, heads, joined, key_mask

_UNUSED = ("decoder.",)
_NAMES = {
    "embeddings.tok_embeddings.": "words.",
    "embeddings.norm.": "norm.",
    ".attn.Wqkv.": ".qkv.",
    ".attn.Wo.": ".attention_out.",
    ".attn_norm.": ".attention_norm.",
    ".mlp.Wi.": ".up.",
    ".mlp.Wo.": ".down.",
    ".mlp_norm.": ".norm.",
    "head.dense.": "dense.",
    "head.norm.": "dense_norm.",
}


def _thetas(config: Mapping[str, Any]) -> tuple[float, float]:
    """Base of the rotation in (global, windowed) layers; newer files nest them by layer type."""
    nested = config.get("rope_parameters") or {}
    whole = nested.get("full_attention", {}).get("rope_theta", config.get("global_rope_theta", 160000.0))
    window = nested.get("sliding_attention", {}).get("rope_theta", config.get("local_rope_theta", 10000.0))
    return float(whole), float(whole if window is None else window)


class Layer(nn.Module):
    """Attention and a gated MLP, each behind its norm. `windowed` layers see `half` tokens to each side."""

    def __init__(self, config: Mapping[str, Any], index: int) -> None:
        super().__init__()
        width, inner = int(config["hidden_size"]), int(config["intermediate_size"])
        eps, norm_bias = float(config.get("norm_eps", 1e-5)), bool(config.get("norm_bias", False))
        kinds = config.get("layer_types")
        every = int(config.get("global_attn_every_n_layers", 3))
        self.windowed = kinds[index] == "sliding_attention" if kinds else index % every != 0
        self.base = _thetas(config)[self.windowed]
        self.num_heads = int(config["num_attention_heads"])
        self.scale = (width // self.num_heads) ** -0.5
        attention_bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
        if index:
            self.attention_norm = nn.LayerNorm(width, eps, bias=norm_bias)
        self.qkv = nn.Linear(width, 3 * width, bias=attention_bias)
        self.attention_out = nn.Linear(width, width, bias=attention_bias)
        self.norm = nn.LayerNorm(width, eps, bias=norm_bias)
        self.up = nn.Linear(width, 2 * inner, bias=mlp_bias)
        self.act = activation(str(config.get("hidden_activation", "gelu")))
        self.down = nn.Linear(inner, width, bias=mlp_bias)

    def __call__(self, x: mx.array, whole: mx.array | None, window: mx.array | None) -> mx.array:
        """x [B, T, D]; the masks are bool, broadcastable to [B, H, T, T], or None where everything is seen."""
        h = self.attention_norm(x) if "attention_norm" in self else x
        q, k, v = (heads(part, self.num_heads) for part in mx.split(self.qkv(h), 3, axis=-1))
        q, k = self._rotated(q), self._rotated(k)
        mask = window if self.windowed else whole
        seen = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask)
        x = x + self.attention_out(joined(seen))
        value, gate = mx.split(self.up(self.norm(x)), 2, axis=-1)
        return x + self.down(self.act(value) * gate)

    def _rotated(self, x: mx.array) -> mx.array:
        return mx.fast.rope(x, x.shape[-1], traditional=False, base=self.base, scale=1.0, offset=0)


class ModernBert(nn.Module):
    """The whole encoder. With `ranks`, `score` gives one number a row."""

    def __init__(self, config: Mapping[str, Any], *, ranks: bool = False) -> None:
        super().__init__()
        width = int(config["hidden_size"])
        eps, norm_bias = float(config.get("norm_eps", 1e-5)), bool(config.get("norm_bias", False))
        self.half_window = int(config.get("local_attention", 128)) // 2
        self.words = nn.Embedding(int(config["vocab_size"]), width)
        self.norm = nn.LayerNorm(width, eps, bias=norm_bias)
        self.layers = [Layer(config, index) for index in range(int(config["num_hidden_layers"]))]
        self.final_norm = nn.LayerNorm(width, eps, bias=norm_bias)
        self.mean_scores = config.get("classifier_pooling", "cls") == "mean"
        if ranks:
            self.dense = nn.Linear(width, width, bias=bool(config.get("classifier_bias")))
            self.dense_act = activation(str(config.get("classifier_activation", "gelu")))
            self.dense_norm = nn.LayerNorm(width, eps, bias=norm_bias)
            self.classifier = nn.Linear(width, 1)

    def __call__(self, tokens: mx.array, types: mx.array, lengths: mx.array, *, ragged: bool) -> mx.array:
        """tokens int32[B, T], lengths int32[B]; `ragged` unless all rows are full -> hidden [B, T, D]. No types."""
        width = tokens.shape[1]
        whole = key_mask(lengths, width) if ragged else None
        window = whole
        if width > self.half_window + 1:
            places = mx.arange(width, dtype=mx.int32)
            near = mx.abs(places[:, None] - places[None, :]) <= self.half_window
            window = near[None, None] if whole is None else near[None, None] & whole
        x = self.norm(self.words(tokens))
        for layer in self.layers:
            x = layer(x, whole, window)
        return self.final_norm(x)

    def score(self, hidden: mx.array, lengths: mx.array) -> mx.array:
        """hidden [B, T, D] -> logits [B], from the first token or the mean of all, as the checkpoint says."""
        if self.mean_scores:
            inside = key_mask(lengths, hidden.shape[1])[:, 0, 0, :, None]
            pooled = mx.where(inside, hidden, 0).sum(axis=1) / lengths[:, None]
        else:
            pooled = hidden[:, 0]
        return self.classifier(self.dense_norm(self.dense_act(self.dense(pooled))))[:, 0]

    @staticmethod
    def renamed(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """A PyTorch checkpoint's weights under this graph's names."""
        ranks = any(name.startswith("classifier.") for name in weights)
        found: dict[str, mx.array] = {}
        for name, value in weights.items():
            own = name.removeprefix("model.")
            if own.startswith(_UNUSED) or (own.startswith("head.") and not ranks):
                continue
            for old, new in _NAMES.items():
                own = own.replace(old, new)
            found[own] = value
        return found
