"""What each family cannot do, with the reason in its source (mlx-lm 0.32.2). Knows no configs and no arrays.

Found by reading the graphs and by running them with left-aligned slot caches against their own caches.
"""

from __future__ import annotations

from collections.abc import Mapping

_METAL_ONLY = "is a Metal kernel only (RuntimeError: [metal_kernel] No Metal back-end.)"

# mlx-lm itself cannot build or run these on a CPU.
BROKEN: Mapping[str, str] = {
    "muse_spark": f"its norm with RoPE {_METAL_ONLY}",
    "olmo": "its attention adds the mask to the scores, but mlx-lm's masks are words and Booleans",
    "phi3small": (
        "its block-sparse layers add the Boolean mask to the scores instead of masking with it, so a prefill "
        "sees later tokens and the output depends on how the prompt is cut"
    ),
}

# These run, but keep their state in a cache class of their own that is neither rows, ring nor arrays.
OWN_CACHE: Mapping[str, str] = {
    "deepseek_v41": (
        "its LayerCache holds a window, compressed groups and an open group, and one integer offset places every row"
    ),
}

# Rows of one forward must start at the same position.
EQUAL_LENGTHS: Mapping[str, str] = {
    "afm7": "layers that reuse keys rotate their queries by the width of the key buffer, not by the row's offset",
    "gpt_bigcode": "learned positions come from numpy.arange over cache.offset, which must be an int",
    "llama4": "the chunk mask comes from mx.arange over cache.offset, which must be an int",
    "minimax_m3_vl": "block-sparse layers place queries at the end of the key buffer, not at the row's offset",
}

# Rows of one forward must hold the same number of tokens, or padding on the right enters a row's state.
EQUAL_WIDTHS: Mapping[str, str] = {
    "baichuan_m1": "the convolution state is the last column of the forward",
    "bailing_moe_linear": "linear attention ignores mask and lengths",
    "jamba": "the Mamba layers ignore mask and lengths",
    "longcat_flash_ngram": "the n-gram context is the last columns of the forward",
    "mamba": "the layers ignore mask and lengths",
    "nemotron_h": "the SSM update gets the mask but not the lengths",
    "olmo_hybrid": "the convolution states are the last columns of the forward",
    "recurrent_gemma": "the recurrence and its convolution ignore mask and lengths",
    "rwkv7": "token shift and state ignore mask and lengths",
}

# Axes of a mask with one plane a row, for graphs that do not take [B, 1, T, S].
MASK_AXES: Mapping[str, int] = {
    "gemma2": 5,  # scores are [B, KV heads, group, T, S], so 4 axes would put the rows on the heads
}

# mlx-lm's own cache is no reference for these: compare greedy outputs with a run without a cache.
RECOMPUTE: Mapping[str, str] = {
    "plamo3": "its mask shows window + 1 keys, but its ring keeps `window` of them from the first decode step on",
}
