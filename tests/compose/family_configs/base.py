"""The sizes that every tiny config starts from, and how overrides are laid on them. Knows no family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOCAB_SIZE = 97
WINDOW = 16

# Heads are 32 wide, so that affine KV quantisation in groups of 32 applies; hidden_size is a multiple of each
# weight group size; two KV heads with two query heads each show a mix-up of the head axes.
BASE: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}

# Families name the same thing differently; a graph picks the keys that it knows.
MOE: Mapping[str, Any] = {
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_shared_expert": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "moe_layer_freq": 1,
    "mlp_only_layers": [],
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}

# Multi-head latent attention. The latent is wider than the rotary part, so cached keys and values differ.
MLA: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}

# Every second layer sees a window only.
WINDOWS: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def config(model_type: str, *parts: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """A config.json of `model_type`: BASE, then `parts` in order, then its own keys; later ones win."""
    merged: dict[str, Any] = {"model_type": model_type, **BASE}
    for part in parts:
        merged.update(part)
    return {**merged, **own}


def wrapped(model_type: str, text: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """A config.json of a vision-language family whose text tower has the config `text`."""
    return {"model_type": model_type, "vocab_size": VOCAB_SIZE, "text_config": dict(text), **own}
