"""Tiny configs of the families with recurrent or convolutional state, some with attention. Knows no arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import MLA, MOE, WINDOW, config, wrapped

_BAILING: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "layer_group_size": 2,
    "group_norm_size": 2,
    "score_function": "sigmoid",
    "use_qk_norm": True,
    "moe_router_enable_expert_bias": True,
}
_CONV_FULL = ["conv", "full_attention"] * 2
_FLOAT16: Mapping[str, Any] = {"dtype": "float16"}
_GATED_DELTA: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}
_GEAR_LAYERS = ["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"]
_KDA: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    },
    "num_experts_per_token": 2,
    "moe_renormalize": True,
}
_LFM2: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": _CONV_FULL,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
}
_MAMBA2: Mapping[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_ssm": 128,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_n_groups": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}

LFM2: Mapping[str, Any] = config(
    "lfm2",
    _LFM2,
    block_dim=128,
    block_multiple_of=32,
    block_ffn_dim_multiplier=1.0,
    block_auto_adjust_ff_dim=False,
    block_ff_dim=192,
)
KIMI_K3: Mapping[str, Any] = config(
    "kimi_linear",
    MOE,
    MLA,
    _KDA,
    hidden_act="situ",
    activation_situ_beta=1.0,
    activation_situ_linear_beta=1.0,
    attn_res_block_size=2,
    mla_use_output_gate=True,
)
QWEN3_5: Mapping[str, Any] = config(
    "qwen3_5_text",
    _GATED_DELTA,
    rope_parameters={"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
)
QWEN3_5_MOE: Mapping[str, Any] = {**QWEN3_5, **MOE, "model_type": "qwen3_5_moe_text"}

RECURRENT: Mapping[str, dict[str, Any]] = {
    family["model_type"]: family
    for family in (
        config(
            "baichuan_m1",
            num_hidden_layers=4,
            sliding_window=WINDOW,
            sliding_window_layers=[0, 2],
            conv_window=2,
            num_swa_attention_heads=4,
            num_swa_key_value_heads=4,
        ),
        config("bailing_hybrid", MOE, MLA, _BAILING),
        config("bailing_moe_linear", MOE, _BAILING, partial_rotary_factor=0.5),
        config("bailing_moe_v3", MOE, MLA, _BAILING),
        config(
            "falcon_h1",
            _MAMBA2,
            embedding_multiplier=1.0,
            key_multiplier=1.0,
            lm_head_multiplier=1.0,
            mamba_expand=1,
        ),
        config("gear", num_hidden_layers=4, layer_types=_GEAR_LAYERS, sliding_window=WINDOW),
        config(
            "granitemoehybrid",
            MOE,
            _MAMBA2,
            num_hidden_layers=4,
            layer_types=["mamba", "attention"] * 2,
            embedding_multiplier=2.0,
            attention_multiplier=0.2,
            logits_scaling=0.25,
            residual_multiplier=0.7,
        ),
        config(
            "jamba",
            MOE,
            num_hidden_layers=4,
            attn_layer_offset=1,
            attn_layer_period=2,
            expert_layer_offset=1,
            expert_layer_period=2,
            mamba_d_conv=4,
            mamba_d_state=16,
            mamba_expand=2,
        ),
        config("kimi_linear", MOE, MLA, _KDA, model_max_length=512),
        dict(LFM2),
        config("lfm2_moe", MOE, _LFM2, use_expert_bias=True, num_dense_layers=1),
        config(
            "mamba",
            intermediate_size=256,
            state_size=16,
            conv_kernel=4,
            use_bias=False,
            use_conv_bias=True,
            time_step_rank=8,
        ),
        config(
            "mamba2",
            num_heads=8,
            intermediate_size=256,
            state_size=32,
            layer_norm_epsilon=1e-5,
            conv_kernel=4,
            n_groups=2,
            use_bias=False,
            use_conv_bias=True,
            time_step_limit=[0.0, 100.0],
            time_step_rank=8,
        ),
        config(
            "nemotron_h",
            MOE,
            hybrid_override_pattern="M*-EM*",
            mamba_num_heads=4,
            mamba_head_dim=32,
            mamba_proj_bias=False,
            ssm_state_size=32,
            conv_kernel=4,
            n_groups=2,
            layer_norm_epsilon=1e-5,
            use_bias=False,
            use_conv_bias=True,
        ),
        config(
            "olmo_hybrid",
            _GATED_DELTA,
            linear_num_key_heads=4,
            linear_allow_neg_eigval=True,
            layer_types=["linear_attention", "full_attention"] * 2,
        ),
        config(
            "plamo2",
            num_hidden_layers=4,
            hidden_size_per_head=32,
            mamba_d_state=32,
            mamba_d_conv=4,
            mamba_num_heads=4,
            mamba_step=2,
            attention_window_size=512,
        ),
        wrapped(
            "prism_hadamard_qwen35",
            {**QWEN3_5, "intermediate_size": 512},
            schema_version=2,
            tensor_namespace="mlx-vlm-qwen3_5",
            gdn_activation_layout="grouped",
            quantization={"bits": 2, "group_size": 128, "mode": "affine"},
            modules=[
                {"path": "model.embed_tokens", "embedding": True, "block": 0, **_FLOAT16},
                {"path": "model.layers.0.mlp.up_proj", "embedding": False, "block": 0, **_FLOAT16},
                {"path": "model.layers.1.mlp.down_proj", "embedding": False, "block": 512, **_FLOAT16},
            ],
        ),
        wrapped("qwen3_5", QWEN3_5),
        wrapped("qwen3_5_moe", QWEN3_5_MOE),
        config("qwen3_next", MOE, _GATED_DELTA),
        config(
            "recurrent_gemma",
            num_hidden_layers=4,
            attention_window_size=WINDOW,
            block_types=["recurrent", "attention"],
            conv1d_width=4,
            logits_soft_cap=30.0,
        ),
        config(
            "rwkv7",
            norm_eps=1e-5,
            a_low_rank_dim=16,
            v_low_rank_dim=16,
            gate_low_rank_dim=16,
            decay_low_rank_dim=16,
        ),
    )
}
