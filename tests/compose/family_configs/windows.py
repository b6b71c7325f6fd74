"""Tiny configs of the families that mix sliding-window or chunked layers with full ones. Knows no arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import MOE, VOCAB_SIZE, WINDOW, WINDOWS, config, wrapped

_ROPE_BY_TYPE: Mapping[str, Any] = {
    "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0},
}
_LLAMA4_SCALING: Mapping[str, Any] = {
    "type": "default",
    "rope_theta": 10000.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 16,
}

GEMMA3: Mapping[str, Any] = config(
    "gemma3_text", WINDOWS, sliding_window_pattern=2, query_pre_attn_scalar=32.0, rope_local_base_freq=1000.0
)
# The last two layers reuse the keys and values of the two before them.
GEMMA3N: Mapping[str, Any] = config(
    "gemma3n_text",
    WINDOWS,
    num_kv_shared_layers=2,
    vocab_size_per_layer_input=VOCAB_SIZE,
    hidden_size_per_layer_input=32,
    rope_local_base_freq=1000.0,
    final_logit_softcapping=30.0,
    activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
    altup_num_inputs=2,
    altup_coef_clip=120.0,
    altup_correct_scale=True,
    altup_active_idx=0,
    laurel_rank=16,
)
GEMMA4: Mapping[str, Any] = config(
    "gemma4_text",
    WINDOWS,
    global_head_dim=64,
    num_global_key_value_heads=1,
    num_kv_shared_layers=2,
    vocab_size_per_layer_input=VOCAB_SIZE,
    hidden_size_per_layer_input=32,
    enable_moe_block=True,
    num_experts=4,
    top_k_experts=2,
    moe_intermediate_size=64,
    tie_word_embeddings=True,
)
MINISTRAL3: Mapping[str, Any] = config("ministral3", WINDOWS, rope_parameters=_LLAMA4_SCALING)
MUSE_SPARK: Mapping[str, Any] = config(
    "muse_spark_text",
    WINDOWS,
    MOE,
    num_shared_experts=0,
    post_norm_eps=1e-6,
    rope_parameters={"rope_theta": 10000.0},
    layer_rope_theta=[10000.0, 0.0, 10000.0, 0.0],
    final_logit_softcapping=20.0,
    output_multiplier=1.0,
    moe_hidden_size=64,
)

WINDOWED: Mapping[str, dict[str, Any]] = {
    family["model_type"]: family
    for family in (
        config("afmoe", WINDOWS, MOE, num_dense_layers=1),
        config("cohere2", WINDOWS, sliding_window_pattern=2, logit_scale=1.0, layer_norm_eps=1e-5),
        config("exaone4", WINDOWS, sliding_window_pattern="LG", rope_scaling=None),
        config("exaone_moe", WINDOWS, MOE, is_moe_layer=[False, True, True, True]),
        dict(GEMMA3),
        wrapped("gemma3n", GEMMA3N),
        dict(GEMMA4),
        config("gpt_oss", WINDOWS, MOE, rope_scaling={"rope_type": "default"}),
        config("iquestloopcoder", loop_num=2, loop_window_size=WINDOW),
        config(
            "laguna",
            WINDOWS,
            MOE,
            rope_parameters=_ROPE_BY_TYPE,
            num_attention_heads_per_layer=[8, 4, 8, 4],
            moe_routed_scaling_factor=1.5,
        ),
        wrapped(
            "llama4",
            config(
                "llama4_text",
                MOE,
                num_hidden_layers=4,
                num_experts_per_tok=1,
                attention_chunk_size=WINDOW,
                interleave_moe_layer_step=2,
                intermediate_size_mlp=192,
                rope_scaling=None,
                use_qk_norm=True,
                floor_scale=16,
            ),
        ),
        config("mellum", WINDOWS, MOE, rope_parameters=_ROPE_BY_TYPE),
        config(
            "mimo_v2_flash",
            MOE,
            num_hidden_layers=4,
            hybrid_layer_pattern=[0, 1, 1, 0],
            moe_layer_freq=[0, 1, 1, 1],
            add_swa_attention_sink_bias=True,
            add_full_attention_sink_bias=False,
            sliding_window_size=WINDOW,
            layernorm_epsilon=1e-5,
            swa_rope_theta=1000.0,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=4,
            v_head_dim=32,
            head_dim=64,
            swa_head_dim=64,
            swa_v_head_dim=32,
            partial_rotary_factor=0.5,
        ),
        dict(MINISTRAL3),
        config("muse_glimmer", WINDOWS, output_multiplier=1.0),
        wrapped("muse_spark", MUSE_SPARK),
        config("olmo3", WINDOWS),
        config("plamo3", num_hidden_layers=4, sliding_window=WINDOW, sliding_window_pattern=2),
        config("spark2_5", WINDOWS, rope_parameters=_ROPE_BY_TYPE),
        config(
            "step3p5",
            WINDOWS,
            num_attention_groups=2,
            partial_rotary_factors=[1.0, 0.5] * 2,
            rope_theta=[1000.0, 10000.0] * 2,
            attention_other_setting={"num_attention_heads": 8, "num_attention_groups": 4},
            moe_num_experts=4,
            moe_top_k=2,
            moe_intermediate_size=64,
            share_expert_dim=64,
            moe_layers_enum="1,2,3",
        ),
    )
}
