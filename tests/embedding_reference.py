"""Embedding graphs once more in numpy, row by row in f64 and from PyTorch's names: what ours are compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray
Weights = Mapping[str, Array]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)))


def linear(w: Weights, name: str, x: Array) -> Array:
    return x @ w[f"{name}.weight"].T.astype(np.float64) + w.get(f"{name}.bias", 0.0)


def layer_norm(w: Weights, name: str, x: Array, eps: float) -> Array:
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
    return y * w[f"{name}.weight"] + w.get(f"{name}.bias", 0.0)


def rms_norm(weight: Array, x: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def split_heads(x: Array, num: int) -> Array:
    """[T, H * D] -> [H, T, D]."""
    return x.reshape(x.shape[0], num, -1).transpose(1, 0, 2)


def attention(q: Array, k: Array, v: Array, allowed: Array | None = None) -> Array:
    """[H, T, D] each -> [T, H * D]."""
    scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    out = chances / chances.sum(-1, keepdims=True) @ v
    return out.transpose(1, 0, 2).reshape(out.shape[1], -1)


def rotate(x: Array, theta: float) -> Array:
    """Rotary positions in halves: x [H, T, D]."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
    )


def bert(
    w: Weights, config: Mapping[str, Any], tokens: Sequence[int], types: Sequence[int], prefix: str = ""
) -> Array:
    """[T, D] of one row; `prefix` is "bert." or "roberta." in checkpoints with a head."""
    eps, first = config["layer_norm_eps"], 0
    if config["model_type"] != "bert":
        first = config["pad_token_id"] + 1
    at = f"{prefix}embeddings."
    x = w[f"{at}word_embeddings.weight"][list(tokens)].astype(np.float64)
    x = x + w[f"{at}position_embeddings.weight"][first : first + len(tokens)]
    x = layer_norm(w, f"{at}LayerNorm", x + w[f"{at}token_type_embeddings.weight"][list(types)], eps)
    for i in range(config["num_hidden_layers"]):
        name = f"{prefix}encoder.layer.{i}."
        q, k, v = (
            split_heads(linear(w, f"{name}attention.self.{part}", x), config["num_attention_heads"])
            for part in ("query", "key", "value")
        )
        seen = linear(w, f"{name}attention.output.dense", attention(q, k, v))
        x = layer_norm(w, f"{name}attention.output.LayerNorm", x + seen, eps)
        inner = gelu(linear(w, f"{name}intermediate.dense", x))
        x = layer_norm(w, f"{name}output.LayerNorm", x + linear(w, f"{name}output.dense", inner), eps)
    return x


def modernbert(w: Weights, config: Mapping[str, Any], tokens: Sequence[int], prefix: str = "") -> Array:
    eps, heads = config["norm_eps"], config["num_attention_heads"]
    x = layer_norm(
        w,
        f"{prefix}embeddings.norm",
        w[f"{prefix}embeddings.tok_embeddings.weight"][list(tokens)].astype(np.float64),
        eps,
    )
    places = np.arange(len(tokens))
    near = np.abs(places[:, None] - places[None]) <= config["local_attention"] // 2
    for i in range(config["num_hidden_layers"]):
        name = f"{prefix}layers.{i}."
        whole = i % config["global_attn_every_n_layers"] == 0
        theta = config["global_rope_theta" if whole else "local_rope_theta"]
        h = layer_norm(w, f"{name}attn_norm", x, eps) if i else x
        q, k, v = (split_heads(part, heads) for part in np.split(linear(w, f"{name}attn.Wqkv", h), 3, -1))
        seen = attention(rotate(q, theta), rotate(k, theta), v, None if whole else near)
        x = x + linear(w, f"{name}attn.Wo", seen)
        value, gate = np.split(linear(w, f"{name}mlp.Wi", layer_norm(w, f"{name}mlp_norm", x, eps)), 2, -1)
        x = x + linear(w, f"{name}mlp.Wo", gelu(value) * gate)
    return layer_norm(w, f"{prefix}final_norm", x, eps)


def qwen3(w: Weights, config: Mapping[str, Any], tokens: Sequence[int]) -> Array:
    """[T, D] of one row, from a checkpoint of the bare graph."""
    eps, heads, kv_heads = (
        config["rms_norm_eps"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    x = w["embed_tokens.weight"][list(tokens)].astype(np.float64)
    allowed = np.tril(np.ones((len(tokens), len(tokens)), bool))
    for i in range(config["num_hidden_layers"]):
        name = f"layers.{i}."
        h = rms_norm(w[f"{name}input_layernorm.weight"], x, eps)
        q = split_heads(linear(w, f"{name}self_attn.q_proj", h), heads)
        k, v = (split_heads(linear(w, f"{name}self_attn.{part}_proj", h), kv_heads) for part in "kv")
        q = rotate(rms_norm(w[f"{name}self_attn.q_norm.weight"], q, eps), config["rope_theta"])
        k = rotate(rms_norm(w[f"{name}self_attn.k_norm.weight"], k, eps), config["rope_theta"])
        k, v = (np.repeat(part, heads // kv_heads, axis=0) for part in (k, v))
        x = x + linear(w, f"{name}self_attn.o_proj", attention(q, k, v, allowed))
        h = rms_norm(w[f"{name}post_attention_layernorm.weight"], x, eps)
        gate = linear(w, f"{name}mlp.gate_proj", h)
        inner = gate / (1 + np.exp(-gate)) * linear(w, f"{name}mlp.up_proj", h)
        x = x + linear(w, f"{name}mlp.down_proj", inner)
    return rms_norm(w["norm.weight"], x, eps)


def unit(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def cosine(a: Array, b: Array) -> float:
    """Of two vectors, by both of their lengths."""
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
