"""Tiny configs of the mixture-of-experts families with full attention (4 experts, 2 a token). Knows no arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import MOE, VOCAB_SIZE, config

_BAILING: Mapping[str, Any] = {
    "use_qk_norm": True,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
_PHIXTRAL: Mapping[str, Any] = {
    "num_vocab": VOCAB_SIZE,
    "model_dim": 128,
    "num_heads": 4,
    "num_layers": 2,
    "rotary_dim": 16,
}
_ROPE_HALF: Mapping[str, Any] = {"partial_rotary_factor": 0.5}

EXPERTS: Mapping[str, dict[str, Any]] = {
    family["model_type"]: family
    for family in (
        config("Klear", MOE, attention_bias=False),
        config("bailing_moe", MOE, _BAILING),
        config(
            "dbrx",
            d_model=128,
            n_layers=2,
            n_heads=4,
            ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
            attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ),
        config("deepseek", MOE),
        config("dots1", MOE),
        config(
            "ernie4_5_moe",
            use_bias=False,
            moe_num_experts=4,
            moe_k=2,
            moe_layer_start_index=1,
            moe_intermediate_size=64,
            moe_num_shared_experts=1,
            moe_use_aux_free=True,
        ),
        config("glm4_moe", MOE, _ROPE_HALF, use_qk_norm=True, rope_scaling=None),
        config(
            "granitemoe",
            MOE,
            logits_scaling=0.25,
            attention_multiplier=0.2,
            embedding_multiplier=2.0,
            residual_multiplier=0.7,
        ),
        config(
            "hunyuan",
            MOE,
            num_hidden_layers=4,
            moe_topk=2,
            use_mixed_mlp_moe=True,
            use_qk_norm=True,
            use_cla=True,
            cla_share_factor=2,
            rope_scaling={"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
        ),
        config("llama4_text", intermediate_size_mlp=192, no_rope_layers=[1, 0], use_qk_norm=True),
        config("minimax", MOE, rotary_dim=16, use_qk_norm=True),
        config("mixtral", MOE),
        config("olmoe", MOE),
        config(
            "phimoe",
            MOE,
            original_max_position_embeddings=512,
            rope_scaling={
                "type": "longrope",
                "long_factor": [1.0] * 16,
                "short_factor": [1.0] * 16,
                "long_mscale": 1.0,
                "short_mscale": 1.0,
            },
        ),
        config("phixtral", MOE, _PHIXTRAL),
        config("qwen2_moe", MOE),
        config("qwen3_moe", MOE),
        config("solar_open", MOE, _ROPE_HALF, use_qk_norm=True),
    )
}
