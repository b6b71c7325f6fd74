"""The attentions that stand before MLX's own in this process, each with the next in `plain`. Knows no arrays."""

from __future__ import annotations

import mlx.core as mx


def stands(kind: type) -> bool:
    """Whether one of this kind is among them, so that a second model puts no other before it."""
    found = mx.fast.scaled_dot_product_attention
    while found is not None and not isinstance(found, kind):
        found = getattr(found, "plain", None)
    return found is not None
