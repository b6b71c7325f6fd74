"""Tiny configs of the families with multi-head latent attention, dense and sparse. Knows no arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import MLA, MOE, WINDOW, config

# Sparse attention keeps fewer keys than a test has tokens, so that the selection really drops some.
_INDEXER: Mapping[str, Any] = {"index_head_dim": 64, "index_n_heads": 2, "index_topk": 8}
_LONGCAT: Mapping[str, Any] = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "zero_expert_num": 2,
    "ffn_hidden_size": 192,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 64,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_DEFAULT_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_YARN: Mapping[str, Any] = {
    "type": "yarn",
    "rope_theta": 10000.0,
    "factor": 1.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.1,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

DEEPSEEK_V3: Mapping[str, Any] = config("deepseek_v3", MOE, MLA, n_group=2)

LATENT: Mapping[str, dict[str, Any]] = {
    family["model_type"]: family
    for family in (
        config("deepseek_v2", MOE, MLA, topk_method="greedy", rope_scaling=_YARN),
        dict(DEEPSEEK_V3),
        config("deepseek_v32", MOE, MLA, _INDEXER),
        config(
            "deepseek_v41",
            MOE,
            num_hidden_layers=4,
            q_lora_rank=48,
            qk_rope_head_dim=16,
            o_groups=2,
            o_lora_rank=32,
            scoring_func="sqrtsoftplus",
            sliding_window=WINDOW,
            compress_ratios=[0, 1, 4, 4],
            kv_source_layer_ids=[1, 2],
            index_source_layer_ids=[1, 2],
            index_n_heads=2,
            index_head_dim=32,
            index_topk=8,
            hc_mult=2,
            hc_sinkhorn_iters=4,
        ),
        config("glm4_moe_lite", MOE, MLA),
        config("glm_moe_dsa", MOE, MLA, _INDEXER, rope_parameters=_DEFAULT_ROPE),
        config("longcat_flash", MOE, MLA, _LONGCAT),
        config(
            "longcat_flash_ngram",
            MOE,
            MLA,
            _LONGCAT,
            ngram_vocab_size_ratio=3,
            emb_neighbor_num=3,
            emb_split_num=2,
        ),
        config("mistral4", MOE, MLA, rope_parameters=_YARN, head_dim=64),
        config("youtu_llm", MLA),
    )
}
