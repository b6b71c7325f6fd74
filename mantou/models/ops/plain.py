"""Plain MLX: the oracle that every other implementation is tested against, and the fallback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class PlainOps:
    name = "mlx"

    def install(self, model: Any) -> Sequence[str]:
        return ()
