"""Tiny configs of the dense families whose every layer is full attention. Knows no arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import VOCAB_SIZE, config

_GPT: Mapping[str, Any] = {
    "n_ctx": 512,
    "n_embd": 128,
    "n_head": 4,
    "n_inner": 192,
    "n_layer": 2,
    "n_positions": 512,
    "num_key_value_heads": None,
    "layer_norm_epsilon": 1e-5,
}
_GPT_NEOX: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "layer_norm_eps": 1e-5,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.5,
}
_GRANITE: Mapping[str, Any] = {
    "logits_scaling": 0.25,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
}
_MINICPM: Mapping[str, Any] = {"dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 2.0}

_ATTENTION: Mapping[str, Any] = {"n_heads_in_group": 2}
_NEMOTRON_NAS_BLOCKS = [
    {"attention": _ATTENTION, "ffn": {"ffn_mult": 1.0}},
    {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}},
    {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 2.0}},
    {"attention": _ATTENTION, "ffn": {"no_op": True}},
]

DENSE: Mapping[str, dict[str, Any]] = {
    family["model_type"]: family
    for family in (
        config(
            "afm7",
            hidden_dim=128,
            num_layers=4,
            num_kv_reuse_layers=2,  # the last layers reuse the keys and values of the layer before them
            num_heads=4,
            num_kv_heads=2,
            hidden_dim_scale_factor=1.5,
        ),
        config("apertus", post_norm=False, qk_norm=True),
        config("bitnet"),
        config("cohere", logit_scale=1.0, layer_norm_eps=1e-5, use_qk_norm=True),
        config("ernie4_5", use_bias=False),
        config("exaone", num_layers=2, layer_norm_epsilon=1e-5),
        config("gemma"),
        config("gemma2", query_pre_attn_scalar=32.0),
        config("glm"),
        config("glm4", partial_rotary_factor=0.5, attention_bias=True),
        config("gpt2", _GPT),
        config("gpt_bigcode", _GPT),
        config("gpt_neox", _GPT_NEOX),
        config("gptj", _GPT, rotary_dim=16),
        config("granite", _GRANITE),
        config("helium"),
        config("hunyuan_v1_dense"),
        config("internlm2", bias=False),
        config("internlm3"),
        config(
            "lille-130m",
            block_size=512,
            layer_norm_eps=1e-5,
            n_embd=128,
            n_head=4,
            n_kv_heads=2,
            n_layer=2,
        ),
        config("llama"),
        config("mimo"),
        config("minicpm", _MINICPM),
        config(
            "minicpm3",
            _MINICPM,
            num_key_value_heads=4,
            q_lora_rank=48,
            kv_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=32,
            rope_scaling={
                "type": "longrope",
                "short_factor": [1.0] * 16,
                "long_factor": [1.0] * 16,
                "original_max_position_embeddings": 512,
            },
        ),
        config("nanbeige", num_loops=2),
        config("nanochat", num_key_value_heads=2),
        config("nemotron", hidden_act="relu2", norm_eps=1e-5),
        config("nemotron-nas", num_hidden_layers=4, block_configs=_NEMOTRON_NAS_BLOCKS),
        config(
            "olmo",
            d_model=128,
            n_layers=2,
            mlp_hidden_size=384,
            n_heads=4,
            embedding_size=VOCAB_SIZE,
        ),
        config("olmo2"),
        config(
            "openelm",
            num_transformer_layers=2,
            model_dim=128,
            ffn_dim_divisor=32,
            num_query_heads=[4, 8],
            num_kv_heads=[2, 4],
            ffn_multipliers=[1.0, 2.0],
        ),
        config("phi", layer_norm_eps=1e-5),
        config("phi3"),
        config(
            "phi3small",
            vocab_size=100352,  # the graph masks token ids up to 100351
            hidden_size=64,
            num_attention_heads=2,
            num_key_value_heads=1,
            dense_attention_every_n_layers=2,
            ff_intermediate_size=128,
            gegelu_limit=20.0,
            layer_norm_epsilon=1e-5,
            mup_embedding_multiplier=1.0,
            mup_width_multiplier=1.0,
            blocksparse_block_size=32,
            blocksparse_num_local_blocks=1,
            blocksparse_vert_stride=2,
        ),
        config("plamo", n_shared_head=2),
        config("qwen", kv_channels=32, layer_norm_epsilon=1e-5, num_key_value_heads=4),
        config("qwen2"),
        config("qwen3"),
        config("seed_oss"),
        config("smollm3", num_hidden_layers=4),
        config("stablelm", layer_norm_eps=1e-5, use_qkv_bias=True, partial_rotary_factor=0.5),
        config("starcoder2", norm_epsilon=1e-5),
        config("talkie"),
        config("telechat3"),
    )
}
