"""Tiny configs of the vision-language families that run another family's text tower. Knows no arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import MOE, config, wrapped
from .dense import DENSE
from .experts import EXPERTS
from .latent import DEEPSEEK_V3
from .recurrent import KIMI_K3, LFM2
from .windows import GEMMA3, GEMMA4, MINISTRAL3

WRAPPERS: Mapping[str, dict[str, Any]] = {
    family["model_type"]: family
    for family in (
        wrapped("gemma3", GEMMA3),
        wrapped("gemma4", GEMMA4),
        wrapped("kimi_k25", DEEPSEEK_V3),
        wrapped("kimi_k3", KIMI_K3),
        wrapped("kimi_vl", DEEPSEEK_V3),
        wrapped("lfm2-vl", LFM2),
        wrapped(
            "minimax_m3_vl",
            config(
                "minimax_m3_text",
                MOE,
                num_hidden_layers=4,
                intermediate_size=64,
                dense_intermediate_size=192,
                moe_layer_freq=[0, 1, 1, 1],
                partial_rotary_factor=0.5,
                sparse_attention_config={
                    "sparse_num_index_heads": 2,
                    "sparse_index_dim": 32,
                    "sparse_block_size": 4,
                    "sparse_topk_blocks": 3,
                    "sparse_local_block": 1,
                    "sparse_attention_freq": [0, 1, 0, 1],
                },
            ),
        ),
        wrapped("mistral3", MINISTRAL3),
        wrapped("pixtral", DENSE["llama"]),
        wrapped("qwen2_vl", DENSE["qwen2"]),
        wrapped("qwen3_vl", DENSE["qwen3"]),
        wrapped("qwen3_vl_moe", EXPERTS["qwen3_moe"]),
    )
}
